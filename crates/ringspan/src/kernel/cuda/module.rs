//! What kernels are compiled for: the shapes and terms at hand.

use super::super::view::Stored;
use super::super::{Inputs, Relative, View};
use super::job::{Job, Move};
use super::nvrtc::{ELEMENT, Source};

/// Rows and threads of a block: the first that fit are taken.
const BLOCKS: [(usize, usize); 3] = [(32, 128), (16, 128), (8, 64)];

/// Rows and threads of a block on tensor cores: 16 rows for each warp.
const TENSOR_BLOCK: (usize, usize) = (64, 128);
/// Widest heads there: wider ones do not leave enough registers for their sums.
const TENSOR_WIDTHS: Widths = Widths { forward: 256, backward: 128 };

struct Widths {
    forward: usize,
    backward: usize,
}

/// Most bytes of shared memory of a block: two of them share a multiprocessor of a data centre's GPU.
const SHARED_MEMORY: usize = 96 * 1024;

const COMMON: &str = include_str!("source/common.cu");
const TENSOR: &str = include_str!("source/tensor.cu");
const TENSOR_FORWARD: &str = include_str!("source/tensor_forward.cu");
const TENSOR_BACKWARD: &str = include_str!("source/tensor_backward.cu");
const FORWARD: &str = include_str!("source/forward.cu");
const BACKWARD: &str = include_str!("source/backward.cu");
const DELTA: &str = include_str!("source/delta.cu");
const MEMORY: &str = include_str!("source/memory.cu");

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Pass {
    Forward,
    Backward,
    TensorForward,
    TensorBackward,
    Delta,
    Memory,
}

/// What kernels are compiled for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Options {
    pass: Pass,
    pub(super) dim: usize,
    pub(super) v_dim: usize,
    /// Rows of a block, of queries and of keys.
    pub(super) rows: usize,
    /// Threads of a block.
    pub(super) threads: usize,
    /// Rows of the other side that a block on tensor cores takes at once.
    chunk: usize,
    /// Of q, k, v, the bias, the gradient of the output and the output.
    types: [Stored; 6],
    softcap: bool,
    alibi: bool,
    buckets: bool,
    bias: bool,
    dropout: bool,
}

impl Options {
    /// For blocks with `shared` bytes of shared memory; on tensor cores where `tensor` says that they can read q, k and v.
    pub(super) fn forward(inputs: &Inputs, tensor: bool, shared: usize) -> Self {
        let Inputs { q, v, .. } = inputs;
        if tensor && multiplies_bf16(inputs) && q.dim.max(v.dim) <= TENSOR_WIDTHS.forward {
            // Wide heads leave fewer registers for scores.
            let chunk = if q.dim.max(v.dim) > 128 { 32 } else { 64 };
            return Self::of_block(inputs, Pass::TensorForward, None, TENSOR_BLOCK, chunk);
        }
        Self::fitted(inputs, Pass::Forward, None, shared)
    }

    /// As [`Self::forward`]; `tensor` is said of `d_out`, too.
    pub(super) fn backward(inputs: &Inputs, d_out: &View, tensor: bool, shared: usize) -> Self {
        let Inputs { q, v, score, bias, .. } = inputs;
        // What is summed for each pair is left to the other kernels.
        let summed = bias.is_some() || matches!(score.relative, Some(Relative::Buckets(_)));
        if tensor && multiplies_bf16(inputs) && !summed && q.dim.max(v.dim) <= TENSOR_WIDTHS.backward {
            return Self::of_block(inputs, Pass::TensorBackward, Some(d_out), TENSOR_BLOCK, 32);
        }
        Self::fitted(inputs, Pass::Backward, Some(d_out), shared)
    }

    pub(super) fn delta(out: &View, d_out: &View) -> Self {
        let f = Stored::F32;
        Self::plain(Pass::Delta, out.dim, [f, f, f, f, d_out.data.stored(), out.data.stored()])
    }

    /// What is done with tensors besides attention: numbers of one type become those of another.
    pub(super) fn memory(from: Stored, to: Stored) -> Self {
        let f = Stored::F32;
        Self::plain(Pass::Memory, 1, [from, f, f, f, f, to])
    }

