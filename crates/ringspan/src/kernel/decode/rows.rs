//! Products of the queries of some heads with rows of keys, and of their weights with rows of values.
//!
//! Rows of f32 and bf16 that are adjacent in memory, as those of a page are, are read in place; others are copied.

use super::super::pack::copy;
use super::super::vector::{Simd, prefetch_line};
use super::super::{Data, View};
use super::{CHUNK, MAX_LANES, ROWS};
use half::bf16;
use std::ops::Range;

/// An element of a row that is read in place.
pub(super) trait Element: Copy {
    /// Loads `LANES` elements in f32.
    ///
    /// # Safety
    /// `from` must be readable for `LANES` elements.
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V;
}

impl Element for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the contract of the caller.
        unsafe { simd.load(from) }
    }
}

impl Element for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(simd: S, from: *const Self) -> S::V {
        // SAFETY: the contract of the caller.
        unsafe { simd.load_bf16(from) }
    }
}

/// Some rows of keys or values of one head, each of whole vectors; there is a multiple of ROWS of them.
#[derive(Clone, Copy)]
pub(super) enum KvRows<'a> {
    F32(Strided<'a, f32>),
    Bf16(Strided<'a, bf16>),
}

/// Rows that are `stride` elements apart.
#[derive(Clone, Copy)]
pub(super) struct Strided<'a, E> {
    elements: &'a [E],
    stride: usize,
    count: usize,
    width: usize,
    /// The first element of rows that are fetched from memory while these are multiplied; of these rows if there are none.
    ahead: *const E,
}

/// Adjacent rows of one head.
struct RowsOfHead<'v, 'a> {
    view: &'v View<'a>,
    first: usize,
    head: usize,
    count: usize,
}

impl RowsOfHead<'_, '_> {
    /// The rows in `data`; `None` if it does not contain them.
    #[inline(always)]
    fn in_place<'a, E>(&self, data: &'a [E], ahead: Option<&[E]>) -> Option<Strided<'a, E>> {
        let (count, stride, width) = (self.count, self.view.token_stride, self.view.dim);
        let at = self.first.checked_mul(stride)?.checked_add(self.head.checked_mul(self.view.head_stride)?)?;
        let len = (count - 1).checked_mul(stride)?.checked_add(width)?;
        let elements = data.get(at..at.checked_add(len)?)?;
        Some(Strided { elements, stride, count, width, ahead: ahead.unwrap_or(elements).as_ptr() })
    }
}

/// Tokens of a tensor whose rows are fetched from memory while others are multiplied.
#[derive(Clone)]
pub(super) struct Prefetch<'v, 'a> {
    pub(super) view: &'v View<'a>,
    pub(super) tokens: Range<usize>,
}

impl<'a> KvRows<'a> {
    /// The rows of the tokens `tokens`, of which there is one at least, and the head `head`. If they are copied, each is padded with
    /// zeros to `width` elements, and rows of zeros follow the last token; `copies` has room for all of these.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        simd: S,
        view: &View<'a>,
        (head, width): (usize, usize),
        tokens: Range<usize>,
        Prefetch { view: next, tokens: ahead }: Prefetch,
        copies: &'a mut [f32],
    ) -> Self {
        if tokens.len().is_multiple_of(ROWS)
            && width == view.dim
            && let Some(first) = first_of_adjacent(view, tokens.clone())
        {
            let rows = RowsOfHead { view, first, head, count: tokens.len() };
            let ahead = (!ahead.is_empty()).then(|| next.at(ahead.start, head));
            let in_place = match (view.data, ahead) {
                (Data::F32(data), Some(Data::F32(ahead))) => rows.in_place(data, Some(ahead)).map(Self::F32),
                (Data::Bf16(data), Some(Data::Bf16(ahead))) => rows.in_place(data, Some(ahead)).map(Self::Bf16),
                (Data::F32(data), _) => rows.in_place(data, None).map(Self::F32),
                (Data::Bf16(data), _) => rows.in_place(data, None).map(Self::Bf16),
                _ => None,
            };
            if let Some(rows) = in_place {
                return rows;
            }
        }
        for token in ahead {
            next.at(token, head).prefetch_far();
        }
        let count = tokens.len().next_multiple_of(ROWS);
        let copies = &mut copies[..count * width];
        copy(simd, copies, width, 1.0, |i| (i < tokens.len()).then(|| view.at(tokens.start + i, head)));
        Self::F32(Strided { elements: copies, stride: width, count, width, ahead: copies.as_ptr() })
    }

    /// Computes the products with queries of whole vectors: that of row i and query h is `scores[h * CHUNK + i]`.
    #[inline(always)]
    pub(super) fn score<S: Simd>(self, simd: S, queries: &[f32], scores: &mut [f32]) {
        match self {
            Self::F32(rows) => rows.score(simd, queries, scores),
            Self::Bf16(rows) => rows.score(simd, queries, scores),
        }
    }

    /// Adds the rows, multiplied by the weight `weights[h * CHUNK + i]` of row i, to the sums of each head h, which have whole vectors.
    #[inline(always)]
    pub(super) fn add_weighted<S: Simd>(self, simd: S, weights: &[f32], sums: &mut [f32]) {
        match self {
            Self::F32(rows) => rows.add_weighted(simd, weights, sums),
            Self::Bf16(rows) => rows.add_weighted(simd, weights, sums),
        }
    }
}

