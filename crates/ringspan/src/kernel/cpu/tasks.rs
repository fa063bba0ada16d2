//! The tasks of the workers in the forward pass of a CPU kernel, and their order.

use super::super::HeadMap;
use super::super::forward::BlockTask;
use super::super::pack::CHUNK;
use super::super::plan::Plan;
use super::super::workers::Countdown;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A worker packs and computes a head alone if it has at most this many chunks: with usual widths they fit into a core's
/// cache.
pub(super) const ALONE: usize = 4;

/// Number of slots for heads that all workers pack and read: one head is computed while the next one is packed, and a slow
/// worker may still be at the head before.
const SHARED_SLOTS: usize = 3;

/// The tasks of the workers for one segment of the keys. In short segments a worker does whole heads, so that their
/// keys and values stay in its cache: each worker has the same number of heads, and the remaining heads are shared. In
/// longer segments all heads are shared: the workers pack the keys and values of the first head; then for each head
/// they pack those of the next one and compute its queries while its own are in the cache. The chunks that a task needs
/// were begun long before by other workers, so waits are rare. No wait is endless, since a task waits only for tasks
/// that were taken before it.
///
/// Packed heads are in slots. Each worker has a slot for its whole heads, and shared heads take turns in others.
pub(super) struct Tasks {
    /// Key-value heads that are each packed by one worker, and computed by it and by workers that have nothing else to do.
    whole: Vec<WholeHead>,
    /// For each worker's part of `whole`, the number of heads that have been taken.
    taken: Vec<AtomicUsize>,
    shared: Vec<SharedHead>,
    /// Number of chunks in a head.
    chunks: usize,
    /// Blocks that have something to compute, in descending order of cost, so that no thread has a long one left at the
    /// end.
    blocks: Vec<usize>,
    slots: usize,
    count: usize,
    /// The next task of the shared heads.
    next: AtomicUsize,
}

/// A key-value head that one worker packs.
pub(super) struct WholeHead {
    kv: usize,
    /// The query heads that read it.
    queries: Range<usize>,
    /// The slot that it was packed into, or [`NOT_PACKED`].
    slot: AtomicUsize,
    /// Blocks of queries, over all of these heads, that have been taken.
    taken: AtomicUsize,
}

/// The slot of a head that has not been packed.
const NOT_PACKED: usize = usize::MAX;

/// A key-value head that all workers pack and read, and the query heads that read it.
pub(super) struct SharedHead {
    pub(super) kv: usize,
    pub(super) slot: usize,
    /// Index among the shared heads.
    index: usize,
    /// The first query head that reads it.
    head: usize,
    /// Index of the first task that packs the next head or computes the queries of this one.
    first: usize,
    /// Counts the chunks of this head that are still to be packed.
    pub(super) packed: Countdown,
    /// Counts the blocks of its queries that are still to be computed.
    pub(super) computed: Countdown,
}

