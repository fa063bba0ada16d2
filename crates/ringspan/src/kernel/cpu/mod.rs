//! The kernel of a rank: its threads, its instruction set, its buffers.

mod backward;
mod delta;
mod forward;

use super::backward::Sizes;
use super::buffer::{Pool, lines};
use super::decode::{self, Decode};
use super::isa::Code;
use super::pack::Keys;
use super::{Data, Inputs, Isa, Relative, Tile};
use std::sync::Arc;

/// Queries whose packed forms a worker holds at a time in the backward pass: they should stay in the L3 cache.
const SEGMENT: usize = 4096;

/// Attention on the CPU: a rank's own threads and buffers, and the instruction set they use.
///
/// The same inputs on the same machine with the same number of threads give the same bits.
pub struct Kernel {
    threads: usize,
    isa: Isa,
    pool: Pool,
    progress: Option<Arc<dyn Fn() + Send + Sync>>,
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
        Self { threads: threads.max(1), isa, pool: Pool::default(), progress: None }
    }

    /// A kernel for one instruction set; `None` if this machine lacks it.
    pub fn with_isa(threads: usize, isa: Isa) -> Option<Self> {
        Isa::available().contains(&isa).then(|| Self { isa, ..Self::new(threads) })
    }

    /// The same kernel, which calls `progress` on the thread of its caller again and again while it computes, about once
    /// a millisecond of work: communication that moves only when it is asked to is driven so.
    pub fn with_progress(self, progress: Arc<dyn Fn() + Send + Sync>) -> Self {
        Self { progress: Some(progress), ..self }
    }

    /// What [`with_progress`](Self::with_progress) was given.
    pub fn progress_hook(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        self.progress.clone()
    }

    /// Called between pieces of work.
    fn progress(&self, worker: usize) {
        if let (0, Some(progress)) = (worker, &self.progress) {
            progress();
        }
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Products in bf16 where q, k and v are stored so. The scale comes after their sum, and there a maximum of products
    /// has to be one of scores.
    fn code(&self, inputs: &Inputs) -> Code {
        let halves = [inputs.q, inputs.k, inputs.v].iter().all(|view| matches!(view.data, Data::Bf16(_)));
        Code::new(self.isa, halves && inputs.score.scale > 0.0)
    }

    /// Most bytes of buffers that a [`forward`](Self::forward) call of these shapes holds besides its arguments.
    pub fn forward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        let Inputs { q, k, v, heads, bias, .. } = *inputs;
        if q.tokens == 1 {
            let chunks: usize = tiles.iter().map(|tile| tile.k.len().div_ceil(decode::CHUNK)).sum();
            let group = (0..k.heads).map(|kv| heads.queries_of(kv).len()).max().unwrap_or(0);
            let states = lines(k.heads * chunks * group * (2 + v.dim));
            let workers = self.threads.min(k.heads * chunks);
            return bytes(states + workers * lines(Decode::scratch(k.dim, v.dim, group)));
        }
        let code = self.code(inputs);
        let (Some(first), Some(last)) = (tiles.iter().map(|t| t.k.start).min(), tiles.iter().map(|t| t.k.end).max())
        else {
            return 0;
        };
        let keys = Keys::size(last.saturating_sub(first / code.rows() * code.rows()), &k, &v, code).0;
        let tasks = heads.heads() * q.tokens.div_ceil(code.lanes());
        bytes(keys + self.threads.min(tasks) * super::forward::scratch(q.dim, v.dim, code, bias.is_some()))
    }

    /// Most bytes of buffers that a [`backward`](Self::backward) call of these shapes holds besides its arguments.
    pub fn backward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
        let Inputs { q, k, v, heads, bias, .. } = *inputs;
        if tiles.is_empty() {
            return 0;
        }
        let code = self.code(inputs);
        let blocks = q.tokens.div_ceil(code.lanes());
        let sizes = Sizes::new(q.dim, v.dim, code, bias.is_some());
        let workers = self.threads.min(heads.heads() * blocks);
        // A worker shares at most the heads at its two ends, or has blocks of all heads.
        let by_block = bias.is_some_and(|bias| bias.heads < q.heads);
        let shared = if by_block { workers * k.heads } else { 2 * workers.saturating_sub(1) };
        let scratch = sizes.scratch(blocks.min(SEGMENT / code.lanes()));
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
fn check(inputs: &Inputs, tiles: &[Tile]) {
    let Inputs { q, k, v, heads, score, bias } = inputs;
    assert!(q.dim > 0 && v.dim > 0, "head widths of {} and {}", q.dim, v.dim);
    assert_eq!((q.dim, k.tokens, k.heads), (k.dim, v.tokens, v.heads), "the shapes of q, k and v");
    assert_eq!((q.heads, k.heads), (heads.heads(), heads.kv_heads()), "the heads of the head map");
    for tile in tiles {
        let inside = tile.q.end <= q.tokens && tile.k.end <= k.tokens;
        assert!(inside, "tile {:?} x {:?} of {} queries and {} keys", tile.q, tile.k, q.tokens, k.tokens);
        let keys = tile.place.key + tile.k.len().saturating_sub(1) * tile.place.step;
        let held = bias.is_none_or(|bias| tile.k.is_empty() || keys < bias.dim);
        assert!(held, "a tile that ends with key {keys}, and a bias of {} keys", bias.map_or(0, |bias| bias.dim));
    }
    if let Some(bias) = bias {
        let fits = bias.tokens == q.tokens && (bias.heads == 1 || bias.heads == q.heads);
        assert!(fits, "a bias of [{}, {}, ..] for q of [{}, {}, ..]", bias.tokens, bias.heads, q.tokens, q.heads);
    }
    let fits = match &score.relative {
        Some(Relative::Alibi { slopes }) => slopes.len() == q.heads,
        Some(Relative::Buckets(buckets)) => buckets.table.len() == q.heads * buckets.count,
        None => true,
    };
    assert!(fits, "relative terms for another number of heads than {}", q.heads);
}
