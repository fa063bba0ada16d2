//! The backward pass: gradients of this rank's inputs, by recomputation of the scores.

use super::block::{Blocks, key_elements, payload, receive, send, stored, wire_of};
use super::ulysses::HeadPart;
use super::wire::floats;
use super::{Forward, Group, Inputs, MAX_TILES_PER_CALL, check_shape, tiling};
use crate::error::{Error, Result};
use crate::kernel::{self, Data, Floats, HeadMap, Kernel, RowTarget, Saved, Statistics, View};
use crate::schedule::{Block, Pass, RowRanges, Schedule};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Gradients of the inputs of [`forward`](super::forward()), each in the shape of its input.
#[derive(Debug, Clone, Default)]
pub struct Gradients<F = Vec<f32>> {
    /// Gradient of the queries, `[T, H, D]`.
    pub dq: F,
    /// Gradient of the keys, `[Tk, G, D]`.
    pub dk: F,
    /// Gradient of the values, `[Tk, G, Dv]`.
    pub dv: F,
    /// Contribution of this rank's queries to the gradient of the sink logits, `[H]`; sum it over the ranks.
    pub d_sinks: Vec<f32>,
    /// Contribution of this rank to the gradient of the table of relative buckets, `[H, count]`; sum it over the ranks.
    pub d_table: Vec<f32>,
    /// Gradient of the bias, `[T, H, Sk]` or `[T, 1, Sk]`.
    pub d_bias: F,
}

impl Gradients<Floats> {
    /// Copies the gradients to the memory of the CPU.
    ///
    /// # Errors
    /// Failures of the kernel's device.
    pub fn to_host(self, kernel: &Kernel) -> Result<Gradients> {
        let Self { dq, dk, dv, d_sinks, d_table, d_bias } = self;
        let host = |values| kernel.to_host(values);
        let (dq, dk, dv, d_bias) = (host(dq)?, host(dk)?, host(dv)?, host(d_bias)?);
        Ok(Gradients { dq, dk, dv, d_sinks, d_table, d_bias })
    }
}

/// Computes the gradients for `d_out` `[T, H, Dv]`, given the inputs and the result of the forward pass.
///
/// All ranks of the group must call this with the same schedule and score.
///
/// # Errors
/// Shapes that do not fit, or failures of other ranks.
pub fn backward(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    forward: &Forward,
    d_out: View,
) -> Result<Gradients> {
    on_device(group, schedule, inputs, &forward.data(), d_out)?.to_host(group.kernel())
}

/// Like [`backward()`], but leaves the results on the device of the group's kernel, except for the gradients of sinks and
/// tables. The result of the forward pass may be on any device ([`Forward::data`]).
///
/// # Errors
/// Like those of [`backward()`].
pub fn on_device(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    forward: &Forward<Data>,
    d_out: View,
) -> Result<Gradients<Floats>> {
    inputs.check("attention backward", group, schedule)?;
    let Forward { out, statistics, .. } = *forward;
    let shape = [inputs.q.tokens, inputs.q.heads, inputs.v.dim];
    check_shape("attention backward", group.rank(), "d_out", &d_out, shape)?;
    let d_out = group.kernel().to_device(d_out)?;
    let delta = delta(group, out, d_out.view())?;
    with_delta(group, schedule, inputs, statistics, delta.data(), d_out.view())
}

/// For each query and head the dot product of attention's output and its gradient, `[H, T]`, from `out` and `d_out` `[T, H,
/// Dv]`. The backward pass reads nothing else of the output, so with [`with_delta`] a caller can free the output first.
///
/// # Errors
/// An output of another size than its gradient, failures of the kernel's device.
pub fn delta(group: &Group, out: Data, d_out: View) -> Result<Floats> {
    let (kernel, View { tokens, heads, dim, .. }) = (group.kernel(), d_out);
    check_len("out", out.len(), [tokens, heads, dim])?;
    let (out, d_out) = (kernel.to_device(stored(out, tokens, heads, dim)?)?, kernel.to_device(d_out)?);
    kernel.delta_on_device(out.view(), d_out.view())
}

fn check_len(what: &'static str, actual: usize, [tokens, heads, dim]: [usize; 3]) -> Result<()> {
    let expected = tokens * heads * dim;
    let (operation, shape) = ("attention backward", format!("[{tokens}, {heads}, {dim}]"));
    if actual == expected { Ok(()) } else { Err(Error::Shape { operation, what, expected, actual, shape }) }
}

