//! Factors as lines of contiguous elements, for packing.

use super::super::buffer::Target;
use super::super::dispatch::dispatch;
use super::super::pack;
use super::super::vector::Simd;
use super::super::view::Data;
use super::matrix::{Element, Matrix};
use super::panels::Panels;
use std::ops::Range;

/// A factor of a product, as lines of contiguous elements. Its *vectors* are the rows of a left factor, or the columns
/// of a right factor; each has a *term* for every product in a sum.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    data: Data<'a>,
    /// Elements from one line to the next.
    stride: usize,
    /// Whether a line contains all terms of a vector; otherwise it contains one term of all vectors.
    along: bool,
    pub(super) vectors: usize,
    pub(super) terms: usize,
}

impl<'a> Lines<'a> {
    /// The lines of a left factor; a right factor is given as its transpose.
    pub(super) fn new<T: Element>(matrix: Matrix<'a, T>) -> Self {
        let Matrix { data, rows, cols, row_stride, col_stride } = matrix;
        let along = col_stride == 1;
        debug_assert!(along || row_stride == 1);
        let stride = if along { row_stride } else { col_stride };
        Self { data: T::data(data), stride, along, vectors: rows, terms: cols }
    }

    /// Whether a line contains all terms of a vector.
    pub(super) fn along(&self) -> bool {
        self.along
    }

    /// Whether products can read these lines where they are: lines of f32 that contain all terms of a vector.
    pub(super) fn readable(&self) -> bool {
        self.along && matches!(self.data, Data::F32(_))
    }

    /// Elements from one line to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// A term of a vector, if the lines are [`readable`](Self::readable).
    pub(super) fn at(&self, vector: usize, term: usize) -> *const f32 {
        match self.data {
            Data::F32(data) => data[vector * self.stride + term..].as_ptr(),
            _ => std::ptr::null(),
        }
    }

    /// The given elements of a line.
    #[inline(always)]
    pub(super) fn line(&self, line: usize, elements: Range<usize>) -> Data<'a> {
        let first = line * self.stride;
        self.data.slice(first + elements.start..first + elements.end)
    }

    /// Packs some terms of some rows into panels of R rows, to be broadcast: `[rows / R][terms / PAIR][R]`. Missing rows of
    /// the last panel are zero.
    ///
    /// # Safety
    /// `to` must have room for them.
    #[inline(always)]
    pub(super) unsafe fn pack_rows<S: Simd, const R: usize>(
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

    /// Packs some terms of some columns into vectors of `width` columns, from element `at` on: `[terms / PAIR][width]`. Missing columns
    /// are zero. Each line contains all terms of a column.
    ///
    /// # Safety
    /// `to` must have room for them there, which no other thread accesses meanwhile; it may be uninitialised before. `width` is a
    /// multiple of LANES.
    #[inline(always)]
    pub(super) unsafe fn pack_columns<S: Simd>(
        &self,
        simd: S,
        columns: Range<usize>,
        terms: Range<usize>,
        width: usize,
        to: Target,
        at: usize,
    ) {
        let column = |i: usize| (i < columns.len()).then(|| self.line(columns.start + i, terms.clone()));
        // SAFETY: the elements belong to the caller.
        unsafe {
            let to = to.pointer(at, terms.len().div_ceil(S::PAIR) * width);
            pack::write_operand_columns(simd, to, terms.len(), width, 1.0, column);
        }
    }

    /// Like [`pack_columns`](Self::pack_columns), for lines that contain one term of all columns, and for consecutive
    /// panels, the first of which starts at element `at`: `[panel][terms / PAIR][width]`.
    ///
    /// # Safety
    /// `to` must have room for them there, which no other thread accesses meanwhile; it may be uninitialised before.
    #[inline(always)]
    pub(super) unsafe fn pack_columns_across<S: Simd>(
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
                    // SAFETY: the elements belong to the caller.
                    unsafe { simd.store(to.pointer(panel + v, S::LANES), x) };
                }
            }
        }
    }
}

dispatch!(
    product_rows,
    Lines<'_>,
    pack_rows<[8], [4], [4]>(rows: Range<usize>, terms: Range<usize>, to: &mut [f32]),
    "Calls [`Lines::pack_rows`] compiled for the instruction set of `features`."
);
dispatch!(
    product_columns,
    Lines<'_>,
    pack_columns<[], [], []>(columns: Range<usize>, terms: Range<usize>, width: usize, to: Target, at: usize),
    "Calls [`Lines::pack_columns`] compiled for the instruction set of `features`."
);
dispatch!(
    product_columns_across,
    Lines<'_>,
    pack_columns_across<[], [], []>
    (panels: Panels, group: Range<usize>, terms: Range<usize>, to: Target, at: usize),
    "Calls [`Lines::pack_columns_across`] compiled for the instruction set of `features`."
);
