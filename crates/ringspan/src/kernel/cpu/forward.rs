//! The forward pass of a CPU kernel: the tasks of its workers, and their order.

use super::super::buffer::Target;
use super::super::decode::{self, Decode};
use super::super::forward::{self, Forward};
use super::super::pack::{CHUNK, Keys, Packing};
use super::super::plan::Plan;
use super::super::terms::{Scaling, ScoreTerms};
use super::super::workers::Countdown;
use super::super::{HeadMap, Inputs, Partial, Tile, isa};
use super::{Cpu, plan};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

impl Cpu {
    /// Like [`forward`](Self::forward), for queries without a backward pass.
    pub(in crate::kernel) fn decode(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) {
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        if !decode::takes(tiles) {
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
        let (code, progress) = (self.code, |worker| self.progress(worker));
        job.run(code, &self.workers, &self.pool, &progress, &visible, partial);
    }

    /// Adds the keys of `tiles` to the softmax state of the queries.
    pub(in crate::kernel) fn forward(&self, inputs: &Inputs, tiles: &[Tile], partial: &mut Partial) {
        self.hook.begin();
        let Inputs { q, k, v, heads, score, bias } = *inputs;
        let terms = ScoreTerms::new(score, bias);
        let code = self.code_for(inputs);
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
            scaling: self.scaling(inputs, terms.is_some()),
            terms: terms.as_ref(),
            out: Target::new(&mut partial.out),
            max: Target::new(&mut partial.max),
            sum: Target::new(&mut partial.sum),
        };
        let tasks = Tasks::new(&plan, heads, keys.rows.div_ceil(CHUNK), self.workers.count());
        let next = AtomicUsize::new(tasks.whole.len());
        self.workers.run(self.workers.count().min(tasks.count), &|worker| {
            let mut scratch = self.pool.take(forward::scratch(q.dim, v.dim, code, bias.is_some()));
            let mut compute = |head, block| {
                // SAFETY: the counter gives each head and block to one worker; the keys and values it reads are packed; the
                // scratch has the required size.
                unsafe { isa::forward_block(code, &job, head, block, &mut scratch) };
                self.progress(worker);
            };
            while let Some(whole) = tasks.next_whole(worker) {
                for chunk in 0..tasks.chunks {
                    // SAFETY: the counters give each head to one worker, and others read it when it is packed.
                    unsafe { isa::pack_chunk(code, &packing, whole.kv, chunk) };
                }
                whole.packed.store(true, Ordering::Release);
                while let Some((head, block)) = tasks.next_block(whole) {
                    compute(head, block);
                }
            }
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks.count {
                    break;
                }
                match tasks.get(task) {
                    Task::Pack { kv, chunk, packed } => {
                        // The chunk is counted even if packing panics, or other workers would wait for ever.
                        let _counted = packed.counted();
                        // SAFETY: the counter gives each chunk to one worker; its head is read only after the chunk is
                        // counted.
                        unsafe { isa::pack_chunk(code, &packing, kv, chunk) };
                    }
                    Task::Block { head, block, packed } => {
                        packed.wait();
                        compute(head, block);
                    }
                }
            }
            // One processor may be slower than another: who is done helps with the heads that others are at.
            for whole in tasks.whole.iter().filter(|whole| whole.packed.load(Ordering::Acquire)) {
                while let Some((head, block)) = tasks.next_block(whole) {
                    compute(head, block);
                }
            }
            self.pool.give(scratch);
        });
        self.pool.give(keys.into_buffer());
    }
}

/// A worker packs and computes a head alone if it has at most this many chunks: with usual widths they fit into a core's
/// cache.
const ALONE: usize = 4;

/// The tasks of the workers. In short sequences a worker does whole heads, so that their keys and values stay in its cache:
/// each worker has the same number of heads, and the remaining heads are shared. In longer sequences all heads are shared:
/// the workers pack the keys and values of the first head; then for each head they pack those of the next one and compute
/// its queries while its own are in the cache. The chunks needed for computing were begun long before, by workers that are
/// still at it, so waits are rare, and none is for ever.
struct Tasks {
    /// Key-value heads that are each packed by one worker, and computed by it and by workers that have nothing else to do.
    whole: Vec<PackedHead>,
    /// For each worker's part of `whole`, the number of heads that have been taken.
    taken: Vec<AtomicUsize>,
    groups: Vec<Group>,
    /// Number of chunks in a head.
    chunks: usize,
    /// Blocks that have something to compute, in descending order of cost, so that no thread has a long one left at the
    /// end.
    blocks: Vec<usize>,
    count: usize,
}