/// Like [`on_device`], with the [`delta`] of output and gradient instead of the output.
///
/// # Errors
/// Like those of [`backward()`].
pub fn with_delta(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    statistics: Statistics<Data>,
    delta: Data,
    d_out: View,
) -> Result<Gradients<Floats>> {
    inputs.check("attention backward", group, schedule)?;
    let (kernel, rows) = (group.kernel(), inputs.q.tokens * inputs.q.heads);
    for (what, numbers) in
        [("the softmax's maxima", statistics.max), ("the softmax's sums", statistics.sum), ("delta", delta)]
    {
        check_len(what, numbers.len(), [inputs.q.tokens, inputs.q.heads, 1])?;
    }
    let shape = [inputs.q.tokens, inputs.q.heads, inputs.v.dim];
    check_shape("attention backward", group.rank(), "d_out", &d_out, shape)?;

    let (held, d_out) = (inputs.to_device(kernel)?, kernel.to_device(d_out)?);
    let numbers = |data| kernel.to_device(stored(data, 1, 1, rows)?);
    let (max, sum, delta) = (numbers(statistics.max)?, numbers(statistics.sum)?, numbers(delta)?);
    let (statistics, delta) = (Statistics { max: max.view().data, sum: sum.view().data }, delta.view().data);
    let (inputs, d_out) = (&held.inputs(), d_out.view());
    let d_sinks = match &inputs.score.sinks {
        // The CPU sums these few numbers per query in f64.
        Some(sinks) => {
            let read = |data| kernel.read_floats(data);
            sink_gradients(sinks, [&read(statistics.max)?, &read(statistics.sum)?, &read(delta)?])
        }
        None => Vec::new(),
    };
    let saved = Saved { statistics, delta, d_out };
    let gradients = match group.ulysses().size() {
        1 => {
            let Inputs { q, k, v, score, bias } = *inputs;
            let heads = &HeadMap::grouped(q.heads, k.heads)?;
            over_ring(group, schedule, &kernel::Inputs { q, k, v, heads, score, bias }, &saved)?
        }
        _ => over_grid(group, schedule, inputs, &saved)?,
    };
    Ok(Gradients { d_sinks, ..gradients })
}

/// The gradients on a grid with Ulysses: each part of the heads travels to the member that computes it over the ring, while
/// the part before it is computed, and its gradients travel back.
fn over_grid(group: &Group, schedule: &Schedule, inputs: &Inputs, saved: &Saved) -> Result<Gradients<Floats>> {
    let (kernel, Inputs { q, k, v, score, bias }) = (group.kernel(), *inputs);
    let mut sums = Gradients {
        dq: kernel.zeros(q.tokens * q.heads * q.dim)?,
        dk: kernel.zeros(k.tokens * k.heads * k.dim)?,
        dv: kernel.zeros(k.tokens * k.heads * v.dim)?,
        d_sinks: Vec::new(),
        d_table: vec![0.0; score.table_len()],
        d_bias: bias_zeros(kernel, bias)?,
    };
    let parts = HeadPart::all(group, schedule, inputs)?;
    let mut results = Vec::new();
    let mut under_way = parts.first().map(|part| part.send(inputs, Some(saved))).transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = part.receive(sent, score)?;
        under_way = parts.get(number + 1).map(|next| next.send(inputs, Some(saved))).transpose()?;
        let Some(saved) = arrived.saved(v.dim)? else { break };
        let part_sums = over_ring(group, schedule, &arrived.inputs(inputs)?, &saved)?;
        drop(arrived);
        let own = part.own_heads();
        let count = score.table_len() / q.heads;
        let table = &mut sums.d_table[own.start * count..own.end * count];
        table.iter_mut().zip(&part_sums.d_table).for_each(|(sum, x)| *sum += x);
        results.push([
            part.return_queries(part_sums.dq, q.dim, 0)?,
            part.return_keys(part_sums.dk, k.dim, 1)?,
            part.return_keys(part_sums.dv, v.dim, 2)?,
        ]);
        if let Some(bias) = bias {
            let moving = part.return_bias(part_sums.d_bias, &bias, 3)?;
            part.queries.tokens(moving, bias.heads, &mut sums.d_bias)?;
        }
    }
    for (part, [dq, dk, dv]) in parts.iter().zip(results) {
        part.queries.tokens(dq, q.heads, &mut sums.dq)?;
        part.keys.tokens(dk, k.heads, &mut sums.dk)?;
        part.keys.tokens(dv, v.heads, &mut sums.dv)?;
    }
    Ok(sums)
}

/// The contribution of this rank's queries to the gradient of the sinks: a sink is a key whose value is 0, so dS = -P
/// delta.
fn sink_gradients(sinks: &[f32], [max, sum, delta]: [&[f32]; 3]) -> Vec<f32> {
    let tokens = delta.len() / sinks.len().max(1);
    let gradient = |(head, &sink): (usize, &f32)| {
        let share = |row: usize| match sink {
            f32::NEG_INFINITY => 0.0,
            _ => (f64::from(sink) - f64::from(max[row])).exp() / f64::from(sum[row]) * f64::from(delta[row]),
        };
        -(head * tokens..(head + 1) * tokens).map(share).sum::<f64>() as f32
    };
    sinks.iter().enumerate().map(gradient).collect()
}

