//! Sums of packed rows times a packed panel of columns, and their output.

use super::super::buffer::Target;
use super::super::dispatch::dispatch;
use super::super::micro::multiply;
use super::super::vector::{PORTABLE_COLUMNS, Simd, prefetch_far};
use super::lines::Lines;
use half::bf16;
use std::ops::Range;
use std::slice::Chunks;

/// Number of elements of a panel between two accesses to the sums: 48 KiB of a panel of three vectors of 16 numbers.
pub(super) const STEP: usize = 256;

/// Number of elements whose products are summed on registers. Each adds a rounding error of the size of the sum so far, so sums of
/// short sums have smaller errors than one long sum.
pub(super) const TERMS: usize = 64;
/// Number of f32 in a cache line.
const LINE: usize = 16;

/// The terms of STEP packed elements from element `from` on.
pub(super) fn part_of(terms: &Range<usize>, from: usize, pair: usize) -> Range<usize> {
    terms.start + from * pair..terms.end.min(terms.start + (from + STEP) * pair)
}

/// The output of a product, shared by its workers: `[m, n]`, row after row.
#[derive(Clone, Copy)]
pub(super) struct ProductOutput<'a> {
    pub(super) to: OutputTarget,
    /// What is added to each row of the sums, `[n]`.
    pub(super) bias: Option<&'a [f32]>,
    /// Number of columns.
    pub(super) n: usize,
}

/// The memory of an output, and what is done with the sums.
#[derive(Clone, Copy)]
pub(super) enum OutputTarget {
    Overwrite(Target),
    Add(Target),
    Rounded(Target<bf16>),
}

impl ProductOutput<'_> {
    /// Whether partial sums can be stored in the output and added to later.
    pub(super) fn holds_sums(self) -> bool {
        !matches!(self.to, OutputTarget::Rounded(_))
    }

    /// The output for further terms, which adds to it.
    pub(super) fn more(self) -> Self {
        let to = match self.to {
            OutputTarget::Overwrite(out) => OutputTarget::Add(out),
            to => to,
        };
        Self { to, bias: None, ..self }
    }

    /// Prefetches some columns of a row.
    #[inline(always)]
    fn prefetch(self, row: usize, columns: &Range<usize>) {
        let at = row * self.n + columns.start;
        match self.to {
            OutputTarget::Overwrite(out) | OutputTarget::Add(out) => out.prefetch(at, columns.len()),
            OutputTarget::Rounded(out) => out.prefetch(at, columns.len()),
        }
    }

    /// Writes the sums of a row's columns from `column` on, with their bias, to the output, which may be uninitialised, or adds them to
    /// what is there. The bias is added to `sums`.
    ///
    /// # Safety
    /// No other thread may access these elements.
    #[inline(always)]
    pub(super) unsafe fn write(self, row: usize, column: usize, sums: &mut [f32]) {
        if let Some(bias) = self.bias {
            sums.iter_mut().zip(&bias[column..]).for_each(|(sum, bias)| *sum += bias);
        }
        let at = row * self.n + column;
        // SAFETY: the contract of the caller.
        unsafe {
            match self.to {
                OutputTarget::Overwrite(out) => {
                    let out = out.pointer(at, sums.len());
                    // A line at a time: a call that copies this few numbers takes longer than copying them.
                    let (lines, rest) = sums.as_chunks::<LINE>();
                    for (i, line) in lines.iter().enumerate() {
                        out.add(i * LINE).cast::<[f32; LINE]>().write_unaligned(*line);
                    }
                    out.add(lines.len() * LINE).copy_from_nonoverlapping(rest.as_ptr(), rest.len());
                }
                OutputTarget::Add(out) => {
                    // Eight at a time, since a panel's width is rarely a multiple of what the compiler takes at once.
                    let (out, rest) = out.row(at, sums.len()).as_chunks_mut::<8>();
                    let (sums, of_rest) = sums.as_chunks::<8>();
                    for (out, sums) in out.iter_mut().zip(sums) {
                        out.iter_mut().zip(sums).for_each(|(out, sum)| *out += sum);
                    }
                    rest.iter_mut().zip(of_rest).for_each(|(out, sum)| *out += sum);
                }
                OutputTarget::Rounded(out) => {
                    let out = out.pointer(at, sums.len());
                    for (i, sum) in sums.iter().enumerate() {
                        out.add(i).write(nearest(*sum));
                    }
                }
            }
        }
    }
}

