//! Options: which kernel computes a call, and the constants it is compiled with.

use crate::kernel_params::{AttentionParams, MemoryParams};
use crate::nvrtc::{ELEMENT, Source};
use ringspan::kernel::DType;
use ringspan::kernel::{Inputs, RelativeBias, View};

/// Numbers of rows and threads of a block, in order of preference: the first that fits into shared memory is used.
const BLOCKS: [(usize, usize); 3] = [(32, 128), (16, 128), (8, 64)];

/// Numbers of rows and threads of a block on tensor cores: 16 rows for each warp.
const TENSOR_BLOCK: (usize, usize) = (64, 128);
/// Numbers of rows and threads of a block of two warpgroups, which uses a whole multiprocessor.
const WARPGROUP_BLOCK: (usize, usize) = (128, 256);
/// Largest head widths on tensor cores: with wider heads there are not enough registers for the sums.
pub(crate) const TENSOR_WIDTHS: Widths = Widths { forward: 256, by_warpgroups: 128, backward: 128 };

pub(crate) struct Widths {
    pub(crate) forward: usize,
    pub(crate) by_warpgroups: usize,
    pub(crate) backward: usize,
}

/// Limit on the shared memory of a block, except for warpgroups: two blocks share a multiprocessor of a data-centre GPU.
pub(crate) const SHARED_MEMORY: usize = 96 * 1024;

/// How a GPU multiplies bf16 on tensor cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TensorCores {
    /// It has no tensor cores for bf16.
    None,
    /// By warps (`mma.sync`), since Ampere.
    Warps,
    /// Also by warpgroups (`wgmma`), on Hopper.
    Warpgroups,
}

impl TensorCores {
    /// The tensor cores of a GPU with this compute capability.
    pub(crate) fn of((major, _minor): (i32, i32)) -> Self {
        match major {
            9 => Self::Warpgroups,
            8.. => Self::Warps,
            _ => Self::None,
        }
    }
}

const COMMON: &str = include_str!("source/common.cu");
const TENSOR: &str = include_str!("source/tensor.cu");
const TENSOR_GRADIENTS: &str = include_str!("source/tensor_gradients.cu");
const TENSOR_FORWARD: &str = include_str!("source/tensor_forward.cu");
const TENSOR_BACKWARD: &str = include_str!("source/tensor_backward.cu");
const WARPGROUP: &str = include_str!("source/warpgroup.cu");
const WARPGROUP_FORWARD: &str = include_str!("source/warpgroup_forward.cu");
const WARPGROUP_BACKWARD: &str = include_str!("source/warpgroup_backward.cu");
const FORWARD: &str = include_str!("source/forward.cu");
const BACKWARD: &str = include_str!("source/backward.cu");
const DELTA: &str = include_str!("source/delta.cu");
const MEMORY: &str = include_str!("source/memory.cu");

/// The kernels of one source, by pass and by the units that multiply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum KernelKind {
    Forward,
    Backward,
    TensorForward,
    TensorBackward,
    WarpgroupForward,
    WarpgroupBackward,
    Delta,
    Memory,
}

/// The constants that a kernel is compiled with.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Options {
    pub(crate) kind: KernelKind,
    pub(crate) dim: usize,
    pub(crate) v_dim: usize,
    /// Number of rows in a block, of queries or of keys.
    pub(crate) rows: usize,
    /// Number of threads in a block.
    pub(crate) threads: usize,
    /// Number of rows of the other side that a block on tensor cores processes at once.
    chunk: usize,
    /// Types of q, k, v, the bias, the gradient of the output and the output.
    types: [DType; 6],
    softcap: bool,
    alibi: bool,
    buckets: bool,
    bias: bool,
    dropout: bool,
}

impl Options {
    /// The options for the forward pass; `shared` is the shared memory of a block, `tensor` the tensor cores that can read
    /// q, k and v.
    pub(crate) fn forward(inputs: &Inputs, tensor: TensorCores, shared: usize) -> Self {
        let Inputs { q, v, .. } = inputs;
        let width = q.dim.max(v.dim);
        if tensor == TensorCores::None || !inputs.multiplies_in_bf16() || width > TENSOR_WIDTHS.forward {
            return Self::fitted(inputs, KernelKind::Forward, None, shared);
        }
        Self::by_warpgroups(inputs, KernelKind::WarpgroupForward, None, tensor, shared).unwrap_or_else(|| {
            // Wide heads leave fewer registers for scores.
            let chunk = if width > 128 { 32 } else { 64 };
            Self::of_block(inputs, KernelKind::TensorForward, None, TENSOR_BLOCK, chunk)
        })
    }

