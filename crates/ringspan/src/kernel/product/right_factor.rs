//! Right factors of products, and how their columns are packed.

use super::super::buffer::{Aligned, BufferPool, Target};
use super::super::isa::TargetFeatures;
use super::lines::{Lines, product_columns, product_columns_across};
use super::matrix::{Element, Matrix};
use super::panels::{Panels, part};
use super::tasks::share;
use super::tile::{STEP, part_of};
use std::ops::Range;

/// Number of panels that are packed together if lines contain one term of all columns.
const BESIDE: usize = 16;

/// A matrix in a quantized format, which a product dequantizes part by part while it packs it.
pub trait QuantizedRows: Sync {
    /// Number of rows and columns.
    fn shape(&self) -> (usize, usize);

    /// Writes a range of rows and columns as f32 numbers to `to`, row after row. The columns begin and end between blocks: at
    /// multiples of 256, or with the row.
    fn dequantize_part(&self, rows: Range<usize>, columns: Range<usize>, to: &mut [f32]);
}

/// The right factor of a product.
#[derive(Clone, Copy)]
pub(super) enum RightFactor<'a> {
    /// Lines of the factor's transpose.
    Lines(Lines<'a>),
    /// Rows of the factor's transpose, and their shape. It is asked for once: memory is written by it, and another answer later would leave
    /// some of it uninitialised.
    Quantized(&'a dyn QuantizedRows, [usize; 2]),
}

impl<'a> RightFactor<'a> {
    pub(super) fn new<T: Element>(b: Matrix<'a, T>) -> Self {
        Self::Lines(Lines::new(b.t()))
    }

    /// The transpose of quantized rows.
    pub(super) fn quantized_t(rows: &'a dyn QuantizedRows) -> Self {
        Self::Quantized(rows, rows.shape().into())
    }

    /// Number of terms of a sum, k, and number of columns, n.
    pub(super) fn shape(self) -> (usize, usize) {
        match self {
            Self::Lines(lines) => (lines.terms, lines.vectors),
            Self::Quantized(_, [columns, terms]) => (terms, columns),
        }
    }

    /// The lines, if each contains all terms of a column.
    pub(super) fn along(self) -> Option<Lines<'a>> {
        match self {
            Self::Lines(lines) => Some(lines).filter(Lines::along),
            Self::Quantized(..) => None,
        }
    }

    /// Packs some terms of the columns of some panels as `[panel][terms / pair][width]`.
    pub(super) fn pack(
        self,
        features: TargetFeatures,
        threads: usize,
        terms: &Range<usize>,
        (panels, some): (Panels, &Range<usize>),
    ) -> Aligned {
        let depth = terms.len().div_ceil(features.pair());
        let buffers = BufferPool::default();
        let work = |packed: Target| match self {
            // Lines with one term of all columns contain columns of many panels, and are read from end to end.
            Self::Lines(lines) if !lines.along() => {
                let groups = some.len().div_ceil(BESIDE).next_multiple_of(threads).min(some.len());
                share(threads, groups, |tasks| {
                    for group in tasks.map(|task| part(some, task, groups)) {
                        let at = panels.at(some.start, group.start, depth);
                        // SAFETY: a panel has room for its terms, and only this task accesses these panels.
                        unsafe { product_columns_across(features, &lines, panels, group, terms.clone(), packed, at) };
                    }
                });
            }
            _ => share(threads, some.len(), |tasks| {
                let mut dequantized = buffers.take(self.scratch(features));
                for panel in tasks.map(|task| some.start + task) {
                    let (at, width) = (panels.at(some.start, panel, depth), panels.width(&(panel..panel + 1)));
                    for from in (0..depth).step_by(STEP) {
                        let terms = part_of(terms, from, features.pair());
                        let (lines, columns, part) = self.lines(panels.columns(panel), terms, &mut dequantized);
                        // SAFETY: as above.
                        unsafe { product_columns(features, &lines, columns, part, width, packed, at + from * width) };
                    }
                }
                buffers.give(dequantized);
            }),
        };
        // SAFETY: all panels are written, from the first element to the last.
        unsafe { Aligned::written(panels.width(some) * depth, work) }
    }

    /// Number of elements of a panel that are dequantized at once; 0 for lines, which are packed as they are.
    fn scratch(self, features: TargetFeatures) -> usize {
        if matches!(self, Self::Quantized(..)) { features.lanes() * STEP * features.pair() } else { 0 }
    }

    /// Returns lines that contain these terms of some columns, with the ranges of vectors and of terms in which they do: either the
    /// factor's own lines, or the numbers that this call dequantizes.
    fn lines<'b>(
        self,
        columns: Range<usize>,
        terms: Range<usize>,
        dequantized: &'b mut [f32],
    ) -> (Lines<'b>, Range<usize>, Range<usize>)
    where
        'a: 'b,
    {
        match self {
            Self::Lines(lines) => (lines, columns, terms),
            Self::Quantized(rows, _) => {
                let (count, width) = (columns.len(), terms.len());
                let to = &mut dequantized[..count * width];
                rows.dequantize_part(columns, terms, to);
                (Lines::new(Matrix::new(to, count, width)), 0..count, 0..width)
            }
        }
    }
}