/// The rows of the left factor.
#[derive(Clone, Copy)]
pub(super) enum LeftRows<'a> {
    /// `[depth / STEP][rows / R][STEP][R]`
    Packed(&'a [f32]),
    /// The rows from this term on, where they are. Their elements are f32, and a product takes one at once.
    InPlace(Lines<'a>, usize),
}

/// At most [`STEP`] elements of each column of a panel.
struct PanelPart<'a> {
    elements: *const f32,
    /// The elements that are needed next. Each [`TERMS`] terms some of them are prefetched: all at once, they would wait for one another.
    ahead: Chunks<'a, f32>,
}

/// Rows of the left factor, which are multiplied by one panel of columns after the other.
pub(super) struct Block<'a> {
    pub(super) a: LeftRows<'a>,
    /// The rows in the output.
    pub(super) rows: Range<usize>,
    pub(super) depth: usize,
    pub(super) out: ProductOutput<'a>,
}

impl Block<'_> {
    /// Multiplies by a panel `[depth][width]`, whose first columns are `columns` of the output. `next` is the panel after
    /// it.
    ///
    /// # Safety
    /// The rows must be there, packed ones for R rows, `width` be at most V vectors, `sums` have room for all rows of all panels of
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
                1 => self.sums::<S, R, 1>(simd, panel, next, &columns, sums),
                2 => self.sums::<S, R, 2>(simd, panel, next, &columns, sums),
                _ => self.sums::<S, R, V>(simd, panel, next, &columns, sums),
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
        columns: &Range<usize>,
        sums: &mut [f32],
    ) {
        let (width, count) = (V * S::LANES, self.rows.len().div_ceil(R));
        for from in (0..self.depth).step_by(STEP) {
            let depth = STEP.min(self.depth - from);
            // The next elements come from slower memory, so a part of them is prefetched with each product.
            let after = if from + depth < self.depth { &panel[(from + depth) * width..] } else { next };
            let after = &after[..after.len().min(STEP * width)];
            let prefetches = count * depth.div_ceil(TERMS);
            let ahead = after.chunks(after.len().div_ceil(prefetches).next_multiple_of(LINE).max(LINE));
            // SAFETY: the panel has `depth` more elements of this width.
            let mut part = PanelPart { elements: unsafe { panel.as_ptr().add(from * width) }, ahead };
            for r in 0..count {
                if from + depth == self.depth {
                    // The output is accessed when all rows are multiplied, and by then it is in the L2 cache.
                    let first = self.rows.start + r * R;
                    for row in first..self.rows.end.min(first + R) {
                        self.out.prefetch(row, columns);
                    }
                }
                let sums = &mut sums[r * R * width..];
                match self.a {
                    LeftRows::Packed(a) => {
                        assert!(a.len() >= count * R * self.depth);
                        // SAFETY: the rows have the asserted size, and there is room for their sums.
                        unsafe {
                            let a = a.as_ptr().add((from * count + r * depth) * R);
                            let sums = sums.as_mut_ptr();
                            match self.rows.len() - r * R {
                                1 => add::<S, R, 1, V>(simd, depth, (a, 1, R), &mut part, sums, from == 0),
                                2 => add::<S, R, 2, V>(simd, depth, (a, 1, R), &mut part, sums, from == 0),
                                3 | 4 => add::<S, R, 4, V>(simd, depth, (a, 1, R), &mut part, sums, from == 0),
                                _ => add::<S, R, R, V>(simd, depth, (a, 1, R), &mut part, sums, from == 0),
                            }
                        }
                    }
                    LeftRows::InPlace(lines, first) => {
                        let row = self.rows.start + r * R;
                        let terms = first + from..first + from + depth;
                        let end = self.rows.end.min(row + R);
                        // SAFETY: the lines have these rows and terms, and there is room for their sums.
                        unsafe { self.in_place::<S, R, V>(simd, lines, (row..end, terms), &mut part, sums, from == 0) };
                    }
                }
            }
        }
    }

    /// Adds the products of at most R rows, which are read where they are.
    ///
    /// # Safety
    /// As for [`sums`](Self::sums).
    #[inline(always)]
    unsafe fn in_place<S: Simd, const R: usize, const V: usize>(
        &self,
        simd: S,
        lines: Lines,
        (rows, terms): (Range<usize>, Range<usize>),
        b: &mut PanelPart,
        sums: &mut [f32],
        first: bool,
    ) {
        let (mut row, depth) = (rows.start, terms.len());
        while row < rows.end {
            // SAFETY: the rows and terms exist.
            unsafe {
                let a = (lines.at(row, terms.start), lines.stride(), 1);
                let sums = sums.as_mut_ptr().add((row - rows.start) * V * S::LANES);
                row += match rows.end - row {
                    left if left >= R => {
                        add::<S, R, R, V>(simd, depth, a, b, sums, first);
                        R
                    }
                    4.. => {
                        add::<S, R, 4, V>(simd, depth, a, b, sums, first);
                        4
                    }
                    2 | 3 => {
                        add::<S, R, 2, V>(simd, depth, a, b, sums, first);
                        2
                    }
                    _ => {
                        add::<S, R, 1, V>(simd, depth, a, b, sums, first);
                        1
                    }
                };
            }
        }
    }

    /// Writes the sums to the output.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    #[inline(always)]
    unsafe fn write(&self, columns: Range<usize>, width: usize, sums: &mut [f32]) {
        for (row, sums) in self.rows.clone().zip(sums.chunks_exact_mut(width)) {
            // SAFETY: these elements belong to the caller.
            unsafe { self.out.write(row, columns.start, &mut sums[..columns.len()]) };
        }
    }
}