    /// The options for the backward pass, with arguments as in [`forward`](Self::forward); `tensor` must also be able to
    /// read `d_out`.
    pub(crate) fn backward(inputs: &Inputs, d_out: &View, tensor: TensorCores, shared: usize) -> Self {
        let Inputs { q, v, score, bias, .. } = inputs;
        // Gradients that are summed over pairs (of bias and buckets) are left to the portable kernels.
        let summed = bias.is_some() || matches!(score.relative, Some(RelativeBias::Buckets(_)));
        let wide = q.dim.max(v.dim) > TENSOR_WIDTHS.backward;
        if tensor == TensorCores::None || !inputs.multiplies_in_bf16() || summed || wide {
            return Self::fitted(inputs, KernelKind::Backward, Some(d_out), shared);
        }
        Self::by_warpgroups(inputs, KernelKind::WarpgroupBackward, Some(d_out), tensor, shared)
            .unwrap_or_else(|| Self::of_block(inputs, KernelKind::TensorBackward, Some(d_out), TENSOR_BLOCK, 32))
    }

    /// The options for warpgroups; `None` if the GPU has none, or if they would not be faster.
    fn by_warpgroups(
        inputs: &Inputs,
        kind: KernelKind,
        d_out: Option<&View>,
        tensor: TensorCores,
        shared: usize,
    ) -> Option<Self> {
        let Inputs { q, v, .. } = inputs;
        let mut options = Self::of_block(inputs, kind, d_out, WARPGROUP_BLOCK, 64);
        let terms = options.softcap || options.alibi || options.buckets || options.bias || options.dropout;
        // Score terms leave fewer registers for scores, and so do the two products of the backward pass.
        if kind == KernelKind::WarpgroupForward && !terms {
            options.chunk = 128;
        }
        let fits = q.dim.max(v.dim) <= TENSOR_WIDTHS.by_warpgroups && options.shared_bytes() <= shared;
        // A block also computes rows that are missing, so there must be more rows than in a block of warps.
        (tensor == TensorCores::Warpgroups && fits && q.tokens > TENSOR_BLOCK.0).then_some(options)
    }

    pub(crate) fn delta(out: &View, d_out: &View) -> Self {
        let f = DType::F32;
        Self::plain(KernelKind::Delta, out.dim, [f, f, f, f, d_out.data.dtype(), out.data.dtype()])
    }

    /// The options for operations besides attention, which convert elements from one type to another.
    pub(crate) fn memory(from: DType, to: DType) -> Self {
        let f = DType::F32;
        Self::plain(KernelKind::Memory, 1, [from, f, f, f, f, to])
    }

    /// Options without blocks of rows and without score terms.
    fn plain(kind: KernelKind, dim: usize, types: [DType; 6]) -> Self {
        Self {
            kind,
            dim,
            v_dim: dim,
            rows: 16,
            threads: 128,
            chunk: 0,
            types,
            softcap: false,
            alibi: false,
            buckets: false,
            bias: false,
            dropout: false,
        }
    }

    fn fitted(inputs: &Inputs, kind: KernelKind, d_out: Option<&View>, shared: usize) -> Self {
        let of_block = |block| Self::of_block(inputs, kind, d_out, block, 0);
        let [.., smallest] = BLOCKS;
        let fits = |options: &Self| options.shared_bytes() <= shared.min(SHARED_MEMORY);
        BLOCKS.into_iter().map(of_block).find(fits).unwrap_or_else(|| of_block(smallest))
    }

    fn of_block(inputs: &Inputs, kind: KernelKind, d_out: Option<&View>, block: (usize, usize), chunk: usize) -> Self {
        let Inputs { q, k, v, score, bias, .. } = inputs;
        let of = |view: Option<&View>| view.map_or(DType::F32, |view| view.data.dtype());
        let (rows, threads) = block;
        Self {
            kind,
            dim: q.dim,
            v_dim: v.dim,
            rows,
            threads,
            chunk,
            types: [of(Some(q)), of(Some(k)), of(Some(v)), of(bias.as_ref()), of(d_out), DType::F32],
            softcap: score.softcap.is_some(),
            alibi: matches!(score.relative, Some(RelativeBias::Alibi { .. })),
            buckets: matches!(score.relative, Some(RelativeBias::Buckets(_))),
            bias: bias.is_some(),
            dropout: score.dropout.is_some_and(|dropout| dropout.rate > 0.0),
        }
    }

