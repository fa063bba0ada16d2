//! One query against many cached keys: nothing is packed, every key and value is read once for its group of heads.
//!
//! Keys are cut into chunks that do not depend on the threads, and the chunks are merged in order ("flash decoding",
//! Dao et al., 2023): any number of threads gives the same bits.

use super::buffer::{Pool, Target};
use super::isa::Code;
use super::pack::load;
use super::plan::Meeting;
use super::terms::Terms;
use super::vector::Simd;
use super::view::Data;
use super::{HeadMap, Partial, Tile, View, isa, workers};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Rows of a chunk.
pub(super) const CHUNK: usize = 1024;

/// What all chunks of a call share; q has one token.
pub(super) struct Decode<'a> {
    pub(super) q: View<'a>,
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) heads: &'a HeadMap,
    /// [`terms::factor`](super::terms::factor)
    pub(super) factor: f32,
    pub(super) terms: Option<&'a Terms<'a>>,
}

impl Decode<'_> {
    /// Elements of the state of one head: greatest score, sum, weighted values.
    pub(super) fn state(&self) -> usize {
        2 + self.v.dim
    }

    /// The softmax states of the heads that read `kv`, over at most CHUNK rows of `tile`, which all are visible.
    ///
    /// R and N, the shape of the packed kernels, have no meaning here.
    ///
    /// # Safety
    /// The instruction set must be enabled; `states` must have a state per head and `scores` CHUNK numbers per head.
    #[inline(always)]
    pub(super) unsafe fn chunk<S: Simd, const R: usize, const N: usize>(
        &self,
        simd: S,
        kv: usize,
        rows: Range<usize>,
        tile: &Tile,
        states: &mut [f32],
        scores: &mut [f32],
    ) {
        let heads = self.heads.queries_of(kv);
        let queries: Vec<Cow<[f32]>> = heads.clone().map(|head| self.q.row(0, head)).collect();
        for (at, row) in rows.clone().enumerate() {
            let key = self.k.at(row, kv);
            for (i, query) in queries.iter().enumerate() {
                scores[i * CHUNK + at] = dot(simd, query, key) * self.factor;
            }
        }
        let meeting = Meeting::of_query(tile, rows.start);
        for ((scores, state), head) in
            scores.chunks_exact_mut(CHUNK).zip(states.chunks_exact_mut(self.state())).zip(heads)
        {
            let (seen, rest) = scores.split_at_mut(rows.len());
            if let Some(terms) = self.terms {
                terms.of_query(simd, head, &meeting, seen);
            }
            // The vectors run over the end; exp2 makes exact zeros of what lies there.
            rest.fill(f32::NEG_INFINITY);
            let max = seen.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
            let finite = simd.splat(max.max(f32::MIN));
            let mut sum = simd.splat(0.0);
            for scores in scores.chunks_exact_mut(S::LANES).take(rows.len().div_ceil(S::LANES)) {
                // SAFETY: the chunk has LANES numbers.
                unsafe {
                    let x = simd.exp2(simd.sub(simd.load(scores.as_ptr()), finite));
                    sum = simd.add(sum, x);
                    simd.store(scores.as_mut_ptr(), x);
                }
            }
            (state[0], state[1]) = (max, simd.sum(sum));
            if let Some(terms) = self.terms {
                terms.drop_of_query(head, &meeting, &mut scores[..rows.len()]);
            }
            state[2..].fill(0.0);
        }
        for (at, row) in rows.enumerate() {
            let value = self.v.at(row, kv);
            for (i, state) in states.chunks_exact_mut(self.state()).enumerate() {
                add(simd, &mut state[2..], scores[i * CHUNK + at], value);
            }
        }
    }

    /// Adds all of `visible`, key rows of a tile each, to the state of the query.
    pub(super) fn run<'t>(
        &self,
        code: Code,
        threads: usize,
        pool: &Pool,
        progress: &(dyn Fn(usize) + Sync),
        visible: &[(Range<usize>, &'t Tile)],
        partial: &mut Partial,
    ) {
        let chunk = |(rows, tile): &(Range<usize>, &'t Tile)| {
            let (rows, tile) = (rows.clone(), *tile);
            rows.clone().step_by(CHUNK).map(move |from| (from..rows.end.min(from + CHUNK), tile))
        };
        let chunks: Vec<(Range<usize>, &Tile)> = visible.iter().flat_map(chunk).collect();
        let read: Vec<usize> = (0..self.k.heads).filter(|&kv| !self.heads.queries_of(kv).is_empty()).collect();
        let tasks = read.len() * chunks.len();
        if tasks == 0 {
            return;
        }
        let group = read.iter().map(|&kv| self.heads.queries_of(kv).len()).max().unwrap_or(0);
        let size = group * self.state();
        let mut states = pool.take(tasks * size);
        let target = Target::new(&mut states);
        let next = AtomicUsize::new(0);
        // A thread costs about as much as reading this many numbers.
        let rows: usize = chunks.iter().map(|(rows, _)| rows.len()).sum();
        let worth = (rows * read.len() * (self.k.dim + self.v.dim)).div_ceil(1 << 19);
        workers::run(threads.min(tasks).min(worth), &|worker| {
            let mut scores = pool.take(group * CHUNK);
            loop {
                let task = next.fetch_add(1, Ordering::Relaxed);
                if task >= tasks {
                    break;
                }
                let (kv, (rows, tile)) = (read[task / chunks.len()], chunks[task % chunks.len()].clone());
                let heads = self.heads.queries_of(kv).len();
                let scores = &mut scores[..heads * CHUNK];
                // SAFETY: the counter gives each task, and with it these states, to one worker.
                unsafe {
                    let states = target.row(task * size, heads * self.state());
                    isa::decode_chunk(code, self, kv, rows, tile, states, scores);
                }
                progress(worker);
            }
            pool.give(scores);
        });
        for task in 0..tasks {
            self.merge(read[task / chunks.len()], &states[task * size..][..size], partial);
        }
        pool.give(states);
    }

    /// Adds the states of a chunk to the running state of the query.
    fn merge(&self, kv: usize, states: &[f32], partial: &mut Partial) {
        let states = states.chunks_exact(self.state());
        for (head, state) in self.heads.queries_of(kv).zip(states) {
            let max = partial.max[head].max(state[0]);
            // A number to measure -inf against, so that no NaN arises.
            let finite = max.max(f32::MIN);
            let (old, new) = ((partial.max[head] - finite).exp2(), (state[0] - finite).exp2());
            partial.max[head] = max;
            partial.sum[head] = partial.sum[head] * old + state[1] * new;
            let out = &mut partial.out[head * self.v.dim..][..self.v.dim];
            for (out, x) in out.iter_mut().zip(&state[2..]) {
                *out = *out * old + x * new;
            }
        }
    }
}

#[inline(always)]
fn dot<S: Simd>(simd: S, a: &[f32], b: Data) -> f32 {
    let mut sum = simd.splat(0.0);
    let whole = a.len() / S::LANES * S::LANES;
    for (at, a) in a.chunks_exact(S::LANES).enumerate() {
        // SAFETY: the chunk has LANES numbers.
        sum = simd.fma(unsafe { simd.load(a.as_ptr()) }, load(simd, b, at * S::LANES), sum);
    }
    let mut total = simd.sum(sum);
    for (at, a) in a.iter().enumerate().skip(whole) {
        total += a * b.get(at);
    }
    total
}

/// `to += factor * from`
#[inline(always)]
fn add<S: Simd>(simd: S, to: &mut [f32], factor: f32, from: Data) {
    let factors = simd.splat(factor);
    let mut whole = 0;
    for to in to.chunks_exact_mut(S::LANES) {
        let from = load(simd, from, whole);
        // SAFETY: the chunk has LANES numbers.
        unsafe { simd.store(to.as_mut_ptr(), simd.fma(factors, from, simd.load(to.as_ptr()))) };
        whole += S::LANES;
    }
    for (at, to) in to.iter_mut().enumerate().skip(whole) {
        *to += factor * from.get(at);
    }
}
