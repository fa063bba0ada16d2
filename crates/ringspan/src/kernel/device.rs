//! The kernel of a rank, whatever device computes it: what calls must fit, and who is asked.

use super::cpu::Cpu;
#[cfg(feature = "cuda")]
use super::cuda::{Cuda, Gpu};
#[cfg(feature = "cuda")]
use super::staged;
use super::workers::Workers;
use super::{Data, Floats, Inputs, Isa, Partial, Relative, Saved, Statistics, Sums, Tile, View};
use crate::error::{Error, Result};
use std::sync::Arc;
use std::time::Duration;

/// What a kernel calls between pieces of work.
pub type Progress = Arc<dyn Fn() + Send + Sync>;

/// Attention of banded tiles on the device of one rank.
///
/// The same inputs on the same device with the same number of threads give the same bits.
pub struct Kernel(pub(super) Device);

pub(super) enum Device {
    Cpu(Cpu),
    #[cfg(feature = "cuda")]
    Cuda(Box<Cuda>),
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Device::Cpu(cpu) => write!(f, "{:?} on {} threads", cpu.code.isa(), cpu.workers.count()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => write!(f, "{cuda:?}"),
        }
    }
}

impl Kernel {
    /// A kernel that computes with `threads` threads (at least one; the calling thread is one of them), with the best
    /// instruction set of this machine. The others are started at the first call and stay as long as the kernel.
    pub fn new(threads: usize) -> Self {
        Self(Device::Cpu(Cpu::new(Workers::new(threads), Isa::best())))
    }

    /// As [`new`](Self::new), with threads of the rayon pool that the calling thread belongs to: a rank that has a pool needs
    /// no second one. A call from outside of any pool computes on its own thread.
    pub fn in_current_pool(threads: usize) -> Self {
        Self(Device::Cpu(Cpu::new(Workers::of_current_pool(threads), Isa::best())))
    }