/// A task of a shared head.
pub(super) enum Task<'a> {
    /// Packs a chunk of the keys and values.
    Pack { shared: &'a SharedHead, chunk: usize },
    /// Computes a block of the queries of a head.
    Block { shared: &'a SharedHead, head: usize, block: usize },
}

/// The key-value heads that some query head reads.
fn in_use(heads: &HeadMap) -> impl Iterator<Item = usize> {
    (0..heads.kv_heads()).filter(|&kv| !heads.queries_of(kv).is_empty())
}

/// Number of key-value heads that some query head reads.
pub(super) fn heads_in_use(heads: &HeadMap) -> usize {
    in_use(heads).count()
}

/// Number of slots for `kv_heads` heads with keys in `chunks` chunks.
pub(super) fn slots(kv_heads: usize, chunks: usize, workers: usize) -> usize {
    let shared = shared_heads(kv_heads, chunks, workers);
    workers.min(kv_heads - shared) + SHARED_SLOTS.min(shared)
}

/// Number of heads that all workers share.
fn shared_heads(kv_heads: usize, chunks: usize, workers: usize) -> usize {
    if chunks <= ALONE { kv_heads % workers } else { kv_heads }
}

impl WholeHead {
    pub(super) fn kv(&self) -> usize {
        self.kv
    }

    /// Lets other workers read the head, which is packed in `slot`.
    pub(super) fn set_packed(&self, slot: usize) {
        self.slot.store(slot, Ordering::Release);
    }
}

impl Tasks {
    pub(super) fn new(plan: &Plan, heads: &HeadMap, segment: &Range<usize>, workers: usize) -> Self {
        let chunks = segment.len().div_ceil(CHUNK);
        let cost = |block: &usize| plan.cost_in(*block, segment);
        let mut blocks: Vec<usize> = (0..plan.blocks()).filter(|block| cost(block) > 0).collect();
        blocks.sort_by_cached_key(|block| std::cmp::Reverse(cost(block)));
        let mut whole: Vec<usize> = in_use(heads).collect();
        let slots = slots(whole.len(), chunks, workers);
        let others = whole.split_off(whole.len() - shared_heads(whole.len(), chunks, workers));
        let own_slots = workers.min(whole.len());
        let (mut shared, mut count) = (Vec::new(), 0);
        for (index, kv) in others.into_iter().enumerate() {
            let queries = heads.queries_of(kv);
            count += chunks;
            shared.push(SharedHead {
                kv,
                slot: own_slots + index % SHARED_SLOTS,
                index,
                head: queries.start,
                first: count,
                packed: Countdown::new(chunks),
                computed: Countdown::new(queries.len() * blocks.len()),
            });
            count += queries.len() * blocks.len();
        }
        let taken = (0..workers).map(|_| AtomicUsize::new(0)).collect();
        let whole = whole.into_iter().map(|kv| WholeHead {
            kv,
            queries: heads.queries_of(kv),
            slot: AtomicUsize::new(NOT_PACKED),
            taken: AtomicUsize::new(0),
        });
        let next = AtomicUsize::new(0);
        Self { whole: whole.collect(), taken, shared, chunks, blocks, slots, count, next }
    }

    /// Whether there is nothing to compute.
    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty() || self.slots == 0
    }

    /// Number of slots for packed heads.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// Number of chunks in a head.
    pub(super) fn chunks(&self) -> usize {
        self.chunks
    }

    /// Number of workers that find something to do.
    pub(super) fn workers(&self) -> usize {
        self.taken.len().min(self.whole.len() + self.count)
    }

    /// Returns a head to be packed by one worker, and the slot for it. A worker takes first from its own part, which is the
    /// same in each call and may still be in its cache, then from other workers' parts.
    ///
    /// A worker that takes a head has computed all blocks of the one that had its slot before: others take blocks only when no
    /// head is left to be taken.
    pub(super) fn next_whole(&self, worker: usize) -> Option<(&WholeHead, usize)> {
        let workers = self.taken.len();
        let at = |owner: usize| self.whole.len() * owner / workers;
        let head = (0..workers).map(|other| (worker + other) % workers).find_map(|owner| {
            let part = &self.whole[at(owner)..at(owner + 1)];
            part.get(self.taken[owner].fetch_add(1, Ordering::Relaxed))
        });
        head.map(|head| (head, worker))
    }

    /// The heads that one worker has packed, whose blocks others may compute as well.
    pub(super) fn packed_whole(&self) -> impl Iterator<Item = &WholeHead> {
        self.whole.iter().filter(|whole| whole.slot.load(Ordering::Acquire) != NOT_PACKED)
    }

    /// Takes a block of queries of a packed head; none if all are taken.
    pub(super) fn next_block(&self, whole: &WholeHead) -> Option<BlockTask> {
        let taken = whole.taken.fetch_add(1, Ordering::Relaxed);
        let head = whole.queries.start + taken / self.blocks.len();
        let (slot, block) = (whole.slot.load(Ordering::Acquire), self.blocks[taken % self.blocks.len()]);
        whole.queries.contains(&head).then_some(BlockTask { head, slot, block })
    }

    /// Takes the next task of the shared heads; none if all are taken.
    pub(super) fn next(&self) -> Option<Task<'_>> {
        let task = self.next.fetch_add(1, Ordering::Relaxed);
        (task < self.count).then(|| self.get(task))
    }

    fn get(&self, task: usize) -> Task<'_> {
        // The shared heads whose tasks have begun; the next one is being packed.
        let begun = self.shared.partition_point(|shared| shared.first <= task);
        let next = self.shared.get(begun);
        let from = begun.checked_sub(1).map_or(0, |now| self.shared[now].first);
        match next {
            Some(shared) if task - from < self.chunks => Task::Pack { shared, chunk: task - from },
            _ => {
                let shared = &self.shared[begun - 1];
                let at = task - from - if next.is_some() { self.chunks } else { 0 };
                let (head, block) = (shared.head + at / self.blocks.len(), self.blocks[at % self.blocks.len()]);
                Task::Block { shared, head, block }
            }
        }
    }

    /// Waits until the head that was in the slot of `shared` before has been computed.
    pub(super) fn wait_for_slot(&self, shared: &SharedHead) {
        if let Some(before) = shared.index.checked_sub(SHARED_SLOTS) {
            self.shared[before].computed.wait();
        }
    }
}
