//! A convolution that receives its input block by block, and keeps what later blocks need of it.
//!
//! Blocks come band by band, a band being some rows of all columns, and in a band from the first frame to the last. The
//! state has two parts. The *tail* is, for each group of frames, the last rows of the band before: a kernel of 3 x 3
//! cannot compute the last row of a band until the next one arrives, so its output lags by a row, and nothing is
//! computed twice. The *history* is the frames before the current ones, in the rows of this band. Border columns come
//! from the neighbours. So the sums of any tiling and any number of ranks have the same terms, and differ by rounding alone.

use super::block::Block;
use super::convolution::Convolution;
use super::norm::ChannelNorm;
use super::sizes::Padded;
use super::strip::{Borders, Strip};
use crate::error::Result;
use ringspan_candle::pool;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// The operation that is applied to a block's values before the convolution.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    Plain,
    /// SiLU of the norm.
    Activated(&'a ChannelNorm),
    /// Each value twice in height and in width: the nearest neighbours at twice the resolution.
    Doubled,
}

impl Source<'_> {
    fn scale(self) -> usize {
        if matches!(self, Self::Doubled) { 2 } else { 1 }
    }

    /// Writes a row of the convolution's input.
    fn write(self, values: &[f32], channels: usize, out: &mut [f32]) {
        match self {
            Self::Plain => out.copy_from_slice(values),
            Self::Activated(norm) => pool::vectorized(
                #[inline(always)]
                || norm.write_activated(values, out),
            ),
            Self::Doubled => {
                for (value, out) in values.chunks_exact(channels).zip(out.chunks_exact_mut(2 * channels)) {
                    out[..channels].copy_from_slice(value);
                    out[channels..].copy_from_slice(value);
                }
            }
        }
    }
}

/// A convolution with its state.
#[derive(Clone)]
pub(crate) struct StreamedConvolution {
    kernel: Arc<Convolution>,
    /// The tails of the groups of frames whose next band has not come yet, oldest first.
    tails: VecDeque<Tail>,
    history: Option<Vec<f32>>,
}

/// The last rows of a band, with their borders: `[frames, rows, padded cols, channels]`.
#[derive(Clone)]
struct Tail {
    first: usize,
    rows: usize,
    data: Vec<f32>,
}

/// The rows of a padded input.
struct PaddedRows {
    /// Rows of zeros above.
    above: usize,
    /// The input row that follows them: the first of the tail.
    first: usize,
    /// The rows of the block.
    new: Range<usize>,
    /// All rows with those of zeros.
    all: usize,
    /// Padded columns.
    cols: usize,
}

impl StreamedConvolution {
    pub(crate) fn new(kernel: Arc<Convolution>) -> Self {
        Self { kernel, tails: VecDeque::new(), history: None }
    }

    pub(crate) fn kernel(&self) -> &Convolution {
        &self.kernel
    }

    /// The rows of the output for a block of these input rows.
    pub(crate) fn out_rows(&self, rows: &Range<usize>, height: usize) -> Range<usize> {
        let sizes = self.kernel.sizes();
        sizes.outputs_of(rows.start, height)..sizes.outputs_of(rows.end, height)
    }

    /// Sets the frames before the next block of this band, `[frames, rows, cols, channels]`, or none.
    pub(crate) fn set_history(&mut self, history: Option<Vec<f32>>) {
        self.history = history;
    }

