//! The ranks of `attend`: each takes its tokens, computes, and hands its part back.

use super::input::Input;
use crate::files::Given;
use crate::mesh::DEADLINE;
use anyhow::{Context, Result};
use ringspan::attention::{self, Forward, Gradients, Wire};
use ringspan::comm::{Communicator, threads};
use ringspan::kernel::View;
use ringspan::schedule::HeadShare;
use ringspan::{Group, Kernel, Layout, Schedule, Score};
use safetensors::Dtype;
use std::sync::Arc;
use std::time::Instant;

/// What to compute, besides the tensors.
pub(super) struct Work<'a> {
    pub(super) input: &'a Input<'a>,
    pub(super) schedule: &'a Schedule,
    pub(super) scale: f32,
    pub(super) threads: usize,
    pub(super) repeat: usize,
}

/// What one rank has computed, and what that took.
pub(super) struct Part {
    forward: Forward,
    gradients: Option<Gradients>,
    /// One time a repetition: from when all ranks began to when all had finished.
    pub(super) seconds_forward: Vec<f64>,
    pub(super) seconds_backward: Vec<f64>,
    pub(super) report: RankReport,
}

/// One rank in the report.
#[derive(Debug, Clone, serde::Serialize)]
pub(crate) struct RankReport {
    /// Query tokens it holds.
    pub(super) tokens: usize,
    /// Visible pairs it computes x query heads x 2 x (D + Dv).
    pub(super) flops_forward: u64,
    pub(super) bytes_sent_forward: u64,
    pub(super) bytes_sent_backward: u64,
    /// Most bytes of tensors, blocks and buffers held at once.
    pub(super) peak_bytes: u64,
}

/// The results, whole.
pub(super) struct Results {
    /// `[B, Sq, H, Dv]`
    pub(super) out: Vec<f32>,
    /// `[B, H, Sq]`
    pub(super) lse: Vec<f32>,
    /// `[B, Sq, H, D]`, `[B, Sk, G, D]`, `[B, Sk, G, Dv]`
    pub(super) gradients: Option<[Vec<f32>; 3]>,
}

