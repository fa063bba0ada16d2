//! Packs the columns of a product block by block, and distributes its rows over threads.

use super::super::buffer::{Aligned, BufferPool};
use super::super::isa::TargetFeatures;
use super::Output;
use super::dots::{self, Dots, product_dots};
use super::lines::{Lines, product_rows};
use super::panels::{Panels, part};
use super::right_factor::RightFactor;
use super::tasks::{share, threads};
use super::tile::{Block, LeftRows, ProductOutput, STEP, part_of, product_block};
use std::ops::Range;

/// Maximum number of packed elements of rows that a worker multiplies by panel after panel: 384 KiB, which stay in an L2 cache of
/// 512 KiB.
const ROWS: usize = 3 << 15;
/// Maximum number of row panels in a block of packed rows, so that their sums stay in the L1 cache or near it.
const MOST_ROWS: usize = 16;
/// Minimum number of row panels in a block of packed rows, even if rows are long, since each panel of columns is fetched for all of them.
const LEAST_ROWS: usize = 4;
/// The most elements of its right factor that a product packs at once, in f32 4 MiB, which stay in the L3 cache. It limits what
/// a product allocates.
pub const MOST_PACKED: usize = 1 << 20;
/// Minimum number of column panels that are packed at once, even if they exceed [`MOST_PACKED`], since the rows are packed again for each
/// block of columns.
const LEAST_COLUMNS: usize = 4;
/// The most column panels that are multiplied by rows where they are, if these are f32: packing rows is worth it only for many
/// panels.
pub(super) const FEW_COLUMNS: usize = 8;
/// Maximum number of terms that are packed at once if partial sums can be stored in an f32 output. With more terms, fewer rows stay
/// in the L2 cache, and fewer columns are packed at once, so that rows are packed more often.
const TERMS: usize = 1536;
/// Number of tasks per thread, so that no thread waits long for the last one.
const TASKS: usize = 4;

/// Computes `a b`, packing b.
pub(super) fn product(features: TargetFeatures, a: Lines, b: RightFactor, mut out: Output) {
    product_to(features, a, b, out.target(b.shape().1));
}

/// Does [`product`]: all elements of an output that is not added to are written, and none is read.
pub(super) fn product_to(features: TargetFeatures, a: Lines, b: RightFactor, target: ProductOutput) {
    let (m, n, k) = (a.vectors, b.shape().1, a.terms);
    if m == 0 || n == 0 {
        return;
    }
    if k == 0 {
        return no_terms(m, target);
    }
    let threads = threads([m, n, k]);
    if let Some(b) = b.along()
        && m <= dots::ROWS
        && a.along()
    {
        return few_rows(features, threads, Dots { a, b, out: target });
    }
    let panels = Panels::new(features, n);
    let most = if target.holds_sums() { terms_at_once(k) } else { k };
    let panel = features.lanes() * most.div_ceil(features.pair());
    let blocks = panels.count().div_ceil((MOST_PACKED / panel).max(LEAST_COLUMNS));
    let buffers = BufferPool::default();
    for from in (0..k).step_by(most) {
        let terms = from..k.min(from + most);
        let out = if from == 0 { target } else { target.more() };
        for block in 0..blocks {
            let block = part(&(0..panels.count()), block, blocks);
            let packed = b.pack(features, threads, &terms, (panels, &block));
            multiply(features, threads, a, &terms, (panels, &block), &packed, (out, &buffers));
        }
    }
}

/// Computes `a b`, where b is packed already.
pub(super) fn product_packed(features: TargetFeatures, a: Lines, panels: Panels, packed: &[f32], mut out: Output) {
    let n = panels.all_columns();
    if a.vectors == 0 || n == 0 {
        return;
    }
    if a.terms == 0 {
        return no_terms(a.vectors, out.target(n));
    }
    let threads = threads([a.vectors, n, a.terms]);
    let out = (out.target(n), &BufferPool::default());
    multiply(features, threads, a, &(0..a.terms), (panels, &(0..panels.count())), packed, out);
}