/// A key-value head that one worker packs.
struct PackedHead {
    kv: usize,
    /// The query heads that read it.
    queries: Range<usize>,
    packed: AtomicBool,
    /// Blocks of queries, over all of these heads, that have been taken.
    taken: AtomicUsize,
}

/// A key-value head that all workers pack and read, and the query heads that read it.
struct Group {
    kv: usize,
    /// First query head of the group.
    head: usize,
    /// Index of the first task that packs the next head or computes the queries of this one.
    first: usize,
    /// Counts the chunks of this head that are still to be packed.
    packed: Countdown,
}

enum Task<'a> {
    Pack { kv: usize, chunk: usize, packed: &'a Countdown },
    Block { head: usize, block: usize, packed: &'a Countdown },
}

impl Tasks {
    fn new(plan: &Plan, heads: &HeadMap, chunks: usize, workers: usize) -> Self {
        let mut blocks: Vec<usize> = (0..plan.blocks()).filter(|&block| plan.cost(block) > 0).collect();
        blocks.sort_by_key(|&block| std::cmp::Reverse(plan.cost(block)));
        let mut whole: Vec<usize> = (0..heads.kv_heads()).filter(|&kv| !heads.queries_of(kv).is_empty()).collect();
        let shared = if chunks <= ALONE { whole.len() % workers } else { whole.len() };
        let others = whole.split_off(whole.len() - shared);
        let (mut groups, mut count) = (Vec::new(), whole.len());
        for kv in others {
            let queries = heads.queries_of(kv);
            count += chunks;
            groups.push(Group { kv, head: queries.start, first: count, packed: Countdown::new(chunks) });
            count += queries.len() * blocks.len();
        }
        let taken = (0..workers).map(|_| AtomicUsize::new(0)).collect();
        let whole = whole.into_iter().map(|kv| PackedHead {
            kv,
            queries: heads.queries_of(kv),
            packed: AtomicBool::new(false),
            taken: AtomicUsize::new(0),
        });
        Self { whole: whole.collect(), taken, groups, chunks, blocks, count }
    }

    /// Returns a head to be packed by one worker: first from the worker's own part, which is the same in each call and may
    /// still be in its cache, then from other workers' parts.
    fn next_whole(&self, worker: usize) -> Option<&PackedHead> {
        let workers = self.taken.len();
        let at = |owner: usize| self.whole.len() * owner / workers;
        (0..workers).map(|other| (worker + other) % workers).find_map(|owner| {
            let part = &self.whole[at(owner)..at(owner + 1)];
            part.get(self.taken[owner].fetch_add(1, Ordering::Relaxed))
        })
    }

    /// Takes a query head and a block of its queries; none if all blocks of the key-value head are taken.
    fn next_block(&self, whole: &PackedHead) -> Option<(usize, usize)> {
        let taken = whole.taken.fetch_add(1, Ordering::Relaxed);
        let head = whole.queries.start + taken / self.blocks.len();
        whole.queries.contains(&head).then(|| (head, self.blocks[taken % self.blocks.len()]))
    }

    fn get(&self, task: usize) -> Task<'_> {
        // The groups whose tasks have begun; the next group is being packed.
        let begun = self.groups.partition_point(|group| group.first <= task);
        let next = self.groups.get(begun);
        let from = begun.checked_sub(1).map_or(self.whole.len(), |now| self.groups[now].first);
        match next {
            Some(next) if task - from < self.chunks => {
                Task::Pack { kv: next.kv, chunk: task - from, packed: &next.packed }
            }
            _ => {
                let now = &self.groups[begun - 1];
                let at = task - from - if next.is_some() { self.chunks } else { 0 };
                let (head, block) = (now.head + at / self.blocks.len(), self.blocks[at % self.blocks.len()]);
                Task::Block { head, block, packed: &now.packed }
            }
        }
    }
}