impl Work<'_> {
    /// Runs all ranks.
    pub(super) fn run(&self) -> Result<Vec<Part>> {
        let ranks = self.schedule.query().ranks();
        let options = threads::Options { deadline: DEADLINE, ..Default::default() };
        threads::run(ranks, options, |comm| self.rank(comm))
    }

    fn rank(&self, comm: Arc<dyn Communicator>) -> Result<Part> {
        let (rank, sizes, schedule) = (comm.rank(), self.input.sizes, self.schedule);
        let (queries, keys) = (schedule.query().rows(rank), schedule.key().rows(rank));
        let group = Group::new(comm.clone(), schedule.ring(), schedule.ulysses(), Kernel::new(self.threads))?;
        let group = group.with_wire(self.wire());
        let local = |given: &Given<'_, 4>, rows: &[usize]| given.float_rows(rows, given.shape[2] * given.shape[3]);
        let (q, k, v) = (local(&self.input.q, &queries), local(&self.input.k, &keys), local(&self.input.v, &keys));
        let q = view(&q, queries.len(), sizes.heads, sizes.dim)?;
        let k = view(&k, keys.len(), sizes.kv_heads, sizes.dim)?;
        let v = view(&v, keys.len(), sizes.kv_heads, sizes.v_dim)?;
        let d_out = self.input.d_out.as_ref().map(|d_out| local(d_out, &queries));
        let d_out = d_out.as_deref().map(|d_out| view(d_out, queries.len(), sizes.heads, sizes.v_dim)).transpose()?;
        let score = Score { scale: self.scale };

        let (mut seconds_forward, mut seconds_backward) = (Vec::new(), Vec::new());
        let mut last = None;
        for _ in 0..self.repeat {
            drop(last.take());
            let start = (together(&*comm)?, comm.bytes_sent());
            let forward = attention::forward(&group, schedule, q, k, v, &score)?;
            let middle = (comm.bytes_sent(), together(&*comm)?, comm.bytes_sent());
            seconds_forward.push((middle.1 - start.0).as_secs_f64());
            let gradients = match d_out {
                Some(d_out) => Some(attention::backward(&group, schedule, q, k, v, &score, &forward, d_out)?),
                None => None,
            };
            let end = (comm.bytes_sent(), together(&*comm)?);
            seconds_backward.push((end.1 - middle.1).as_secs_f64());
            last = Some((forward, gradients, middle.0 - start.1, end.0 - middle.2));
        }
        let (forward, gradients, bytes_sent_forward, bytes_sent_backward) = last.context("nothing was computed")?;
        let shares = HeadShare::all(sizes.heads, sizes.kv_heads, schedule.ring(), schedule.ulysses())?;
        let heads = shares[rank % schedule.ulysses()].query.len();
        let report = RankReport {
            tokens: queries.len(),
            flops_forward: schedule.pairs(rank) * (heads * 2 * (sizes.dim + sizes.v_dim)) as u64,
            bytes_sent_forward,
            bytes_sent_backward,
            peak_bytes: forward.peak_bytes.max(gradients.as_ref().map_or(0, |gradients| gradients.peak_bytes)),
        };
        Ok(Part { forward, gradients, seconds_forward, seconds_backward, report })
    }

    /// The type in which everything can travel without loss.
    fn wire(&self) -> Wire {
        let Input { q, k, v, .. } = self.input;
        match (q.dtype, k.dtype, v.dtype) {
            (Dtype::BF16, Dtype::BF16, Dtype::BF16) => Wire::Bf16,
            (Dtype::F16, Dtype::F16, Dtype::F16) => Wire::F16,
            _ => Wire::F32,
        }
    }

    /// Puts the parts of all ranks together. Tokens that no rank holds are padding: out 0, lse -inf, gradients 0.
    pub(super) fn join(&self, parts: Vec<Part>) -> Result<Results> {
        let sizes = self.input.sizes;
        let (queries, keys) = (sizes.batch * sizes.queries, sizes.batch * sizes.keys);
        let mut out = vec![0.0; queries * sizes.heads * sizes.v_dim];
        let mut lse = vec![f32::NEG_INFINITY; queries * sizes.heads];
        let mut gradients = self.input.d_out.as_ref().map(|_| {
            [
                vec![0.0; queries * sizes.heads * sizes.dim],
                vec![0.0; keys * sizes.kv_heads * sizes.dim],
                vec![0.0; keys * sizes.kv_heads * sizes.v_dim],
            ]
        });
        let (query, key) = (self.schedule.query(), self.schedule.key());
        for (rank, part) in parts.into_iter().enumerate() {
            query.unshard(rank, &part.forward.out, sizes.heads * sizes.v_dim, &mut out)?;
            scatter_lse(&part.forward.lse, query, rank, sizes.queries, sizes.heads, &mut lse);
            if let (Some([dq, dk, dv]), Some(local)) = (&mut gradients, part.gradients) {
                query.unshard(rank, &local.dq, sizes.heads * sizes.dim, dq)?;
                key.unshard(rank, &local.dk, sizes.kv_heads * sizes.dim, dk)?;
                key.unshard(rank, &local.dv, sizes.kv_heads * sizes.v_dim, dv)?;
            }
        }
        Ok(Results { out, lse, gradients })
    }
}

/// From a rank's `[H, T]` to its places in `[B, H, Sq]`.
fn scatter_lse(local: &[f32], layout: &Layout, rank: usize, queries: usize, heads: usize, lse: &mut [f32]) {
    let rows = layout.rows(rank);
    for (head, values) in local.chunks_exact(rows.len().max(1)).enumerate() {
        for (&row, &value) in rows.iter().zip(values) {
            let (b, s) = (row / queries, row % queries);
            lse[(b * heads + head) * queries + s] = value;
        }
    }
}

/// The moment when all ranks are here.
fn together(comm: &dyn Communicator) -> Result<Instant> {
    comm.barrier()?;
    Ok(Instant::now())
}

fn view(data: &[f32], tokens: usize, heads: usize, dim: usize) -> Result<View<'_>> {
    View::new(data, tokens, heads, dim)
        .with_context(|| format!("{} elements are no [{tokens}, {heads}, {dim}]", data.len()))
}
