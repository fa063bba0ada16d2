//! The forward pass: output and log-sum-exp of this rank's queries.

use super::block::{Blocks, payload, receive, send, zeros};
use super::exchange::transpose;
use super::meter::Meter;
use super::ulysses::Part;
use super::wire::floats;
use super::{Group, Inputs, f32_bytes, stored_bytes};
use crate::comm::Buffer;
use crate::error::Result;
use crate::kernel::{self, HeadMap, Partial};
use crate::schedule::{Block, Pass, Schedule};
use std::sync::Arc;

/// What the forward pass leaves, for the caller and for the backward pass.
#[derive(Debug, Clone)]
pub struct Forward {
    /// Attention output `[T, H, Dv]`; 0 where a query sees nothing.
    pub out: Vec<f32>,
    /// Natural log of the sum of exponentials of the scores `[H, T]`; where a query sees nothing, its sink or -inf.
    pub lse: Vec<f32>,
    /// Most bytes this rank held at once: its tensors, blocks of others, packing buffers.
    pub peak_bytes: u64,
}

/// Attention of this rank's queries over the keys of all ranks.
///
/// The inputs are what this rank holds in the schedule's layouts. All ranks of the group must call this with the same
/// schedule and score.
///
/// # Errors
/// Shapes that do not fit the schedule, heads that do not fit the group, failures of other ranks.
pub fn forward(group: &Group, schedule: &Schedule, inputs: &Inputs) -> Result<Forward> {
    inputs.check("attention forward", group, schedule)?;
    let Inputs { q, k, v, score, bias } = *inputs;
    let mut meter = Meter::default();
    meter.hold([q, k, v].iter().map(stored_bytes).sum());
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        let inputs = kernel::Inputs { q, k, v, heads, score, bias };
        let (out, lse) = over_ring(group, schedule, &inputs, &mut meter)?;
        return Ok(Forward { out, lse, peak_bytes: meter.peak() });
    }

    let parts = Part::all(group, schedule, inputs)?;
    let mut out = zeros(q.tokens * q.heads * v.dim, &mut meter);
    let mut lse = zeros(q.tokens * q.heads, &mut meter);
    let mut results = Vec::new();
    let mut under_way = parts.first().map(|part| part.send(inputs, None)).transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = part.receive(sent, score, &mut meter)?;
        under_way = parts.get(number + 1).map(|next| next.send(inputs, None)).transpose()?;
        let (out, lse) = over_ring(group, schedule, &arrived.inputs(inputs)?, &mut meter)?;
        let lse = transpose(&lse, part.own_heads().len(), part.queries.all_tokens());
        results.push((part.return_queries(&out, v.dim, 0)?, part.return_queries(&lse, 1, 1)?));
    }
    for (part, (out_part, lse_part)) in parts.iter().zip(results) {
        part.queries.tokens(out_part, q.heads, &mut out)?;
        // 0 + (-inf) is -inf, so the sum that places the heads leaves empty rows as they are.
        part.queries.tokens(lse_part, q.heads, &mut lse)?;
    }
    let lse = transpose(&lse, q.tokens, q.heads);
    Ok(Forward { out, lse, peak_bytes: meter.peak() })
}

/// Runs the forward plan of this ring rank: output `[Tg, heads, Dv]` and log-sum-exp `[heads, Tg]`.
fn over_ring(
    group: &Group,
    schedule: &Schedule,
    inputs: &kernel::Inputs,
    meter: &mut Meter,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let rank = group.ring().rank();
    let (heads, v_dim) = (inputs.q.heads, inputs.v.dim);
    let state = |tokens: usize| f32_bytes(tokens * heads * (v_dim + 2));
    let mut own = Partial::new(inputs.q.tokens, heads, v_dim);
    meter.hold(state(inputs.q.tokens));
    let plan = schedule.plan(Pass::Forward, rank);
    let mut blocks = Blocks::new(*inputs, None, rank, group.wire(), &plan);
    let mut sent = Vec::new();
    for (number, step) in plan.iter().enumerate() {
        for transfer in &step.send {
            sent.push(send(group, transfer, blocks.message(transfer, meter)?)?);
        }
        let received = step.receive.iter().map(|transfer| receive(group, transfer)).collect::<Result<Vec<_>>>()?;
        let mut foreign = None;
        if let Some(compute) = &step.compute {
            let inputs = blocks.inputs(compute)?;
            meter.touch(group.kernel().forward_workspace(&inputs, &compute.tiles));
            let partial = if compute.queries == rank {
                &mut own
            } else {
                meter.hold(state(inputs.q.tokens));
                foreign.insert(Partial::new(inputs.q.tokens, heads, v_dim))
            };
            group.kernel().forward(&inputs, &compute.tiles, partial)?;
        }
        blocks.drop_after(number, meter);
        for (transfer, pending) in step.receive.iter().zip(received) {
            let message = payload(pending)?;
            match transfer.block {
                Block::Partial(_) => {
                    let tokens = inputs.q.tokens;
                    meter.touch(message.bytes());
                    own.merge(
                        tokens,
                        heads,
                        v_dim,
                        floats(&message, tokens * heads * (v_dim + 2), "attention forward")?,
                    );
                }
                _ => blocks.insert(transfer, message, meter),
            }
        }
        for (transfer, partial) in step.after.iter().zip(foreign) {
            let message = Buffer::F32(partial.into_message());
            meter.release(message.bytes());
            sent.push(send(group, transfer, Arc::new(message))?);
        }
    }
    for pending in sent {
        pending.wait()?;
    }
    Ok(own.finish(inputs.q.tokens, heads, v_dim, inputs.score.sinks.as_deref()))
}
