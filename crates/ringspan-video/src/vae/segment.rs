//! A segment of the network: consecutive layers through which a whole video is passed, block by block.

use super::block::{Shape, Video};
use super::layer::Layer;
use super::strip::Strip;
use crate::error::Result;
use std::ops::Range;

/// How a video is cut into blocks at the input of a segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tiling {
    /// Rows of a band.
    pub(crate) rows: usize,
    /// Frames of the first group of frames.
    pub(crate) first: usize,
    /// Frames of each further group.
    pub(crate) frames: usize,
}

impl Tiling {
    /// The bands of a video of `height` rows.
    pub(crate) fn bands(self, height: usize) -> impl Iterator<Item = Range<usize>> {
        (0..height).step_by(self.rows.max(1)).map(move |first| first..height.min(first + self.rows.max(1)))
    }

    /// The groups of `frames` frames.
    pub(crate) fn groups(self, frames: usize) -> impl Iterator<Item = Range<usize>> {
        let first = self.first.clamp(1, frames.max(1));
        let more = (first..frames).step_by(self.frames.max(1)).map(move |at| at..frames.min(at + self.frames.max(1)));
        std::iter::once(0..first.min(frames)).chain(more)
    }
}

/// Passes a video through layers.
///
/// # Errors
/// Failures of other ranks.
pub(crate) fn run(layers: &mut [Layer], strip: &Strip, input: Video, tiling: Tiling) -> Result<Video> {
    let mut out = Video::zeros(output(layers, input.shape));
    for (band, rows) in tiling.bands(input.shape.height).enumerate() {
        for frames in tiling.groups(input.shape.frames) {
            let mut block = input.block(band, frames, rows.clone());
            for layer in layers.iter_mut() {
                block = layer.push(strip, block)?;
            }
            out.store(&block);
        }
    }
    Ok(out)
}

/// The sizes of a segment's output.
pub(crate) fn output(layers: &[Layer], input: Shape) -> Shape {
    layers.iter().fold(input, |shape, layer| layer.output(shape))
}
