//! Products of a few rows with columns whose terms are contiguous: each column is read once, in place.

use super::super::dispatch::dispatch;
use super::super::pack::{direct, load_along};
use super::super::vector::Simd;
use super::lines::Lines;
use super::tile::ProductOutput;
use std::ops::Range;

/// Maximum number of rows: with more, packing the columns costs less than it saves.
pub(super) const ROWS: usize = 4;
/// Number of columns that are read at once.
const COLUMNS: usize = 4;

/// A product of rows and columns whose terms are both along lines.
pub(super) struct Dots<'a> {
    /// The left factor, with at most ROWS rows.
    pub(super) a: Lines<'a>,
    pub(super) b: Lines<'a>,
    pub(super) out: ProductOutput<'a>,
}

/// Number of elements in a worker's scratch, for lines of `depth` elements and vectors of `vector`.
pub(super) fn scratch(depth: usize, vector: usize) -> usize {
    ROWS * depth.next_multiple_of(vector)
}

impl Dots<'_> {
    /// Computes some columns of the output.
    ///
    /// # Safety
    /// No other thread may access these elements of the output.
    #[inline(always)]
    pub(super) unsafe fn columns<S: Simd>(&self, simd: S, columns: Range<usize>, scratch: &mut [f32]) {
        let (a, depth) = (self.a, self.a.terms.div_ceil(S::PAIR));
        let rows = &mut scratch[..a.vectors * depth.next_multiple_of(S::LANES)];
        for (i, row) in rows.chunks_exact_mut(depth.next_multiple_of(S::LANES)).enumerate() {
            for (at, to) in row.chunks_exact_mut(S::LANES).enumerate() {
                let x = load_along(simd, a.line(i, 0..a.terms), S::PAIR, at * S::LANES);
                // SAFETY: the chunk has LANES numbers.
                unsafe { simd.store(to.as_mut_ptr(), x) };
            }
        }
        for first in columns.clone().step_by(COLUMNS) {
            let few = first..columns.end.min(first + COLUMNS);
            // SAFETY: the contract of the caller.
            unsafe {
                match a.vectors {
                    1 => self.few::<S, 1>(simd, few, rows),
                    2 => self.few::<S, 2>(simd, few, rows),
                    3 => self.few::<S, 3>(simd, few, rows),
                    _ => self.few::<S, ROWS>(simd, few, rows),
                }
            }
        }
    }

    /// Multiplies M rows by at most COLUMNS columns.
    ///
    /// # Safety
    /// As for [`columns`](Self::columns).
    #[inline(always)]
    unsafe fn few<S: Simd, const M: usize>(&self, simd: S, columns: Range<usize>, rows: &[f32]) {
        let (terms, depth) = (self.b.terms, self.b.terms.div_ceil(S::PAIR));
        let padded = depth.next_multiple_of(S::LANES);
        assert!(rows.len() == M * padded);
        // If there are fewer columns, the last is read again.
        let lines: [_; COLUMNS] =
            std::array::from_fn(|j| self.b.line(columns.end.min(columns.start + j + 1) - 1, 0..terms));
        let whole = terms / S::PAIR / S::LANES * S::LANES;
        let direct = direct(&lines, S::PAIR, whole);
        let mut acc = [[simd.splat(0.0); COLUMNS]; M];
        let mut from = 0;
        // These are loops, because a closure that is not inlined is compiled without the vector instructions.
        let mut b = [simd.splat(0.0); COLUMNS];
        if let Some(lines) = direct {
            for d in (0..whole).step_by(S::LANES) {
                for j in 0..COLUMNS {
                    // SAFETY: each line has this many elements.
                    b[j] = unsafe { simd.load(lines[j].add(d)) };
                }
                add(simd, &rows[d..], padded, &b, &mut acc);
            }
            from = whole;
        }
        for d in (from..padded).step_by(S::LANES) {
            for j in 0..COLUMNS {
                b[j] = load_along(simd, lines[j], S::PAIR, d);
            }
            add(simd, &rows[d..], padded, &b, &mut acc);
        }
        for (i, acc) in acc.iter().enumerate() {
            let mut sums = [0.0; COLUMNS];
            for j in 0..COLUMNS {
                sums[j] = simd.sum(acc[j]);
            }
            // SAFETY: the contract of the caller.
            unsafe { self.out.write(i, columns.start, &mut sums[..columns.len()]) };
        }
    }
}

/// Adds the products of a vector of each of M rows, which are `stride` apart, and a vector of each column.
#[inline(always)]
fn add<S: Simd, const M: usize>(
    simd: S,
    rows: &[f32],
    stride: usize,
    b: &[S::V; COLUMNS],
    acc: &mut [[S::V; COLUMNS]; M],
) {
    assert!(rows.len() >= (M - 1) * stride + S::LANES);
    for (i, acc) in acc.iter_mut().enumerate() {
        // SAFETY: the asserted size.
        let x = unsafe { simd.load(rows.as_ptr().add(i * stride)) };
        for j in 0..COLUMNS {
            acc[j] = simd.product(x, b[j], acc[j]);
        }
    }
}

dispatch!(
    product_dots,
    Dots<'_>,
    columns<[], [], []>(columns: Range<usize>, scratch: &mut [f32]),
    "Calls [`Dots::columns`] compiled for the instruction set of `features`."
);