impl<E: Element> Strided<'_, E> {
    /// Requests the cache line of the element `at` of the rows ahead.
    #[inline(always)]
    fn prefetch(&self, at: usize) {
        prefetch_line(self.ahead.wrapping_add(at));
    }

    /// A product takes as many pairs of a query and a row as a vector has lanes, so that their sums are one vector.
    #[inline(always)]
    fn score<S: Simd>(self, simd: S, queries: &[f32], scores: &mut [f32]) {
        let heads = queries.len() / self.width;
        let mut head = 0;
        while head < heads {
            head += match (S::LANES, heads - head) {
                (16, 4..) => self.score_square::<S, 4, 4>(simd, head, queries, scores),
                (16, 2..) => self.score_square::<S, 2, 8>(simd, head, queries, scores),
                (16, _) => self.score_square::<S, 1, 16>(simd, head, queries, scores),
                (8, 2..) => self.score_square::<S, 2, 4>(simd, head, queries, scores),
                (8, _) => self.score_square::<S, 1, 8>(simd, head, queries, scores),
                (_, 2..) => self.score_square::<S, 2, 2>(simd, head, queries, scores),
                (_, _) => self.score_square::<S, 1, 4>(simd, head, queries, scores),
            };
        }
    }

    /// Multiplies H queries from `head` on with R rows at once, and returns H.
    #[inline(always)]
    fn score_square<S: Simd, const H: usize, const R: usize>(
        &self,
        simd: S,
        head: usize,
        queries: &[f32],
        scores: &mut [f32],
    ) -> usize {
        let Self { elements, stride, count, width, .. } = *self;
        assert!(H * R == S::LANES && count.is_multiple_of(R) && width.is_multiple_of(S::LANES));
        assert!(elements.len() >= (count - 1) * stride + width);
        let queries = &queries[head * width..(head + H) * width];
        for first in (0..count).step_by(R) {
            let mut sums = [[simd.splat(0.0); R]; H];
            for at in (0..width).step_by(S::LANES) {
                let mut q = [simd.splat(0.0); H];
                for (h, q) in q.iter_mut().enumerate() {
                    // SAFETY: there are H queries of `width` elements.
                    *q = unsafe { simd.load(queries.as_ptr().add(h * width + at)) };
                }
                for r in 0..R {
                    let at = (first + r) * stride + at;
                    if head == 0 {
                        self.prefetch(at);
                    }
                    // SAFETY: the asserted size.
                    let k = unsafe { E::load(simd, elements.as_ptr().add(at)) };
                    for (sums, q) in sums.iter_mut().zip(q) {
                        sums[r] = simd.fma(q, k, sums[r]);
                    }
                }
            }
            let mut square = [simd.splat(0.0); 16];
            for (square, sums) in square.chunks_exact_mut(R).zip(&sums) {
                square.copy_from_slice(sums);
            }
            let mut totals = [0.0; MAX_LANES];
            // SAFETY: no vector has more than MAX_LANES numbers.
            unsafe { simd.store(totals.as_mut_ptr(), simd.sums(square)) };
            for (h, totals) in totals.chunks_exact(R).take(H).enumerate() {
                scores[(head + h) * CHUNK + first..][..R].copy_from_slice(totals);
            }
        }
        H
    }

    #[inline(always)]
    fn add_weighted<S: Simd>(self, simd: S, weights: &[f32], sums: &mut [f32]) {
        let heads = sums.len() / self.width;
        let mut head = 0;
        while head < heads {
            head += match heads - head {
                4.. => self.add_for_heads::<S, 4>(simd, head, weights, sums),
                2.. => self.add_for_heads::<S, 2>(simd, head, weights, sums),
                _ => self.add_for_heads::<S, 1>(simd, head, weights, sums),
            };
        }
    }

    /// Adds the rows to the sums of H heads from `head` on, and returns H.
    #[inline(always)]
    fn add_for_heads<S: Simd, const H: usize>(&self, simd: S, head: usize, weights: &[f32], sums: &mut [f32]) -> usize {
        let weights = &weights[head * CHUNK..];
        let mut column = 0;
        while column < self.width {
            column += match (self.width - column) / S::LANES {
                1 => self.add_columns::<S, H, 1>(simd, head, column, weights, sums),
                4.. if S::LANES == 16 || H < 4 => self.add_columns::<S, H, 4>(simd, head, column, weights, sums),
                _ => self.add_columns::<S, H, 2>(simd, head, column, weights, sums),
            };
        }
        H
    }

    /// Adds V vectors of columns of each row to the sums of H heads from `head` on, whose weights are the first, and returns the number of
    /// columns.
    #[inline(always)]
    fn add_columns<S: Simd, const H: usize, const V: usize>(
        &self,
        simd: S,
        head: usize,
        column: usize,
        weights: &[f32],
        sums: &mut [f32],
    ) -> usize {
        let Self { elements, stride, count, width, .. } = *self;
        let (columns, sums) = (V * S::LANES, &mut sums[head * width..(head + H) * width]);
        assert!(column + columns <= width && weights.len() >= (H - 1) * CHUNK + count);
        assert!(elements.len() >= (count - 1) * stride + width);
        let mut added = [[simd.splat(0.0); V]; H];
        for (h, added) in added.iter_mut().enumerate() {
            for (v, added) in added.iter_mut().enumerate() {
                // SAFETY: the asserted size of the sums.
                *added = unsafe { simd.load(sums.as_ptr().add(h * width + column + v * S::LANES)) };
            }
        }
        for row in 0..count {
            let mut values = [simd.splat(0.0); V];
            for (v, value) in values.iter_mut().enumerate() {
                let at = row * stride + column + v * S::LANES;
                if head == 0 {
                    self.prefetch(at);
                }
                // SAFETY: the asserted size of the rows.
                *value = unsafe { E::load(simd, elements.as_ptr().add(at)) };
            }
            for (h, added) in added.iter_mut().enumerate() {
                // SAFETY: the asserted size of the weights.
                let weight = simd.splat(unsafe { *weights.as_ptr().add(h * CHUNK + row) });
                for (added, value) in added.iter_mut().zip(values) {
                    *added = simd.fma(weight, value, *added);
                }
            }
        }
        for (h, added) in added.iter().enumerate() {
            for (v, added) in added.iter().enumerate() {
                // SAFETY: as above.
                unsafe { simd.store(sums.as_mut_ptr().add(h * width + column + v * S::LANES), *added) };
            }
        }
        columns
    }
}

/// The row of the first token, if the tokens are in adjacent rows, in order.
#[inline(always)]
fn first_of_adjacent(view: &View, tokens: Range<usize>) -> Option<usize> {
    let Some(rows) = view.rows else { return Some(tokens.start) };
    let rows = &rows[tokens];
    let first = *rows.first()?;
    // Without an early end this compiles to vector instructions.
    let differ = rows.iter().zip(first..).fold(0, |differ, (row, wanted)| differ | (row ^ wanted));
    (differ == 0).then_some(first as usize)
}
