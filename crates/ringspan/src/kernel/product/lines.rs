//! What the packing of a factor reads: lines of contiguous elements.

use super::super::buffer::Target;
use super::super::pack;
use super::super::vector::Simd;
use super::super::view::Data;
use super::matrix::{Element, Matrix};
use super::panels::Panels;
use std::ops::Range;

/// A factor as lines of contiguous elements. Its *places* are the rows of a left factor, the columns of a right one; each
/// has a *term* for every product that is summed.
#[derive(Clone, Copy)]
pub(in super::super) struct Lines<'a> {
    data: Data<'a>,
    /// Elements from one line to the next.
    stride: usize,
    /// Whether a line holds all terms of a place; else it holds one term of all places.
    along: bool,
    pub(super) places: usize,
    pub(super) terms: usize,
}

impl<'a> Lines<'a> {
    /// A left factor; a right one is given as its transpose.
    pub(super) fn new<T: Element>(matrix: Matrix<'a, T>) -> Self {
        let Matrix { data, rows, cols, row_stride, col_stride } = matrix;
        let along = col_stride == 1;
        debug_assert!(along || row_stride == 1);
        let stride = if along { row_stride } else { col_stride };
        Self { data: T::data(data), stride, along, places: rows, terms: cols }
    }

    /// Whether a line holds all terms of a place.
    pub(super) fn along(&self) -> bool {
        self.along
    }

    /// Some elements of a line.
    #[inline(always)]
    pub(super) fn line(&self, line: usize, elements: Range<usize>) -> Data<'a> {
        let first = line * self.stride;
        self.data.slice(first + elements.start..first + elements.end)
    }

    /// Packs some terms of some rows as panels of R rows that are broadcast: `[rows / R][terms / PAIR][R]`. Missing rows of
    /// the last panel are zero.
    ///
    /// # Safety
    /// `to` must have room for this.
    #[inline(always)]
    pub(in super::super) unsafe fn pack_rows<S: Simd, const R: usize>(
        &self,
        simd: S,
        rows: Range<usize>,
        terms: Range<usize>,
        to: &mut [f32],
    ) {
        let padded = rows.len().next_multiple_of(R);
        if self.along {
            let row = |i: usize| (i < rows.len()).then(|| self.line(rows.start + i, terms.clone()));
            pack::panels::<S, R>(simd, to, terms.len(), padded, row);
        } else {
            let column = |t: usize| (t < terms.len()).then(|| self.line(terms.start + t, rows.clone()));
            pack::panels_across::<S, R>(simd, to, terms.len(), padded, column);
        }
    }

    /// Packs some terms of some columns as vectors of `width` columns: `[terms / PAIR][width]`. Missing columns are zero. Lines
    /// run along the terms.
    ///
    /// # Safety
    /// `to` must have room for this; `width` is a multiple of LANES.
    #[inline(always)]
    pub(in super::super) unsafe fn pack_columns<S: Simd>(
        &self,
        simd: S,
        columns: Range<usize>,
        terms: Range<usize>,
        width: usize,
        to: &mut [f32],
    ) {
        let column = |i: usize| (i < columns.len()).then(|| self.line(columns.start + i, terms.clone()));
        pack::operand_columns(simd, to, terms.len(), width, 1.0, column);
    }

    /// The same for lines across the columns, and several panels one behind the other, of which the first starts `at` some
    /// element: `[panel][terms / PAIR][width]`.
    ///
    /// # Safety
    /// `to` must have room for this, which is nobody else's meanwhile, and need not have been written before.
    #[inline(always)]
    pub(in super::super) unsafe fn pack_columns_across<S: Simd>(
        &self,
        simd: S,
        panels: Panels,
        group: Range<usize>,
        terms: Range<usize>,
        to: Target,
        at: usize,
    ) {
        let depth = terms.len().div_ceil(S::PAIR);
        let columns = panels.columns(group.start).start..panels.columns(group.end - 1).end;
        for i in 0..depth {
            let lines = [0, 1].map(|half| {
                let term = terms.start + i * S::PAIR + half;
                (half < S::PAIR && term < terms.end).then(|| self.line(term, columns.clone()))
            });
            for panel in group.clone() {
                let width = panels.width(&(panel..panel + 1));
                let first = panels.columns(panel).start - columns.start;
                let panel = at + panels.at(group.start, panel, depth) + i * width;
                for v in (0..width).step_by(S::LANES) {
                    let x = pack::load_across(simd, 0, first + v, |half| lines[half]);
                    // SAFETY: the caller's own elements.
                    unsafe { simd.store(to.pointer(panel + v, S::LANES), x) };
                }
            }
        }
    }
}
