//! The backward pass: gradients of this rank's queries, keys and values, by recomputation of the scores.

use super::block::{Blocks, Widths, payload, receive, send};
use super::exchange::{Exchange, transpose};
use super::forward::{Forward, exchanged};
use super::meter::Meter;
use super::wire::Wire;
use super::{Group, Inputs, f32_bytes};
use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{HeadMap, Score, View, delta};
use crate::schedule::{Block, Schedule};
use std::collections::HashMap;
use std::sync::Arc;

/// Gradients of the inputs of [`forward`](super::forward()), in their shapes.
#[derive(Debug, Clone)]
pub struct Gradients {
    /// `[T, H, D]`
    pub dq: Vec<f32>,
    /// `[T, G, D]`
    pub dk: Vec<f32>,
    /// `[T, G, Dv]`
    pub dv: Vec<f32>,
    /// Most bytes this rank held at once: its tensors, blocks of others, packing buffers.
    pub peak_bytes: u64,
}

/// Gradients for `d_out` `[T, H, Dv]`, given the same inputs as the forward pass and what it returned.
///
/// All ranks of the group must call this with the same schedule.
///
/// # Errors
/// Shapes that do not fit, failures of other ranks.
#[allow(clippy::too_many_arguments)] // The inputs of the forward pass, what it returned, and one gradient.
pub fn backward(
    group: &Group,
    schedule: &Schedule,
    q: View,
    k: View,
    v: View,
    score: &Score,
    saved: &Forward,
    d_out: View,
) -> Result<Gradients> {
    let inputs = Inputs::new("attention backward", group, schedule, q, k, v)?;
    let elements = |what, actual: usize, dim: usize| {
        let expected = q.tokens * q.heads * dim;
        let shape = format!("[{}, {}, {dim}]", q.tokens, q.heads);
        let operation = "attention backward";
        if actual == expected { Ok(()) } else { Err(Error::Shape { operation, what, expected, actual, shape }) }
    };
    elements("out", saved.out.len(), v.dim)?;
    elements("lse", saved.lse.len(), 1)?;
    elements("d_out", d_out.tokens * d_out.heads * d_out.dim, v.dim)?;

    let shares = inputs.shares(schedule)?;
    let share = &shares[group.ulysses().rank()];
    let map = HeadMap::new(share.kv_of.clone(), share.kv.len())?;
    let delta = delta(&saved.out, d_out);
    let mut meter = Meter::default();
    let rows = q.tokens * q.heads;
    meter.hold(f32_bytes(rows * q.dim + 2 * rows * v.dim + 2 * rows + Widths::of(&inputs).both(k.tokens)));
    if group.ulysses().size() == 1 {
        let saved = Saved { lse: &saved.lse, delta: &delta, d_out };
        let (dq, dk, dv) = over_ring(group, schedule, &inputs, &map, score, &saved, &mut meter)?;
        return Ok(Gradients { dq, dk, dv, peak_bytes: meter.peak() });
    }

    let (rank, comm) = (group.rank(), group.ulysses());
    let queries = Exchange::new(comm, schedule.query(), rank, shares.iter().map(|s| s.query.clone()).collect());
    let keys = Exchange::new(comm, schedule.key(), rank, shares.iter().map(|s| s.kv.clone()).collect());
    let q_heads = queries.to_heads(&q, group.wire(), &mut meter)?;
    let k_heads = keys.to_heads(&k, group.wire(), &mut meter)?;
    let v_heads = keys.to_heads(&v, group.wire(), &mut meter)?;
    let d_out_heads = queries.to_heads(&d_out, Wire::F32, &mut meter)?;
    // Statistics are kept by head; they travel by token like everything else.
    let statistic = |values: &[f32], meter: &mut Meter| -> Result<Vec<f32>> {
        let by_token = transpose(values, q.heads, q.tokens);
        let view = View::new(&by_token, q.tokens, q.heads, 1).ok_or_else(|| Error::Shape {
            operation: "attention backward",
            what: "lse",
            expected: rows,
            actual: values.len(),
            shape: format!("[{}, {}]", q.heads, q.tokens),
        })?;
        let all = queries.to_heads(&view, Wire::F32, meter)?;
        Ok(transpose(&all, queries.all_tokens(), queries.own_heads()))
    };
    let (lse, delta) = (statistic(&saved.lse, &mut meter)?, statistic(&delta, &mut meter)?);
    let inputs = Inputs {
        q: exchanged(&q_heads, &queries, q.dim)?,
        k: exchanged(&k_heads, &keys, k.dim)?,
        v: exchanged(&v_heads, &keys, v.dim)?,
    };
    let saved = Saved { lse: &lse, delta: &delta, d_out: exchanged(&d_out_heads, &queries, v.dim)? };
    let (dq, dk, dv) = over_ring(group, schedule, &inputs, &map, score, &saved, &mut meter)?;
    Ok(Gradients {
        dq: queries.to_tokens(&dq, q.heads, q.dim)?,
        dk: keys.to_tokens(&dk, k.heads, k.dim)?,
        dv: keys.to_tokens(&dv, v.heads, v.dim)?,
        peak_bytes: meter.peak(),
    })
}

