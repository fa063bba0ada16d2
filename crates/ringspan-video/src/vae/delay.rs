//! Buffers rows of a residual branch until the convolution beside it, whose output lags one row, has produced the same rows.

use super::block::Block;
use std::collections::VecDeque;
use std::ops::Range;

/// Keeps the last rows of each group of frames until the next band.
#[derive(Clone, Default)]
pub(crate) struct Delay {
    waiting: VecDeque<Block>,
}

impl Delay {
    /// Adds the rows of a block after those that wait, and takes out the rows `rows`, which are the first of them.
    pub(crate) fn push(&mut self, block: Block, rows: Range<usize>) -> Block {
        let waiting = if block.band > 0 { self.waiting.pop_front() } else { None };
        let old = waiting.unwrap_or_else(|| Block { rows: block.rows.start..block.rows.start, ..block.without_data() });
        let all = old.rows.start..block.rows.end;
        if all == rows && old.rows.is_empty() {
            if rows.end < block.height {
                self.waiting.push_back(Block { rows: rows.end..rows.end, ..block.without_data() });
            }
            return block;
        }
        debug_assert!(rows.start == all.start && rows.end <= all.end, "{rows:?} of {all:?}");
        let taken = part(&old, &block, rows.clone());
        if all.end < block.height {
            self.waiting.push_back(part(&old, &block, rows.end..all.end));
        }
        taken
    }
}

/// Rows of two blocks of the same frames, the second below the first.
fn part(above: &Block, below: &Block, rows: Range<usize>) -> Block {
    let row = below.row_len();
    let mut data = Vec::with_capacity(below.frames.len() * rows.len() * row);
    for frame in 0..below.frames.len() {
        for block in [above, below] {
            let start = rows.start.clamp(block.rows.start, block.rows.end);
            let end = rows.end.clamp(start, block.rows.end);
            let at = frame * block.frame_len();
            let (start, end) = (start - block.rows.start, end - block.rows.start);
            data.extend_from_slice(&block.data[at + start * row..at + end * row]);
        }
    }
    Block { rows, data, ..below.without_data() }
}
