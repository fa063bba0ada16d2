//! The forward pass: output and softmax statistics of this rank's queries.

use super::block::{Blocks, payload, receive, send, wire_of, zeros};
use super::meter::Meter;
use super::ulysses::HeadPart;
use super::wire::floats;
use super::{Group, Inputs, MAX_TILES_PER_CALL, f32_bytes, stored_bytes, tiling};
use crate::error::Result;
use crate::kernel::{self, Data, Floats, HeadMap, Kernel, Statistics};
use crate::schedule::{self, Block, Pass, Schedule};
use std::sync::Arc;

/// The result of the forward pass, for the caller and for the backward pass.
#[derive(Debug, Clone, Copy)]
pub struct Forward<F = Vec<f32>> {
    /// Attention output `[T, H, Dv]`; 0 where a query sees nothing.
    pub out: F,
    /// Softmax statistics (maximum and sum) from which the backward pass recomputes the weights, `[H, T]` each.
    pub statistics: Statistics<F>,
    /// Peak number of bytes that this rank held: its tensors, blocks of others, messages until they are sent, the kernel's
    /// buffers, the lists of its plan and of the current tiles. Not counted are the schedule, which ranks of a process
    /// share, and messages that the transport keeps until they are received.
    pub peak_bytes: u64,
}

impl Forward {
    /// Natural log of the sum of exponentials of the scores `[H, T]`; where a query sees nothing, its sink or -inf.
    pub fn lse(&self) -> Vec<f32> {
        self.statistics.lse()
    }

    /// Borrows the results without copying, as the backward pass reads them.
    pub fn data(&self) -> Forward<Data<'_>> {
        Forward { out: Data::F32(&self.out), statistics: self.statistics.data(), peak_bytes: self.peak_bytes }
    }
}

impl Forward<Floats> {
    /// Borrows the results without copying, as the backward pass reads them.
    pub fn data(&self) -> Forward<Data<'_>> {
        Forward { out: self.out.data(), statistics: self.statistics.data(), peak_bytes: self.peak_bytes }
    }

    /// Copies the results to the memory of the CPU.
    ///
    /// # Errors
    /// Failures of the kernel's device.
    pub fn to_host(self, kernel: &Kernel) -> Result<Forward> {
        let Self { out, statistics, peak_bytes } = self;
        Ok(Forward { out: kernel.to_host(out)?, statistics: statistics.to_host(kernel)?, peak_bytes })
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
    let held = inputs.hold(group.kernel())?;
    let inputs = &held.inputs();
    let (kernel, Inputs { q, k, v, score, bias }) = (group.kernel(), *inputs);
    let mut meter = Meter::default();
    meter.hold([q, k, v].iter().chain(&bias).map(stored_bytes).sum());
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        let inputs = kernel::Inputs { q, k, v, heads, score, bias };
        let (out, statistics) = over_ring(group, schedule, &inputs, &mut meter)?;
        return Ok(Forward { out, statistics, peak_bytes: meter.peak() });
    }

    let parts = HeadPart::all(group, schedule, inputs)?;
    let mut out = zeros(kernel, q.tokens * q.heads * v.dim, &mut meter)?;
    let [mut max, mut sum] =
        [zeros(kernel, q.tokens * q.heads, &mut meter)?, zeros(kernel, q.tokens * q.heads, &mut meter)?];
    let mut results = Vec::new();
    let mut under_way = parts.first().map(|part| part.send(inputs, None, &mut meter)).transpose()?;
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = part.receive(sent, score, &mut meter)?;
        under_way = parts.get(number + 1).map(|next| next.send(inputs, None, &mut meter)).transpose()?;
        let (out, Statistics { max, sum }) = over_ring(group, schedule, &arrived.inputs(inputs)?, &mut meter)?;
        arrived.release(&mut meter);
        let held = f32_bytes(out.len() + max.len() + sum.len());
        let by_token = |x: Floats| kernel.transpose(x.data(), part.own_heads().len(), part.queries.all_tokens());
        let returned = [(out, v.dim), (by_token(max)?, 1), (by_token(sum)?, 1)].into_iter().zip(0..);
        let returned = returned.map(|((all, dim), number)| part.return_queries(all, dim, number, &mut meter));
        results.push(returned.collect::<Result<Vec<_>>>()?);
        meter.release(held);
    }
    for (part, results) in parts.iter().zip(results) {
        // Heads are placed by adding to zeros; 0 + (-inf) is -inf, so the maxima of rows that see nothing stay -inf.
        for (all, local) in results.into_iter().zip([&mut out, &mut max, &mut sum]) {
            part.queries.tokens(all, q.heads, local, &mut meter)?;
        }
    }
    meter.touch(f32_bytes(max.len()));
    let by_head = |x: Floats| kernel.transpose(x.data(), q.tokens, q.heads);
    let statistics = Statistics { max: by_head(max)?, sum: by_head(sum)? };
    Ok(Forward { out, statistics, peak_bytes: meter.peak() })
}

