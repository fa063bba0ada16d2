//! Runs the ranks of `attend`: each takes its tokens, computes, and returns its part of the results.

use super::input::Input;
use super::parameters::ScoreTerms;
use crate::device::Devices;
use crate::files::FileTensor;
use crate::mesh::DEADLINE;
use anyhow::{Context, Result, bail};
use ringspan::attention::{self, Forward, Gradients, Inputs, Wire, on_device};
use ringspan::comm::process_group::ProcessGroup;
use ringspan::comm::{Buffer, Communicator, threads};
use ringspan::kernel::{Data, DeviceTensor, Kernel, Statistics, View};
use ringspan::schedule::HeadShare;
use ringspan::{Group, Schedule, World, world};
use std::sync::Arc;
use std::time::Instant;

/// Everything that the ranks need to compute.
pub(super) struct RankWork<'a> {
    pub(super) input: &'a Input<'a>,
    pub(super) schedule: &'a Schedule,
    pub(super) terms: &'a ScoreTerms<'a>,
    pub(super) wire: Wire,
    pub(super) devices: &'a Devices,
    pub(super) repeat: usize,
    /// How blocks travel between ranks, where there is a choice (NCCL or not).
    pub(super) blocks: Option<String>,
}

/// The results of one rank, with their times and counts.
pub(super) struct RankResult {
    pub(super) forward: Forward,
    pub(super) gradients: Option<Gradients>,
    /// Seconds of each repetition, from the barrier before it to the barrier after it.
    pub(super) seconds_forward: Vec<f64>,
    pub(super) seconds_backward: Vec<f64>,
    pub(super) report: RankReport,
}

/// One rank's line of the report.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct RankReport {
    /// Number of query tokens on the rank.
    pub(super) tokens: usize,
    /// Visible pairs that the rank computes x query heads x 2 x (D + Dv).
    pub(super) flops_forward: u64,
    pub(super) bytes_sent_forward: u64,
    pub(super) bytes_sent_backward: u64,
    /// Peak of the bytes of tensors, blocks and buffers, computed from the plan.
    pub(super) peak_bytes: u64,
}

impl RankWork<'_> {
    /// Runs all ranks; returns `None` in a process without rank 0.
    pub(super) fn run(&self, processes: &ProcessGroup) -> Result<Option<Vec<RankResult>>> {
        let size = self.schedule.query().ranks();
        // The kernel of a rank has threads of its own, if it has several.
        let ranks = threads::Options { deadline: DEADLINE, ..Default::default() };
        let options = world::Options { threads_per_rank: 1, ranks };
        let own = World::start(processes, size, options)?.run(|rank| self.rank(rank.communicator().clone()))?;
        gather(processes, own)
    }

    fn rank(&self, comm: Arc<dyn Communicator>) -> Result<RankResult> {
        let (rank, sizes, schedule) = (comm.rank(), self.input.sizes, self.schedule);
        let (queries, keys) = (schedule.query().rows(rank), schedule.key().rows(rank));
        let kernel = self.devices.kernel(rank)?;
        let group = Group::new(comm.clone(), schedule.grid(), kernel)?.with_wire(self.wire);
        let local =
            |given: &FileTensor<'_, 4>, rows: &[usize]| given.stored_rows(rows, given.shape[2] * given.shape[3]);
        let (q, k, v) = (local(&self.input.q, &queries), local(&self.input.k, &keys), local(&self.input.v, &keys));
        let q = view(q.data(), queries.len(), sizes.heads, sizes.dim)?;
        let k = view(k.data(), keys.len(), sizes.kv_heads, sizes.dim)?;
        let v = view(v.data(), keys.len(), sizes.kv_heads, sizes.v_dim)?;
        let d_out = self.input.d_out.as_ref().map(|d_out| local(d_out, &queries));
        let d_out =
            d_out.as_ref().map(|d_out| view(d_out.data(), queries.len(), sizes.heads, sizes.v_dim)).transpose()?;
        let bias = self.terms.bias.as_ref().map(|bias| (self.bias_rows(bias, &queries), bias.shape[1]));
        let bias =
            bias.as_ref().map(|(rows, heads)| view(Data::F32(rows), queries.len(), *heads, sizes.keys)).transpose()?;
        // The tensors are copied to a GPU once, however often the computation is repeated.
        let kernel = group.kernel();
        let (q, k, v) = (kernel.to_device(q)?, kernel.to_device(k)?, kernel.to_device(v)?);
        let (d_out, bias) = (to_device(kernel, d_out)?, to_device(kernel, bias)?);
        let bias = bias.as_ref().map(DeviceTensor::view);
        let inputs = Inputs { bias, ..Inputs::new(q.view(), k.view(), v.view(), &self.terms.score) };

        let (mut seconds_forward, mut seconds_backward) = (Vec::new(), Vec::new());
        let mut last = None;
        for _ in 0..self.repeat {
            drop(last.take());
            let start = (together(&*comm)?, comm.bytes_sent());
            let forward = on_device::forward(&group, schedule, &inputs)?;
            kernel.wait()?;
            let middle = (comm.bytes_sent(), together(&*comm)?, comm.bytes_sent());
            seconds_forward.push((middle.1 - start.0).as_secs_f64());
            let gradients = match &d_out {
                Some(d_out) => Some(on_device::backward(&group, schedule, &inputs, &forward.data(), d_out.view())?),
                None => None,
            };
            kernel.wait()?;
            let end = (comm.bytes_sent(), together(&*comm)?);
            seconds_backward.push((end.1 - middle.1).as_secs_f64());
            last = Some((forward, gradients, middle.0 - start.1, end.0 - middle.2));
        }
        let (forward, gradients, bytes_sent_forward, bytes_sent_backward) = last.context("nothing was computed")?;
        let forward = forward.to_host(kernel)?;
        let gradients = gradients.map(|gradients| gradients.to_host(kernel)).transpose()?;
        let shares = HeadShare::all(sizes.heads, sizes.kv_heads, schedule.grid())?;
        let heads = shares[schedule.grid().coordinates(rank).1].query.len();
        let backward_bytes = d_out
            .as_ref()
            .map(|d_out| attention::backward_bytes(&group, schedule, &inputs, d_out.view()))
            .transpose()?;
        let report = RankReport {
            tokens: queries.len(),
            flops_forward: schedule.pairs(rank) * (heads * 2 * (sizes.dim + sizes.v_dim)) as u64,
            bytes_sent_forward,
            bytes_sent_backward,
            peak_bytes: attention::forward_bytes(&group, schedule, &inputs)?.max(backward_bytes.unwrap_or(0)),
        };
        Ok(RankResult { forward, gradients, seconds_forward, seconds_backward, report })
    }

    /// Rows of the bias for some queries, `[T, H or 1, Sk]`.
    fn bias_rows(&self, bias: &FileTensor<'_, 4>, queries: &[usize]) -> Vec<f32> {
        let [batch, heads, len, keys] = bias.shape;
        let row = |&query: &usize| {
            let (b, s) = (query / len, query % len);
            (0..heads).map(move |head| (b.min(batch - 1) * heads + head) * len + s)
        };
        bias.float_rows(&queries.iter().flat_map(row).collect::<Vec<_>>(), keys)
    }
}

