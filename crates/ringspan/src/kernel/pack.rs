//! Keys, values and queries in the order in which the micro kernel reads them.
//!
//! `[T, H, D]` rows lie a power of two apart: read in place, a column of them falls into a few sets of the L1 cache.

use super::View;
use super::buffer::{Aligned, Target, lines};
use super::plan::Plan;

/// Keys as `[panel][D][R]` and values as `[Dv / R][row][R]`, for each key-value head: R keys or R value columns side
/// by side, to be broadcast one by one.
pub(super) struct Keys {
    data: Aligned,
    /// First key row of the first panel.
    pub(super) base: usize,
    /// Rows in all panels.
    pub(super) rows: usize,
    /// Elements of the keys of one head.
    k_head: usize,
    /// Elements of keys and values of one head.
    head: usize,
    dim: usize,
}

impl Keys {
    /// Elements needed for keys and values of `rows` rows, and of these those of one head's keys.
    pub(super) fn size(rows: usize, k: &View, v: &View, r: usize) -> (usize, usize) {
        let rows = rows.next_multiple_of(r);
        let keys = lines(rows * k.dim);
        (k.heads * (keys + lines(rows * v.dim.next_multiple_of(r))), keys)
    }

    /// An empty place for the visible keys of `plan`, in panels of `r`; `pack_chunk` fills it.
    pub(super) fn new(plan: &Plan, k: &View, v: &View, r: usize, take: impl FnOnce(usize) -> Aligned) -> Self {
        let base = plan.keys.start / r * r;
        let rows = (plan.keys.end - base).next_multiple_of(r);
        let (size, k_head) = Self::size(rows, k, v, r);
        Self { data: take(size), base, rows, k_head, head: size / k.heads.max(1), dim: k.dim }
    }

    pub(super) fn into_buffer(self) -> Aligned {
        self.data
    }

    pub(super) fn target(&mut self) -> Target {
        Target::new(&mut self.data)
    }

    /// Packs rows `rows` (counted from `base`, borders multiples of R) of one head.
    ///
    /// # Safety
    /// `target` is this buffer's, and no two calls at once may name the same rows and head.
    #[allow(clippy::too_many_arguments)] // A piece of a copy: from where, to where, which.
    pub(super) unsafe fn pack_chunk<const R: usize>(
        &self,
        target: Target,
        plan: &Plan,
        k: &View,
        v: &View,
        head: usize,
        rows: std::ops::Range<usize>,
    ) {
        let seen = |row: usize| (row < k.tokens && plan.sees_key(row)).then_some(row);
        // SAFETY: the rows of this call are its own.
        let keys = unsafe { target.row(head * self.head + rows.start * k.dim, rows.len() * k.dim) };
        panels::<R>(keys, k.dim, rows.len(), |i| Some(k.row(seen(self.base + rows.start + i)?, head)));
        for column in (0..v.dim).step_by(R) {
            let at = head * self.head + self.k_head + column * self.rows + rows.start * R;
            // SAFETY: as above.
            let values = unsafe { target.row(at, rows.len() * R) };
            for (i, to) in values.chunks_exact_mut(R).enumerate() {
                let from = seen(self.base + rows.start + i).map_or(&[][..], |row| &v.row(row, head)[column..]);
                let width = from.len().min(R);
                to[..width].copy_from_slice(&from[..width]);
                to[width..].fill(0.0);
            }
        }
    }

    /// The panel of R keys that starts `row` rows after `base`: `[D][R]`.
    pub(super) fn keys(&self, head: usize, row: usize) -> &[f32] {
        &self.data[head * self.head + row * self.dim..][..(self.rows - row) * self.dim]
    }

    /// R value columns from `column` on, of the rows that start `row` after `base`: `[row][R]`.
    pub(super) fn values<const R: usize>(&self, head: usize, column: usize, row: usize) -> &[f32] {
        &self.data[head * self.head + self.k_head + column * self.rows + row * R..][..(self.rows - row) * R]
    }
}

/// Rows as panels `[rows / R][dim][R]`; a row that is `None` is zero.
#[inline(always)]
pub(super) fn panels<'a, const R: usize>(
    to: &mut [f32],
    dim: usize,
    rows: usize,
    row: impl Fn(usize) -> Option<&'a [f32]>,
) {
    for first in (0..rows).step_by(R) {
        transpose::<R>(&mut to[first * dim..][..R * dim], dim, R, 1.0, |i| row(first + i));
    }
}

/// Rows as columns: `to[d][lane] = factor * row(lane)[d]` for `lanes` lanes; a row that is `None` is zero.
#[inline(always)]
pub(super) fn transpose<'a, const R: usize>(
    to: &mut [f32],
    dim: usize,
    lanes: usize,
    factor: f32,
    row: impl Fn(usize) -> Option<&'a [f32]>,
) {
    for lane in (0..lanes).step_by(R) {
        let mut from: [&[f32]; R] = [&[]; R];
        for (i, from) in from.iter_mut().enumerate() {
            *from = row(lane + i).unwrap_or(&[]);
        }
        if from.iter().all(|from| from.len() == dim) {
            for (d, to) in to.chunks_exact_mut(lanes).enumerate().take(dim) {
                for i in 0..R {
                    to[lane + i] = from[i][d] * factor;
                }
            }
        } else {
            for (d, to) in to.chunks_exact_mut(lanes).enumerate().take(dim) {
                for i in 0..R {
                    to[lane + i] = from[i].get(d).map_or(0.0, |x| x * factor);
                }
            }
        }
    }
}

/// Rows in their order, each filled up with zeros to `width`: `to[i][..width] = factor * row(i)`.
#[inline(always)]
pub(super) fn copy<'a>(to: &mut [f32], width: usize, factor: f32, row: impl Fn(usize) -> Option<&'a [f32]>) {
    for (i, to) in to.chunks_exact_mut(width).enumerate() {
        let from = row(i).unwrap_or(&[]);
        for (to, from) in to.iter_mut().zip(from) {
            *to = from * factor;
        }
        to[from.len()..].fill(0.0);
    }
}
