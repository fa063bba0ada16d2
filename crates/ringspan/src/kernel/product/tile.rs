//! Sums of packed rows times a packed panel of columns, and their output.

use super::super::buffer::Target;
use super::super::dispatch::dispatch;
use super::super::micro::multiply;
use super::super::vector::{PORTABLE_COLUMNS, Simd, prefetch_far};
use half::bf16;
use std::ops::Range;

/// Number of elements of a panel between two accesses to the sums: 48 KiB of a panel of three vectors of 16 numbers.
pub(super) const STEP: usize = 256;

/// The output of a product, shared by its workers: `[m, n]`, row after row.
#[derive(Clone, Copy)]
pub(super) enum ProductOutput {
    Overwrite(Target),
    Add(Target),
    Rounded(Target<bf16>),
}

impl ProductOutput {
    /// Whether partial sums can be stored in the output and added to later.
    pub(super) fn holds_sums(self) -> bool {
        !matches!(self, Self::Rounded(_))
    }

    /// The output for further terms, which adds to it.
    pub(super) fn more(self) -> Self {
        match self {
            Self::Overwrite(out) => Self::Add(out),
            target => target,
        }
    }

    /// Writes consecutive sums to the elements from `at` on, which may be uninitialised, or adds them to what is there.
    ///
    /// # Safety
    /// No other thread may access these elements.
    #[inline(always)]
    pub(super) unsafe fn write(self, at: usize, sums: &[f32]) {
        // SAFETY: the contract of the caller.
        unsafe {
            match self {
                Self::Overwrite(out) => out.pointer(at, sums.len()).copy_from_nonoverlapping(sums.as_ptr(), sums.len()),
                Self::Add(out) => out.row(at, sums.len()).iter_mut().zip(sums).for_each(|(out, sum)| *out += sum),
                Self::Rounded(out) => {
                    let out = out.pointer(at, sums.len());
                    for (i, sum) in sums.iter().enumerate() {
                        out.add(i).write(nearest(*sum));
                    }
                }
            }
        }
    }
}

/// Packed rows of the left factor, which are multiplied by one panel of columns after the other.
pub(super) struct Block<'a> {
    /// `[depth / STEP][rows / R][STEP][R]`
    pub(super) a: &'a [f32],
    /// The rows in the output.
    pub(super) rows: Range<usize>,
    pub(super) depth: usize,
    pub(super) out: ProductOutput,
    /// Number of columns of the output.
    pub(super) n: usize,
}

impl Block<'_> {
    /// Multiplies by a panel `[depth][width]`, whose first columns are `columns` of the output. `next` is the panel after
    /// it.
    ///
    /// # Safety
    /// `a` must have been packed for R rows, `width` be at most V vectors, `sums` have room for all rows of all panels of
    /// rows; no other thread may access these elements of the output.
    #[inline(always)]
    pub(super) unsafe fn multiply<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        panel: &[f32],
        next: &[f32],
        columns: Range<usize>,
        sums: &mut [f32],
    ) {
        let width = columns.len().next_multiple_of(S::LANES);
        assert!(panel.len() == self.depth * width && sums.len() >= self.rows.len().next_multiple_of(R) * width);
        // SAFETY: the contract of the caller, and the sizes above.
        unsafe {
            match width / S::LANES {
                1 => self.sums::<S, R, 1>(simd, panel, next, sums),
                2 => self.sums::<S, R, 2>(simd, panel, next, sums),
                _ => self.sums::<S, R, V>(simd, panel, next, sums),
            }
            self.write(columns, width, sums);
        }
    }

    /// Computes `sums[row][..V * LANES]` for all rows.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply), with a panel of V vectors.
    #[inline(always)]
    unsafe fn sums<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        panel: &[f32],
        next: &[f32],
        sums: &mut [f32],
    ) {
        let (width, count) = (V * S::LANES, self.rows.len().div_ceil(R));
        assert!(self.a.len() >= count * R * self.depth);
        for from in (0..self.depth).step_by(STEP) {
            let depth = STEP.min(self.depth - from);
            // The next elements come from slower memory, so a part of them is prefetched with each product.
            let after = if from + depth < self.depth { &panel[(from + depth) * width..] } else { next };
            let after = &after[..after.len().min(STEP * width)];
            let mut ahead = after.chunks(after.len().div_ceil(count).max(1));
            // SAFETY: the panel has `depth` more elements of this width.
            let b = unsafe { panel.as_ptr().add(from * width) };
            for r in 0..count {
                ahead.next().into_iter().for_each(prefetch_far);
                // SAFETY: the asserted sizes.
                unsafe {
                    let a = self.a.as_ptr().add((from * count + r * depth) * R);
                    let sums = sums.as_mut_ptr().add(r * R * width);
                    match self.rows.len() - r * R {
                        1 => add::<S, R, 1, V>(simd, depth, a, b, sums, from == 0),
                        2 => add::<S, R, 2, V>(simd, depth, a, b, sums, from == 0),
                        3 | 4 => add::<S, R, 4, V>(simd, depth, a, b, sums, from == 0),
                        _ => add::<S, R, R, V>(simd, depth, a, b, sums, from == 0),
                    }
                }
            }
        }
    }

    /// Writes the sums to the output.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn write(&self, columns: Range<usize>, width: usize, sums: &[f32]) {
        for (row, sums) in self.rows.clone().zip(sums.chunks_exact(width)) {
            // SAFETY: these elements belong to the caller.
            unsafe { self.out.write(row * self.n + columns.start, &sums[..columns.len()]) };
        }
    }
}

/// Adds the product of M of the R rows of a panel to `sums[i][..V * LANES]`, which start at zero if `first`.
///
/// # Safety
/// `a` must be readable for `depth * R` numbers, `b` for `depth * V * LANES`, `sums` readable and writable for
/// `M * V * LANES`; M is at most R.
#[inline(always)]
unsafe fn add<S: Simd, const R: usize, const M: usize, const V: usize>(
    simd: S,
    depth: usize,
    a: *const f32,
    b: *const f32,
    sums: *mut f32,
    first: bool,
) {
    let width = V * S::LANES;
    let mut acc = [[simd.splat(0.0); V]; M];
    // SAFETY: the contract of the caller.
    unsafe {
        if !first {
            for (i, acc) in acc.iter_mut().enumerate() {
                for (v, x) in acc.iter_mut().enumerate() {
                    *x = simd.load(sums.add(i * width + v * S::LANES));
                }
            }
        }
        acc = multiply::<S, M, V>(simd, depth, a, 1, R, b, width, acc);
        for (i, acc) in acc.iter().enumerate() {
            for (v, x) in acc.iter().enumerate() {
                simd.store(sums.add(i * width + v * S::LANES), *x);
            }
        }
    }
}

/// Rounds to the nearest bf16, ties to even; a NaN stays a NaN. Plain arithmetic, so that loops become vector instructions.
#[inline(always)]
fn nearest(x: f32) -> bf16 {
    let bits = x.to_bits();
    let up = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if x.is_nan() { nan as u16 } else { up as u16 })
}

dispatch!(
    product_block,
    Block<'_>,
    multiply<[8, 3], [4, 3], [4, PORTABLE_COLUMNS]>
    (panel: &[f32], next: &[f32], columns: Range<usize>, sums: &mut [f32]),
    "[`Block::multiply`] compiled for `isa`."
);
