//! The forward pass: output and softmax statistics of this rank's queries.

use super::block::{Blocks, payload, receive, send, wire_of};
use super::ulysses::HeadPart;
use super::wire::floats;
use super::{Group, Inputs, MAX_TILES_PER_CALL, tiling};
use crate::error::Result;
use crate::kernel::{self, Data, Floats, HeadMap, Kernel, Statistics};
use crate::schedule::{Block, Pass, Schedule};
use std::sync::Arc;

/// The result of the forward pass, for the caller and for the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Forward<F = Vec<f32>> {
    /// Attention output `[T, H, Dv]`; 0 where a query sees nothing.
    pub out: F,
    /// Softmax statistics (maximum and sum) from which the backward pass recomputes the weights, `[H, T]` each.
    pub statistics: Statistics<F>,
}

impl Forward {
    /// Natural log of the sum of exponentials of the scores `[H, T]`; where a query sees nothing, its sink or -inf.
    pub fn lse(&self) -> Vec<f32> {
        self.statistics.lse()
    }

    /// Borrows the results without copying, as the backward pass reads them.
    pub fn data(&self) -> Forward<Data<'_>> {
        Forward { out: Data::F32(&self.out), statistics: self.statistics.data() }
    }
}

impl Forward<Floats> {
    /// Borrows the results without copying, as the backward pass reads them.
    pub fn data(&self) -> Forward<Data<'_>> {
        Forward { out: self.out.data(), statistics: self.statistics.data() }
    }

    /// Copies the results to the memory of the CPU.
    ///
    /// # Errors
    /// Failures of the kernel's device.
    pub fn to_host(self, kernel: &Kernel) -> Result<Forward> {
        let Self { out, statistics } = self;
        Ok(Forward { out: kernel.to_host(out)?, statistics: statistics.to_host(kernel)? })
    }
}

/// Attention of this rank's queries over the keys of all ranks.
///
/// The inputs are this rank's tensors in the schedule's layouts. All ranks of the group must call this with the same
/// schedule and score.
///
/// # Errors
/// Shapes that do not fit the schedule, heads that do not fit the group, or failures of other ranks.
pub fn forward(group: &Group, schedule: &Schedule, inputs: &Inputs) -> Result<Forward> {
    on_device(group, schedule, inputs)?.to_host(group.kernel())
}

/// Like [`forward()`], but leaves the results on the device of the group's kernel. Inputs that are there already are not
/// copied, and on a GPU the call returns without waiting for the computation.
///
/// # Errors
/// Like those of [`forward()`].
pub fn on_device(group: &Group, schedule: &Schedule, inputs: &Inputs) -> Result<Forward<Floats>> {
    inputs.check("attention forward", group, schedule)?;
    let held = inputs.to_device(group.kernel())?;
    let inputs = &held.inputs();
    let (kernel, Inputs { q, k, v, score, bias }) = (group.kernel(), *inputs);
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        let inputs = kernel::Inputs { q, k, v, heads, score, bias };
        let (out, statistics) = over_ring(group, schedule, &inputs)?;
        return Ok(Forward { out, statistics });
    }

    let parts = HeadPart::all(group, schedule, inputs)?;
    let mut out = kernel.zeros(q.tokens * q.heads * v.dim)?;
    let [mut max, mut sum] = [kernel.zeros(q.tokens * q.heads)?, kernel.zeros(q.tokens * q.heads)?];
    let mut results = Vec::new();
    let mut under_way = parts.first().map(|part| part.send(inputs, None)).transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = part.receive(sent, score)?;
        under_way = parts.get(number + 1).map(|next| next.send(inputs, None)).transpose()?;
        let (out, Statistics { max, sum }) = over_ring(group, schedule, &arrived.inputs(inputs)?)?;
        drop(arrived);
        let by_token = |x: Floats| kernel.transpose(x.data(), part.own_heads().len(), part.queries.all_tokens());
        let returned = [(out, v.dim), (by_token(max)?, 1), (by_token(sum)?, 1)].into_iter().zip(0..);
        let returned = returned.map(|((all, dim), number)| part.return_queries(all, dim, number));
        results.push(returned.collect::<Result<Vec<_>>>()?);
    }
    for (part, results) in parts.iter().zip(results) {
        // Heads are placed by adding to zeros; 0 + (-inf) is -inf, so the maxima of rows that see nothing stay -inf.
        for (all, local) in results.into_iter().zip([&mut out, &mut max, &mut sum]) {
            part.queries.tokens(all, q.heads, local)?;
        }
    }
    let by_head = |x: Floats| kernel.transpose(x.data(), q.tokens, q.heads);
    let statistics = Statistics { max: by_head(max)?, sum: by_head(sum)? };
    Ok(Forward { out, statistics })
}

/// Runs the forward plan of this ring rank and returns output `[Tg, heads, Dv]` and statistics `[heads, Tg]`.
fn over_ring(group: &Group, schedule: &Schedule, inputs: &kernel::Inputs) -> Result<(Floats, Statistics<Floats>)> {
    let (kernel, rank) = (group.kernel(), group.ring().rank());
    let (heads, v_dim) = (inputs.q.heads, inputs.v.dim);
    let mut own = kernel.state(inputs.q.tokens, heads, v_dim)?;
    let plan = schedule.steps(Pass::Forward, rank);
    let wire = group.wire(&inputs.q, &inputs.k, &inputs.v);
    let mut blocks = Blocks::new(group, *inputs, None, wire, &plan);
    let mut sent = Vec::new();
    for (number, step) in plan.iter().enumerate() {
        for transfer in &step.send {
            sent.push(send(group, transfer, wire, blocks.message(transfer)?)?);
        }
        let received =
            step.receive.iter().map(|transfer| receive(group, transfer, wire)).collect::<Result<Vec<_>>>()?;
        let mut foreign = None;
        if let Some(compute) = &step.compute {
            let inputs = blocks.inputs(compute)?;
            let state = if compute.queries == rank {
                &mut own
            } else {
                foreign.insert(kernel.state_to_send(inputs.q.tokens, heads, v_dim)?)
            };
            schedule.in_batches(compute, tiling(&inputs), MAX_TILES_PER_CALL, |tiles| {
                kernel.attend(&inputs, tiles, state)
            })?;
        }
        blocks.drop_after(number);
        for (transfer, pending) in step.receive.iter().zip(received) {
            let message = payload(group, pending, wire_of(wire, transfer.block, inputs))?;
            match transfer.block {
                Block::Partial(_) => {
                    let elements = inputs.q.tokens * heads * (v_dim + 2);
                    kernel.merge(&mut own, floats(&message, elements, "attention forward")?)?;
                }
                _ => blocks.insert(transfer, message),
            }
        }
        for (transfer, state) in step.after.iter().zip(foreign) {
            let message = state.into_message();
            sent.push(send(group, transfer, wire, Arc::new(message))?);
        }
        kernel.step()?;
    }
    for pending in sent {
        pending.wait()?;
    }
    kernel.finish(own, inputs.score.sinks.as_deref())
}