    /// As [`new`](Self::new), for one instruction set: to measure and to test those that are not this machine's best.
    ///
    /// # Errors
    /// [`Error::MissingIsa`] if this machine lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self> {
        let available = Isa::available();
        if !available.contains(&isa) {
            let names: Vec<String> = available.iter().map(Isa::to_string).collect();
            return Err(Error::MissingIsa { isa: isa.to_string(), available: names.join(", ") });
        }
        Ok(Self(Device::Cpu(Cpu::new(Workers::new(threads), isa))))
    }

    /// A kernel on an NVIDIA GPU, with a stream of its own: kernels of several ranks may share a GPU.
    ///
    /// # Errors
    /// What the driver says.
    #[cfg(feature = "cuda")]
    pub fn cuda(gpu: &Gpu) -> Result<Self> {
        Ok(Self(Device::Cuda(Box::new(Cuda::new(gpu)?))))
    }

    /// The same kernel, which calls `progress` on the thread of its caller again and again while it computes, between tiles,
    /// at once and then with a [pause](Self::with_pause) of 250 microseconds: communication that moves only when it is asked
    /// to is driven so.
    pub fn with_progress(mut self, progress: Progress) -> Self {
        match &mut self.0 {
            Device::Cpu(cpu) => cpu.hook.progress = Some(progress),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.progress = Some(progress),
        }
        self
    }

    /// The same kernel with another pause, at least, between two calls while it computes; none calls between all tiles. A
    /// GPU computes by itself: whoever waits for it calls again and again.
    pub fn with_pause(mut self, pause: Duration) -> Self {
        match &mut self.0 {
            Device::Cpu(cpu) => cpu.hook.pause = pause,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {}
        }
        self
    }

    /// What [`with_progress`](Self::with_progress) was given.
    pub fn progress_hook(&self) -> Option<Progress> {
        match &self.0 {
            Device::Cpu(cpu) => cpu.hook.progress.clone(),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.progress.clone(),
        }
    }

    /// Whether q, k and v that are stored as bf16 are multiplied as bf16, weights rounded too, where the scale is positive;
    /// on GPUs only where their widths and strides are multiples of 8.
    pub fn multiplies_bf16(&self) -> bool {
        match &self.0 {
            Device::Cpu(cpu) => cpu.code.isa().multiplies_bf16(),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.multiplies_bf16(),
        }
    }

    /// Adds the keys of `tiles` to the softmax state of the queries.
    ///
    /// Called once per key block; each visible pair must be named by one tile of one call.
    ///
    /// # Errors
    /// Tensors on a GPU for a kernel of the CPU; failures of the device.
    ///
    /// # Panics
    /// If shapes, tiles and `partial` do not fit each other.
    pub fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) -> Result<()> {
        self.add_tiles(inputs, tiles, partial, Cpu::forward)
    }

    /// [`forward`](Self::forward) of queries that will have no backward pass: a CPU takes a single query a faster way, which
    /// rounds its scores otherwise than [`backward`](Self::backward) does.
    ///
    /// # Errors
    /// As of [`forward`](Self::forward).
    ///
    /// # Panics
    /// As [`forward`](Self::forward).
    pub fn decode(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) -> Result<()> {
        self.add_tiles(inputs, tiles, partial, Cpu::decode)
    }

    fn add_tiles(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        partial: &mut Partial,
        on_cpu: fn(&Cpu, &Inputs, &[Tile], &mut Partial),
    ) -> Result<()> {
        check(inputs, tiles);
        let Inputs { q, v, .. } = *inputs;
        let rows = q.tokens * q.heads;
        assert_eq!(
            [partial.out.len(), partial.max.len(), partial.sum.len()],
            [rows * v.dim, rows, rows],
            "a softmax state for other sizes than [{}, {}, {}]",
            q.tokens,
            q.heads,
            v.dim
        );
        if rows == 0 {
            return Ok(());
        }
        match &self.0 {
            Device::Cpu(cpu) => {
                self.check_place(inputs.views())?;
                on_cpu(cpu, inputs, tiles, partial);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => staged::forward(cuda, inputs, tiles, partial),
        }
    }

    /// Row sums of `out * d_out`, `[H, Tq]`, for out and d_out `[Tq, H, Dv]`: what the backward pass subtracts.
    ///
    /// # Errors
    /// As of [`forward`](Self::forward).
    ///
    /// # Panics
    /// If the shapes are not equal.
    pub fn delta(&self, out: View, d_out: View) -> Result<Vec<f32>> {
        check_delta(&out, &d_out);
        match &self.0 {
            Device::Cpu(cpu) => {
                self.check_place([&out, &d_out])?;
                Ok(cpu.delta(out, d_out))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => staged::delta(cuda, out, d_out),
        }
    }

    /// [`delta`](Self::delta) of tensors that lie where this kernel computes.
    pub(crate) fn delta_there(&self, out: View, d_out: View) -> Result<Floats> {
        match &self.0 {
            Device::Cpu(_) => self.delta(out, d_out).map(Floats::Host),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => {
                check_delta(&out, &d_out);
                cuda.delta(&out, &d_out).map(Floats::Gpu)
            }
        }
    }

    /// Adds the gradients of `tiles` to `sums`.
    ///
    /// On a GPU sums may lie there: then all that is read does, and nothing is copied or waited for.
    ///
    /// # Errors
    /// As of [`forward`](Self::forward), also for sums.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    pub fn backward(&self, inputs: &Inputs, tiles: &[Tile], saved: &Saved, sums: &mut Sums) -> Result<()> {
        check(inputs, tiles);
        let Inputs { q, k, v, score, bias, .. } = *inputs;
        let Saved { statistics: Statistics { max, sum }, delta, d_out } = *saved;
        let rows = q.tokens * q.heads;
        assert_eq!((d_out.tokens, d_out.heads, d_out.dim), (q.tokens, q.heads, v.dim), "the shape of d_out");
        assert_eq!([max.len(), sum.len(), delta.len()], [rows; 3], "the sizes of max, sum and delta");
        assert_eq!(sums.dq.len(), rows * q.dim, "the size of dq");
        let keys = k.tokens * k.heads;
        assert_eq!([sums.dk.len(), sums.dv.len()], [keys * k.dim, keys * v.dim], "the sizes of dk and dv");
        let biases = bias.map_or(0, |bias| bias.tokens * bias.heads * bias.dim);
        let terms = [sums.d_table.len(), sums.d_bias.len()];
        assert_eq!(terms, [score.table_len(), biases], "the sizes of d_table and d_bias");
        if rows == 0 {
            return Ok(());
        }
        match &self.0 {
            Device::Cpu(cpu) => {
                self.check_place(inputs.views())?;
                self.check_place([&d_out])?;
                cpu.backward(inputs, tiles, saved, sums).ok_or_else(|| self.misplaced(delta))
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => staged::backward(cuda, inputs, tiles, saved, sums),
        }
    }

    /// Waits until all that was started is done, while communication goes on: results may be on their way on a GPU when a
    /// call of [`on_device`](crate::attention::on_device) returns.
    ///
    /// # Errors
    /// Failures of what was started.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.wait(),
        }
    }

    /// Marks the end of a step of a plan. A GPU that is some steps behind is waited for, so that no more memory is taken than
    /// that of the steps it is at; communication goes on meanwhile.
    pub(crate) fn step(&self) -> Result<()> {
        match &self.0 {
            Device::Cpu(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => cuda.step(),
        }
    }

    /// An error unless the tensors can be read here.
    pub(super) fn check_place<'v>(&self, views: impl IntoIterator<Item = &'v View<'v>>) -> Result<()> {
        let there = |data: Data| match (&self.0, data) {
            (Device::Cpu(_), Data::F32(_) | Data::Bf16(_) | Data::F16(_)) => true,
            #[cfg(feature = "cuda")]
            (Device::Cuda(_), Data::Gpu(_)) => true,
            #[cfg(feature = "cuda")]
            _ => false,
        };
        views.into_iter().find(|view| !there(view.data)).map_or(Ok(()), |view| Err(self.misplaced(view.data)))
    }

    /// The error of elements that lie where this kernel does not compute.
    pub(super) fn misplaced(&self, data: Data) -> Error {
        Error::Device {
            device: format!("{self:?}"),
            operation: "use a tensor",
            message: format!("{} elements lie in the memory of another device", data.len()),
        }
    }

    #[cfg(feature = "cuda")]
    pub(super) fn on_gpu(&self) -> Result<&Cuda> {
        match &self.0 {
            Device::Cuda(cuda) => Ok(cuda),
            Device::Cpu(_) => Err(Error::Device {
                device: format!("{self:?}"),
                operation: "use a tensor",
                message: "it lies in the memory of a GPU".into(),
            }),
        }
    }

    /// Most bytes of buffers that a [`forward`](Self::forward) call of these shapes holds in the memory of the CPU,
    /// besides its arguments.
    pub fn forward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.forward_workspace(inputs, tiles),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 0,
        }
    }

    /// As [`forward_workspace`](Self::forward_workspace), of [`decode`](Self::decode).
    pub fn decode_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.decode_workspace(inputs, tiles),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 0,
        }
    }

    /// As [`forward_workspace`](Self::forward_workspace), of [`backward`](Self::backward).
    pub fn backward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.backward_workspace(inputs, tiles),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 0,
        }
    }
}

