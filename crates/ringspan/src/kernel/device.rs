//! The kernel of a rank on any device: checks calls and passes them on to the device.

use super::backend::Backend;
use super::cpu::Cpu;
use super::staged;
use super::workers::Workers;
use super::{Data, Floats, Inputs, Isa, OnlineSoftmax, Progress, RelativeBias, Saved, Statistics, Sums, Tile, View};
use crate::error::{Error, Result};
use std::time::Duration;

/// Attention of banded tiles on the device of one rank.
///
/// The same inputs on the same device with the same number of threads give the same bits.
pub struct Kernel(pub(super) Device);

pub(super) enum Device {
    Cpu(Cpu),
    Backend(Box<dyn Backend>),
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Device::Cpu(cpu) => write!(f, "{:?} on {} threads", cpu.features.isa(), cpu.workers.count()),
            Device::Backend(backend) => write!(f, "{backend:?}"),
        }
    }
}

impl Kernel {
    /// A CPU kernel with `threads` threads (at least one; the calling thread is one of them) and the fastest instruction
    /// set of this machine. The other threads are started at the first call and live as long as the kernel.
    pub fn new(threads: usize) -> Self {
        Self(Device::Cpu(Cpu::new(Workers::new(threads), Isa::best())))
    }

    /// Like [`new`](Self::new), but uses the threads of the rayon pool that the calling thread belongs to, so a rank with a
    /// pool needs no second one. Outside of any pool, a call computes on its own thread only.
    pub fn in_current_pool(threads: usize) -> Self {
        Self(Device::Cpu(Cpu::new(Workers::of_current_pool(threads), Isa::best())))
    }

    /// Like [`in_current_pool`](Self::in_current_pool), for a given instruction set, to measure and to test the slower ones.
    ///
    /// # Errors
    /// [`Error::MissingIsa`] if this machine lacks it.
    pub fn in_current_pool_with_isa(threads: usize, isa: Isa) -> Result<Self> {
        isa.check_available()?;
        Ok(Self(Device::Cpu(Cpu::new(Workers::of_current_pool(threads), isa))))
    }

