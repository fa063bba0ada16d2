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
pub(crate) struct State {
    sizes: (usize, usize, usize),
    place: Place,
}

#[derive(Debug)]
enum Place {
    Host(Partial),
    /// Output, maximum and sum, one after the other as in messages.
    #[cfg(feature = "cuda")]
    Gpu(GpuArray),
}

impl State {
    /// The state as a message: output, maximum, sum.
    pub(crate) fn into_message(self) -> Buffer {
        match self.place {
            Place::Host(partial) => Buffer::F32(partial.into_message()),
            #[cfg(feature = "cuda")]
            Place::Gpu(array) => Buffer::Device(Arc::new(array)),
        }
    }
}

impl Kernel {
    /// A state that has seen no keys yet.
    pub(crate) fn state(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<State> {
        let place = match &self.0 {
            Device::Cpu(_) => Place::Host(Partial::new(tokens, heads, v_dim)),
            #[cfg(feature = "cuda")]
            Device::Cuda(cuda) => Place::Gpu(cuda.state(tokens * heads, v_dim)?),
        };
        Ok(State { sizes: (tokens, heads, v_dim), place })
    }

    /// Like [`state`](Self::state), but with capacity for the message of [`State::into_message`].
    pub(crate) fn state_to_send(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<State> {
        match &self.0 {
            Device::Cpu(_) => {
                let place = Place::Host(Partial::to_send(tokens, heads, v_dim));
                Ok(State { sizes: (tokens, heads, v_dim), place })
            }
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => self.state(tokens, heads, v_dim),
        }
    }

    /// Like [`Kernel::forward`], for tensors on this kernel's device.
    pub(crate) fn attend(&self, inputs: &Inputs, tiles: &[Tile], state: &mut State) -> Result<()> {
        self.add_keys(inputs, tiles, state, Self::forward)
    }

    /// Like [`Kernel::decode`], for tensors on this kernel's device.
    pub(crate) fn decode_into(&self, inputs: &Inputs, tiles: &[Tile], state: &mut State) -> Result<()> {
        self.add_keys(inputs, tiles, state, Self::decode)
    }

    fn add_keys(
        &self,
        inputs: &Inputs,
        tiles: &[Tile],
        state: &mut State,
        on_host: impl Fn(&Self, &Inputs, &[Tile], &mut Partial) -> Result<()>,
    ) -> Result<()> {
        match &mut state.place {
            Place::Host(partial) => on_host(self, inputs, tiles, partial),
            #[cfg(feature = "cuda")]
            Place::Gpu(array) => {
                let (tokens, heads, v_dim) = state.sizes;
                super::device::check(inputs, tiles);
                assert_eq!((tokens, heads, v_dim), (inputs.q.tokens, inputs.q.heads, inputs.v.dim), "a softmax state");
                if tokens * heads == 0 { Ok(()) } else { self.on_gpu()?.forward(inputs, tiles, array) }
            }
        }
    }

    /// Merges the state of the same queries over other keys, as a message of [`State::into_message`].
    ///
    /// # Panics
    /// If the message has another size.
    pub(crate) fn merge(&self, state: &mut State, message: Data) -> Result<()> {
        let (tokens, heads, v_dim) = state.sizes;
        assert_eq!(message.len(), tokens * heads * (v_dim + 2), "the size of a softmax state");
        match (&mut state.place, message) {
            (Place::Host(partial), Data::F32(message)) => {
                partial.merge(tokens, heads, v_dim, message);
                Ok(())
            }
            #[cfg(feature = "cuda")]
            (Place::Gpu(array), Data::Gpu(message)) => self.on_gpu()?.merge(array, state.sizes, message),
            _ => Err(self.misplaced(message)),
        }
    }

    /// Output `[Tq, H, Dv]` and statistics, computed as by [`Partial::finish`].
    pub(crate) fn finish(&self, state: State, sinks: Option<&[f32]>) -> Result<(Floats, Statistics<Floats>)> {
        let (tokens, heads, v_dim) = state.sizes;
        match state.place {
            Place::Host(partial) => {
                let (out, Statistics { max, sum }) = partial.finish(tokens, heads, v_dim, sinks);
                Ok((Floats::Host(out), Statistics { max: Floats::Host(max), sum: Floats::Host(sum) }))
            }
            #[cfg(feature = "cuda")]
            Place::Gpu(array) => {
                let (out, Statistics { max, sum }) = self.on_gpu()?.finish(array, (tokens, heads, v_dim), sinks)?;
                Ok((Floats::Gpu(out), Statistics { max: Floats::Gpu(max), sum: Floats::Gpu(sum) }))
            }
        }
    }
}
