//! Panels: the codes of weights in the order in which they are multiplied.

use super::instructions::{Instructions, VectorWork};
use super::lanes::Lanes;
use super::{BLOCK, COLUMNS, ROWS};

/// The most scales of a row of a panel.
const PARTS: usize = COLUMNS / 16;

/// The codes and scales of some rows, row by row.
#[derive(Debug, Clone)]
#[repr(C, align(64))]
pub struct RowCodes {
    /// The codes of each row.
    pub codes: [[i8; COLUMNS]; ROWS],
    /// The scale of columns 16 i to 16 i + 15 of row r is `scales[i][r]`. Where 32 columns share one, that of the first 16 is used.
    pub scales: [[f32; ROWS]; PARTS],
    /// What is subtracted from the numbers in columns 32 i to 32 i + 31 of row r is `minima[i][r]`.
    pub minima: [[f32; ROWS]; COLUMNS / BLOCK],
}

impl RowCodes {
    /// Zeros.
    pub fn zeros() -> Box<Self> {
        Box::new(Self {
            codes: [[0; COLUMNS]; ROWS],
            scales: [[0.0; ROWS]; PARTS],
            minima: [[0.0; ROWS]; COLUMNS / BLOCK],
        })
    }
}

/// The codes of 16 rows in some columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Panel {
    pub(super) pairs: [[[i16; 2]; ROWS]; COLUMNS / 2],
    pub(super) scales: [[f32; ROWS]; PARTS],
    pub(super) minima: [[f32; ROWS]; COLUMNS / BLOCK],
}

/// Two panels of 16 rows each, which are multiplied together.
#[derive(Debug, Clone)]
pub struct Panels(pub(super) Box<[Panel; 2]>);

impl Panels {
    /// Zeros.
    pub fn zeros() -> Self {
        let panel = Panel {
            pairs: [[[0; 2]; ROWS]; COLUMNS / 2],
            scales: [[0.0; ROWS]; PARTS],
            minima: [[0.0; ROWS]; COLUMNS / BLOCK],
        };
        Self(Box::new([panel; 2]))
    }

    /// Packs the first `width` columns of the codes of 16 rows into a panel, 0 or 1.
    ///
    /// # Panics
    /// Another panel, and more than [`COLUMNS`] columns.
    pub fn pack(&mut self, instructions: Instructions, panel: usize, width: usize, codes: &RowCodes) {
        assert!(width <= COLUMNS);
        instructions.run(Packing { panel: &mut self.0[panel], width, codes });
    }
}

struct Packing<'a> {
    panel: &'a mut Panel,
    width: usize,
    codes: &'a RowCodes,
}

impl VectorWork for Packing<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { panel, width, codes } = self;
        panel.scales = codes.scales;
        panel.minima = codes.minima;
        let pairs = panel.pairs.as_chunks_mut::<8>().0;
        for (column, pairs) in (0..width).step_by(16).zip(pairs) {
            let part = column / 16;
            let rows = codes.codes.each_ref().map(|row| &row.as_chunks::<16>().0[part]);
            l.transpose(rows, pairs);
        }
    }
}
