//! The running softmax state of a rank's queries, on its kernel's device.

use super::device::Device;
use super::device_array::DeviceArray;
use super::{Data, Floats, Inputs, Kernel, OnlineSoftmax, StateShape, Statistics, Tile};
use crate::comm::Buffer;
use crate::error::Result;
use std::sync::Arc;

/// The softmax state on a device.
#[derive(Debug)]
pub(crate) struct SoftmaxState {
    shape: StateShape,
    place: StateMemory,
}

#[derive(Debug)]
enum StateMemory {
    Host(OnlineSoftmax),
    /// Output, maximum and sum, one after the other as in messages.
    Device(DeviceArray),
}

impl SoftmaxState {
    /// The state as a message: output, maximum, sum.
    pub(crate) fn into_message(self) -> Buffer {
        match self.place {
            StateMemory::Host(partial) => Buffer::F32(partial.into_message()),
            StateMemory::Device(array) => Buffer::Device(Arc::new(array)),
        }
    }
}

impl Kernel {
    /// A state that has seen no keys yet.
    pub(crate) fn state(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<SoftmaxState> {
        let shape = StateShape { tokens, heads, v_dim };
        let place = match &self.0 {
            Device::Cpu(_) => StateMemory::Host(OnlineSoftmax::new(tokens, heads, v_dim)),
            Device::Backend(backend) => StateMemory::Device(backend.softmax_state(shape)?),
        };
        Ok(SoftmaxState { shape, place })
    }

    /// Like [`state`](Self::state), but with capacity for the message of [`SoftmaxState::into_message`].
    pub(crate) fn state_to_send(&self, tokens: usize, heads: usize, v_dim: usize) -> Result<SoftmaxState> {
        match &self.0 {
            Device::Cpu(_) => {
                let place = StateMemory::Host(OnlineSoftmax::to_send(tokens, heads, v_dim));
                Ok(SoftmaxState { shape: StateShape { tokens, heads, v_dim }, place })
            }
            Device::Backend(_) => self.state(tokens, heads, v_dim),
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
        on_host: impl Fn(&Self, &Inputs, &[Tile], &mut OnlineSoftmax) -> Result<()>,
    ) -> Result<()> {
        match &mut state.place {
            StateMemory::Host(partial) => on_host(self, inputs, tiles, partial),
            StateMemory::Device(array) => {
                super::device::check(inputs, tiles);
                let Inputs { q, v, .. } = inputs;
                let wanted = StateShape { tokens: q.tokens, heads: q.heads, v_dim: v.dim };
                assert_eq!(state.shape, wanted, "a softmax state");
                if wanted.is_empty() { Ok(()) } else { self.on_device()?.forward(inputs, tiles, array) }
            }
        }
    }

    /// Merges the state of the same queries over other keys, as a message of [`SoftmaxState::into_message`].
    ///
    /// # Panics
    /// If the message has another size.
    pub(crate) fn merge(&self, state: &mut SoftmaxState, message: Data) -> Result<()> {
        let shape @ StateShape { tokens, heads, v_dim } = state.shape;
        assert_eq!(message.len(), shape.len(), "the size of a softmax state");
        match (&mut state.place, message) {
            (StateMemory::Host(partial), Data::F32(message)) => {
                partial.merge(tokens, heads, v_dim, message);
                Ok(())
            }
            (StateMemory::Device(array), Data::Device(message)) => self.on_device()?.merge(array, shape, message),
            _ => Err(self.wrong_device_error(message)),
        }
    }

    /// Output `[Tq, H, Dv]` and statistics, computed as by [`OnlineSoftmax::finish`].
    pub(crate) fn finish(&self, state: SoftmaxState, sinks: Option<&[f32]>) -> Result<(Floats, Statistics<Floats>)> {
        let shape @ StateShape { tokens, heads, v_dim } = state.shape;
        match state.place {
            StateMemory::Host(partial) => {
                let (out, Statistics { max, sum }) = partial.finish(tokens, heads, v_dim, sinks);
                Ok((Floats::Host(out), Statistics { max: Floats::Host(max), sum: Floats::Host(sum) }))
            }
            StateMemory::Device(array) => {
                let (out, Statistics { max, sum }) = self.on_device()?.finish(array, shape, sinks)?;
                Ok((Floats::Device(out), Statistics { max: Floats::Device(max), sum: Floats::Device(sum) }))
            }
        }
    }
}
