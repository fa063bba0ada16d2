//! Gate and up of all tokens, which wait for the backward.

use crate::kept::{Kept, Storage};
use crate::number::{Number, convert};
use crate::offload::Offload;
use candle_core::Result;
use half::bf16;

/// The two wide results of a gated layer, `[T, W]` each, where it was computed.
#[derive(Debug, Clone)]
pub enum Wide {
    /// Kept tile by tile.
    Cpu(Tiles),
    /// Kept whole.
    Gpu([Kept; 2]),
}

impl Wide {
    /// Numbers of each of the two.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Cpu(tiles) => tiles.len(),
            Self::Gpu([gate, _]) => gate.len(),
        }
    }

    /// The same, which waits on the CPU as [`Kept::away`] says.
    ///
    /// # Errors
    /// As there.
    pub fn away(self, offload: &Offload) -> Result<Self> {
        Ok(match self {
            Self::Gpu([gate, up]) => Self::Gpu([gate.away(offload)?, up.away(offload)?]),
            Self::Cpu(tiles) => Self::Cpu(tiles),
        })
    }
}

/// Both on the CPU.
#[derive(Debug, Clone)]
pub struct Tiles(Numbers);

#[derive(Debug, Clone)]
enum Numbers {
    Whole([Vec<f32>; 2]),
    Rounded([Vec<bf16>; 2]),
}

impl Tiles {
    /// Room for `size` numbers twice.
    pub(super) fn new(size: usize, storage: Storage) -> Self {
        Self(match storage {
            Storage::F32 => Numbers::Whole([vec![0.0; size], vec![0.0; size]]),
            Storage::Bf16 => Numbers::Rounded([vec![bf16::ZERO; size], vec![bf16::ZERO; size]]),
        })
    }

    fn len(&self) -> usize {
        match &self.0 {
            Numbers::Whole([gate, _]) => gate.len(),
            Numbers::Rounded([gate, _]) => gate.len(),
        }
    }

    /// Keeps a tile whose numbers begin at `at`.
    pub(super) fn write<T: Number>(&mut self, at: usize, gate: &[T], up: &[T]) {
        let range = at..at + gate.len();
        match &mut self.0 {
            Numbers::Whole([g, u]) => {
                convert(gate, &mut g[range.clone()]);
                convert(up, &mut u[range]);
            }
            Numbers::Rounded([g, u]) => {
                convert(gate, &mut g[range.clone()]);
                convert(up, &mut u[range]);
            }
        }
    }

    /// A tile again.
    pub(super) fn read<T: Number>(&self, at: usize, gate: &mut [T], up: &mut [T]) {
        let range = at..at + gate.len();
        match &self.0 {
            Numbers::Whole([g, u]) => {
                convert(&g[range.clone()], gate);
                convert(&u[range], up);
            }
            Numbers::Rounded([g, u]) => {
                convert(&g[range.clone()], gate);
                convert(&u[range], up);
            }
        }
    }
}