/// What the backward pass knows of the forward pass: `lse` and `delta` `[heads, Tg]`, `d_out` `[Tg, heads, Dv]`.
struct Saved<'a> {
    lse: &'a [f32],
    delta: &'a [f32],
    d_out: View<'a>,
}

/// Runs the backward plan of this ring rank: dq, dk, dv of its tokens and heads.
fn over_ring(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    map: &HeadMap,
    score: &Score,
    saved: &Saved,
    meter: &mut Meter,
) -> Result<(Vec<f32>, Vec<f32>, Vec<f32>)> {
    let rank = group.ring().rank();
    let (q, widths) = (inputs.q, Widths::of(inputs));
    let tokens = |owner: usize| schedule.key_groups().tokens(owner);
    let mut dq = vec![0.0; q.tokens * q.heads * q.dim];
    // Gradients of keys and values of one owner, as one message: dk, then dv.
    let mut gradients = HashMap::from([(rank, vec![0.0; widths.both(tokens(rank))])]);
    meter.hold(f32_bytes(dq.len() + widths.both(tokens(rank))));
    let mut blocks = Blocks::new(*inputs, rank, group.wire());
    let mut sent = Vec::new();
    for step in schedule.backward(rank) {
        for transfer in &step.send {
            let Block::Keys(owner) = transfer.block else { continue };
            sent.push(send(group, transfer, blocks.message(owner)?)?);
        }
        let received = step.receive.iter().map(|transfer| receive(group, transfer)).collect::<Result<Vec<_>>>()?;
        if let Some(compute) = &step.compute {
            let owner = compute.owner;
            let sum = gradients.entry(owner).or_insert_with(|| {
                meter.hold(f32_bytes(widths.both(tokens(owner))));
                vec![0.0; widths.both(tokens(owner))]
            });
            let (dk, dv) = sum.split_at_mut(widths.keys(tokens(owner)));
            meter.touch(group.kernel().backward_workspace(inputs.q, inputs.k, inputs.v, map, &compute.tiles));
            blocks.with(owner, |k, v| {
                let Saved { lse, delta, d_out } = *saved;
                group.kernel().backward(q, k, v, map, &compute.tiles, score, lse, delta, d_out, &mut dq, dk, dv);
            })?;
            if owner != rank {
                blocks.remove(owner);
                meter.release(f32_bytes(widths.both(tokens(owner))));
            }
        }
        for (block, pending) in received {
            let message = payload(pending)?;
            match block {
                Block::Keys(owner) => {
                    meter.hold(f32_bytes(widths.both(tokens(owner))));
                    blocks.insert(owner, tokens(owner), message);
                }
                Block::Gradients(owner) => {
                    let others = Wire::F32.unpack(&message, widths.both(tokens(owner)), "attention backward")?;
                    meter.touch(f32_bytes(others.len()));
                    for (sum, x) in gradients.entry(owner).or_default().iter_mut().zip(others.iter()) {
                        *sum += x;
                    }
                }
            }
        }
        for transfer in &step.after {
            let Block::Gradients(owner) = transfer.block else { continue };
            let sum = gradients.remove(&owner).unwrap_or_default();
            meter.release(f32_bytes(sum.len()));
            sent.push(send(group, transfer, Arc::new(Buffer::F32(sum)))?);
        }
    }
    for pending in sent {
        pending.wait()?;
    }
    let mut dk = gradients.remove(&rank).unwrap_or_default();
    let dv = dk.split_off(widths.keys(tokens(rank)));
    Ok((dq, dk, dv))
}
