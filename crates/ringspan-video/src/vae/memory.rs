//! The memory of a pass, computed from sizes alone: buffers of the layer that computes, and state that all layers keep
//! between blocks.

use super::block::Shape;
use super::convolution::Convolution;
use super::layer::Layer;
use super::resample::Upsample;
use super::residual_block::ResidualBlock;
use super::segment::Tiling;
use super::shortcut::{ResidualDown, ResidualUp};

/// Elements of sums of a block of products, for each output channel.
const SUMS: usize = 2048;

/// The sizes of the largest block at the input of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tile {
    frames: usize,
    rows: usize,
    cols: usize,
    channels: usize,
    height: usize,
    /// Frames of the video at this level.
    all_frames: usize,
    /// Whether there are several bands, so that rows are kept for the next one.
    banded: bool,
}

impl Tile {
    pub(super) fn new(video: Shape, tiling: Tiling) -> Self {
        let frames = tiling.frames.max(tiling.first).min(video.frames);
        let banded = tiling.rows < video.height;
        let Shape { frames: all_frames, height, cols, channels } = video;
        Self { frames, rows: tiling.rows.min(height), cols, channels, height, all_frames, banded }
    }

    fn elements(self) -> usize {
        self.frames * self.rows * self.cols * self.channels
    }

    /// Elements of `rows` rows of all frames.
    fn kept(self, rows: usize) -> usize {
        if self.banded { self.all_frames * rows * self.cols * self.channels } else { 0 }
    }
}

/// Numbers of elements that a pass holds.
#[derive(Debug, Clone, Copy)]
pub(super) struct PassMemory {
    tile: Tile,
    /// Elements that layers keep between blocks.
    states: usize,
    /// Peak of the elements that are held while a layer computes.
    peak: usize,
}

impl PassMemory {
    pub(super) fn new(tile: Tile) -> Self {
        Self { tile, states: 0, peak: tile.elements() }
    }

    pub(super) fn elements(self) -> usize {
        self.states + self.peak
    }

    fn hold(self, elements: usize) -> Self {
        Self { peak: self.peak.max(elements), ..self }
    }

    fn keep(self, elements: usize) -> Self {
        Self { states: self.states + elements, ..self }
    }

    fn to(self, tile: Tile) -> Self {
        Self { tile, ..self }.hold(tile.elements())
    }

    /// A convolution whose input is the tile at `scale` times the resolution, while `beside` elements are held.
    fn convolution(self, kernel: &Convolution, scale: usize, beside: usize) -> Self {
        let (x, sizes) = (self.tile, kernel.sizes());
        let cols = x.cols * scale + sizes.padding_before() + sizes.padding_after();
        let old = if x.banded { 2 * sizes.padding_after() } else { 0 };
        let rows = (x.rows * scale + old + sizes.padding_after()).min(x.height * scale + 2);
        let row = cols * sizes.inputs;
        let history = sizes.history() * rows * row;
        let padded = history + x.frames * rows * row;
        let lag = usize::from(x.banded) * sizes.padding_after();
        let height = x.height * scale / sizes.stride;
        let out = Tile {
            frames: x.frames.div_ceil(sizes.time_stride),
            rows: ((x.rows * scale).div_ceil(sizes.stride) + lag).min(height),
            cols: x.cols * scale / sizes.stride,
            channels: sizes.outputs,
            height,
            all_frames: x.all_frames.div_ceil(sizes.time_stride),
            banded: x.banded,
        };
        let tails = if x.banded { x.all_frames * old.min(2) * row } else { 0 };
        let buffers = sizes.buffers([out.frames, out.rows, out.cols], cols);
        let memory = self.keep(history + tails).hold(beside + x.elements() + padded + out.elements() + buffers);
        memory.to(out)
    }

    fn residual(self, block: &ResidualBlock) -> Self {
        let x = self.tile;
        let memory = self.convolution(block.conv1.kernel(), 1, 0);
        let shortcut = Tile { channels: memory.tile.channels, ..x };
        let taken = Tile { rows: (x.rows + 2).min(x.height), ..shortcut };
        let memory = memory.keep(shortcut.kept(2));
        memory.convolution(block.conv2.kernel(), 1, taken.elements())
    }

    fn up(self, up: &Upsample, beside: usize) -> Self {
        let x = self.tile;
        let Some(time) = &up.time else { return self.convolution(up.space.kernel(), 2, beside) };
        let memory = self.convolution(time.kernel(), 1, beside + 2 * x.elements());
        let doubled = Tile { frames: 2 * x.frames, all_frames: 2 * x.all_frames, ..x };
        memory.to(doubled).convolution(up.space.kernel(), 2, beside)
    }
}

impl Layer {
    /// Adds what this layer holds and keeps.
    pub(super) fn memory(&self, memory: PassMemory) -> PassMemory {
        let x = memory.tile;
        match self {
            Self::Convolution(convolution) | Self::Head(_, convolution) => {
                memory.convolution(convolution.kernel(), 1, 0)
            }
            Self::Residual(block) => memory.residual(block),
            // Input, norm, q, k and v, blocks of keys and values that travel, output.
            Self::Attention(_) => memory.hold(12 * x.elements() + SUMS * 3 * x.channels),
            Self::Up(up) => memory.up(up, 0),
            Self::Down(down) => {
                let memory = memory.convolution(down.space.kernel(), 1, 0);
                match &down.time {
                    Some(time) => memory.convolution(time.kernel(), 1, 2 * memory.tile.elements()),
                    None => memory,
                }
            }
            Self::ResidualUp(ResidualUp { blocks, up, .. }) => {
                let memory = blocks.iter().fold(memory, |memory, block| memory.residual(block));
                let Some(up) = up else { return memory };
                // The shortcut has the sizes of the output, and is there from the beginning.
                let after = memory.up(up, 0).tile;
                let shortcut = 2 * after.elements();
                let memory = memory.up(up, shortcut);
                let lag = 4 * blocks.len() + 2;
                Tile::with_shortcut(memory, shortcut, after.kept(lag))
            }
            Self::ResidualDown(ResidualDown { blocks, down, .. }) => {
                let memory = blocks.iter().fold(memory, |memory, block| memory.residual(block));
                let memory = match down {
                    Some(down) => Self::Down(down.clone()).memory(memory),
                    None => memory,
                };
                let lag = 2 * blocks.len() + 2;
                Tile::with_shortcut(memory, 2 * x.elements(), x.kept(lag))
            }
        }
    }
}

impl Tile {
    /// Adds a shortcut that is held during all of a layer, and the rows of it that wait.
    fn with_shortcut(memory: PassMemory, held: usize, kept: usize) -> PassMemory {
        PassMemory { peak: memory.peak + held, ..memory }.keep(kept)
    }
}
