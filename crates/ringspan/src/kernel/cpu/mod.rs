//! Attention on the CPU: a rank's threads, their instruction set, their buffers.

mod backward;
mod delta;
mod forward;

use super::backward::Sizes;
use super::buffer::{Pool, lines};
use super::decode::{self, Decode};
use super::isa::Code;
use super::pack::Keys;
use super::plan::Plan;
use super::terms::Terms;
use super::{Data, Inputs, Isa, Progress, Tile};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Queries whose packed forms a worker holds at a time in the backward pass: they should stay in the L3 cache.
const SEGMENT: usize = 4096;

/// A rank's own threads and buffers, and the instruction set they use.
pub(super) struct Cpu {
    pub(super) threads: usize,
    pub(super) isa: Isa,
    pool: Pool,
    hook: Option<Hook>,
}

/// What drives communication between pieces of work, which may be as short as a microsecond.
struct Hook {
    progress: Progress,
    created: Instant,
    /// Nanoseconds behind `created` before which it is not called again.
    next: AtomicU64,
}

/// From one call of the hook to the next within a computation, at least: one that takes a microsecond then costs 0.4%.
const PAUSE: Duration = Duration::from_micros(250);

impl Cpu {
    /// `threads` threads (at least one), and an instruction set that this machine has.
    pub(super) fn new(threads: usize, isa: Isa) -> Self {
        Self { threads: threads.max(1), isa, pool: Pool::default(), hook: None }
    }

    pub(super) fn set_progress(&mut self, progress: Progress) {
        self.hook = Some(Hook { progress, created: Instant::now(), next: AtomicU64::new(0) });
    }

    pub(super) fn progress_hook(&self) -> Option<Progress> {
        self.hook.as_ref().map(|hook| hook.progress.clone())
    }

    /// At the begin of a call: even a short one drives communication on.
    fn begin_progress(&self) {
        self.hook.iter().for_each(|hook| hook.next.store(0, Ordering::Relaxed));
    }

    /// Called between pieces of work.
    fn progress(&self, worker: usize) {
        let (0, Some(Hook { progress, created, next })) = (worker, &self.hook) else { return };
        if created.elapsed() >= Duration::from_nanos(next.load(Ordering::Relaxed)) {
            progress();
            let soonest = (created.elapsed() + PAUSE).as_nanos();
            next.store(u64::try_from(soonest).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    }

    /// Products in bf16 where q, k and v are stored so. The scale comes after their sum, and there a maximum of products
    /// has to be one of scores.
    fn code(&self, inputs: &Inputs) -> Code {
        let halves = [inputs.q, inputs.k, inputs.v].iter().all(|view| matches!(view.data, Data::Bf16(_)));
        Code::new(self.isa, halves && inputs.score.scale > 0.0)
    }

    /// Most bytes of buffers that a [`forward`](Self::forward) call of these shapes holds besides its arguments.
    pub(super) fn forward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
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
    pub(super) fn backward_workspace(&self, inputs: &Inputs, tiles: &[Tile]) -> u64 {
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
impl Cpu {
    /// Bytes of the buffers kept for the next call.
    pub(super) fn held(&self) -> u64 {
        bytes(self.pool.held())
    }
}

/// What the blocks of a call compute. Terms depend on where tiles lie, so only without them tiles may be joined.
fn plan<'a>(inputs: &Inputs, tiles: &'a [Tile], terms: Option<&Terms>, code: Code) -> Plan<'a> {
    let make = if terms.is_some() { Plan::new } else { Plan::joined };
    make(tiles, code.lanes(), inputs.q.tokens, inputs.k.tokens)
}

fn bytes(elements: usize) -> u64 {
    elements as u64 * 4
}
