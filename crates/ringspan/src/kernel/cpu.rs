//! The kernel of a rank: its threads, its instruction set, its buffers.

use super::backward::{Backward, Sizes, Sums};
use super::buffer::{Aligned, Pool, Target, lines};
use super::decode::{self, Decode};
use super::forward::{self, Forward};
use super::pack::Keys;
use super::plan::Plan;
use super::{HeadMap, Isa, Partial, Score, Tile, View, isa, workers};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows a worker packs at a time.
const CHUNK: usize = 256;

/// Queries whose packed forms a worker holds at a time in the backward pass: they should stay in the L3 cache.
const SEGMENT: usize = 4096;

/// Attention on the CPU: a rank's own threads and buffers, and the instruction set they use.
///
/// The same inputs on the same machine with the same number of threads give the same bits.
pub struct Kernel {
    threads: usize,
    isa: Isa,
    pool: Pool,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").field("threads", &self.threads).field("isa", &self.isa).finish_non_exhaustive()
    }
}

impl Kernel {
    /// A kernel that computes with `threads` threads (at least one; the calling thread is one of them), with the best
    /// instruction set of this machine.
    pub fn new(threads: usize) -> Self {
        let isa = Isa::available().first().copied().unwrap_or(Isa::Portable);
        Self { threads: threads.max(1), isa, pool: Pool::default() }
    }

