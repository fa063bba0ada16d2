//! Shortcuts around resampling without weights, in WAN 2.2's autoencoder: groups of channels become pixels and frames, or the
//! other way around.

use super::block::Block;
use super::delay::Delay;
use super::resample::{Downsample, Upsample};
use super::residual_block::ResidualBlock;
use super::strip::Strip;
use crate::error::Result;

/// Residual blocks and a doubling of the resolution, with a shortcut that repeats channels.
#[derive(Clone)]
pub(crate) struct ResidualUp {
    pub(crate) blocks: Vec<ResidualBlock>,
    pub(crate) up: Option<Upsample>,
    pub(crate) outputs: usize,
    pub(crate) delay: Delay,
}

impl ResidualUp {
    pub(crate) fn push(&mut self, strip: &Strip, x: Block) -> Result<Block> {
        let shortcut = self.up.as_ref().map(|up| repeat(&x, self.outputs, if up.time.is_some() { 2 } else { 1 }));
        let mut x = x;
        for block in &mut self.blocks {
            x = block.push(strip, x)?;
        }
        let Some((up, shortcut)) = self.up.as_mut().zip(shortcut) else { return Ok(x) };
        let mut out = up.push(strip, x)?;
        let shortcut = self.delay.push(shortcut, out.rows.clone());
        add(&mut out, &shortcut);
        Ok(out)
    }
}

/// Residual blocks and a halving of the resolution, with a shortcut that averages.
#[derive(Clone)]
pub(crate) struct ResidualDown {
    pub(crate) blocks: Vec<ResidualBlock>,
    pub(crate) down: Option<Downsample>,
    pub(crate) outputs: usize,
    pub(crate) delay: Delay,
}

impl ResidualDown {
    pub(crate) fn push(&mut self, strip: &Strip, x: Block) -> Result<Block> {
        let (input, mut x) = (x.clone(), x);
        for block in &mut self.blocks {
            x = block.push(strip, x)?;
        }
        let (space, time) = match &mut self.down {
            Some(down) => {
                x = down.push(strip, &x)?;
                (2, if down.time.is_some() { 2 } else { 1 })
            }
            None => (1, 1),
        };
        let input = self.delay.push(input, x.rows.start * space..x.rows.end * space);
        let average = average(&input, self.outputs, time, space);
        add(&mut x, &average);
        Ok(x)
    }
}

fn add(out: &mut Block, shortcut: &Block) {
    debug_assert_eq!((&out.frames, &out.rows, out.cols), (&shortcut.frames, &shortcut.rows, shortcut.cols));
    out.data.iter_mut().zip(&shortcut.data).for_each(|(out, x)| *out += x);
}

/// Each output channel at each of the `time x 2 x 2` places that a position becomes is an input channel. The first frame of the
/// video becomes one frame, the last of its places in time.
fn repeat(x: &Block, outputs: usize, time: usize) -> Block {
    let places = time * 4;
    let repeats = outputs * places / x.channels;
    let start = if x.frames.start == 0 { 0 } else { (x.frames.start - 1) * time + 1 };
    let end = if x.frames.end == 0 { 0 } else { (x.frames.end - 1) * time + 1 };
    let (rows, cols) = (2 * x.rows.start..2 * x.rows.end, 2 * x.cols);
    let mut data = Vec::with_capacity((end - start) * rows.len() * cols * outputs);
    for frame in start..end {
        let (from, place) = if frame == 0 { (0, time - 1) } else { ((frame - 1) / time + 1, (frame - 1) % time) };
        for row in 0..rows.len() {
            let at = (from - x.frames.start) * x.frame_len() + row / 2 * x.row_len();
            for col in 0..cols {
                let values = &x.data[at + col / 2 * x.channels..][..x.channels];
                let place = place * 4 + row % 2 * 2 + col % 2;
                data.extend((0..outputs).map(|output| values[(output * places + place) / repeats]));
            }
        }
    }
    Block { frames: start..end, rows, height: 2 * x.height, cols, channels: outputs, data, band: x.band }
}

/// Each output channel is the mean of a group of the `channels x time x space x space` values that become one position. The
/// first frame of the video has zeros before it.
fn average(x: &Block, outputs: usize, time: usize, space: usize) -> Block {
    let places = time * space * space;
    let group = x.channels * places / outputs;
    let (rows, cols) = (x.rows.start / space..x.rows.end / space, x.cols / space);
    let frames = x.frames.start.div_ceil(time)..x.frames.end.div_ceil(time);
    let value = |frame: isize, row: usize, col: usize, channel: usize| match usize::try_from(frame) {
        Ok(frame) => x.data[(frame - x.frames.start) * x.frame_len() + row * x.row_len() + col * x.channels + channel],
        Err(_) => 0.0,
    };
    let mut data = Vec::with_capacity(frames.len() * rows.len() * cols * outputs);
    for frame in frames.clone() {
        let first = (frame * time) as isize - (time as isize - 1);
        for (row, col) in (0..rows.len()).flat_map(|row| (0..cols).map(move |col| (row, col))) {
            let mean = |output: usize| {
                let of = |index: usize| {
                    let (channel, place) = (index / places, index % places);
                    let (in_time, in_space) = (place / (space * space), place % (space * space));
                    let (y, x) = (row * space + in_space / space, col * space + in_space % space);
                    value(first + in_time as isize, y, x, channel)
                };
                (output * group..(output + 1) * group).map(of).sum::<f32>() / group as f32
            };
            data.extend((0..outputs).map(mean));
        }
    }
    Block { frames, rows, height: x.height / space, cols, channels: outputs, data, band: x.band }
}