    /// Bytes of a block's shared memory, as the CUDA sources lay it out.
    pub(crate) fn shared_bytes(&self) -> usize {
        let (rows, keys, values) = (self.rows, self.rows * (self.dim + 1), self.rows * (self.v_dim + 1));
        let pairs = rows * (rows + 1);
        // Sizes in 16-bit elements: widths are whole steps of 16, with 8 elements of padding except for warpgroups, whose
        // right operands are whole products of 64 columns.
        let (width, v_width) = (self.dim.next_multiple_of(16), self.v_dim.next_multiple_of(16));
        let (whole, v_whole) = (self.dim.next_multiple_of(64), self.v_dim.next_multiple_of(64));
        let (key, value, chunk) = (width + 8, v_width + 8, self.chunk);
        let floats = match self.kind {
            KernelKind::Forward => keys + keys.max(values) + pairs,
            KernelKind::Backward => 2 * keys + 2 * values + if self.buckets { 4 * pairs } else { 2 * pairs },
            KernelKind::TensorForward => (rows * key + chunk * (key + value)) / 2,
            KernelKind::TensorBackward => (rows + chunk) * (key + value) / 2 + 3 * chunk,
            KernelKind::WarpgroupForward => (rows * width + 2 * chunk * (width + v_whole)) / 2,
            KernelKind::WarpgroupBackward => (rows * (width + v_width) + 2 * chunk * (whole + v_whole)) / 2 + 6 * chunk,
            KernelKind::Delta | KernelKind::Memory => 0,
        };
        4 * floats
    }

    pub(crate) fn source(&self) -> Source {
        let text = match self.kind {
            KernelKind::Forward => [ELEMENT, COMMON, FORWARD].concat(),
            KernelKind::Backward => [ELEMENT, COMMON, BACKWARD].concat(),
            KernelKind::TensorForward => [ELEMENT, COMMON, TENSOR, TENSOR_FORWARD].concat(),
            KernelKind::TensorBackward => [ELEMENT, COMMON, TENSOR, TENSOR_GRADIENTS, TENSOR_BACKWARD].concat(),
            KernelKind::WarpgroupForward => [ELEMENT, COMMON, TENSOR, WARPGROUP, WARPGROUP_FORWARD].concat(),
            KernelKind::WarpgroupBackward => {
                [ELEMENT, COMMON, TENSOR, TENSOR_GRADIENTS, WARPGROUP, WARPGROUP_BACKWARD].concat()
            }
            KernelKind::Delta => [ELEMENT, COMMON, DELTA].concat(),
            KernelKind::Memory => [ELEMENT, MEMORY].concat(),
        };
        let specific = matches!(self.kind, KernelKind::WarpgroupForward | KernelKind::WarpgroupBackward);
        Source { text, definitions: self.definitions(), specific }
    }

    fn definitions(&self) -> Vec<(&'static str, usize)> {
        let stored = |stored: DType| match stored {
            DType::F32 => 0,
            DType::Bf16 => 1,
            DType::F16 => 2,
        };
        let sizes = [
            ("DIM", self.dim),
            ("V_DIM", self.v_dim),
            ("ROWS", self.rows),
            ("THREADS", self.threads),
            ("CHUNK", self.chunk),
            (
                "PARAMS_BYTES",
                if self.kind == KernelKind::Memory { size_of::<MemoryParams>() } else { size_of::<AttentionParams>() },
            ),
        ];
        let names = ["Q_TYPE", "K_TYPE", "V_TYPE", "BIAS_TYPE", "D_OUT_TYPE", "OUT_TYPE"];
        let types = names.into_iter().zip(self.types.map(stored));
        let terms = [
            ("SOFTCAP", self.softcap),
            ("ALIBI", self.alibi),
            ("BUCKETS", self.buckets),
            ("BIAS", self.bias),
            ("DROPOUT", self.dropout),
        ];
        sizes.into_iter().chain(types).chain(terms.map(|(name, on)| (name, usize::from(on)))).collect()
    }
}

#[cfg(test)]
mod tests;
