//! The running softmax state of a rank's queries, on its kernel's device.

#[cfg(feature = "cuda")]
use super::cuda::GpuArray;
use super::device::Device;
use super::{Data, Floats, Inputs, Kernel, Partial, Statistics, Tile};
use crate::comm::Buffer;
use crate::error::Result;
#[cfg(feature = "cuda")]
use std::sync::Arc;

/// The softmax state on a device; the sizes are tokens, heads and the width of values.
#[derive(Debug)]
pub(crate) struct SoftmaxState {
    sizes: (usize, usize, usize),
    place: StateMemory,
}

#[derive(Debug)]
enum StateMemory {
    Host(Partial),
    /// Output, maximum and sum, one after the other as in messages.
    #[cfg(feature = "cuda")]
    Gpu(GpuArray),
}

impl SoftmaxState {
    /// The state as a message: output, maximum, sum.
    pub(crate) fn into_message(self) -> Buffer {
        match self.place {
            StateMemory::Host(partial) => Buffer::F32(partial.into_message()),
            #[cfg(feature = "cuda")]
            StateMemory::Gpu(array) => Buffer::Device(Arc::new(array)),
        }
    }
}

impl Kernel {
    /// A state that has seen no keys yet.
    pub(crate) fn state(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<SoftmaxState> {
        let place = match &self.0 {
            Device::Cpu(_) => StateMemory::Host(Partial::new(tokens, heads, v_dim)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => StateMemory::Gpu(cuda.state(tokens * heads, v_dim)?),
        };
        Ok(SoftmaxState { sizes: (tokens, heads, v_dim), place })
    }

    /// Like [`state`](Self::state), but with capacity for the message of [`SoftmaxState::into_message`].
    pub(crate) fn state_to_send(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<SoftmaxState> {
        match &self.0 {
            Device::Cpu(_) => {
                let place = StateMemory::Host(Partial::to_send(tokens, heads, v_dim));
                Ok(SoftmaxState { sizes: (tokens, heads, v_dim), place })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => self.state(tokens, heads, v_dim),
        }
    }

    /// Like [`Kernel::forward`], for tensors on this kernel's device.
    pub(crate) fn attend(&self, inputs: &Inputs, tiles: &[Tile], state: &mut SoftmaxState) -> Result<()> {
        self.add_keys(inputs, tiles, state, Self::forward)
    }

    /// Like [`Kernel::decode`], for tensors on this kernel's device.
    pub(crate) fn decode_into(&self, inputs: &Inputs, tiles: &[Tile], state: &mut SoftmaxState) -> Result<()> {
        self.add_keys(inputs, tiles, state, Self::decode)
    }

    fn add_keys(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        state: &mut SoftmaxState,
        on_host: impl Fn(&Self, &Inputs, &[Tile], &mut Partial) -> Result<()>,
    ) -> Result<()> {
        match &mut state.place {
            StateMemory::Host(partial) => on_host(self, inputs, tiles, partial),
            #[cfg(feature = "cuda")]
            StateMemory::Gpu(array) => {
                let (tokens, heads, v_dim) = state.sizes;
                super::device::check(inputs, tiles);
                assert_eq!((tokens, heads, v_dim), (inputs.q.tokens, inputs.q.heads, inputs.v.dim), "a softmax state");
                if tokens * heads == 0 { Ok(()) } else { self.on_gpu()?.forward(inputs, tiles, array) }
            }
        }
    }

    /// Merges the state of the same queries over other keys, as a message of [`SoftmaxState::into_message`].
    ///
    /// # Panics
    /// If the message has another size.
    pub(crate) fn merge(&self, state: &mut SoftmaxState, message: Data) -> Result<()> {
        let (tokens, heads, v_dim) = state.sizes;
        assert_eq!(message.len(), tokens * heads * (v_dim + 2), "the size of a softmax state");
        match (&mut state.place, message) {
            (StateMemory::Host(partial), Data::F32(message)) => {
                partial.merge(tokens, heads, v_dim, message);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            (StateMemory::Gpu(array), Data::Gpu(message)) => self.on_gpu()?.merge(array, state.sizes, message),
            _ => Err(self.misplaced(message)),
        }
    }

    /// Output `[Tq, H, Dv]` and statistics, computed as by [`Partial::finish`].
    pub(crate) fn finish(&self, state: SoftmaxState, sinks: Option<&[f32]>) -> Result<(Floats, Statistics<Floats>)> {
        let (tokens, heads, v_dim) = state.sizes;
        match state.place {
            StateMemory::Host(partial) => {
                let (out, Statistics { max, sum }) = partial.finish(tokens, heads, v_dim, sinks);
                Ok((Floats::Host(out), Statistics { max: Floats::Host(max), sum: Floats::Host(sum) }))
            }
            #[cfg(feature = "cuda")]
            StateMemory::Gpu(array) => {
                let (out, Statistics { max, sum }) = self.on_gpu()?.finish(array, (tokens, heads, v_dim), sinks)?;
                Ok((Floats::Gpu(out), Statistics { max: Floats::Gpu(max), sum: Floats::Gpu(sum) }))
            }
        }
    }
}
