//! The forward pass of a kernel: what its workers do, and in which order.

use super::super::buffer::Target;
use super::super::decode::Decode;
use super::super::forward::{self, Forward};
use super::super::isa::Code;
use super::super::pack::{CHUNK, Keys, Packing};
use super::super::plan::Plan;
use super::super::terms::{self, Terms};
use super::super::{HeadMap, Inputs, Partial, Tile, isa, workers};
use super::{Cpu, plan};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

impl Cpu {
    /// Adds the keys of `tiles` to the softmax state of the queries.
    pub(in crate::kernel) fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) {
        self.hook.begin();
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        let (factor, terms) = (terms::factor(score), Terms::new(score, bias));
        if q.tokens == 1 {
            // Packing would cost more than the whole product.
            let seen = |tile: &Tile| {
                let keys = if tile.q.is_empty() { 0..0 } else { tile.band.keys(0, tile.k.len()) };
                tile.k.start + keys.start..tile.k.start + keys.end
            };
            let visible: Vec<(Range<usize>, &Tile)> = tiles.iter().map(|tile| (seen(tile), tile)).collect();
            let job = Decode { q, k, v, heads, factor, terms: terms.as_ref() };
            return job.run(
                Code::new(self.isa, false),
                self.threads,
                &self.pool,
                &|worker| self.progress(worker),
                &visible,
                partial,
            );
        }
        let code = self.code(inputs);
        let plan = plan(inputs, tiles, code);
        if plan.keys.is_empty() || q.heads == 0 {
            return;
        }
        let keys = Keys::new(&plan, &k, &v, code, |len| self.pool.take(len));
        let packing = Packing { keys: &keys, plan: &plan, k, v };
        let job = Forward {
            q,
            heads,
            plan: &plan,
            keys: &keys,
            v_dim: v.dim,
            factor,
            terms: terms.as_ref(),
            out: Target::new(&mut partial.out),
            max: Target::new(&mut partial.max),
            sum: Target::new(&mut partial.sum),
        };
        let tasks = Tasks::new(&plan, heads, keys.rows.div_ceil(CHUNK));
        let next = AtomicUsize::new(0);
        workers::run(self.threads.min(tasks.count), &|worker| {
            let mut scratch = self.pool.take(forward::scratch(q.dim, v.dim, code, bias.is_some()));
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks.count {
                    break;
                }
                match tasks.get(task) {
                    Task::Pack { kv, chunk, packed } => {
                        // Counted even if it panics, or others would wait for ever.
                        let _counted = Counted(packed);
                        // SAFETY: the counter gives each chunk to one worker; its head is read when it is counted.
                        unsafe { isa::pack_chunk(code, &packing, kv, chunk) };
                    }
                    Task::Block { head, block, packed } => {
                        while packed.load(Ordering::Acquire) < tasks.chunks {
                            std::thread::yield_now();
                        }
                        // SAFETY: the counter gives each head and block to one worker; what it reads is packed; the
                        // scratch has the asked size.
                        unsafe { isa::forward_block(code, &job, head, block, &mut scratch) };
                        self.progress(worker);
                    }
                }
            }
            self.pool.give(scratch);
        });
        self.pool.give(keys.into_buffer());
    }
}

/// What workers do, in this order, head by head: pack its keys and values, then its queries while those are in the
/// cache. Chunks come first, so whoever waits for one waits for a worker that is at it.
struct Tasks {
    /// Key-value head, first query head, and first task.
    groups: Vec<(usize, usize, usize)>,
    /// Chunks packed, for each group.
    packed: Vec<AtomicUsize>,
    chunks: usize,
    /// Blocks with something to compute, those with most keys first: no thread is left with a long one at the end.
    blocks: Vec<usize>,
    count: usize,
}

enum Task<'a> {
    Pack { kv: usize, chunk: usize, packed: &'a AtomicUsize },
    Block { head: usize, block: usize, packed: &'a AtomicUsize },
}

impl Tasks {
    fn new(plan: &Plan, heads: &HeadMap, chunks: usize) -> Self {
        let mut blocks: Vec<usize> = (0..plan.blocks()).filter(|&block| plan.cost(block) > 0).collect();
        blocks.sort_by_key(|&block| std::cmp::Reverse(plan.cost(block)));
        let (mut groups, mut count) = (Vec::new(), 0);
        for kv in 0..heads.kv_heads() {
            let queries = heads.queries_of(kv);
            if !queries.is_empty() {
                groups.push((kv, queries.start, count));
                count += chunks + queries.len() * blocks.len();
            }
        }
        Self { packed: groups.iter().map(|_| AtomicUsize::new(0)).collect(), groups, chunks, blocks, count }
    }

    fn get(&self, task: usize) -> Task<'_> {
        let group = self.groups.partition_point(|group| group.2 <= task) - 1;
        let ((kv, head, first), packed) = (self.groups[group], &self.packed[group]);
        match (task - first).checked_sub(self.chunks) {
            None => Task::Pack { kv, chunk: task - first, packed },
            Some(at) => {
                let (head, block) = (head + at / self.blocks.len(), self.blocks[at % self.blocks.len()]);
                Task::Block { head, block, packed }
            }
        }
    }
}

/// Counts when it is dropped.
struct Counted<'a>(&'a AtomicUsize);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Release);
    }
}
