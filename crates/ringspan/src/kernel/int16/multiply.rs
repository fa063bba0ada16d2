//! The product of activations with panels.

use super::activations::{Chunk, RoundedActivations};
use super::instructions::{Instructions, VectorWork};
use super::lanes::{Lanes, Tile};
use super::panel::{Panel, Panels, RowCodes};
use super::{BLOCK, ROWS, Scales};
use std::ops::Range;

/// The sums of a token with the rows of two panels.
pub type PanelSums = [[f32; ROWS]; 2];

impl Panels {
    /// Adds the products of the activations of `tokens` in some columns, given as the first one and their number, with the panels' rows to
    /// `sums`, one for each of these tokens. If the last block is not whole, its other codes may be anything, since the activations there
    /// are zeros.
    ///
    /// # Panics
    /// Another number of sums than tokens, tokens and columns behind the activations, more than [`COLUMNS`](super::COLUMNS) columns, and a
    /// first column that is not a multiple of it.
    pub fn add_products(
        &self,
        instructions: Instructions,
        x: &RoundedActivations,
        tokens: Range<usize>,
        columns: (usize, usize),
        scales: Scales,
        sums: &mut [PanelSums],
    ) {
        let (panels, (x, blocks)) = (&*self.0, x.chunks(tokens, columns));
        assert_eq!(sums.len(), x.len());
        match scales {
            Scales::Of16 => instructions.run(Products::<16, false> { x, panels, blocks, sums }),
            Scales::Of32 => instructions.run(Products::<32, false> { x, panels, blocks, sums }),
            Scales::Of32WithMinima => instructions.run(Products::<32, true> { x, panels, blocks, sums }),
        }
    }
}

impl RowCodes {
    /// Like [`Panels::add_products`], for the rows of one panel, 0 or 1, without packing them: faster for at most
    /// [`few`](Instructions::few) tokens, with the same bits.
    ///
    /// # Panics
    /// As for [`Panels::add_products`], and another panel.
    pub fn add_products(
        &self,
        instructions: Instructions,
        x: &RoundedActivations,
        tokens: Range<usize>,
        columns: (usize, usize),
        scales: Scales,
        (panel, sums): (usize, &mut [PanelSums]),
    ) {
        let (codes, (x, blocks)) = (self, x.chunks(tokens, columns));
        assert_eq!(sums.len(), x.len());
        match scales {
            Scales::Of16 => instructions.run(RowProducts::<16, false> { x, codes, blocks, panel, sums }),
            Scales::Of32 => instructions.run(RowProducts::<32, false> { x, codes, blocks, panel, sums }),
            Scales::Of32WithMinima => instructions.run(RowProducts::<32, true> { x, codes, blocks, panel, sums }),
        }
    }
}

/// Products with weights of which each PART have a scale.
struct Products<'a, const PART: usize, const MINIMA: bool> {
    x: &'a [Chunk],
    panels: &'a [Panel; 2],
    blocks: usize,
    sums: &'a mut [PanelSums],
}

impl<const PART: usize, const MINIMA: bool> VectorWork for Products<'_, PART, MINIMA> {
    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        match L::TILE {
            Tile::Wide => {
                let done = self.tiles::<L, 8, 2>(l, 0, 0);
                let done = self.tiles::<L, 4, 2>(l, done, 0);
                let done = self.tiles::<L, 2, 2>(l, done, 0);
                self.tiles::<L, 1, 2>(l, done, 0);
            }
            Tile::Narrow => {
                for panel in 0..2 {
                    let done = self.tiles::<L, 4, 1>(l, 0, panel);
                    let done = self.tiles::<L, 2, 1>(l, done, panel);
                    self.tiles::<L, 1, 1>(l, done, panel);
                }
            }
        }
    }
}

impl<const PART: usize, const MINIMA: bool> Products<'_, PART, MINIMA> {
    /// Multiplies T tokens at a time with P panels, while there are as many tokens; returns how many tokens are done.
    #[inline(always)]
    fn tiles<L: Lanes, const T: usize, const P: usize>(&mut self, l: L, mut done: usize, panel: usize) -> usize {
        let Some(panels) = self.panels[panel..].first_chunk::<P>() else { return done };
        while let (Some(x), Some(sums)) = (self.x[done..].first_chunk::<T>(), self.sums[done..].first_chunk_mut::<T>())
        {
            for block in 0..self.blocks {
                tile::<L, T, P, PART, MINIMA>(l, x, panels, block, sums, panel);
            }
            done += T;
        }
        done
    }
}

/// Adds the products of T tokens with P panels in one block.
#[inline(always)]
fn tile<L: Lanes, const T: usize, const P: usize, const PART: usize, const MINIMA: bool>(
    l: L,
    x: &[Chunk; T],
    panels: &[Panel; P],
    block: usize,
    sums: &mut [PanelSums; T],
    first: usize,
) {
    for part in 0..BLOCK / PART {
        let mut products = [[l.zeros(); P]; T];
        for i in 0..PART / 2 {
            let pair = (block * BLOCK + part * PART) / 2 + i;
            for p in 0..P {
                let weights = l.load_pairs(&panels[p].pairs[pair]);
                for t in 0..T {
                    products[t][p] = l.add_products(products[t][p], weights, x[t].pairs[pair]);
                }
            }
        }
        for p in 0..P {
            let scales = PartScales::<L> {
                scales: l.load(&panels[p].scales[(block * BLOCK + part * PART) / 16]),
                minima: l.load(&panels[p].minima[block]),
            };
            for t in 0..T {
                scales.add::<MINIMA>(l, products[t][p], &x[t], block, &mut sums[t][first + p]);
            }
        }
    }
}

/// The scales and minima of rows.
struct PartScales<L: Lanes> {
    scales: L::F,
    minima: L::F,
}

impl<L: Lanes> PartScales<L> {
    /// Adds the products of a token's activations in some block, scaled, to the token's sums.
    #[inline(always)]
    fn add<const MINIMA: bool>(&self, l: L, products: L::I, x: &Chunk, block: usize, sums: &mut [f32; ROWS]) {
        let scale = l.mul(l.splat(x.scales[block]), self.scales);
        let mut sum = l.mul_add(l.convert(products), scale, l.load(sums));
        if MINIMA {
            sum = l.mul_add(l.splat(-x.sums[block]), self.minima, sum);
        }
        l.store(sum, sums);
    }
}

/// Products of few tokens with the rows of a panel that is not packed.
struct RowProducts<'a, const PART: usize, const MINIMA: bool> {
    x: &'a [Chunk],
    codes: &'a RowCodes,
    blocks: usize,
    panel: usize,
    sums: &'a mut [PanelSums],
}

impl<const PART: usize, const MINIMA: bool> VectorWork for RowProducts<'_, PART, MINIMA> {
    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for block in 0..self.blocks {
            for part in (2 * block..2 * block + 2).step_by(PART / 16) {
                let scales = PartScales::<L> {
                    scales: l.load(&self.codes.scales[part]),
                    minima: l.load(&self.codes.minima[block]),
                };
                for (x, sums) in self.x.iter().zip(&mut *self.sums) {
                    let products = if PART == 16 {
                        l.row_products::<1>(&self.codes.codes, part, &x.pairs)
                    } else {
                        l.row_products::<2>(&self.codes.codes, part, &x.pairs)
                    };
                    scales.add::<MINIMA>(l, products, x, block, &mut sums[self.panel]);
                }
            }
        }
    }
}