#[cfg(test)]
impl Kernel {
    /// The portable kernel of a machine without AVX.
    pub(super) fn without_avx(threads: usize) -> Self {
        let mut cpu = Cpu::new(Workers::new(threads), Isa::Portable);
        cpu.code = cpu.code.without_avx();
        Self(Device::Cpu(cpu))
    }

    /// Bytes of the buffers kept for the next call.
    pub(super) fn held(&self) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.held(),
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 0,
        }
    }
}

fn check_delta(out: &View, d_out: &View) {
    let View { tokens, heads, dim, .. } = *d_out;
    assert_eq!((out.tokens, out.heads, out.dim), (tokens, heads, dim), "the shapes of out and d_out");
}

/// The kernels read and write by pointer: what does not fit must not come that far.
pub(super) fn check(inputs: &Inputs, tiles: &[Tile]) {
    let Inputs { q, k, v, heads, score, bias } = inputs;
    assert!(q.dim > 0 && v.dim > 0, "head widths of {} and {}", q.dim, v.dim);
    assert_eq!((q.dim, k.tokens, k.heads), (k.dim, v.tokens, v.heads), "the shapes of q, k and v");
    assert_eq!((q.heads, k.heads), (heads.heads(), heads.kv_heads()), "the heads of the head map");
    for tile in tiles {
        let inside = tile.q.end <= q.tokens && tile.k.end <= k.tokens;
        assert!(inside, "tile {:?} x {:?} of {} queries and {} keys", tile.q, tile.k, q.tokens, k.tokens);
        let keys = tile.place.key + tile.k.len().saturating_sub(1) * tile.place.step;
        let held = bias.is_none_or(|bias| tile.k.is_empty() || keys < bias.dim);
        assert!(held, "a tile that ends with key {keys}, and a bias of {} keys", bias.map_or(0, |bias| bias.dim));
    }
    if let Some(bias) = bias {
        let fits = bias.tokens == q.tokens && (bias.heads == 1 || bias.heads == q.heads);
        assert!(fits, "a bias of [{}, {}, ..] for q of [{}, {}, ..]", bias.tokens, bias.heads, q.tokens, q.heads);
    }
    let fits = match &score.relative {
        Some(Relative::Alibi { slopes }) => slopes.len() == q.heads,
        Some(Relative::Buckets(buckets)) => buckets.table.len() == q.heads * buckets.count,
        None => true,
    };
    assert!(fits, "relative terms for another number of heads than {}", q.heads);
}