/// Runs the backward plan of this ring rank and returns the gradients of its tokens and heads.
fn over_ring(group: &Group, schedule: &Schedule, inputs: &kernel::Inputs, saved: &Saved) -> Result<Gradients<Floats>> {
    let (kernel, rank) = (group.kernel(), group.ring().rank());
    let q = inputs.q;
    let mut dq = kernel.zeros(q.tokens * q.heads * q.dim)?;
    let mut d_table = kernel.zeros(inputs.score.table_len())?;
    let mut d_bias = bias_zeros(kernel, inputs.bias)?;
    let (both, keys) = key_elements(inputs, inputs.k.tokens);
    // Gradients of this rank's keys and of its values. Those of another rank are one message: dk, then dv.
    let mut own = [kernel.zeros(keys)?, kernel.zeros(both - keys)?];
    let mut foreign: HashMap<usize, Floats> = HashMap::new();
    let plan = schedule.steps(Pass::Backward, rank);
    let wire = group.wire(&inputs.q, &inputs.k, &inputs.v);
    let mut blocks = Blocks::new(group, *inputs, Some(*saved), wire, &plan);
    let mut sent = Vec::new();
    for (number, step) in plan.iter().enumerate() {
        for transfer in &step.send {
            sent.push(send(group, transfer, wire, blocks.message(transfer)?)?);
        }
        let received =
            step.receive.iter().map(|transfer| receive(group, transfer, wire)).collect::<Result<Vec<_>>>()?;
        // Gradients of another rank's queries, followed by those of its bias rows.
        let mut q_foreign = Floats::default();
        if let Some(compute) = &step.compute {
            let (inputs, saved) = (blocks.inputs(compute)?, blocks.saved(compute)?);
            let (both, keys) = key_elements(&inputs, inputs.k.tokens);
            let (dk, dv) = match compute.keys == rank {
                true => {
                    let [dk, dv] = &mut own;
                    (dk.all_mut(), dv.all_mut())
                }
                false => {
                    let sum = match foreign.entry(compute.keys) {
                        Entry::Occupied(sum) => sum.into_mut(),
                        Entry::Vacant(place) => place.insert(kernel.zeros(both)?),
                    };
                    sum.split_at_mut(keys)
                }
            };
            let (dq, d_bias) = match compute.queries == rank {
                true => (dq.all_mut(), d_bias.all_mut()),
                false => {
                    let queries = inputs.q.tokens * q.heads * q.dim;
                    let terms = inputs.bias.map_or(0, |bias| bias.tokens * bias.heads * bias.dim);
                    q_foreign = kernel.zeros(queries + terms)?;
                    q_foreign.split_at_mut(queries)
                }
            };
            let mut sums = kernel::Sums { dq, dk, dv, d_table: d_table.all_mut(), d_bias };
            schedule.in_batches(compute, tiling(&inputs), MAX_TILES_PER_CALL, |tiles| {
                kernel.backward(&inputs, tiles, &saved, &mut sums)
            })?;
        }
        blocks.drop_after(number);
        for (transfer, pending) in step.receive.iter().zip(received) {
            let message = payload(group, pending, wire_of(wire, transfer.block, inputs))?;
            match transfer.block {
                Block::KeyGradients(owner) => {
                    let (both, _) = key_elements(inputs, transfer.rows.len());
                    let values = floats(&message, both, "attention backward")?;
                    match foreign.get_mut(&owner) {
                        Some(sum) => kernel.add_all(sum.all_mut(), values)?,
                        None => add_rows(kernel, &mut own, values, &transfer.rows, inputs)?,
                    }
                }
                Block::QueryGradients(_) => {
                    let (queries, all) = (dq.len(), dq.len() + d_bias.len());
                    let values = floats(&message, all, "attention backward")?;
                    kernel.add_all(dq.all_mut(), values.slice(0..queries))?;
                    if inputs.bias.is_some() {
                        kernel.add_all(d_bias.all_mut(), values.slice(queries..all))?;
                    }
                }
                _ => blocks.insert(transfer, message),
            }
        }
        for transfer in &step.after {
            let sum = match transfer.block {
                Block::KeyGradients(owner) => foreign.remove(&owner).unwrap_or_default(),
                _ => std::mem::take(&mut q_foreign),
            };
            sent.push(send(group, transfer, wire, Arc::new(sum.into_message()))?);
        }
        kernel.step()?;
    }
    for pending in sent {
        pending.wait()?;
    }
    let [dk, dv] = own;
    Ok(Gradients { dq, dk, dv, d_table: kernel.to_host(d_table)?, d_bias, ..Gradients::default() })
}

fn bias_zeros(kernel: &Kernel, bias: Option<View>) -> Result<Floats> {
    bias.map_or(Ok(Floats::default()), |bias| kernel.zeros(bias.tokens * bias.heads * bias.dim))
}

/// Adds received gradients of the given key rows (dk, then dv) to the sums of dk and dv.
fn add_rows(
    kernel: &Kernel,
    [dk, dv]: &mut [Floats; 2],
    values: Data,
    rows: &RowRanges,
    inputs: &kernel::Inputs,
) -> Result<()> {
    let (k, v) = (inputs.k, inputs.v);
    let (k_width, v_width) = (k.heads * k.dim, v.heads * v.dim);
    let keys = rows.len() * k_width;
    let place = |width| RowTarget { rows: rows.ranges(), offset: 0, stride: width, width };
    kernel.add(dk.all_mut(), &place(k_width), values.slice(0..keys))?;
    kernel.add(dv.all_mut(), &place(v_width), values.slice(keys..values.len()))
}
