//! Packs keys, values and queries in the order in which the micro kernel reads them.
//!
//! Rows of `[T, H, D]` are a power of two apart: read in place, a column of them would use only a few sets of the L1 cache.

mod rows;

use super::dispatch::dispatch;
use rows::store_parts;
pub(super) use rows::{
    columns, copy, direct, is_finite, load_across, load_along, operand_columns, panels, panels_across, rows,
    write_operand_columns,
};

use super::View;
use super::buffer::{Aligned, Target, lines};
use super::isa::TargetFeatures;
use super::plan::Plan;
use super::vector::Simd;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

/// Number of rows that are packed at a time.
pub(super) const CHUNK: usize = 256;

/// Packed keys as `[panel][D][R]` and values as `[Dv / R][row][R]`, of one key-value head in each slot: R keys or R value
/// columns are adjacent, to be broadcast one by one. If products take pairs, the elements are pairs of D and of rows.
///
/// A slot is packed again, with another head, when its head has been computed.
pub(super) struct PackedKv {
    data: Aligned,
    /// The same elements as a shared target, because workers read one slot while others pack another.
    target: Target,
    /// Key row at which the first panel starts.
    pub(super) base: usize,
    /// Number of rows in all panels.
    pub(super) rows: usize,
    /// Number of elements of the packed keys of one head.
    k_head: usize,
    /// Number of elements of the packed keys and values of one head.
    head: usize,
    /// Number of elements of a key: D, or its pairs.
    depth: usize,
    /// Number of rows in an element of the values: 1 or 2.
    pair: usize,
    /// Whether the values of a slot in a chunk of rows are not all finite: `[slot][chunk]`.
    has_non_finite: Vec<AtomicBool>,
}

impl PackedKv {
    /// Number of elements for the keys and values of `rows` rows in each of `slots` slots, and for the keys of one slot.
    pub(super) fn size(rows: usize, slots: usize, k: &View, v: &View, features: TargetFeatures) -> (usize, usize) {
        let rows = rows.next_multiple_of(features.rows());
        let keys = lines(rows * k.dim.div_ceil(features.pair()));
        (slots * (keys + lines(rows / features.pair() * v.dim.next_multiple_of(features.rows()))), keys)
    }

    /// A buffer for the key rows `segment`, whose start is a multiple of R, of as many heads at a time as there are slots;
    /// [`Packing`] fills it.
    pub(super) fn new(
        segment: &Range<usize>,
        slots: usize,
        k: &View,
        v: &View,
        features: TargetFeatures,
        take: impl FnOnce(usize) -> Aligned,
    ) -> Self {
        let rows = segment.len().next_multiple_of(features.rows());
        let (size, k_head) = Self::size(rows, slots, k, v, features);
        let has_non_finite = (0..slots * rows.div_ceil(CHUNK)).map(|_| AtomicBool::new(false)).collect();
        let (head, pair) = (size / slots.max(1), features.pair());
        let mut data = take(size);
        let target = Target::new(&mut data);
        let depth = k.dim.div_ceil(pair);
        Self { data, target, base: segment.start, rows, k_head, head, depth, pair, has_non_finite }
    }

    pub(super) fn into_buffer(self) -> Aligned {
        self.data
    }

    /// Whether values of a slot in the chunks of these rows (counted from `base`) are not all finite.
    pub(super) fn has_non_finite(&self, slot: usize, rows: &Range<usize>) -> bool {
        let chunks = rows.start / CHUNK..rows.end.div_ceil(CHUNK);
        let first = slot * self.rows.div_ceil(CHUNK);
        chunks.into_iter().any(|chunk| self.has_non_finite[first + chunk].load(Ordering::Relaxed))
    }

    /// The panel of R keys that starts `row` rows after `base`, and those after it: `[D][R]` each.
    ///
    /// # Safety
    /// A head must have been packed into the slot, and no other one may be packed while the result is read.
    pub(super) unsafe fn keys(&self, slot: usize, row: usize) -> &[f32] {
        // SAFETY: nothing is written meanwhile, by contract.
        unsafe { self.target.read(slot * self.head + row * self.depth, (self.rows - row) * self.depth) }
    }

    /// The R value columns from `column` on, for the rows from `row` after `base` on: `[row][R]`.
    ///
    /// # Safety
    /// As for [`keys`](Self::keys).
    pub(super) unsafe fn values<const R: usize>(&self, slot: usize, column: usize, row: usize) -> &[f32] {
        let (rows, row) = (self.rows / self.pair, row / self.pair);
        // SAFETY: nothing is written meanwhile, by contract.
        unsafe { self.target.read(slot * self.head + self.k_head + column * rows + row * R, (rows - row) * R) }
    }
}

/// The tensors that all workers share which pack keys and values.
pub(super) struct Packing<'a> {
    pub(super) keys: &'a PackedKv,
    pub(super) plan: &'a Plan<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
}

impl Packing<'_> {
    /// Packs the rows of chunk `chunk`, counted from the base, of one head into a slot.
    ///
    /// # Safety
    /// No two concurrent calls may have the same chunk and slot, and no thread may read the slot meanwhile.
    #[inline(always)]
    pub(super) unsafe fn chunk<S: Simd, const R: usize>(&self, simd: S, head: usize, slot: usize, chunk: usize) {
        let Self { keys, k, v, .. } = *self;
        let target = keys.target;
        let rows = chunk * CHUNK..((chunk + 1) * CHUNK).min(keys.rows);
        let seen = |i: usize| {
            let row = keys.base + rows.start + i;
            (row < k.tokens && self.plan.sees_key(row)).then_some(row)
        };
        let depth = keys.depth;
        // SAFETY: only this call accesses these rows.
        let to = unsafe { target.row(slot * keys.head + rows.start * depth, rows.len() * depth) };
        panels::<S, R>(simd, to, k.dim, rows.len(), |i| Some(k.at(seen(i)?, head)));

        let value = |i: usize| Some(v.at(seen(i)?, head));
        let (wide, pairs, count) = (v.dim.next_multiple_of(R), keys.rows / S::PAIR, rows.len() / S::PAIR);
        // This pass also brings the rows, which are far apart, into the cache in the order of their addresses.
        let mut finite = true;
        for i in 0..rows.len() {
            value(i + 8).filter(|_| i + 8 < rows.len()).into_iter().for_each(|row| row.prefetch());
            finite &= value(i).is_none_or(|row| row.is_finite());
        }
        for column in (0..wide).step_by(S::LANES) {
            let parts = ((wide - column) / R).min(S::LANES / R);
            let at = slot * keys.head + keys.k_head + column * pairs + rows.start / S::PAIR * R;
            let panel = |part: usize| {
                // SAFETY: only this call accesses these rows in each panel of columns.
                unsafe { target.row(at + part * pairs * R, count * R) }.as_mut_ptr()
            };
            let (first, second) = (panel(0), (parts > 1).then(|| panel(1)));
            for i in 0..count {
                let x = load_across(simd, i, column, value);
                // SAFETY: both panels have row i.
                unsafe { store_parts::<S, R>(simd, first.add(i * R), second.map(|second| second.add(i * R)), x) };
            }
        }
        // Threads read this only after they have seen that the chunk is counted as packed.
        keys.has_non_finite[slot * keys.rows.div_ceil(CHUNK) + chunk].store(!finite, Ordering::Relaxed);
    }
}

dispatch!(
    pack_chunk,
    Packing<'_>,
    chunk<[8], [4], [4]>(head: usize, slot: usize, chunk: usize),
    "Calls [`Packing::chunk`] compiled for the instruction set of `features`."
);
