//! Doubling and halving of space and time.

use super::block::Block;
use super::streamed::{Source, StreamedConvolution};
use super::strip::Strip;
use crate::error::Result;

/// Twice the height and width and, with `time`, two frames for each one after the first.
#[derive(Clone)]
pub(crate) struct Upsample {
    /// A convolution over time that makes two frames of one: the first half of its channels, then the second half.
    pub(crate) time: Option<StreamedConvolution>,
    pub(crate) space: StreamedConvolution,
}

impl Upsample {
    pub(crate) fn push(&mut self, strip: &Strip, x: Block) -> Result<Block> {
        let x = match &mut self.time {
            Some(time) => double_time(time, strip, x)?,
            None => x,
        };
        self.space.push(strip, &x, Source::Doubled, None)
    }
}

/// Doubles all frames but the first of the video, which passes unchanged and which the convolution does not see: for it, the
/// video begins with the second frame.
fn double_time(time: &mut StreamedConvolution, strip: &Strip, x: Block) -> Result<Block> {
    let begins = x.frames.start == 0;
    if begins {
        time.set_history(None);
    }
    let place = x.without_data();
    let frames = if begins { 0 } else { 2 * x.frames.start - 1 }..2 * x.frames.end.max(1) - 1;
    let (first, rest) = x.split_frames(usize::from(begins));
    let frame = rest.frame_len();
    let mut data = first.data;
    data.reserve(2 * rest.data.len());
    let pairs = time.advance(strip, &rest, Source::Plain, None)?;
    if frame > 0 {
        for pairs in pairs.data.chunks_exact(2 * frame) {
            for half in [0, place.channels] {
                let values = pairs.chunks_exact(2 * place.channels);
                values.for_each(|both| data.extend_from_slice(&both[half..half + place.channels]));
            }
        }
    }
    Ok(Block { frames, data, ..place })
}

/// Half the height and width and, with `time`, one frame for each two after the first.
#[derive(Clone)]
pub(crate) struct Downsample {
    pub(crate) space: StreamedConvolution,
    pub(crate) time: Option<StreamedConvolution>,
}

impl Downsample {
    pub(crate) fn push(&mut self, strip: &Strip, x: &Block) -> Result<Block> {
        let x = self.space.push(strip, x, Source::Plain, None)?;
        match &mut self.time {
            Some(time) => halve_time(time, strip, x),
            None => Ok(x),
        }
    }
}

/// Halves all frames but the first of the video, which passes unchanged.
fn halve_time(time: &mut StreamedConvolution, strip: &Strip, x: Block) -> Result<Block> {
    let begins = x.frames.start == 0;
    let place = x.without_data();
    let frames = x.frames.start.div_ceil(2)..x.frames.end.div_ceil(2);
    let (first, rest) = x.split_frames(usize::from(begins));
    if begins {
        time.set_history(Some(first.data.clone()));
    }
    let mut data = first.data;
    data.extend(time.advance(strip, &rest, Source::Plain, None)?.data);
    Ok(Block { frames, data, ..place })
}
