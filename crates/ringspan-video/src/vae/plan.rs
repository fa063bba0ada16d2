//! Plans how a video passes through the network: which segments are computed together, and in which blocks.

use super::block::{Shape, Video};
use super::layer::Layer;
use super::memory::{PassMemory, Tile};
use super::network::Network;
use super::segment::{self, Tiling};
use super::stored::StoredNetwork;
use super::strip::Strip;
use crate::error::{Error, Result};
use std::fmt::{self, Display, Formatter};
use std::ops::Range;

/// The memory that blocks may take if the caller does not say: larger ones are hardly faster.
const DEFAULT_BLOCK_BYTES: u64 = 256 << 20;
/// Positions of the latents that convolutions at the lowest resolution should have at once.
const POSITIONS: usize = 1024;

/// The passes of a video through the network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    passes: Vec<SegmentPass>,
    weights: u64,
}

/// Segments that a video passes block by block; between two passes it is whole.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SegmentPass {
    segments: Range<usize>,
    tiling: Tiling,
    bytes: u64,
    /// Bytes of this rank's columns of what callers give to the first pass and take of the last one, latents and frames: no part of
    /// `bytes`.
    ends: u64,
}

impl Plan {
    /// Bytes of activations, buffers and states on the rank with most columns, computed from the sizes. Latents and
    /// frames come on top.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.passes.iter().map(|pass| pass.bytes).max().unwrap_or(0)
    }

    /// The same, with this rank's columns of one video's latents and frames while a pass reads or writes them.
    #[must_use]
    pub fn bytes_with_frames(&self) -> u64 {
        self.passes.iter().map(|pass| pass.bytes + pass.ends).max().unwrap_or(0)
    }

    /// The most bytes of weights that a pass reads, which the ranks of a process share.
    #[must_use]
    pub fn weights(&self) -> u64 {
        self.weights
    }

    /// Passes a video through the network.
    ///
    /// # Errors
    /// Failures of other ranks, and of the file system.
    pub(super) fn run(&self, network: &StoredNetwork, strip: &Strip, mut video: Video) -> Result<Video> {
        for SegmentPass { segments, tiling, .. } in &self.passes {
            // The weights are shared; each run has states of its own.
            let network = network.load(segments)?;
            let mut layers: Vec<Layer> = network.segments[segments.clone()].iter().flatten().cloned().collect();
            video = segment::run(&mut layers, strip, video, *tiling)?;
        }
        Ok(video)
    }
}

impl Display for Plan {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let passes: Vec<String> = self.passes.iter().map(ToString::to_string).collect();
        write!(f, "{} within {:.1} MB a rank", passes.join(", then "), self.bytes() as f64 / 1e6)
    }
}

impl Display for SegmentPass {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Tiling { rows, frames, .. } = self.tiling;
        write!(f, "{rows} rows x {frames} frames")
    }
}

/// Chooses passes that fit `memory` bytes: as many segments on their own as possible, in the largest bands. Segment `whole` attends,
/// so its blocks are whole frames. A video of the input has `unit` frames for each latent frame after the first. A single pass comes last:
/// what it needs does not grow with the number of frames, since no video is whole between passes.
///
/// # Errors
/// Memory that even the smallest blocks exceed.
pub(super) fn choose(network: &Network, whole: usize, shape: Shape, unit: usize, memory: Option<u64>) -> Result<Plan> {
    let limit = memory.unwrap_or(DEFAULT_BLOCK_BYTES);
    let mut least: Option<Plan> = None;
    let weights_of = |pass: &SegmentPass| {
        let layers = network.segments[pass.segments.clone()].iter().flatten();
        layers.map(|layer| 4 * layer.parameters() as u64).sum::<u64>()
    };
    for cuts in partitions(network.segments.len(), whole) {
        let (mut passes, mut input, mut unit) = (Vec::new(), shape, unit);
        for segments in cuts {
            let layers: Vec<&Layer> = network.segments[segments.clone()].iter().flatten().collect();
            let output = layers.iter().fold(input, |shape, layer| layer.output(shape));
            let bytes = |shape: Shape| 4 * shape.elements() as u64;
            let (first, last) = (segments.start == 0, segments.end == network.segments.len());
            let ends = if first { bytes(input) } else { 0 } + if last { bytes(output) } else { 0 };
            let between = bytes(input) + bytes(output) - ends;
            let limit = limit.saturating_sub(between);
            let (tiling, of_blocks) = largest(&layers, segments.contains(&whole), input, unit, limit);
            passes.push(SegmentPass { segments, tiling, bytes: between + of_blocks, ends });
            // Between segments the groups need not be those of whole latent frames, except in the encoder's first one.
            (input, unit) = (output, 1);
        }
        let weights = passes.iter().map(weights_of).max().unwrap_or(0);
        let plan = Plan { passes, weights };
        if plan.bytes() <= limit {
            return Ok(plan);
        }
        if least.as_ref().is_none_or(|least| plan.bytes() < least.bytes()) {
            least = Some(plan);
        }
    }
    match (least, memory) {
        (Some(plan), None) => Ok(plan),
        (plan, _) => Err(Error::Input(format!(
            "{limit} bytes of memory a rank are too few: the smallest blocks of {} x {} positions need {} bytes on {} columns; more \
             ranks have fewer columns each",
            shape.height,
            shape.cols,
            plan.map_or(0, |plan| plan.bytes()),
            shape.cols
        ))),
    }
}

/// The ways to join segments, most passes first: they are joined from the end with the highest resolution, down to a single pass. All
/// passes but the one with segment `whole`, which attends, have bands of rows.
fn partitions(segments: usize, whole: usize) -> Vec<Vec<Range<usize>>> {
    let alone = |range: Range<usize>| range.map(|index| index..index + 1);
    match whole {
        0 => (0..segments).rev().map(|from| alone(0..from).chain(std::iter::once(from..segments)).collect()).collect(),
        _ => (1..=segments).map(|to| std::iter::once(0..to).chain(alone(to..segments)).collect()).collect(),
    }
}

/// The largest blocks of a pass that fit, or else the smallest, with their bytes.
fn largest(layers: &[&Layer], whole: bool, input: Shape, unit: usize, limit: u64) -> (Tiling, u64) {
    let bytes = |tiling: Tiling| {
        let tile = Tile::new(input, tiling);
        4 * layers.iter().fold(PassMemory::new(tile), |memory, layer| layer.memory(memory)).elements() as u64
    };
    let most = if whole { POSITIONS.div_ceil((input.height * input.cols).max(1)).min(input.frames) } else { 1 };
    let of_frames = |groups: usize| {
        let tiling = move |rows| Tiling { rows, first: 1 + (groups - 1) * unit, frames: groups * unit };
        let heights = std::iter::successors(Some(input.height), |rows| (*rows > 1 && !whole).then(|| rows.div_ceil(2)));
        heights.map(tiling)
    };
    let mut tilings = (1..=most.max(1)).rev().flat_map(of_frames).map(|tiling| (tiling, bytes(tiling)));
    let mut least = None;
    let fits = tilings.find(|(tiling, bytes)| {
        if least.is_none_or(|(_, least)| *bytes < least) {
            least = Some((*tiling, *bytes));
        }
        *bytes <= limit
    });
    fits.or(least).unwrap_or((Tiling { rows: 1, first: 1, frames: unit }, 0))
}
