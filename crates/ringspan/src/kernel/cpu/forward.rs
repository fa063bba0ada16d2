//! The forward pass of a CPU kernel: packs the keys of a segment and computes its blocks, in the order of [`Tasks`].

use super::super::buffer::{self, Target};
use super::super::decode::{self, Decode};
use super::super::forward::{self, BlockTask, Forward, forward_block};
use super::super::pack::{PackedKv, Packing, pack_chunk};
use super::super::plan::Plan;
use super::super::scaling::Scaling;
use super::super::terms::ScoreTerms;
use super::super::{Inputs, KEY_BLOCK, OnlineSoftmax, Tile};
use super::tasks::{self, Task, Tasks};
use super::{Cpu, plan};
use std::ops::Range;

impl Cpu {
    /// Like [`forward`](Self::forward), for queries without a backward pass.
    pub(in crate::kernel) fn decode(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut OnlineSoftmax) {
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        if !decode::has_single_queries(tiles) {
            return self.forward(inputs, tiles, partial);
        }
        // For single queries, packing would cost more than the products.
        self.hook.begin();
        let terms = ScoreTerms::new(score, bias);
        let seen = |tile: &Tile| {
            let keys = if tile.q.is_empty() { 0..0 } else { tile.band.keys(0, tile.k.len()) };
            tile.k.start + keys.start..tile.k.start + keys.end
        };
        let visible: Vec<(Range<usize>, &Tile)> = tiles.iter().map(|tile| (seen(tile), tile)).collect();
        let job = Decode { q, k, v, heads, scaling: Scaling::new(score, terms.is_some(), &q), terms: terms.as_ref() };
        let (features, progress) = (self.features, |worker| self.progress(worker));
        job.run(features, &self.workers, &self.pool, &progress, &visible, partial);
    }

    /// Adds the keys of `tiles` to the softmax state of the queries, a segment of the keys after the other.
    pub(in crate::kernel) fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut OnlineSoftmax) {
        self.hook.begin();
        let features = self.features_for(inputs);
        let plan = plan(inputs, tiles, features);
        if plan.keys.is_empty() || inputs.q.heads == 0 {
            return;
        }
        let first = plan.keys.start / features.rows() * features.rows();
        let rows = segment_rows(inputs, self.workers.count());
        for start in (first..plan.keys.end).step_by(rows) {
            self.forward_segment(inputs, &plan, start..plan.keys.end.min(start + rows), partial);
        }
    }

    /// Packs the key rows of a segment, a head after the other, and adds them to the softmax state of the queries.
    fn forward_segment(&self, inputs: &Inputs, plan: &Plan, segment: Range<usize>, partial: &mut OnlineSoftmax) {
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        let features = self.features_for(inputs);
        let tasks = Tasks::new(plan, heads, &segment, self.workers.count());
        if tasks.is_empty() {
            return;
        }
        let keys = PackedKv::new(&segment, tasks.slots(), &k, &v, features, |len| self.pool.take(len));
        let packing = Packing { keys: &keys, plan, k, v };
        let terms = ScoreTerms::new(score, bias);
        let job = Forward {
            q,
            plan,
            keys: &keys,
            v_dim: v.dim,
            scaling: self.scaling(inputs, terms.is_some()),
            terms: terms.as_ref(),
            out: Target::new(&mut partial.out),
            max: Target::new(&mut partial.max),
            sum: Target::new(&mut partial.sum),
        };
        self.workers.run(tasks.workers(), &|worker| {
            let mut scratch = self.pool.take(forward::scratch(q.dim, v.dim, features, bias.is_some()));
            let mut compute = |task: BlockTask| {
                // SAFETY: each head and block is given to one worker; the keys and values it reads are packed, and stay until
                // it is done; the scratch has the required size.
                unsafe { forward_block(features, &job, task, &mut scratch) };
                self.progress(worker);
            };
            while let Some((whole, slot)) = tasks.next_whole(worker) {
                for chunk in 0..tasks.chunks() {
                    // SAFETY: each head is given to one worker, whose slot it has; others read it when it is packed, and the
                    // blocks of the worker's last head are computed.
                    unsafe { pack_chunk(features, &packing, whole.kv(), slot, chunk) };
                }
                whole.set_packed(slot);
                while let Some(task) = tasks.next_block(whole) {
                    compute(task);
                }
            }
            while let Some(task) = tasks.next() {
                match task {
                    Task::Pack { shared, chunk } => {
                        // The chunk is counted even if packing panics, or other workers would wait for ever.
                        let _counted = shared.packed.counted();
                        tasks.wait_for_slot(shared);
                        // SAFETY: each chunk is given to one worker; its head is read only after the chunk is counted, and
                        // the head that had the slot before is computed.
                        unsafe { pack_chunk(features, &packing, shared.kv, shared.slot, chunk) };
                    }
                    Task::Block { shared, head, block } => {
                        let _counted = shared.computed.counted();
                        shared.packed.wait();
                        compute(BlockTask { head, slot: shared.slot, block });
                    }
                }
            }
            // One processor may be slower than another: who is done helps with the heads that others are at.
            for whole in tasks.packed_whole() {
                while let Some(task) = tasks.next_block(whole) {
                    compute(task);
                }
            }
            self.pool.give(scratch);
        });
        self.pool.give(keys.into_buffer());
    }
}

/// Number of key rows that are packed at a time: as many as fit, for the heads in all slots, into a buffer that is kept from
/// call to call. It is a multiple of the blocks of keys, so that a sequence from its first key on has the same blocks, and
/// bits, as without segments.
pub(super) fn segment_rows(inputs: &Inputs, workers: usize) -> usize {
    let Inputs { k, v, heads, .. } = *inputs;
    let slots = tasks::slots(tasks::heads_in_use(heads), usize::MAX, workers);
    let rows = buffer::LARGEST / (slots * (k.dim + v.dim)).max(1);
    (rows / KEY_BLOCK * KEY_BLOCK).max(LEAST_SEGMENT)
}

/// Number of rows in the smallest segment: with so many keys, reading and writing the outputs for each segment costs little.
const LEAST_SEGMENT: usize = 2048;
