//! The backward pass: gradients of this rank's inputs, by recomputation of the scores.

use super::block::{Blocks, key_elements, payload, receive, send, stored, zeros};
use super::meter::Meter;
use super::ulysses::Part;
use super::wire::floats;
use super::{Forward, Group, Inputs, f32_bytes, stored_bytes};
use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{self, Data, HeadMap, Saved, View};
use crate::schedule::{Block, Pass, Rows, Schedule};
use std::collections::HashMap;
use std::sync::Arc;

/// Gradients of the inputs of [`forward`](super::forward()), in their shapes.
#[derive(Debug, Clone, Default)]
pub struct Gradients {
    /// `[T, H, D]`
    pub dq: Vec<f32>,
    /// `[Tk, G, D]`
    pub dk: Vec<f32>,
    /// `[Tk, G, Dv]`
    pub dv: Vec<f32>,
    /// Of the sinks `[H]`: what this rank's queries contribute. The gradient is the sum over the ranks.
    pub d_sinks: Vec<f32>,
    /// Of the table of relative buckets `[H, count]`: what this rank computed. The gradient is the sum over the ranks.
    pub d_table: Vec<f32>,
    /// Of the bias, `[T, H, Sk]` or `[T, 1, Sk]`.
    pub d_bias: Vec<f32>,
    /// Most bytes this rank held at once: its tensors, blocks of others, packing buffers.
    pub peak_bytes: u64,
}

/// Gradients for `d_out` `[T, H, Dv]`, given the same inputs as the forward pass and what it returned.
///
/// All ranks of the group must call this with the same schedule and score.
///
/// # Errors
/// Shapes that do not fit, failures of other ranks.
pub fn backward(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    forward: &Forward,
    d_out: View,
) -> Result<Gradients> {
    inputs.check("attention backward", group, schedule)?;
    let Inputs { q, k, v, score, bias } = *inputs;
    let elements = |what, actual: usize, dim: usize| {
        let expected = q.tokens * q.heads * dim;
        let shape = format!("[{}, {}, {dim}]", q.tokens, q.heads);
        let operation = "attention backward";
        if actual == expected { Ok(()) } else { Err(Error::Shape { operation, what, expected, actual, shape }) }
    };
    elements("out", forward.out.len(), v.dim)?;
    elements("lse", forward.lse.len(), 1)?;
    elements("d_out", d_out.tokens * d_out.heads * d_out.dim, v.dim)?;

    let out = stored(Data::F32(&forward.out), q.tokens, q.heads, v.dim)?;
    let delta = group.kernel().delta(out, d_out)?;
    let d_sinks = score.sinks.as_ref().map_or(Vec::new(), |sinks| of_sinks(sinks, &forward.lse, &delta));
    let saved = Saved { lse: &forward.lse, delta: &delta, d_out };
    let mut meter = Meter::default();
    let rows = q.tokens * q.heads;
    meter.hold([q, k, v, d_out].iter().map(stored_bytes).sum::<u64>() + f32_bytes(rows * (v.dim + 2)));
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        let inputs = kernel::Inputs { q, k, v, heads, score, bias };
        let gradients = over_ring(group, schedule, &inputs, &saved, &mut meter)?;
        return Ok(Gradients { d_sinks, peak_bytes: meter.peak(), ..gradients });
    }

    let mut sums = Gradients {
        dq: zeros(rows * q.dim, &mut meter),
        dk: zeros(k.tokens * k.heads * k.dim, &mut meter),
        dv: zeros(k.tokens * k.heads * v.dim, &mut meter),
        d_sinks,
        d_table: vec![0.0; score.table_len()],
        d_bias: bias.map_or(Vec::new(), |bias| zeros(bias.tokens * bias.heads * bias.dim, &mut meter)),
        peak_bytes: 0,
    };
    let parts = Part::all(group, schedule, inputs)?;
    let mut results = Vec::new();
    let mut under_way = parts.first().map(|part| part.send(inputs, Some(&saved))).transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = part.receive(sent, score, &mut meter)?;
        under_way = parts.get(number + 1).map(|next| next.send(inputs, Some(&saved))).transpose()?;
        let Some(saved) = arrived.saved(v.dim)? else { break };
        let part_sums = over_ring(group, schedule, &arrived.inputs(inputs)?, &saved, &mut meter)?;
        let own = part.own_heads();
        let count = score.table_len() / q.heads;
        let table = &mut sums.d_table[own.start * count..own.end * count];
        table.iter_mut().zip(&part_sums.d_table).for_each(|(sum, x)| *sum += x);
        results.push([
            part.return_queries(&part_sums.dq, q.dim, 0)?,
            part.return_keys(&part_sums.dk, k.dim, 1)?,
            part.return_keys(&part_sums.dv, v.dim, 2)?,
        ]);
        if let Some(bias) = bias {
            let moving = part.return_bias(&part_sums.d_bias, &bias, 3)?;
            part.queries.tokens(moving, bias.heads, &mut sums.d_bias)?;
        }
    }
    for (part, [dq, dk, dv]) in parts.iter().zip(results) {
        part.queries.tokens(dq, q.heads, &mut sums.dq)?;
        part.keys.tokens(dk, k.heads, &mut sums.dk)?;
        part.keys.tokens(dv, v.heads, &mut sums.dv)?;
    }
    Ok(Gradients { peak_bytes: meter.peak(), ..sums })
}

