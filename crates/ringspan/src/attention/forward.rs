//! The forward pass: output and log-sum-exp of this rank's queries.

use super::block::{Blocks, Widths, payload, receive, send};
use super::exchange::{Exchange, transpose};
use super::meter::Meter;
use super::{Group, Inputs, f32_bytes};
use crate::error::{Error, Result};
use crate::kernel::{HeadMap, Partial, Score, View};
use crate::schedule::{Block, Schedule};

/// What the forward pass leaves, for the caller and for the backward pass.
#[derive(Debug, Clone)]
pub struct Forward {
    /// Attention output `[T, H, Dv]`; 0 where a query sees nothing.
    pub out: Vec<f32>,
    /// Natural log of the sum of exponentials of the scores `[H, T]`; -inf where a query sees nothing.
    pub lse: Vec<f32>,
    /// Most bytes this rank held at once: its tensors, blocks of others, packing buffers.
    pub peak_bytes: u64,
}

/// Attention of this rank's queries over the keys of all ranks.
///
/// q is `[T, H, D]`, k `[T, G, D]`, v `[T, G, Dv]`: what this rank holds in the schedule's layouts. All ranks of the
/// group must call this with the same schedule.
///
/// # Errors
/// Shapes that do not fit the schedule, heads that do not fit the group, failures of other ranks.
pub fn forward(group: &Group, schedule: &Schedule, q: View, k: View, v: View, score: &Score) -> Result<Forward> {
    let inputs = Inputs::new("attention forward", group, schedule, q, k, v)?;
    let shares = inputs.shares(schedule)?;
    let share = &shares[group.ulysses().rank()];
    let map = HeadMap::new(share.kv_of.clone(), share.kv.len())?;
    let mut meter = Meter::default();
    meter.hold(f32_bytes(q.tokens * q.heads * q.dim + Widths::of(&inputs).both(k.tokens)));
    if group.ulysses().size() == 1 {
        let (out, lse) = over_ring(group, schedule, &inputs, &map, score, &mut meter)?;
        return Ok(Forward { out, lse, peak_bytes: meter.peak() });
    }

    let (rank, comm) = (group.rank(), group.ulysses());
    let queries = Exchange::new(comm, schedule.query(), rank, shares.iter().map(|s| s.query.clone()).collect());
    let keys = Exchange::new(comm, schedule.key(), rank, shares.iter().map(|s| s.kv.clone()).collect());
    let q_heads = queries.to_heads(&q, group.wire(), &mut meter)?;
    let k_heads = keys.to_heads(&k, group.wire(), &mut meter)?;
    let v_heads = keys.to_heads(&v, group.wire(), &mut meter)?;
    let view = |data, exchange: &Exchange, dim| exchanged(data, exchange, dim);
    let inputs = Inputs {
        q: view(&q_heads, &queries, q.dim)?,
        k: view(&k_heads, &keys, k.dim)?,
        v: view(&v_heads, &keys, v.dim)?,
    };
    let (out, lse) = over_ring(group, schedule, &inputs, &map, score, &mut meter)?;
    let lse = transpose(&lse, queries.own_heads(), queries.all_tokens());
    let out = queries.to_tokens(&out, q.heads, v.dim)?;
    // 0 + (-inf) is -inf, so the sum that places the heads leaves empty rows as they are.
    let lse = transpose(&queries.to_tokens(&lse, q.heads, 1)?, q.tokens, q.heads);
    Ok(Forward { out, lse, peak_bytes: meter.peak() })
}

/// A view of what an exchange returned.
pub(super) fn exchanged<'a>(data: &'a [f32], exchange: &Exchange, dim: usize) -> Result<View<'a>> {
    let (tokens, heads) = (exchange.all_tokens(), exchange.own_heads());
    View::new(data, tokens, heads, dim).ok_or_else(|| Error::Shape {
        operation: "the exchange of heads",
        what: "an exchanged tensor",
        expected: tokens * heads * dim,
        actual: data.len(),
        shape: format!("[{tokens}, {heads}, {dim}]"),
    })
}

/// Runs the forward plan of this ring rank: output `[Tg, heads, Dv]` and log-sum-exp `[heads, Tg]`.
fn over_ring(
    group: &Group,
    schedule: &Schedule,
    inputs: &Inputs,
    map: &HeadMap,
    score: &Score,
    meter: &mut Meter,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let rank = group.ring().rank();
    let q = inputs.q;
    let mut partial = Partial::new(q.tokens, q.heads, inputs.v.dim);
    meter.hold(f32_bytes(partial.out.len() + partial.max.len() + partial.sum.len()));
    let mut blocks = Blocks::new(*inputs, rank, group.wire());
    let block_bytes = |owner: usize| f32_bytes(Widths::of(inputs).both(schedule.key_groups().tokens(owner)));
    let mut sent = Vec::new();
    for step in schedule.forward(rank) {
        for transfer in &step.send {
            let Block::Keys(owner) = transfer.block else { continue };
            sent.push(send(group, transfer, blocks.message(owner)?)?);
        }
        let received = step.receive.iter().map(|transfer| receive(group, transfer)).collect::<Result<Vec<_>>>()?;
        if let Some(compute) = &step.compute {
            meter.touch(group.kernel().forward_workspace(inputs.q, inputs.k, inputs.v, map, &compute.tiles));
            blocks.with(compute.owner, |k, v| {
                group.kernel().forward(q, k, v, map, &compute.tiles, score, &mut partial);
            })?;
            if compute.owner != rank {
                blocks.remove(compute.owner);
                meter.release(block_bytes(compute.owner));
            }
        }
        for (block, pending) in received {
            let Block::Keys(owner) = block else { continue };
            meter.hold(block_bytes(owner));
            blocks.insert(owner, schedule.key_groups().tokens(owner), payload(pending)?);
        }
    }
    for pending in sent {
        pending.wait()?;
    }
    Ok(partial.finish(q.tokens, q.heads, inputs.v.dim))
}
