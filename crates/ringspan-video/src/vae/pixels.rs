//! Converts between tensors of callers, `[B, C, F, H, W]`, and videos of the network, whose channels are last.

use super::block::{Shape, Video};
use super::columns_of;
use super::config::VaeConfig;
use super::strip::ColumnSplit;
use super::video_tensor::VideoTensor;
use crate::error::Result;
use ringspan::comm::Buffer;
use std::ops::Range;
use std::sync::Arc;

/// Latents of one video as the decoder takes them: with the mean and deviation of each channel put back.
pub(super) fn from_latents(latents: &VideoTensor, index: usize, columns: Range<usize>, config: &VaeConfig) -> Video {
    let [_, channels, frames, height, _] = latents.shape();
    let shape = Shape { frames, height, cols: columns.len(), channels };
    let value = |channel: usize, x: f32| x * config.latents_std[channel] + config.latents_mean[channel];
    columns_of(latents, index, columns, shape, |position, channel| position * channels + channel, value)
}

/// Frames of one video as the encoder takes them, in the given latent columns: a patch of pixels becomes one position.
pub(super) fn from_frames(frames: &VideoTensor, index: usize, columns: Range<usize>, config: &VaeConfig) -> Video {
    let (space, patch) = (config.space(), config.patch());
    let columns = columns.start * space..columns.end * space;
    let [_, channels, count, height, _] = frames.shape();
    let pixels = Shape { frames: count, height, cols: columns.len(), channels };
    let of_patch = patch * patch;
    let shape = Shape { height: height / patch, cols: pixels.cols / patch, channels: channels * of_patch, ..pixels };
    let at = |pixel: usize, channel: usize| {
        let (position, place) = place(pixel, pixels, patch);
        position * shape.channels + channel * of_patch + place
    };
    columns_of(frames, index, columns, shape, at, |_, x| x)
}

/// The network's position of a pixel, and the pixel's place in its patch. Of a patch, the columns come first.
fn place(pixel: usize, shape: Shape, patch: usize) -> (usize, usize) {
    let (row, col) = (pixel / shape.cols, pixel % shape.cols);
    let (frame, row) = (row / shape.height, row % shape.height);
    let position = (frame * (shape.height / patch) + row / patch) * (shape.cols / patch) + col / patch;
    (position, col % patch * patch + row % patch)
}

/// The decoder's output as pixels in [-1, 1].
pub(super) fn to_frames(video: Video, patch: usize) -> Vec<f32> {
    let Shape { frames, height, cols, channels } = video.shape;
    let colors = channels / (patch * patch);
    let mut pixels = video.data;
    if patch > 1 {
        let shape = Shape { frames, height: height * patch, cols: cols * patch, channels: colors };
        let mut out = vec![0.0; shape.elements()];
        for (pixel, values) in out.chunks_exact_mut(colors).enumerate() {
            let (position, place) = place(pixel, shape, patch);
            for (color, value) in values.iter_mut().enumerate() {
                *value = pixels[position * channels + color * patch * patch + place];
            }
        }
        pixels = out;
    }
    pixels.iter_mut().for_each(|x| *x = x.clamp(-1.0, 1.0));
    pixels
}

/// The mode of the posterior, normalised: the first half of the encoder's channels.
pub(super) fn to_latents(video: &Video, config: &VaeConfig) -> Vec<f32> {
    let mode = |values: &[f32]| -> Vec<f32> {
        let statistics = config.latents_mean.iter().zip(&config.latents_std);
        values.iter().zip(statistics).map(|(x, (mean, std))| (x - mean) / std).collect()
    };
    video.data.chunks_exact(video.shape.channels).flat_map(mode).collect()
}

/// Puts the columns of all ranks together: parts `[B, F, H, columns, C]`, and `scale` columns for each latent column.
pub(super) fn join(
    parts: &[Arc<Buffer>],
    [batch, channels, frames, height, width]: [usize; 5],
    split: ColumnSplit,
    scale: usize,
) -> Result<Vec<f32>> {
    let mut out = vec![0.0; batch * channels * frames * height * width];
    for (rank, part) in parts.iter().enumerate() {
        let columns = split.columns(rank);
        let (first, cols) = (columns.start * scale, columns.len() * scale);
        for (index, values) in part.f32()?.chunks_exact((cols * channels).max(1)).enumerate() {
            let (video, row) = (index / (frames * height), index % (frames * height));
            for (col, pixel) in values.chunks_exact(channels).enumerate() {
                for (channel, value) in pixel.iter().enumerate() {
                    out[((video * channels + channel) * frames * height + row) * width + first + col] = *value;
                }
            }
        }
    }
    Ok(out)
}