    /// A kernel for one instruction set; `None` if this machine lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Option<Self> {
        Isa::available().contains(&isa).then(|| Self { isa, ..Self::new(threads) })
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Adds the keys of `tiles` to the softmax state of the queries.
    ///
    /// q is `[Tq, H, D]`, k `[Tk, G, D]`, v `[Tk, G, Dv]`. Called once per key block; each visible pair must be named
    /// by one tile of one call.
    ///
    /// # Panics
    /// If shapes, tiles and `partial` do not fit each other.
    #[allow(clippy::too_many_arguments)] // The inputs of attention.
    pub fn forward(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        tiles: &[Tile],
        score: &Score,
        partial: &mut Partial,
    ) {
        check(&q, &k, &v, heads, tiles);
        let rows = q.tokens * q.heads;
        assert_eq!(
            [partial.out.len(), partial.max.len(), partial.sum.len()],
            [rows * v.dim, rows, rows],
            "a softmax state for other sizes than [{}, {}, {}]",
            q.tokens,
            q.heads,
            v.dim
        );
        if q.tokens == 1 {
            // Packing would cost more than the whole product.
            let seen = |tile: &Tile| {
                let keys = if tile.q.is_empty() { 0..0 } else { tile.band.keys(0, tile.k.len()) };
                tile.k.start + keys.start..tile.k.start + keys.end
            };
            let visible: Vec<Range<usize>> = tiles.iter().map(seen).collect();
            return self.one_query(q, k, v, heads, &visible, score, partial);
        }
        let (lanes, r) = (self.isa.lanes(), self.isa.rows());
        let plan = Plan::new(tiles, lanes, q.tokens, k.tokens);
        if plan.keys.is_empty() || q.heads == 0 {
            return;
        }
        let mut keys = Keys::new(&plan, &k, &v, r, |len| self.pool.take(len));
        self.pack(&mut keys, &plan, &k, &v);

        // The blocks with most keys first, so that no thread is left with a long one at the end.
        let mut order: Vec<usize> = (0..plan.blocks()).filter(|&block| plan.cost(block) > 0).collect();
        order.sort_by_key(|&block| std::cmp::Reverse(plan.cost(block)));
        let job = Forward {
            q,
            heads,
            plan: &plan,
            keys: &keys,
            v_dim: v.dim,
            scale: score.scale * std::f32::consts::LOG2_E,
            out: Target::new(&mut partial.out),
            max: Target::new(&mut partial.max),
            sum: Target::new(&mut partial.sum),
        };
        let tasks = q.heads * order.len();
        let next = AtomicUsize::new(0);
        workers::run(self.threads.min(tasks), &|_| {
            let mut scratch = self.pool.take(forward::scratch(q.dim, v.dim, lanes, r));
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                let (head, block) = (task / order.len(), order[task % order.len()]);
                // SAFETY: the counter gives each head and block to one worker; the scratch has the asked size.
                unsafe { isa::forward_block(self.isa, &job, head, block, &mut scratch) };
            }
            self.pool.give(scratch);
        });
        self.pool.give(keys.into_buffer());
    }

    /// The softmax state of one query `[1, H, D]` over the rows `visible` of a cache k `[Tk, G, D]`, v `[Tk, G, Dv]`.
    ///
    /// The same bits for any number of threads. States of several ranks can be merged by their maxima and sums.
    ///
    /// # Panics
    /// If the shapes or rows do not fit each other, or `q` has another number of tokens than one.
    pub fn decode(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        visible: &[Range<usize>],
        score: &Score,
    ) -> Partial {
        check(&q, &k, &v, heads, &[]);
        assert_eq!(q.tokens, 1, "queries of a decoding step");
        for rows in visible {
            assert!(rows.end <= k.tokens, "rows {rows:?} of a cache of {}", k.tokens);
        }
        let mut partial = Partial::new(1, q.heads, v.dim);
        self.one_query(q, k, v, heads, visible, score, &mut partial);
        partial
    }

    #[allow(clippy::too_many_arguments)] // The inputs of attention.
    fn one_query(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        visible: &[Range<usize>],
        score: &Score,
        partial: &mut Partial,
    ) {
        let job = Decode { q, k, v, heads, scale: score.scale * std::f32::consts::LOG2_E };
        let chunk = |rows: &Range<usize>| {
            let rows = rows.clone();
            rows.clone().step_by(decode::CHUNK).map(move |from| from..rows.end.min(from + decode::CHUNK))
        };
        let chunks: Vec<Range<usize>> = visible.iter().flat_map(chunk).collect();
        let read: Vec<usize> = (0..k.heads).filter(|&kv| !heads.queries_of(kv).is_empty()).collect();
        let tasks = read.len() * chunks.len();
        if tasks == 0 {
            return;
        }
        let group = read.iter().map(|&kv| heads.queries_of(kv).len()).max().unwrap_or(0);
        let size = group * job.state();
        let mut states = self.pool.take(tasks * size);
        let target = Target::new(&mut states);
        let next = AtomicUsize::new(0);
        // A thread costs about as much as reading this many numbers.
        let rows: usize = chunks.iter().map(ExactSizeIterator::len).sum();
        let worth = (rows * read.len() * (k.dim + v.dim)).div_ceil(1 << 19);
        workers::run(self.threads.min(tasks).min(worth), &|_| {
            let mut scores = self.pool.take(group * decode::CHUNK);
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                let (kv, rows) = (read[task / chunks.len()], chunks[task % chunks.len()].clone());
                let heads = heads.queries_of(kv).len();
                let scores = &mut scores[..heads * decode::CHUNK];
                // SAFETY: the counter gives each task, and with it these states, to one worker.
                unsafe {
                    let states = target.row(task * size, heads * job.state());
                    isa::decode_chunk(self.isa, &job, kv, rows, states, scores);
                }
            }
            self.pool.give(scores);
        });
        for task in 0..tasks {
            job.merge(read[task / chunks.len()], &states[task * size..][..size], partial);
        }
        self.pool.give(states);
    }

    fn pack(&self, keys: &mut Keys, plan: &Plan, k: &View, v: &View) {
        let target = keys.target();
        let keys = &*keys;
        let chunks = keys.rows.div_ceil(CHUNK);
        let next = AtomicUsize::new(0);
        // A thread costs more than packing a few chunks.
        workers::run(self.threads.min((k.heads * chunks).div_ceil(8)), &|_| {
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= k.heads * chunks {
                    break;
                }
                let (head, from) = (task / chunks, task % chunks * CHUNK);
                let rows = from..(from + CHUNK).min(keys.rows);
                // SAFETY: the counter gives each chunk and head to one worker.
                unsafe {
                    match self.isa.rows() {
                        8 => keys.pack_chunk::<8>(target, plan, k, v, head, rows),
                        _ => keys.pack_chunk::<4>(target, plan, k, v, head, rows),
                    }
                }
            }
        });
    }

    /// Adds the gradients of `tiles` to `dq` `[Tq, H, D]`, `dk` `[Tk, G, D]` and `dv` `[Tk, G, Dv]`.
    ///
    /// `lse` `[H, Tq]` is the final log-sum-exp of the queries over all their keys, not only of this block; `delta`
    /// `[H, Tq]` is [`delta`](super::delta) of the final output.
    ///
    /// # Panics
    /// If the shapes do not fit each other.
    #[allow(clippy::too_many_arguments)] // The inputs of attention and three gradients.
    pub fn backward(
        &self,
        q: View,
        k: View,
        v: View,
        heads: &HeadMap,
        tiles: &[Tile],
        score: &Score,
        lse: &[f32],
        delta: &[f32],
        d_out: View,
        dq: &mut [f32],
        dk: &mut [f32],
        dv: &mut [f32],
    ) {
        check(&q, &k, &v, heads, tiles);
        let rows = q.tokens * q.heads;
        assert_eq!((d_out.tokens, d_out.heads, d_out.dim), (q.tokens, q.heads, v.dim), "the shape of d_out");
        assert_eq!([lse.len(), delta.len(), dq.len()], [rows, rows, rows * q.dim], "the sizes of lse, delta, dq");
        let keys = k.tokens * k.heads;
        assert_eq!([dk.len(), dv.len()], [keys * k.dim, keys * v.dim], "the sizes of dk and dv");
        let lanes = self.isa.lanes();
        let plan = Plan::new(tiles, lanes, q.tokens, k.tokens);
        if plan.keys.is_empty() || q.heads == 0 {
            return;
        }

        let shares = plan.shares(q.heads, self.threads);
        let owners = |kv: usize| {
            let touches = |share: &[(usize, Range<usize>)]| share.iter().any(|(head, _)| heads.kv_of(*head) == kv);
            shares.iter().filter(|share| touches(share)).count()
        };
        // A key-value head of several workers gets one private sum per worker, added up in the order of workers.
        let (k_size, v_size) = (lines(k.tokens * k.dim), lines(k.tokens * v.dim));
        let mut private: Vec<Vec<(usize, Aligned)>> = shares
            .iter()
            .map(|share| {
                let mut kv: Vec<usize> = share.iter().map(|(head, _)| heads.kv_of(*head)).collect();
                kv.dedup();
                kv.retain(|&kv| owners(kv) > 1);
                let zeroed = |kv| {
                    let mut buffer = self.pool.take(k_size + v_size);
                    buffer.fill(0.0);
                    (kv, buffer)
                };
                kv.into_iter().map(zeroed).collect()
            })
            .collect();
        let job = Backward { q, k, v, d_out, lse, delta, heads, plan: &plan, scale: score.scale, dq: Target::new(dq) };
        let targets: Vec<Vec<(usize, Sums)>> = private
            .iter_mut()
            .map(|private| {
                let sums = |(kv, buffer): &mut (usize, Aligned)| {
                    let (dk, dv) = buffer.split_at_mut(k_size);
                    let (dk, dv) = (Target::new(dk), Target::new(dv));
                    (*kv, Sums { dk, dv, strides: (k.dim, v.dim), offsets: (0, 0) })
                };
                private.iter_mut().map(sums).collect()
            })
            .collect();
        let (dk_target, dv_target) = (Target::new(dk), Target::new(dv));
        let sizes = Sizes::new(q.dim, v.dim, lanes, self.isa.vector());
        workers::run(shares.len(), &|worker| {
            let most = shares[worker].iter().map(|(_, blocks)| blocks.len()).max().unwrap_or(0);
            let segment = SEGMENT / lanes;
            let mut scratch = self.pool.take(sizes.scratch(most.min(segment)));
            for (head, blocks) in &shares[worker] {
                let kv = heads.kv_of(*head);
                let strides = (k.heads * k.dim, k.heads * v.dim);
                let direct = Sums { dk: dk_target, dv: dv_target, strides, offsets: (kv * k.dim, kv * v.dim) };
                let sums = targets[worker].iter().find(|target| target.0 == kv).map_or(direct, |target| target.1);
                for from in blocks.clone().step_by(segment) {
                    let blocks = from..blocks.end.min(from + segment);
                    // SAFETY: shares are disjoint; a key-value head of several workers has private sums; the scratch
                    // has the asked size.
                    unsafe { isa::backward_head(self.isa, &job, *head, blocks, sums, &mut scratch) };
                }
            }
            self.pool.give(scratch);
        });
        for (kv, buffer) in private.into_iter().flatten() {
            let (from_k, from_v) = buffer.split_at(k_size);
            for (from, to, dim) in [(from_k, &mut *dk, k.dim), (from_v, &mut *dv, v.dim)] {
                for (row, from) in from.chunks_exact(dim).take(k.tokens).enumerate() {
                    let to = &mut to[(row * k.heads + kv) * dim..][..dim];
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
                }
            }
            self.pool.give(buffer);
        }
    }

    /// Most bytes of buffers that a [`forward`](Self::forward) call of these shapes holds besides its arguments.
    pub fn forward_workspace(&self, q: View, k: View, v: View, heads: &HeadMap, tiles: &[Tile]) -> u64 {
        if q.tokens == 1 {
            let chunks: usize = tiles.iter().map(|tile| tile.k.len().div_ceil(decode::CHUNK)).sum();
            let group = (0..k.heads).map(|kv| heads.queries_of(kv).len()).max().unwrap_or(0);
            let states = lines(k.heads * chunks * group * (2 + v.dim));
            let workers = self.threads.min(k.heads * chunks);
            return bytes(states + workers * lines(group * decode::CHUNK));
        }
        let (lanes, r) = (self.isa.lanes(), self.isa.rows());
        let (Some(first), Some(last)) = (tiles.iter().map(|t| t.k.start).min(), tiles.iter().map(|t| t.k.end).max())
        else {
            return 0;
        };
        let keys = Keys::size(last.saturating_sub(first / r * r), &k, &v, r).0;
        let tasks = heads.heads() * q.tokens.div_ceil(lanes);
        bytes(keys + self.threads.min(tasks) * forward::scratch(q.dim, v.dim, lanes, r))
    }

    /// Most bytes of buffers that a [`backward`](Self::backward) call of these shapes holds besides its arguments.
    pub fn backward_workspace(&self, q: View, k: View, v: View, heads: &HeadMap, tiles: &[Tile]) -> u64 {
        if tiles.is_empty() {
            return 0;
        }
        let blocks = q.tokens.div_ceil(self.isa.lanes());
        let sizes = Sizes::new(q.dim, v.dim, self.isa.lanes(), self.isa.vector());
        let workers = self.threads.min(heads.heads() * blocks);
        // A worker shares at most the heads at its two ends.
        let shared = 2 * workers.saturating_sub(1);
        let scratch = sizes.scratch(blocks.min(SEGMENT / self.isa.lanes()));
        bytes(workers * scratch + shared * (lines(k.tokens * k.dim) + lines(k.tokens * v.dim)))
    }
}

#[cfg(test)]
impl Kernel {
    /// Bytes of the buffers kept for the next call.
    pub(super) fn held(&self) -> u64 {
        bytes(self.pool.held())
    }
}

fn bytes(elements: usize) -> u64 {
    elements as u64 * 4
}

/// The kernels read and write by pointer: what does not fit must not come that far.
fn check(q: &View, k: &View, v: &View, heads: &HeadMap, tiles: &[Tile]) {
    assert!(q.dim > 0 && v.dim > 0, "head widths of {} and {}", q.dim, v.dim);
    assert_eq!((q.dim, k.tokens, k.heads), (k.dim, v.tokens, v.heads), "the shapes of q, k and v");
    assert_eq!((q.heads, k.heads), (heads.heads(), heads.kv_heads()), "the heads of the head map");
    for tile in tiles {
        let inside = tile.q.end <= q.tokens && tile.k.end <= k.tokens;
        assert!(inside, "tile {:?} x {:?} of {} queries and {} keys", tile.q, tile.k, q.tokens, k.tokens);
    }
}
