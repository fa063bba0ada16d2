//! A layer of the network: computes its output for a block, and the sizes of its output for a video.

use super::attention::FrameAttention;
use super::block::{Block, Shape};
use super::convolution::Convolution;
use super::norm::ChannelNorm;
use super::resample::{Downsample, Upsample};
use super::residual_block::ResidualBlock;
use super::shortcut::{ResidualDown, ResidualUp};
use super::streamed::{Source, StreamedConvolution};
use super::strip::Strip;
use crate::error::Result;
use std::sync::Arc;

#[derive(Clone)]
pub(crate) enum Layer {
    Convolution(StreamedConvolution),
    /// The head: a convolution of SiLU of the norm.
    Head(Arc<ChannelNorm>, StreamedConvolution),
    Residual(ResidualBlock),
    Attention(FrameAttention),
    Up(Upsample),
    Down(Downsample),
    ResidualUp(ResidualUp),
    ResidualDown(ResidualDown),
}

impl Layer {
    /// Computes the rows that can be computed once this block is there.
    pub(crate) fn push(&mut self, strip: &Strip, x: Block) -> Result<Block> {
        match self {
            Self::Convolution(convolution) => convolution.push(strip, &x, Source::Plain, None),
            Self::Head(norm, convolution) => convolution.push(strip, &x, Source::Activated(norm), None),
            Self::Residual(block) => block.push(strip, x),
            Self::Attention(attention) => attention.push(strip, x),
            Self::Up(up) => up.push(strip, x),
            Self::Down(down) => down.push(strip, &x),
            Self::ResidualUp(up) => up.push(strip, x),
            Self::ResidualDown(down) => down.push(strip, x),
        }
    }

    /// Numbers of the weights and biases of all convolutions. Gains of norms are few.
    pub(crate) fn parameters(&self) -> usize {
        let streamed = |convolution: &StreamedConvolution| convolution.kernel().sizes().parameters();
        let pointwise = |convolution: &Arc<Convolution>| convolution.sizes().parameters();
        let residual = |block: &ResidualBlock| {
            streamed(&block.conv1) + streamed(&block.conv2) + block.shortcut.as_ref().map_or(0, pointwise)
        };
        let up = |up: &Upsample| streamed(&up.space) + up.time.as_ref().map_or(0, streamed);
        let down = |down: &Downsample| streamed(&down.space) + down.time.as_ref().map_or(0, streamed);
        match self {
            Self::Convolution(convolution) | Self::Head(_, convolution) => streamed(convolution),
            Self::Residual(block) => residual(block),
            Self::Attention(FrameAttention { qkv, proj, .. }) => pointwise(qkv) + pointwise(proj),
            Self::Up(layer) => up(layer),
            Self::Down(layer) => down(layer),
            Self::ResidualUp(layer) => {
                layer.blocks.iter().map(residual).sum::<usize>() + layer.up.as_ref().map_or(0, up)
            }
            Self::ResidualDown(layer) => {
                layer.blocks.iter().map(residual).sum::<usize>() + layer.down.as_ref().map_or(0, down)
            }
        }
    }

    /// The sizes of the output for a video of these sizes.
    pub(crate) fn output(&self, x: Shape) -> Shape {
        let doubled = |x: Shape, up: &Upsample| Shape {
            frames: if up.time.is_some() { 2 * x.frames.max(1) - 1 } else { x.frames },
            height: 2 * x.height,
            cols: 2 * x.cols,
            channels: up.space.kernel().sizes().outputs,
        };
        let halved = |x: Shape, down: &Downsample| Shape {
            frames: if down.time.is_some() { x.frames.div_ceil(2) } else { x.frames },
            height: x.height / 2,
            cols: x.cols / 2,
            channels: down.space.kernel().sizes().outputs,
        };
        let through = |x: Shape, blocks: &[ResidualBlock]| Shape {
            channels: blocks.last().map_or(x.channels, |block| block.conv2.kernel().sizes().outputs),
            ..x
        };
        match self {
            Self::Convolution(convolution) | Self::Head(_, convolution) => {
                Shape { channels: convolution.kernel().sizes().outputs, ..x }
            }
            Self::Residual(block) => through(x, std::slice::from_ref(block)),
            Self::Attention(_) => x,
            Self::Up(up) => doubled(x, up),
            Self::Down(down) => halved(x, down),
            Self::ResidualUp(ResidualUp { blocks, up, .. }) => {
                let x = through(x, blocks);
                up.as_ref().map_or(x, |up| doubled(x, up))
            }
            Self::ResidualDown(ResidualDown { blocks, down, .. }) => {
                let x = through(x, blocks);
                down.as_ref().map_or(x, |down| halved(x, down))
            }
        }
    }
}