/// What a rank's queries contribute to the gradient of the sinks: a sink is a key whose value is 0, so dS = -P delta.
fn of_sinks(sinks: &[f32], lse: &[f32], delta: &[f32]) -> Vec<f32> {
    let tokens = lse.len() / sinks.len().max(1);
    let of_head = |(head, &sink): (usize, &f32)| {
        let rows = head * tokens..(head + 1) * tokens;
        let share = |(lse, delta): (&f32, &f32)| {
            let p = if sink == f32::NEG_INFINITY { 0.0 } else { (f64::from(sink) - f64::from(*lse)).exp() };
            -p * f64::from(*delta)
        };
        lse[rows.clone()].iter().zip(&delta[rows]).map(share).sum::<f64>() as f32
    };
    sinks.iter().enumerate().map(of_head).collect()
}

/// Runs the backward plan of this ring rank: gradients of its tokens and heads.
fn over_ring(
    group: &Group,
    schedule: &Schedule,
    inputs: &kernel::Inputs,
    saved: &Saved,
    meter: &mut Meter,
) -> Result<Gradients> {
    let rank = group.ring().rank();
    let q = inputs.q;
    let mut dq = zeros(q.tokens * q.heads * q.dim, meter);
    let mut d_table = vec![0.0; inputs.score.table_len()];
    let mut d_bias = inputs.bias.map_or(Vec::new(), |bias| zeros(bias.tokens * bias.heads * bias.dim, meter));
    let (both, keys) = key_elements(inputs, inputs.k.tokens);
    // Gradients of keys and values of one owner, as one message: dk, then dv.
    let mut own = zeros(both, meter);
    let mut foreign: HashMap<usize, Vec<f32>> = HashMap::new();
    let plan = schedule.plan(Pass::Backward, rank);
    let mut blocks = Blocks::new(*inputs, Some(*saved), rank, group.wire(), &plan);
    let mut sent = Vec::new();
    for (number, step) in plan.iter().enumerate() {
        for transfer in &step.send {
            sent.push(send(group, transfer, blocks.message(transfer, meter)?)?);
        }
        let received = step.receive.iter().map(|transfer| receive(group, transfer)).collect::<Result<Vec<_>>>()?;
        let mut dq_foreign = Vec::new();
        if let Some(compute) = &step.compute {
            let (inputs, saved) = (blocks.inputs(compute)?, blocks.saved(compute)?);
            meter.touch(group.kernel().backward_workspace(&inputs, &compute.tiles));
            let (both, keys) = key_elements(&inputs, inputs.k.tokens);
            let sum = match compute.keys == rank {
                true => &mut own,
                false => foreign.entry(compute.keys).or_insert_with(|| zeros(both, meter)),
            };
            let (dk, dv) = sum.split_at_mut(keys);
            let dq = match compute.queries == rank {
                true => &mut dq,
                false => {
                    dq_foreign = zeros(inputs.q.tokens * q.heads * q.dim, meter);
                    &mut dq_foreign
                }
            };
            let mut sums = kernel::Sums { dq, dk, dv, d_table: &mut d_table, d_bias: &mut d_bias };
            group.kernel().backward(&inputs, &compute.tiles, &saved, &mut sums)?;
        }
        blocks.drop_after(number, meter);
        for (transfer, pending) in step.receive.iter().zip(received) {
            let message = payload(pending)?;
            meter.touch(message.bytes());
            match transfer.block {
                Block::KeyGradients(owner) => {
                    let (both, keys) = key_elements(inputs, transfer.rows.len());
                    let values = floats(&message, both, "attention backward")?;
                    match foreign.get_mut(&owner) {
                        Some(sum) => add(sum, values),
                        None => add_rows(&mut own, values, &transfer.rows, keys, inputs),
                    }
                }
                Block::QueryGradients(_) => {
                    let values = floats(&message, dq.len(), "attention backward")?;
                    add(&mut dq, values);
                }
                _ => blocks.insert(transfer, message, meter),
            }
        }
        for transfer in &step.after {
            let sum = match transfer.block {
                Block::KeyGradients(owner) => foreign.remove(&owner).unwrap_or_default(),
                _ => std::mem::take(&mut dq_foreign),
            };
            meter.release(f32_bytes(sum.len()));
            sent.push(send(group, transfer, Arc::new(Buffer::F32(sum)))?);
        }
    }
    for pending in sent {
        pending.wait()?;
    }
    let dv = own.split_off(keys);
    Ok(Gradients { dq, dk: own, dv, d_table, d_bias, ..Gradients::default() })
}

fn add(sum: &mut [f32], values: &[f32]) {
    sum.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
}

/// Adds gradients of some rows, dk then dv, of which the first `keys` elements are dk.
fn add_rows(sum: &mut [f32], values: &[f32], rows: &Rows, keys: usize, inputs: &kernel::Inputs) {
    let (k, v) = (inputs.k, inputs.v);
    let (dk, dv) = sum.split_at_mut(k.tokens * k.heads * k.dim);
    let (from_k, from_v) = values.split_at(keys);
    for (sum, mut from, width) in [(dk, from_k, k.heads * k.dim), (dv, from_v, v.heads * v.dim)] {
        for range in rows.ranges() {
            let (these, later) = from.split_at(range.len() * width);
            add(&mut sum[range.start * width..range.end * width], these);
            from = later;
        }
    }
}