/// Gathers the results of all ranks in the process of rank 0; returns `None` in other processes.
fn gather(processes: &ProcessGroup, mut own: Vec<RankResult>) -> Result<Option<Vec<RankResult>>> {
    if processes.local().is_none() {
        return Ok(Some(own));
    }
    let mut reports = Vec::new();
    for part in &own {
        reports.push(Buffer::U8(serde_json::to_vec(&part.report)?));
    }
    let reports = processes.gather(reports)?;
    let mut tensors = Vec::new();
    for of in TENSORS {
        let own = own.iter_mut().map(|part| Buffer::F32(of(part).map(std::mem::take).unwrap_or_default())).collect();
        tensors.push(processes.gather(own)?);
    }
    let (Some(reports), Some(first)) = (reports, own.first()) else { return Ok(None) };
    let mut parts = Vec::new();
    for (rank, report) in reports.iter().enumerate() {
        let report = match &**report {
            Buffer::U8(text) => serde_json::from_slice(text)?,
            other => bail!("rank {rank} sent {} elements that are no report", other.len()),
        };
        // All ranks leave the same barriers, so the times of rank 0 stand for all.
        let (seconds_forward, seconds_backward) = (first.seconds_forward.clone(), first.seconds_backward.clone());
        let forward = Forward { out: Vec::new(), statistics: Statistics::default() };
        let gradients = first.gradients.as_ref().map(|_| Gradients::default());
        let mut part = RankResult { forward, gradients, seconds_forward, seconds_backward, report };
        for (of, all) in TENSORS.iter().zip(&tensors) {
            if let (Some(to), Some(all)) = (of(&mut part), all) {
                *to = all[rank].f32()?.to_vec();
            }
        }
        parts.push(part);
    }
    Ok(Some(parts))
}

/// Accesses a tensor of a rank's results, if it is there.
type TensorField = fn(&mut RankResult) -> Option<&mut Vec<f32>>;

/// All tensors of a rank's results.
const TENSORS: [TensorField; 9] = [
    |part| Some(&mut part.forward.out),
    |part| Some(&mut part.forward.statistics.max),
    |part| Some(&mut part.forward.statistics.sum),
    |part| part.gradients.as_mut().map(|of| &mut of.dq),
    |part| part.gradients.as_mut().map(|of| &mut of.dk),
    |part| part.gradients.as_mut().map(|of| &mut of.dv),
    |part| part.gradients.as_mut().map(|of| &mut of.d_sinks),
    |part| part.gradients.as_mut().map(|of| &mut of.d_table),
    |part| part.gradients.as_mut().map(|of| &mut of.d_bias),
];

/// Waits at a barrier for all ranks, and returns the time at which all have arrived.
fn together(comm: &dyn Communicator) -> Result<Instant> {
    comm.barrier()?;
    Ok(Instant::now())
}

/// Copies a tensor, if there is one, to the device where the rank's kernel computes.
fn to_device<'a>(kernel: &Kernel, view: Option<View<'a>>) -> Result<Option<DeviceTensor<'a>>> {
    Ok(view.map(|view| kernel.to_device(view)).transpose()?)
}

fn view(data: Data<'_>, tokens: usize, heads: usize, dim: usize) -> Result<View<'_>> {
    View::stored(data, tokens, heads, dim)
        .with_context(|| format!("{} elements are no [{tokens}, {heads}, {dim}]", data.len()))
}