/// Runs the forward plan of this ring rank and returns output `[Tg, heads, Dv]` and statistics `[heads, Tg]`.
fn over_ring(
    group: &Group,
    schedule: &Schedule,
    inputs: &kernel::Inputs,
    meter: &mut Meter,
) -> Result<(Floats, Statistics<Floats>)> {
    let (kernel, rank) = (group.kernel(), group.ring().rank());
    let (heads, v_dim) = (inputs.q.heads, inputs.v.dim);
    let state_bytes = |tokens: usize| f32_bytes(tokens * heads * (v_dim + 2));
    let mut own = kernel.state(inputs.q.tokens, heads, v_dim)?;
    meter.hold(state_bytes(inputs.q.tokens));
    let plan = schedule.steps(Pass::Forward, rank);
    let lists = schedule::list_bytes(&plan);
    meter.hold(lists);
    let wire = group.wire(&inputs.q, &inputs.k, &inputs.v);
    let mut blocks = Blocks::new(group, *inputs, None, wire, &plan);
    let mut sent = Vec::new();
    for (number, step) in plan.iter().enumerate() {
        for transfer in &step.send {
            sent.push(send(group, transfer, wire, blocks.message(transfer, meter)?)?);
        }
        let received =
            step.receive.iter().map(|transfer| receive(group, transfer, wire)).collect::<Result<Vec<_>>>()?;
        let mut foreign = None;
        if let Some(compute) = &step.compute {
            let inputs = blocks.inputs(compute)?;
            let state = if compute.queries == rank {
                &mut own
            } else {
                meter.hold(state_bytes(inputs.q.tokens));
                foreign.insert(kernel.state_to_send(inputs.q.tokens, heads, v_dim)?)
            };
            schedule.in_batches(compute, tiling(&inputs), MAX_TILES_PER_CALL, |tiles| {
                meter.touch(size_of_val(tiles) as u64 + kernel.forward_workspace(&inputs, tiles));
                kernel.attend(&inputs, tiles, state)
            })?;
        }
        blocks.drop_after(number, meter);
        for (transfer, pending) in step.receive.iter().zip(received) {
            let message = payload(group, pending, wire_of(wire, transfer.block, inputs))?;
            match transfer.block {
                Block::Partial(_) => {
                    meter.touch(message.bytes());
                    let elements = inputs.q.tokens * heads * (v_dim + 2);
                    kernel.merge(&mut own, floats(&message, elements, "attention forward")?)?;
                }
                _ => blocks.insert(transfer, message, meter),
            }
        }
        for (transfer, state) in step.after.iter().zip(foreign) {
            let message = state.into_message();
            meter.release(message.bytes());
            sent.push(send(group, transfer, wire, Arc::new(message))?);
        }
        kernel.step()?;
    }
    for pending in sent {
        pending.wait()?;
    }
    meter.release(lists);
    kernel.finish(own, inputs.score.sinks.as_deref())
}
