//! Products with activations that are rounded to 16-bit integers, by integer instructions.

use super::blocks::{self, BlockCodes, BlockTarget};
use super::dots::split_columns;
use super::format::Format;
use super::input::Input;
use super::lanes::{Lanes, VectorWork, dispatch};
use super::matrix::{QuantizedMatrix, StoredColumns};
use crate::pool;
use ringspan::kernel::int16::{COLUMNS, Instructions, Panels, ROWS, RoundedActivations, RowCodes, Scales};
use ringspan::kernel::prefetch;
use std::marker::PhantomData;
use std::ops::Range;

/// Number of rows of the weight that are multiplied together: those of two panels.
const GROUP: usize = 2 * ROWS;
/// The largest number of tokens of a task. With more, their activations would not stay in the L2 cache.
const TOKENS: usize = 256;
/// With fewer tokens, rounding them takes less time than to wake other threads.
const SHARED: usize = 16;

/// How the blocks of a format are unpacked to codes.
#[derive(Clone, Copy)]
pub(super) struct Unpacking {
    scales: Scales,
    /// Unpacks the first argument, and prefetches the second.
    unpack: fn(StoredColumns, &[u8], &mut RowCodes),
}

impl Unpacking {
    /// How blocks of a format are unpacked; `None` for formats that are not integers.
    pub(super) fn of(format: Format) -> Option<Self> {
        Some(match format {
            Format::F16 | Format::BF16 => return None,
            Format::Q4_0 => Self::new::<blocks::Q4_0, 32>(),
            Format::Q5_0 => Self::new::<blocks::Q5_0, 32>(),
            Format::Q8_0 => Self::new::<blocks::Q8_0, 32>(),
            Format::Q4K => Self::new::<blocks::Q4K, 256>(),
            Format::Q5K => Self::new::<blocks::Q5K, 256>(),
            Format::Q6K => Self::new::<blocks::Q6K, 256>(),
            Format::Iq4Nl => Self::new::<blocks::Iq4Nl, 32>(),
            Format::Mxfp4 => Self::new::<blocks::Mxfp4, 32>(),
        })
    }

    fn new<B: BlockCodes<LEN>, const LEN: usize>() -> Self {
        fn unpack<B: BlockCodes<LEN>, const LEN: usize>(rows: StoredColumns, next: &[u8], to: &mut RowCodes) {
            dispatch(Unpack::<B, LEN> { rows, next, to, blocks: PhantomData });
        }
        Self { scales: B::SCALES, unpack: unpack::<B, LEN> }
    }
}

struct Unpack<'a, B, const LEN: usize> {
    rows: StoredColumns<'a>,
    next: &'a [u8],
    to: &'a mut RowCodes,
    blocks: PhantomData<B>,
}

impl<B: BlockCodes<LEN>, const LEN: usize> VectorWork for Unpack<'_, B, LEN> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { rows, next, to, .. } = self;
        let mut next = next.chunks(next.len().div_ceil(ROWS).max(1));
        for (row, bytes) in rows.rows().enumerate() {
            prefetch(next.next().unwrap_or_default());
            let blocks: &[B] = bytemuck::cast_slice(bytes);
            for (i, block) in blocks.iter().enumerate() {
                block.codes(l, BlockTarget { codes: to, row, column: i * LEN });
            }
        }
    }
}

/// Adds `x weight^T` to out: x `[T, in]`, weight `[out, in]`, out `[T, out]`.
pub(super) fn add_forward(x: Input, weight: &QuantizedMatrix, unpacking: Unpacking, out: &mut [f32]) {
    let (rows, columns) = weight.dims();
    if columns == 0 || out.is_empty() {
        return;
    }
    let instructions = Instructions::best(pool::isa());
    let mut rounded = RoundedActivations::zeros(x.tokens, columns);
    let parts: Vec<_> = rounded.parts_mut().collect();
    if x.tokens < SHARED {
        parts.into_iter().for_each(|mut part| part.round(instructions, |token| x.row(token)));
    } else {
        pool::map(parts, |mut part| part.round(instructions, |token| x.row(token)));
    }
    let groups = pool::parts(rows.div_ceil(GROUP), GROUP * columns);
    let ranges: Vec<_> = groups.into_iter().map(|some| some.start * GROUP..rows.min(some.end * GROUP)).collect();
    let mut tasks = Vec::new();
    for (index, out) in out.chunks_mut(TOKENS * rows).enumerate() {
        let tokens = index * TOKENS..index * TOKENS + out.len() / rows;
        let outs = split_columns(out, rows, &ranges);
        tasks.extend(ranges.iter().zip(outs).map(|(rows, out)| (tokens.clone(), rows.clone(), out)));
    }
    pool::map(tasks, |(tokens, rows, out)| {
        let product = Product { weight, unpacking, instructions, x: &rounded, tokens };
        product.add(rows, out);
    });
}

/// The products of some tokens.
struct Product<'a> {
    weight: &'a QuantizedMatrix,
    unpacking: Unpacking,
    instructions: Instructions,
    x: &'a RoundedActivations,
    tokens: Range<usize>,
}

impl Product<'_> {
    /// Adds the products with some rows of the weight: `out` has the numbers of these rows of each token.
    fn add(&self, rows: Range<usize>, mut out: Vec<&mut [f32]>) {
        let (columns, scales, tokens) = (self.weight.dims().1, self.unpacking.scales, &self.tokens);
        let is_packed = tokens.len() > self.instructions.few();
        // What rows beyond the last one leave in the codes and panels of a group is multiplied, too, but never read.
        let (mut codes, mut panels) = (RowCodes::zeros(), is_packed.then(Panels::zeros));
        let mut sums = vec![[[0.0; ROWS]; 2]; tokens.len()];
        for group in rows.clone().step_by(GROUP).map(|first| first..rows.end.min(first + GROUP)) {
            // Processors do not foresee reads that jump from row to row, so each part of this group that is unpacked prefetches as much of
            // the next group, whose rows follow in memory.
            let next = self.weight.bytes_of_rows(group.end..rows.end.min(group.end + GROUP));
            let mut next = next.chunks(next.len().div_ceil(2 * columns.div_ceil(COLUMNS)).max(1));
            sums.fill([[0.0; ROWS]; 2]);
            for start in (0..columns).step_by(COLUMNS) {
                let width = COLUMNS.min(columns - start);
                for (panel, first) in group.clone().step_by(ROWS).enumerate() {
                    let of_panel = first..group.end.min(first + ROWS);
                    let stored = self.weight.stored(of_panel, start..start + width);
                    (self.unpacking.unpack)(stored, next.next().unwrap_or_default(), &mut codes);
                    match &mut panels {
                        Some(panels) => panels.pack(self.instructions, panel, width, &codes),
                        None => {
                            let (x, to) = (self.x, (panel, &mut sums[..]));
                            codes.add_products(self.instructions, x, tokens.clone(), (start, width), scales, to);
                        }
                    }
                }
                if let Some(panels) = &panels {
                    panels.add_products(self.instructions, self.x, tokens.clone(), (start, width), scales, &mut sums);
                }
            }
            for (out, sums) in out.iter_mut().zip(&sums) {
                let out = &mut out[group.start - rows.start..group.end - rows.start];
                out.iter_mut().zip(sums.as_flattened()).for_each(|(out, sum)| *out += sum);
            }
        }
    }
}