    /// Like [`new`](Self::new), for a given instruction set, to measure and to test the slower ones.
    ///
    /// # Errors
    /// [`Error::MissingIsa`] if this machine lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Result<Self> {
        isa.check_available()?;
        Ok(Self(Device::Cpu(Cpu::new(Workers::new(threads), isa))))
    }

    /// The portable kernel as it computes on a machine without AVX, to test it on others.
    pub fn without_avx(threads: usize) -> Self {
        let mut cpu = Cpu::new(Workers::new(threads), Isa::Portable);
        cpu.features = cpu.features.without_avx();
        Self(Device::Cpu(cpu))
    }

    /// A kernel on a device with its own memory.
    pub fn on(backend: impl Backend) -> Self {
        Self(Device::Backend(Box::new(backend)))
    }

    /// The backend of this kernel; `None` if it computes on the CPU.
    pub fn backend(&self) -> Option<&dyn Backend> {
        match &self.0 {
            Device::Cpu(_) => None,
            Device::Backend(backend) => Some(&**backend),
        }
    }

    /// Lets the kernel call `progress` repeatedly while it computes: on the caller's thread, between tiles, first at once
    /// and then with a [pause](Self::with_pause) of 250 microseconds. This advances communication that only moves when it
    /// is called.
    pub fn with_progress(mut self, progress: Progress) -> Self {
        match &mut self.0 {
            Device::Cpu(cpu) => cpu.hook.progress = Some(progress),
            Device::Backend(backend) => backend.set_progress(progress),
        }
        self
    }

    /// Sets the least pause between two calls of the progress function during a computation; zero calls it between all
    /// tiles. It has no effect on a device with its own memory, which computes by itself: there, the function is called while the CPU
    /// waits.
    pub fn with_pause(mut self, pause: Duration) -> Self {
        match &mut self.0 {
            Device::Cpu(cpu) => cpu.hook.pause = pause,
            Device::Backend(_) => {}
        }
        self
    }

    /// Whether this kernel computes on the CPU.
    pub fn is_cpu(&self) -> bool {
        match &self.0 {
            Device::Cpu(_) => true,
            Device::Backend(_) => false,
        }
    }

    /// The function given to [`with_progress`](Self::with_progress).
    pub fn progress_hook(&self) -> Option<Progress> {
        match &self.0 {
            Device::Cpu(cpu) => cpu.hook.progress.clone(),
            Device::Backend(backend) => backend.progress(),
        }
    }

    /// Whether q, k and v stored in bf16 are multiplied in bf16, with rounded weights, if the scale is positive; on GPUs
    /// only if their widths and strides are multiples of 8.
    pub fn multiplies_bf16(&self) -> bool {
        match &self.0 {
            Device::Cpu(cpu) => cpu.features.isa().multiplies_bf16(),
            Device::Backend(backend) => backend.multiplies_bf16(),
        }
    }

    /// Adds the keys of `tiles` to the softmax state of the queries.
    ///
    /// It is called once per key block; each visible pair must be in one tile of one call.
    ///
    /// # Errors
    /// Tensors on another device for a CPU kernel, or failures of the device.
    ///
    /// # Panics
    /// If shapes, tiles and `partial` do not fit each other.
    pub fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut OnlineSoftmax) -> Result<()> {
        self.add_tiles(inputs, tiles, partial, Cpu::forward)
    }

    /// Like [`forward`](Self::forward), for queries without a backward pass: for a single query the CPU has a faster way,
    /// which rounds scores differently from [`backward`](Self::backward).
    ///
    /// # Errors
    /// Like those of [`forward`](Self::forward).
    ///
    /// # Panics
    /// Like [`forward`](Self::forward).
    pub fn decode(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut OnlineSoftmax) -> Result<()> {
        self.add_tiles(inputs, tiles, partial, Cpu::decode)
    }

    fn add_tiles(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        partial: &mut OnlineSoftmax,
        on_cpu: fn(&Cpu, &Inputs, &[Tile], &mut OnlineSoftmax),
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
                self.check_device(inputs.views())?;
                on_cpu(cpu, inputs, tiles, partial);
                Ok(())
            }
            Device::Backend(backend) => staged::forward(&**backend, inputs, tiles, partial),
        }
    }

    /// Row sums of `out * d_out`, `[H, Tq]`, for out and d_out `[Tq, H, Dv]`; the backward pass subtracts them from dP.
    ///
    /// # Errors
    /// Like those of [`forward`](Self::forward).
    ///
    /// # Panics
    /// If the shapes are not equal.
    pub fn delta(&self, out: View, d_out: View) -> Result<Vec<f32>> {
        check_delta(&out, &d_out);
        match &self.0 {
            Device::Cpu(cpu) => {
                self.check_device([&out, &d_out])?;
                Ok(cpu.delta(out, d_out))
            }
            Device::Backend(backend) => staged::delta(&**backend, out, d_out),
        }
    }

    /// Like [`delta`](Self::delta), for tensors on this kernel's device.
    pub(crate) fn delta_on_device(&self, out: View, d_out: View) -> Result<Floats> {
        match &self.0 {
            Device::Cpu(_) => self.delta(out, d_out).map(Floats::Host),
            Device::Backend(backend) => {
                check_delta(&out, &d_out);
                backend.delta(&out, &d_out).map(Floats::Device)
            }
        }
    }

    /// Adds the gradients of `tiles` to `sums`.
    ///
    /// On a device with its own memory the sums may be there: then all inputs must be too, and
    /// nothing is copied or waited for.
    ///
    /// # Errors
    /// Like those of [`forward`](Self::forward), also for sums.
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
                self.check_device(inputs.views())?;
                self.check_device([&d_out])?;
                cpu.backward(inputs, tiles, saved, sums).ok_or_else(|| self.wrong_device_error(delta))
            }
            Device::Backend(backend) => staged::backward(&**backend, inputs, tiles, saved, sums),
        }
    }

    /// Waits until all started work is done, while communication goes on: after a call of
    /// [`on_device`](crate::attention::on_device), a device may still be computing the results.
    ///
    /// # Errors
    /// Failures of the started work.
    pub fn wait(&self) -> Result<()> {
        match &self.0 {
            Device::Cpu(_) => Ok(()),
            Device::Backend(backend) => backend.wait(),
        }
    }

    /// Marks the end of a step of a plan. If a device is some steps behind, this waits for it, so that only the memory of the
    /// current steps is in use; communication goes on meanwhile.
    pub(crate) fn step(&self) -> Result<()> {
        match &self.0 {
            Device::Cpu(_) => Ok(()),
            Device::Backend(backend) => backend.step(),
        }
    }

    /// Returns an error unless this kernel's device can read the tensors.
    pub(super) fn check_device<'v>(&self, views: impl IntoIterator<Item = &'v View<'v>>) -> Result<()> {
        let there = |data: Data| matches!(data, Data::Device(_)) != self.is_cpu();
        views.into_iter().find(|view| !there(view.data)).map_or(Ok(()), |view| Err(self.wrong_device_error(view.data)))
    }

    /// The error for elements that are on another device.
    pub(super) fn wrong_device_error(&self, data: Data) -> Error {
        Error::Device {
            device: format!("{self:?}"),
            operation: "use a tensor",
            message: format!("{} elements lie in the memory of another device", data.len()),
        }
    }

    /// The backend, to read a tensor in the memory of its device.
    pub(super) fn on_device(&self) -> Result<&dyn Backend> {
        self.backend().ok_or_else(|| Error::Device {
            device: format!("{self:?}"),
            operation: "use a tensor",
            message: "it lies in the memory of another device".into(),
        })
    }

    /// Upper bound on the bytes of buffers in the memory of the CPU that a [`forward`](Self::forward) call with these
    /// shapes holds, without its arguments.
    pub fn forward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.forward_workspace(inputs, tiles),
            Device::Backend(_) => 0,
        }
    }

    /// Like [`forward_workspace`](Self::forward_workspace), for [`decode`](Self::decode).
    pub fn decode_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.decode_workspace(inputs, tiles),
            Device::Backend(_) => 0,
        }
    }

    /// Like [`forward_workspace`](Self::forward_workspace), for [`backward`](Self::backward).
    pub fn backward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.backward_workspace(inputs, tiles),
            Device::Backend(_) => 0,
        }
    }
}

