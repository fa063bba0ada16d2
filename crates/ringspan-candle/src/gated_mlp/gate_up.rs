//! Gate and up of all tokens, stored for the backward pass.

use crate::number::{Number, StoredValues};
use crate::offload::Offload;
use crate::stored_activation::{Storage, StoredActivation};
use candle_core::Result;
use std::collections::VecDeque;

/// Gate and up of a gated layer, `[T, W]` each, on the device that computed them.
#[derive(Debug, Clone)]
pub enum GateUpActivations {
    /// Stored on the CPU, filled tile by tile.
    Cpu(Tiles),
    /// Stored on a GPU, as whole tensors.
    Gpu([StoredActivation; 2]),
}

impl GateUpActivations {
    /// The number of elements in each of gate and up.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Cpu(tiles) => tiles.len(),
            Self::Gpu([gate, _]) => gate.len(),
        }
    }

    /// Offloads gate and up from a GPU to CPU memory, as [`StoredActivation::offload`] does.
    ///
    /// # Errors
    /// As for [`StoredActivation::offload`].
    pub fn offload(self, offload: &Offload) -> Result<Self> {
        Ok(match self {
            Self::Gpu([gate, up]) => Self::Gpu([gate.offload(offload)?, up.offload(offload)?]),
            Self::Cpu(tiles) => Self::Cpu(tiles),
        })
    }
}

/// Gate and up of all tokens in CPU memory, tile by tile, in the order in which a pass comes to the tiles.
#[derive(Debug, Clone)]
pub struct Tiles {
    storage: Storage,
    tiles: VecDeque<[StoredValues; 2]>,
}

impl Tiles {
    /// No tiles yet; numbers will be stored in this type.
    pub(super) fn new(storage: Storage) -> Self {
        Self { storage, tiles: VecDeque::new() }
    }

    /// The number of elements in each of gate and up.
    fn len(&self) -> usize {
        self.tiles.iter().map(|[gate, _]| gate.len()).sum()
    }

    /// Stores the next tile.
    pub(super) fn push<T: Number>(&mut self, gate: Vec<T>, up: Vec<T>) {
        self.tiles.push_back([gate, up].map(|values| T::stored(values, self.storage)));
    }

    /// Removes the first tile that is left.
    pub(super) fn pop<T: Number>(&mut self) -> Option<[Vec<T>; 2]> {
        Some(self.tiles.pop_front()?.map(T::restored))
    }
}