    /// Convolves the next block of a sequence whose first frame has number 0. `add`, of the output's shape, is added to it.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn push(&mut self, strip: &Strip, input: &Block, source: Source, add: Option<&[f32]>) -> Result<Block> {
        if input.frames.start == 0 {
            self.history = None;
        }
        self.advance(strip, input, source, add)
    }

    /// Like [`push`](Self::push), with the stored history.
    pub(crate) fn advance(
        &mut self,
        strip: &Strip,
        input: &Block,
        source: Source,
        add: Option<&[f32]>,
    ) -> Result<Block> {
        let (sizes, scale) = (self.kernel.sizes(), source.scale());
        let (height, cols) = (input.height * scale, input.cols * scale);
        let new = input.rows.start * scale..input.rows.end * scale;
        let out_rows = self.out_rows(&new, height);
        let tail = if input.band > 0 { self.tails.pop_front() } else { None };
        let first = tail.as_ref().map_or(new.start, |tail| tail.first);
        let above = if out_rows.start == 0 { sizes.padding_before() } else { 0 };
        let below = if new.end == height { sizes.padding_after() } else { 0 };
        let all = above + (new.end - first) + below;
        let rows =
            PaddedRows { above, first, new, all, cols: sizes.padding_before() + cols + right_border(&self.kernel) };
        let (frames, frame) = (input.frames.len(), all * rows.cols * sizes.inputs);
        let history = sizes.history();

        let mut data = vec![0.0; (history + frames) * frame];
        if let Some(past) = self.history.take() {
            data[..history * frame].copy_from_slice(&past);
        }
        if cols > 0 && all > 0 {
            let present = &mut data[history * frame..];
            self.fill(present, &rows, input, source, tail.as_ref());
            self.fill_borders(strip, present, &rows, frames, cols)?;
        }
        if history > 0 {
            self.history = Some(data[frames * frame..].to_vec());
        }
        if rows.new.end < height {
            let first = (out_rows.end * sizes.stride).saturating_sub(sizes.padding_before()).max(rows.first);
            self.tails.push_back(self.tail(&data[history * frame..], &rows, first));
        }
        let frames_out = (history + frames + sizes.time_stride - sizes.time) / sizes.time_stride;
        let cols_out = cols / sizes.stride;
        let padded = Padded { data: &data, rows: all, cols: rows.cols };
        let data = self.kernel.apply(&padded, [frames_out, out_rows.len(), cols_out], add);
        let start = input.frames.start.div_ceil(sizes.time_stride);
        Ok(Block {
            band: input.band,
            frames: start..start + frames_out,
            rows: out_rows,
            height: height / sizes.stride,
            cols: cols_out,
            channels: sizes.outputs,
            data,
        })
    }

    /// Copies the tail and the block's rows to their places.
    fn fill(&self, present: &mut [f32], rows: &PaddedRows, input: &Block, source: Source, tail: Option<&Tail>) {
        let sizes = self.kernel.sizes();
        let (row, scale) = (rows.cols * sizes.inputs, source.scale());
        let inside =
            sizes.padding_before() * sizes.inputs..sizes.padding_before() * sizes.inputs + scale * input.row_len();
        let old = rows.new.start - rows.first;
        let mut parts = Vec::new();
        for (index, frame) in present.chunks_exact_mut(rows.all * row).enumerate() {
            if let Some(Tail { rows: some, data, .. }) = tail {
                let size = some * row;
                frame[rows.above * row..][..size].copy_from_slice(&data[index * size..(index + 1) * size]);
            }
            let frame = &mut frame[(rows.above + old) * row..][..rows.new.len() * row];
            parts.extend(frame.chunks_exact_mut(row).enumerate().map(|(y, out)| (index, y, out)));
        }
        pool::map(parts, |(frame, y, out): (usize, usize, &mut [f32])| {
            let at = frame * input.frame_len() + y / scale * input.row_len();
            source.write(&input.data[at..at + input.row_len()], input.channels, &mut out[inside.clone()]);
        });
    }

    /// Fills the columns beside those of this rank; at the border of the frame they stay zero.
    fn fill_borders(
        &self,
        strip: &Strip,
        present: &mut [f32],
        rows: &PaddedRows,
        frames: usize,
        cols: usize,
    ) -> Result<()> {
        let (channels, left, right) =
            (self.kernel.sizes().inputs, self.kernel.sizes().padding_before(), right_border(&self.kernel));
        if left + right == 0 || rows.new.is_empty() || frames == 0 {
            return Ok(());
        }
        let row = rows.cols * channels;
        let old = rows.above + rows.new.start - rows.first;
        let place = |index: usize, col: usize| {
            let (frame, y) = (index / rows.new.len(), index % rows.new.len());
            let at = (frame * rows.all + old + y) * row + col * channels;
            at..at + channels
        };
        let count = frames * rows.new.len();
        let column = |col: usize| {
            let mut values = Vec::with_capacity(count * channels);
            (0..count).for_each(|index| values.extend_from_slice(&present[place(index, col)]));
            values
        };
        let Borders { left: before, right: after } =
            strip.exchange(|| column(left), || column(left + cols - 1), (left > 0, right > 0))?;
        for (column, col) in [(before, 0), (after, left + cols)] {
            let Some(column) = column else { continue };
            for (index, values) in column.f32()?.chunks_exact(channels).take(count).enumerate() {
                present[place(index, col)].copy_from_slice(values);
            }
        }
        Ok(())
    }

    /// The rows from `first` on, which the next band needs.
    fn tail(&self, present: &[f32], rows: &PaddedRows, first: usize) -> Tail {
        let row = rows.cols * self.kernel.sizes().inputs;
        let (some, at) = (rows.new.end - first, rows.above + first - rows.first);
        let mut data = Vec::with_capacity(present.len() / rows.all.max(1) * some);
        for frame in present.chunks_exact((rows.all * row).max(1)) {
            data.extend_from_slice(&frame[at * row..(at + some) * row]);
        }
        Tail { first, rows: some, data }
    }
}

/// Columns of the neighbour on the right that outputs depend on.
fn right_border(kernel: &Convolution) -> usize {
    usize::from(kernel.sizes().side > 1)
}