#[cfg(test)]
impl Kernel {
    /// Bytes of the buffers that are kept for the next call.
    pub(super) fn held(&self) -> u64 {
        match &self.0 {
            Device::Cpu(cpu) => cpu.held(),
            Device::Backend(_) => 0,
        }
    }
}

fn check_delta(out: &View, d_out: &View) {
    let View { tokens, heads, dim, .. } = *d_out;
    assert_eq!((out.tokens, out.heads, out.dim), (tokens, heads, dim), "the shapes of out and d_out");
}

/// Panics unless shapes and tiles fit: the kernels access memory by pointers, which must stay in bounds.
pub(super) fn check(inputs: &Inputs, tiles: &[Tile]) {
    let Inputs { q, k, v, heads, score, bias } = inputs;
    assert!(q.dim > 0 && v.dim > 0, "head widths of {} and {}", q.dim, v.dim);
    assert_eq!((q.dim, k.tokens, k.heads), (k.dim, v.tokens, v.heads), "the shapes of q, k and v");
    assert_eq!((q.heads, k.heads), (heads.heads(), heads.kv_heads()), "the heads of the head map");
    for tile in tiles {
        let inside = tile.q.end <= q.tokens && tile.k.end <= k.tokens;
        assert!(inside, "tile {:?} x {:?} of {} queries and {} keys", tile.q, tile.k, q.tokens, k.tokens);
        let keys = tile.position.key + tile.k.len().saturating_sub(1) * tile.position.step;
        let held = bias.is_none_or(|bias| tile.k.is_empty() || keys < bias.dim);
        assert!(held, "a tile that ends with key {keys}, and a bias of {} keys", bias.map_or(0, |bias| bias.dim));
    }
    if let Some(bias) = bias {
        let fits = bias.tokens == q.tokens && (bias.heads == 1 || bias.heads == q.heads);
        assert!(fits, "a bias of [{}, {}, ..] for q of [{}, {}, ..]", bias.tokens, bias.heads, q.tokens, q.heads);
    }
    let fits = match &score.relative {
        Some(RelativeBias::Alibi { slopes }) => slopes.len() == q.heads,
        Some(RelativeBias::Buckets(buckets)) => buckets.table.len() == q.heads * buckets.count,
        None => true,
    };
    assert!(fits, "relative terms for another number of heads than {}", q.heads);
}