/// Adds the product of M of the R rows of a panel to `sums[i][..V * LANES]`, which start at zero if `first`.
///
/// # Safety
/// `a` is the first row with the distance of rows and that of terms, and must be readable for M rows and `depth` terms, `b.elements` for
/// `depth * V * LANES`, `sums` readable and writable for `M * V * LANES`; M is at most R.
#[inline(always)]
unsafe fn add<S: Simd, const R: usize, const M: usize, const V: usize>(
    simd: S,
    depth: usize,
    (a, a_row, a_step): (*const f32, usize, usize),
    b: &mut PanelPart,
    sums: *mut f32,
    first: bool,
) {
    let width = V * S::LANES;
    for from in (0..depth).step_by(TERMS) {
        b.ahead.next().into_iter().for_each(prefetch_far);
        let zero = [[simd.splat(0.0); V]; M];
        // SAFETY: the contract of the caller.
        unsafe {
            let (a, b) = (a.add(from * a_step), b.elements.add(from * width));
            let acc = multiply::<S, M, V>(simd, TERMS.min(depth - from), a, a_row, a_step, b, width, zero);
            for (i, acc) in acc.iter().enumerate() {
                for (v, x) in acc.iter().enumerate() {
                    let sum = sums.add(i * width + v * S::LANES);
                    let x = if first && from == 0 { *x } else { simd.add(simd.load(sum), *x) };
                    simd.store(sum, x);
                }
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
    "Calls [`Block::multiply`] compiled for the instruction set of `features`."
);