/// Writes a product without terms, whose sums are 0.
fn no_terms(m: usize, out: ProductOutput) {
    let mut sums = vec![0.0; out.n];
    for row in 0..m {
        sums.fill(0.0);
        // SAFETY: no other thread accesses the output.
        unsafe { out.write(row, 0, &mut sums) };
    }
}

/// Number of terms that are packed at once, of `k`: equal numbers each time, whole sums of the micro kernel and whole blocks of quantized
/// rows.
fn terms_at_once(k: usize) -> usize {
    k.div_ceil(k.div_ceil(TERMS)).next_multiple_of(STEP)
}

/// Multiplies some terms of all rows by the packed columns of some panels.
fn multiply(
    features: TargetFeatures,
    threads: usize,
    a: Lines,
    terms: &Range<usize>,
    (panels, some): (Panels, &Range<usize>),
    packed: &[f32],
    (out, buffers): (ProductOutput, &BufferPool),
) {
    let (depth, pair) = (terms.len().div_ceil(features.pair()), features.pair());
    let row_panels = a.vectors.div_ceil(features.rows());
    let most = (ROWS / (features.rows() * depth)).clamp(LEAST_ROWS, MOST_ROWS);
    let row_blocks = row_panels.div_ceil(most).next_multiple_of(threads).min(row_panels);
    let groups = if threads == 1 { 1 } else { (TASKS * threads).div_ceil(row_blocks).min(some.len()) };
    let most_rows = row_panels.div_ceil(row_blocks) * features.rows();
    let in_place = a.readable() && pair == 1 && some.len() <= FEW_COLUMNS;
    share(threads, row_blocks * groups, |tasks| {
        let mut rows_packed = buffers.take(if in_place { 0 } else { most_rows * depth });
        let mut sums = buffers.take(most_rows * features.lanes());
        for task in tasks {
            let row_panels = part(&(0..row_panels), task / groups, row_blocks);
            let rows = row_panels.start * features.rows()..a.vectors.min(row_panels.end * features.rows());
            let left = if in_place {
                LeftRows::InPlace(a, terms.start)
            } else {
                for from in (0..depth).step_by(STEP) {
                    let part = part_of(terms, from, pair);
                    let to = &mut rows_packed[from * row_panels.len() * features.rows()..];
                    // SAFETY: there is room for the rows of a block with all their terms.
                    unsafe { product_rows(features, &a, rows.clone(), part, to) };
                }
                LeftRows::Packed(&rows_packed)
            };
            let block = Block { a: left, rows, depth, out };
            let panel = |panel: usize| {
                let range = panel..some.end.min(panel + 1);
                &packed[panels.at(some.start, range.start, depth)..panels.at(some.start, range.end, depth)]
            };
            for index in part(some, task % groups, groups) {
                // SAFETY: the rows are packed, a panel has as many vectors as the code takes, there is room for the sums of
                // all rows with it, and no other task has these rows and columns.
                unsafe {
                    product_block(features, &block, panel(index), panel(index + 1), panels.columns(index), &mut sums)
                };
            }
        }
        buffers.give(rows_packed);
        buffers.give(sums);
    });
}

/// Multiplies a few rows by all columns.
fn few_rows(features: TargetFeatures, threads: usize, dots: Dots) {
    /// Minimum number of columns in a task, to be worth preparing the rows.
    const LEAST: usize = 64;
    let columns = dots.b.vectors;
    let tasks = if threads == 1 { 1 } else { (TASKS * threads).min(columns.div_ceil(LEAST)) };
    share(threads, tasks, |some| {
        let mut scratch = Aligned::zeros(dots::scratch(dots.a.terms.div_ceil(features.pair()), features.vector()));
        for task in some {
            // SAFETY: no other task has these columns.
            unsafe { product_dots(features, &dots, part(&(0..columns), task, tasks), &mut scratch) };
        }
    });
}
