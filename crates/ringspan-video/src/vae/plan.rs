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
}

impl Plan {
    /// Bytes of activations, buffers and states on the rank with most columns, computed from the sizes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.passes.iter().map(|pass| pass.bytes).max().unwrap_or(0)
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
/// so its blocks are whole frames. A video of the input has `unit` frames for each latent frame after the first.
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
            let pass = largest(&layers, segments.contains(&whole), input, unit, limit);
            let output = pass.1;
            passes.push(SegmentPass { segments, tiling: pass.0, bytes: pass.2 });
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

/// The ways to join segments, most passes first: the segments after (or before) the one that attends are joined from the end with
/// the highest resolution.
fn partitions(segments: usize, whole: usize) -> Vec<Vec<Range<usize>>> {
    if whole > 0 || segments == 1 {
        return vec![(0..segments).map(|index| index..index + 1).collect()];
    }
    let joined = |from: usize| (0..from).map(|index| index..index + 1).chain(std::iter::once(from..segments)).collect();
    (1..segments).rev().map(joined).collect()
}

/// The largest blocks of a pass that fit, or else the smallest; with the sizes of its output, and its bytes.
fn largest(layers: &[&Layer], whole: bool, input: Shape, unit: usize, limit: u64) -> (Tiling, Shape, u64) {
    let output = layers.iter().fold(input, |shape, layer| layer.output(shape));
    let bytes = |tiling: Tiling| {
        let tile = Tile::new(input, tiling);
        let memory = layers.iter().fold(PassMemory::new(tile), |memory, layer| layer.memory(memory));
        4 * (input.elements() + output.elements() + memory.elements()) as u64
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
    let (tiling, bytes) = fits.or(least).unwrap_or((Tiling { rows: 1, first: 1, frames: unit }, 0));
    (tiling, output, bytes)
}