    /// Without blocks of rows and without terms.
    fn plain(pass: Pass, dim: usize, types: [Stored; 6]) -> Self {
        Self {
            pass,
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

    fn fitted(inputs: &Inputs, pass: Pass, d_out: Option<&View>, shared: usize) -> Self {
        let of_block = |block| Self::of_block(inputs, pass, d_out, block, 0);
        let [.., smallest] = BLOCKS;
        let fits = |options: &Self| options.shared_bytes() <= shared.min(SHARED_MEMORY);
        BLOCKS.into_iter().map(of_block).find(fits).unwrap_or_else(|| of_block(smallest))
    }

    fn of_block(inputs: &Inputs, pass: Pass, d_out: Option<&View>, block: (usize, usize), chunk: usize) -> Self {
        let Inputs { q, k, v, score, bias, .. } = inputs;
        let of = |view: Option<&View>| view.map_or(Stored::F32, |view| view.data.stored());
        let (rows, threads) = block;
        Self {
            pass,
            dim: q.dim,
            v_dim: v.dim,
            rows,
            threads,
            chunk,
            types: [of(Some(q)), of(Some(k)), of(Some(v)), of(bias.as_ref()), of(d_out), Stored::F32],
            softcap: score.softcap.is_some(),
            alibi: matches!(score.relative, Some(Relative::Alibi { .. })),
            buckets: matches!(score.relative, Some(Relative::Buckets(_))),
            bias: bias.is_some(),
            dropout: score.dropout.is_some_and(|dropout| dropout.rate > 0.0),
        }
    }

    /// Shared memory of a block of threads, as the sources lay it out.
    pub(super) fn shared_bytes(&self) -> usize {
        let (rows, keys, values) = (self.rows, self.rows * (self.dim + 1), self.rows * (self.v_dim + 1));
        let pairs = rows * (rows + 1);
        // In halves of a word, whole steps of 16 and 8 between rows.
        let row = |dim: usize| dim.next_multiple_of(16) + 8;
        let (key, value, chunk) = (row(self.dim), row(self.v_dim), self.chunk);
        let floats = match self.pass {
            Pass::Forward => keys + keys.max(values) + pairs,
            Pass::Backward => 2 * keys + 2 * values + if self.buckets { 4 * pairs } else { 2 * pairs },
            Pass::TensorForward => (rows * key + chunk * (key + value)) / 2,
            Pass::TensorBackward => (rows + chunk) * (key + value) / 2 + 2 * chunk,
            Pass::Delta | Pass::Memory => 0,
        };
        4 * floats
    }

    pub(super) fn source(&self) -> Source {
        let text = match self.pass {
            Pass::Forward => [ELEMENT, COMMON, FORWARD].concat(),
            Pass::Backward => [ELEMENT, COMMON, BACKWARD].concat(),
            Pass::TensorForward => [ELEMENT, COMMON, TENSOR, TENSOR_FORWARD].concat(),
            Pass::TensorBackward => [ELEMENT, COMMON, TENSOR, TENSOR_BACKWARD].concat(),
            Pass::Delta => [ELEMENT, COMMON, DELTA].concat(),
            Pass::Memory => [ELEMENT, MEMORY].concat(),
        };
        Source { text, definitions: self.definitions() }
    }

    fn definitions(&self) -> Vec<(&'static str, usize)> {
        let stored = |stored: Stored| match stored {
            Stored::F32 => 0,
            Stored::Bf16 => 1,
            Stored::F16 => 2,
        };
        let sizes = [
            ("DIM", self.dim),
            ("V_DIM", self.v_dim),
            ("ROWS", self.rows),
            ("THREADS", self.threads),
            ("CHUNK", self.chunk),
            ("JOB_BYTES", if self.pass == Pass::Memory { size_of::<Move>() } else { size_of::<Job>() }),
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
        let all = sizes.into_iter().chain(types).chain(terms.map(|(name, on)| (name, usize::from(on))));
        all.collect()
    }
}

/// Where the CPU's kernels multiply bf16, too.
fn multiplies_bf16(inputs: &Inputs) -> bool {
    let halves = [inputs.q, inputs.k, inputs.v].iter().all(|view| view.data.stored() == Stored::Bf16);
    halves && inputs.score.scale > 0.0
}

#[cfg(test)]
mod tests {
    use super::super::super::{Buckets, Data, Dropout, HeadMap, Score};
    use super::super::nvrtc;
    use super::*;
    use half::{bf16, f16};
    use std::collections::HashSet;

    #[test]
    fn tensor_cores_take_bf16_of_their_widths() {
        let heads = HeadMap::grouped(1, 1).expect("they divide");
        let (plain, flat) = (Score::new(1.0), Score::new(0.0));
        let buckets = Buckets { table: vec![0.0; 4], count: 4, max_distance: 8, bidirectional: false };
        let buckets = Score { relative: Some(Relative::Buckets(buckets)), ..plain.clone() };
        let (f, b) = (vec![0.0; 512], vec![bf16::ZERO; 512]);
        let (floats, halves) = (Data::F32(&f), Data::Bf16(&b));
        let pass = |data: Data, dim: usize, score: &Score, readable: bool| {
            let view = View::stored(data.slice(0..dim), 1, 1, dim).expect("its size");
            let inputs = Inputs { q: view, k: view, v: view, heads: &heads, score, bias: None };
            let forward = Options::forward(&inputs, readable, SHARED_MEMORY).pass;
            (forward, Options::backward(&inputs, &view, readable, SHARED_MEMORY).pass)
        };
        use Pass::{Backward, Forward, TensorBackward, TensorForward};
        assert_eq!(pass(halves, 128, &plain, true), (TensorForward, TensorBackward));
        assert_eq!(pass(halves, 256, &plain, true), (TensorForward, Backward));
        assert_eq!(pass(halves, 64, &buckets, true), (TensorForward, Backward));
        assert_eq!(pass(halves, 264, &plain, true), (Forward, Backward));
        assert_eq!(pass(halves, 128, &plain, false), (Forward, Backward));
        assert_eq!(pass(halves, 128, &flat, true), (Forward, Backward));
        assert_eq!(pass(floats, 128, &plain, true), (Forward, Backward));
    }

    /// Without a GPU this still shows that the kernels are CUDA, fit its architectures, and agree on the job's size.
    #[test]
    fn kernels_compile_and_fit_for_every_architecture_since_ampere() {
        if !nvrtc::is_there() {
            println!("skipped: no NVRTC (libnvrtc.so) on this machine");
            return;
        }
        let heads = HeadMap::grouped(1, 1).expect("they divide");
        let plain = Score::new(1.0);
        let buckets = Buckets { table: vec![0.0; 32], count: 32, max_distance: 128, bidirectional: true };
        let all = Score {
            softcap: Some(20.0),
            relative: Some(Relative::Buckets(buckets)),
            dropout: Some(Dropout { rate: 0.1, seed: 0, first_head: 0 }),
            ..plain.clone()
        };
        let alibi = Score { relative: Some(Relative::Alibi { slopes: vec![0.1] }), ..plain.clone() };
        let types = [Stored::F32, Stored::Bf16, Stored::F16];
        let compile = |options: &Options, architecture: &str| {
            let binary = options.source().compile(architecture).unwrap_or_else(|error| panic!("{error}"));
            assert!(!binary.is_empty(), "{options:?}");
        };
        // Of an A100, an L40, an H100 (also with what only it has), a B200, and of what stands under desks.
        for architecture in ["sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"] {
            for (from, to) in types.into_iter().flat_map(|from| types.map(|to| (from, to))) {
                compile(&Options::memory(from, to), architecture);
            }
            let widest = vec![bf16::ZERO; TENSOR_WIDTHS.forward];
            let view = View::stored(Data::Bf16(&widest), 1, 1, widest.len()).expect("its size");
            let inputs = Inputs { q: view, k: view, v: view, heads: &heads, score: &plain, bias: None };
            let options = Options::forward(&inputs, true, SHARED_MEMORY);
            assert!(options.pass == Pass::TensorForward && options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
            compile(&options, architecture);
            for (dim, v_dim) in [(128, 128), (8, 24), (576, 512)] {
                let wide = 2 * dim.max(v_dim);
                let (f, b, h) = (vec![0.0; wide], vec![bf16::ZERO; wide], vec![f16::ZERO; wide]);
                for (score, data, biased) in
                    [(&plain, Data::Bf16(&b), false), (&all, Data::F16(&h), true), (&alibi, Data::F32(&f), false)]
                {
                    let view = |dim: usize| View::stored(data.slice(0..2 * dim), 2, 1, dim).expect("its size");
                    let bias = biased.then(|| view(2));
                    let inputs = Inputs { q: view(dim), k: view(dim), v: view(v_dim), heads: &heads, score, bias };
                    let passes: HashSet<Options> = HashSet::from([
                        Options::forward(&inputs, false, SHARED_MEMORY),
                        Options::forward(&inputs, true, SHARED_MEMORY),
                        Options::backward(&inputs, &view(v_dim), false, SHARED_MEMORY),
                        Options::backward(&inputs, &view(v_dim), true, SHARED_MEMORY),
                        Options::delta(&view(v_dim), &view(v_dim)),
                    ]);
                    for options in passes {
                        assert!(options.shared_bytes() <= SHARED_MEMORY, "{options:?}");
                        compile(&options, architecture);
                    }
                }
            }
        }
    }
}
