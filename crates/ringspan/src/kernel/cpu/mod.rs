//! Attention on the CPU: a rank's threads, its instruction set, its buffers.

mod backward;
mod delta;
mod forward;
mod tasks;

use super::backward::BufferSizes;
use super::buffer::{BufferPool, lines};
use super::decode::{self, Decode};
use super::isa::TargetFeatures;
use super::pack::{CHUNK, PackedKv};
use super::plan::Plan;
use super::progress::ProgressHook;
use super::scaling::Scaling;
use super::workers::Workers;
use super::{Inputs, Isa, Tile};

/// Number of queries whose packed form a worker holds at a time in the backward pass, so that they stay in the L3 cache.
const SEGMENT: usize = 4096;

/// The threads and buffers of a rank, and the instruction set they use.
pub(super) struct Cpu {
    pub(super) workers: Workers,
    /// What kernels are compiled for where products are not in bf16.
    pub(super) features: TargetFeatures,
    pool: BufferPool,
    pub(super) hook: ProgressHook,
}

impl Cpu {
    /// Makes a kernel for an instruction set that this machine has.
    pub(super) fn new(workers: Workers, isa: Isa) -> Self {
        Self { workers, features: TargetFeatures::new(isa), pool: BufferPool::default(), hook: ProgressHook::default() }
    }

    /// Calls the progress function between tasks, on the caller's thread only.
    fn progress(&self, worker: usize) {
        if worker == 0 {
            self.hook.call();
        }
    }

    /// What kernels are compiled for with these inputs: with products of bf16 where they allow them.
    fn features_for(&self, inputs: &Inputs) -> TargetFeatures {
        self.features.with_pairs(inputs.multiplies_in_bf16())
    }

    /// The factors on queries and products, for the code that computes them.
    fn scaling(&self, inputs: &Inputs, terms: bool) -> Scaling {
        let scaling = Scaling::new(inputs.score, terms, &inputs.q);
        if self.features_for(inputs).pair() > 1 { scaling.of_pairs() } else { scaling }
    }

    /// Upper bound on the bytes of buffers that a [`forward`](Self::forward) call with these shapes holds, without its
    /// arguments.
    pub(super) fn forward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        let Inputs { q, k, v, heads, bias, .. } = *inputs;
        let features = self.features_for(inputs);
        let (Some(first), Some(last)) = (tiles.iter().map(|t| t.k.start).min(), tiles.iter().map(|t| t.k.end).max())
        else {
            return 0;
        };
        let rows = last.saturating_sub(first / features.rows() * features.rows());
        let longest = rows.min(forward::segment_rows(inputs, self.workers.count()));
        // A shorter segment may have more slots.
        let sizes = [rows.min(tasks::ALONE * CHUNK), longest].map(|rows| {
            let slots = tasks::slots(tasks::heads_in_use(heads), rows.div_ceil(CHUNK), self.workers.count());
            PackedKv::size(rows, slots, &k, &v, features).0
        });
        let keys = sizes[0].max(sizes[1]);
        let tasks = heads.heads() * q.tokens.div_ceil(features.lanes());
        let scratch = super::forward::scratch(q.dim, v.dim, features, bias.is_some());
        let lists = Plan::bytes(tiles, features.lanes(), q.tokens, k.tokens);
        bytes(keys + self.workers.count().min(tasks) * scratch) + lists
    }

    /// Upper bound on the bytes of buffers that a [`decode`](Self::decode) call with these shapes holds, without its
    /// arguments.
    pub(super) fn decode_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        let Inputs { k, v, heads, .. } = *inputs;
        if !decode::has_single_queries(tiles) {
            return self.forward_workspace(inputs, tiles);
        }
        let chunks: usize = tiles.iter().map(|tile| decode::most_chunks(tile.k.len())).sum();
        bytes(Decode::workspace(heads, (k.dim, v.dim), chunks, self.workers.count()))
    }

    /// Upper bound on the bytes of buffers that a [`backward`](Self::backward) call with these shapes holds, without its
    /// arguments.
    pub(super) fn backward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        let Inputs { q, k, v, heads, bias, .. } = *inputs;
        if tiles.is_empty() {
            return 0;
        }
        let features = self.features_for(inputs);
        let blocks = q.tokens.div_ceil(features.lanes());
        let sizes = BufferSizes::new(q.dim, v.dim, features, bias.is_some());
        let workers = self.workers.count().min(heads.heads() * blocks);
        // A worker shares at most the heads at both ends of its range, or it has blocks of all heads.
        let by_block = bias.is_some_and(|bias| bias.heads < q.heads);
        let shared = if by_block { workers * k.heads } else { 2 * workers.saturating_sub(1) };
        let scratch = sizes.scratch(blocks.min(SEGMENT / features.lanes()));
        bytes(workers * scratch + shared * (lines(k.tokens * k.dim) + lines(k.tokens * v.dim)))
            + Plan::bytes(tiles, features.lanes(), q.tokens, k.tokens)
    }
}

#[cfg(test)]
impl Cpu {
    /// Bytes of the buffers that are kept for the next call.
    pub(super) fn held(&self) -> u64 {
        bytes(self.pool.held())
    }
}

/// The plan of a call. Tiles may be joined unless scores depend on positions.
fn plan<'a>(inputs: &Inputs, tiles: &'a [Tile], features: TargetFeatures) -> Plan<'a> {
    let make = if inputs.counts_positions() { Plan::new } else { Plan::joined };
    make(tiles, features.lanes(), inputs.q.tokens, inputs.k.tokens)
}

fn bytes(elements: usize) -> u64 {
    elements as u64 * 4
}
