//! A part of a video inside the network: some frames and some rows of one level of resolution, and the columns of this rank.

use std::ops::Range;

/// Values `[frames, rows, cols, channels]`: channels last, so that norms and products read them in order.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    /// Number of the band of rows that this block belongs to; all frames of a band come before the next band.
    pub(crate) band: usize,
    /// The frames of this level.
    pub(crate) frames: Range<usize>,
    /// The rows of this level.
    pub(crate) rows: Range<usize>,
    /// Rows of a whole frame of this level.
    pub(crate) height: usize,
    /// Columns of this rank.
    pub(crate) cols: usize,
    pub(crate) channels: usize,
    pub(crate) data: Vec<f32>,
}

impl Block {
    /// Number of elements in a row.
    pub(crate) fn row_len(&self) -> usize {
        self.cols * self.channels
    }

    /// Number of elements in the rows of one frame.
    pub(crate) fn frame_len(&self) -> usize {
        self.rows.len() * self.row_len()
    }

    /// A block at the same frames, rows and columns, with other values.
    pub(crate) fn with(&self, channels: usize, data: Vec<f32>) -> Self {
        let Self { band, frames, rows, height, cols, .. } = self.without_data();
        debug_assert_eq!(data.len(), frames.len() * rows.len() * cols * channels);
        Self { band, frames, rows, height, cols, channels, data }
    }

    /// The same frames, rows and columns without the values.
    pub(crate) fn without_data(&self) -> Self {
        let Self { band, height, cols, channels, .. } = *self;
        Self { band, frames: self.frames.clone(), rows: self.rows.clone(), height, cols, channels, data: Vec::new() }
    }

    /// Splits off the first `count` frames.
    pub(crate) fn split_frames(mut self, count: usize) -> (Self, Self) {
        let middle = (self.frames.start + count).min(self.frames.end);
        let mut rest = self.without_data();
        rest.data = self.data.split_off((middle - self.frames.start) * self.frame_len());
        rest.frames = middle..self.frames.end;
        self.frames.end = middle;
        (self, rest)
    }
}

/// All frames and rows of one level, and the columns of this rank: `[frames, height, cols, channels]`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Video {
    pub(crate) shape: Shape,
    pub(crate) data: Vec<f32>,
}

/// The sizes of a [`Video`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) frames: usize,
    pub(crate) height: usize,
    pub(crate) cols: usize,
    pub(crate) channels: usize,
}

impl Shape {
    pub(crate) fn elements(self) -> usize {
        self.frames * self.height * self.cols * self.channels
    }
}

impl Video {
    pub(crate) fn zeros(shape: Shape) -> Self {
        Self { shape, data: vec![0.0; shape.elements()] }
    }

    /// A copy of some frames and rows.
    pub(crate) fn block(&self, band: usize, frames: Range<usize>, rows: Range<usize>) -> Block {
        let Shape { height, cols, channels, .. } = self.shape;
        let row = cols * channels;
        let of = |frame: usize| &self.data[(frame * height + rows.start) * row..(frame * height + rows.end) * row];
        let mut data = Vec::with_capacity(frames.len() * rows.len() * row);
        frames.clone().for_each(|frame| data.extend_from_slice(of(frame)));
        Block { band, frames, rows, height, cols, channels, data }
    }

    /// Writes a block to its place.
    pub(crate) fn store(&mut self, block: &Block) {
        let Shape { height, cols, channels, .. } = self.shape;
        let row = cols * channels;
        for (index, frame) in block.frames.clone().enumerate() {
            let to = (frame * height + block.rows.start) * row;
            let values = &block.data[index * block.frame_len()..(index + 1) * block.frame_len()];
            self.data[to..to + values.len()].copy_from_slice(values);
        }
    }
}
