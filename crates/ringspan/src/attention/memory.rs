//! The memory that a rank needs for a call, computed from its plan and the sizes of the kernel's buffers, without running it.
//!
//! It follows the executor step by step: what a call allocates, keeps, and frees. `tests/attention_memory.rs` compares it with what an
//! allocator counts.

use super::block::{key_elements, last_uses, shape_of, wire_of};
use super::exchange::ExchangeShape;
use super::ulysses::HeadPart;
use super::wire::Wire;
use super::{Group, Inputs, MAX_TILES_PER_CALL, f32_bytes, stored_bytes, tiling};
use crate::error::Result;
use crate::kernel::{self, HeadMap, View};
use crate::schedule::{self, Block, Compute, Pass, Plan, RowRanges, Schedule, Transfer};
use std::collections::HashMap;

/// Peak number of bytes that this rank holds in a [forward](super::forward()) call with these inputs: its tensors and results, blocks
/// of others, messages until they are sent, the kernel's buffers, the lists of its plan and of the current tiles. Not counted are the
/// schedule, which ranks of a process share, and messages that the transport keeps until they are received. The inputs' elements
/// are not read.
///
/// # Errors
/// Shapes that do not fit the schedule, and heads that do not fit the group.
pub fn forward_bytes(group: &Group, schedule: &Schedule, inputs: &Inputs) -> Result<u64> {
    inputs.check("attention forward", group, schedule)?;
    let Inputs { q, k, v, score, bias } = *inputs;
    let mut memory = Memory::default();
    memory.hold([q, k, v].iter().chain(&bias).map(stored_bytes).sum());
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        memory.ring_forward(group, schedule, &kernel::Inputs { q, k, v, heads, score, bias })?;
        return Ok(memory.peak);
    }

    let parts = HeadPart::all(group, schedule, inputs)?;
    let rows = q.tokens * q.heads;
    memory.hold(f32_bytes(rows * (v.dim + 2)));
    let mut returned = Vec::new();
    let mut under_way = parts.first().map(|part| memory.send(part, inputs, None));
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = memory.receive(sent);
        under_way = parts.get(number + 1).map(|next| memory.send(next, inputs, None));
        let (map, score) = part.heads(score)?;
        memory.ring_forward(group, schedule, &part.shapes(inputs, &map, &score))?;
        memory.release(arrived);
        // Output, maximum and sum of the part return as messages, which are split off the results.
        let results = [v.dim, 1, 1].map(|dim| part.query_exchange(dim, Wire::F32));
        results.iter().for_each(|result| memory.hold(result.gathered()));
        memory.release(results.iter().map(ExchangeShape::gathered).sum());
        returned.push(results);
    }
    returned.iter().flatten().for_each(|result| memory.return_to_tokens(result));
    memory.touch(f32_bytes(rows));
    Ok(memory.peak)
}

/// Peak number of bytes that this rank holds in a [backward](super::backward()) call for `d_out`, like [`forward_bytes`].
///
/// # Errors
/// Like those of [`forward_bytes`].
pub fn backward_bytes(group: &Group, schedule: &Schedule, inputs: &Inputs, d_out: View) -> Result<u64> {
    inputs.check("attention backward", group, schedule)?;
    let Inputs { q, k, v, score, bias } = *inputs;
    let rows = q.tokens * q.heads;
    let mut memory = Memory::default();
    // The output, and maximum, sum and delta of each row.
    let saved = f32_bytes(rows * (v.dim + 3));
    memory.hold([q, k, v, d_out].iter().chain(&bias).map(stored_bytes).sum::<u64>() + saved);
    if group.ulysses().size() == 1 {
        let heads = &HeadMap::grouped(q.heads, k.heads)?;
        memory.ring_backward(group, schedule, &kernel::Inputs { q, k, v, heads, score, bias })?;
        return Ok(memory.peak);
    }

    let biases = bias.map_or(0, |bias| bias.tokens * bias.heads * bias.dim);
    memory.hold(f32_bytes(rows * q.dim + k.tokens * k.heads * (k.dim + v.dim) + biases));
    let parts = HeadPart::all(group, schedule, inputs)?;
    let mut returned = Vec::new();
    let mut under_way = parts.first().map(|part| memory.send(part, inputs, Some(&d_out)));
    for (number, part) in parts.iter().enumerate() {
        let Some(sent) = under_way.take() else { break };
        let arrived = memory.receive(sent);
        under_way = parts.get(number + 1).map(|next| memory.send(next, inputs, Some(&d_out)));
        let (map, score) = part.heads(score)?;
        let gradients = memory.ring_backward(group, schedule, &part.shapes(inputs, &map, &score))?;
        memory.release(arrived);
        let sums = [
            part.query_exchange(q.dim, Wire::F32),
            part.key_exchange(k.dim, Wire::F32),
            part.key_exchange(v.dim, Wire::F32),
        ];
        sums.iter().for_each(|sum| memory.hold(sum.gathered()));
        if let Some(bias) = &bias {
            let sum = part.bias_exchange(bias);
            memory.hold(sum.gathered());
            memory.return_to_tokens(&sum);
        }
        memory.release(gradients);
        returned.push(sums);
    }
    returned.iter().flatten().for_each(|sum| memory.return_to_tokens(sum));
    Ok(memory.peak)
}

/// The tensors of a part whose exchange was started, and whether each is transposed when it arrives.
type PendingInputs = Vec<(ExchangeShape, bool)>;

/// Bytes that are held now, and their peak.
#[derive(Debug, Default)]
struct Memory {
    now: u64,
    peak: u64,
}

impl Memory {
    fn hold(&mut self, bytes: u64) {
        self.now += bytes;
        self.peak = self.peak.max(self.now);
    }

    fn release(&mut self, bytes: u64) {
        self.now -= bytes;
    }

    /// Counts memory that is allocated and freed inside one call.
    fn touch(&mut self, bytes: u64) {
        self.hold(bytes);
        self.release(bytes);
    }

    /// Starts the exchange of a part's inputs, and backward of the saved values.
    fn send(&mut self, part: &HeadPart, inputs: &Inputs, d_out: Option<&View>) -> PendingInputs {
        let mut sent = Vec::new();
        if let Some(d_out) = d_out {
            let statistics = [(); 3].map(|()| part.query_exchange(1, Wire::F32));
            for statistic in statistics {
                self.hold(statistic.local());
                sent.push((statistic, true));
            }
            let d_out = part.query_exchange(d_out.dim, Wire::F32);
            self.hold(d_out.local());
            sent.insert(0, (d_out, false));
        }
        let bias = inputs.bias.as_ref().map(|bias| part.bias_exchange(bias));
        let tensors = [
            part.query_exchange(inputs.q.dim, part.wire()),
            part.key_exchange(inputs.k.dim, part.wire()),
            part.key_exchange(inputs.v.dim, part.wire()),
        ];
        for tensor in tensors.into_iter().chain(bias) {
            self.hold(tensor.local());
            sent.push((tensor, false));
        }
        sent
    }

    /// Receives what [`send`](Self::send) started, and returns the bytes of what arrived.
    fn receive(&mut self, sent: PendingInputs) -> u64 {
        let mut arrived = 0;
        for (tensor, is_transposed) in sent {
            let own = tensor.heads[tensor.member].len();
            self.hold(tensor.gathered());
            self.touch(tensor.largest_message(|member| tensor.tokens[member] * own));
            self.release(tensor.local());
            if is_transposed {
                self.touch(tensor.gathered());
            }
            arrived += tensor.gathered();
        }
        arrived
    }

    /// Adds a returned result to this member's tokens.
    fn return_to_tokens(&mut self, result: &ExchangeShape) {
        let tokens = result.tokens[result.member];
        self.touch(result.largest_message(|member| tokens * result.heads[member].len()));
        self.release(result.gathered());
    }

    /// Runs the forward plan of this ring rank. The softmax state, which becomes the results, stays held.
    fn ring_forward(&mut self, group: &Group, schedule: &Schedule, inputs: &kernel::Inputs) -> Result<()> {
        let plan = schedule.steps(Pass::Forward, group.ring().rank());
        let mut blocks = BlockBytes::new(group, inputs, &plan);
        let state = |tokens: usize| f32_bytes(tokens * inputs.q.heads * (inputs.v.dim + 2));
        let lists = schedule::list_bytes(&plan);
        self.hold(state(inputs.q.tokens));
        self.hold(lists);
        for (number, step) in plan.iter().enumerate() {
            step.send.iter().for_each(|transfer| blocks.send(transfer, self));
            let mut foreign = 0;
            if let Some(compute) = &step.compute {
                let inputs = blocks.inputs(compute);
                if compute.queries != blocks.rank {
                    foreign = state(inputs.q.tokens);
                    self.hold(foreign);
                }
                schedule.in_batches(compute, tiling(&inputs), MAX_TILES_PER_CALL, |tiles| {
                    self.touch(size_of_val(tiles) as u64 + group.kernel().forward_workspace(&inputs, tiles));
                    Ok(())
                })?;
            }
            blocks.drop_after(number, self);
            for transfer in &step.receive {
                match transfer.block {
                    Block::Partial(_) => self.touch(state(inputs.q.tokens)),
                    _ => blocks.insert(transfer, self),
                }
            }
            // A state of other queries is sent after the step that computed it.
            if !step.after.is_empty() {
                self.release(foreign);
            }
        }
        self.release(lists);
        Ok(())
    }

    /// Runs the backward plan of this ring rank. Returns the bytes of its gradients, which stay held.
    fn ring_backward(&mut self, group: &Group, schedule: &Schedule, inputs: &kernel::Inputs) -> Result<u64> {
        let plan = schedule.steps(Pass::Backward, group.ring().rank());
        let mut blocks = BlockBytes::new(group, inputs, &plan);
        let both = key_elements(inputs, inputs.k.tokens).0;
        let of_queries = |inputs: &kernel::Inputs| {
            let biases = inputs.bias.map_or(0, |bias| bias.tokens * bias.heads * bias.dim);
            f32_bytes(inputs.q.tokens * inputs.q.heads * inputs.q.dim + biases)
        };
        let of_keys = |rows: usize| f32_bytes(key_elements(inputs, rows).0);
        let lists = schedule::list_bytes(&plan);
        self.hold(of_queries(inputs) + f32_bytes(both) + lists);
        // Gradient sums of other ranks' keys, which are sent on when this rank has added its own.
        let mut sums: HashMap<usize, u64> = HashMap::new();
        for (number, step) in plan.iter().enumerate() {
            step.send.iter().for_each(|transfer| blocks.send(transfer, self));
            let mut foreign_queries = 0;
            if let Some(compute) = &step.compute {
                let inputs = blocks.inputs(compute);
                if compute.keys != blocks.rank {
                    sums.entry(compute.keys).or_insert_with(|| {
                        self.hold(of_keys(inputs.k.tokens));
                        of_keys(inputs.k.tokens)
                    });
                }
                if compute.queries != blocks.rank {
                    foreign_queries = of_queries(&inputs);
                    self.hold(foreign_queries);
                }
                schedule.in_batches(compute, tiling(&inputs), MAX_TILES_PER_CALL, |tiles| {
                    self.touch(size_of_val(tiles) as u64 + group.kernel().backward_workspace(&inputs, tiles));
                    Ok(())
                })?;
            }
            blocks.drop_after(number, self);
            for transfer in &step.receive {
                match transfer.block {
                    Block::KeyGradients(_) => self.touch(of_keys(transfer.rows.len())),
                    Block::QueryGradients(_) => self.touch(of_queries(inputs)),
                    _ => blocks.insert(transfer, self),
                }
            }
            for transfer in &step.after {
                self.release(match transfer.block {
                    Block::KeyGradients(owner) => sums.remove(&owner).unwrap_or(0),
                    _ => std::mem::take(&mut foreign_queries),
                });
            }
        }
        self.release(lists);
        Ok(of_queries(inputs) + f32_bytes(both))
    }
}

/// The sizes of the blocks that a rank holds while a plan runs.
struct BlockBytes<'a> {
    rank: usize,
    own: kernel::Inputs<'a>,
    wire: Wire,
    held: HashMap<Block, (RowRanges, u64)>,
    last_use: HashMap<Block, usize>,
}

impl<'a> BlockBytes<'a> {
    fn new(group: &Group, own: &kernel::Inputs<'a>, plan: &Plan) -> Self {
        let wire = group.wire(&own.q, &own.k, &own.v);
        Self { rank: group.ring().rank(), own: *own, wire, held: HashMap::new(), last_use: last_uses(plan) }
    }

    fn bytes(&self, block: Block, rows: usize) -> u64 {
        let kernel::Inputs { q, v, bias, .. } = &self.own;
        let elements = match block {
            Block::Keys(_) => key_elements(&self.own, rows).0,
            Block::Queries(_) => rows * (q.heads * q.dim + bias.map_or(0, |bias| bias.heads * bias.dim)),
            _ => rows * q.heads * (v.dim + 3),
        };
        elements as u64 * wire_of(self.wire, block, &self.own).width()
    }

    /// Packs an own block, unless the same rows are packed already.
    fn send(&mut self, transfer: &Transfer, memory: &mut Memory) {
        let is_packed = self.held.get(&transfer.block).is_some_and(|(rows, _)| *rows == transfer.rows);
        if transfer.block.owner() == self.rank && !is_packed {
            self.insert(transfer, memory);
        }
    }

    fn insert(&mut self, transfer: &Transfer, memory: &mut Memory) {
        let bytes = self.bytes(transfer.block, transfer.rows.len());
        memory.hold(bytes);
        if let Some((_, old)) = self.held.insert(transfer.block, (transfer.rows.clone(), bytes)) {
            memory.release(old);
        }
    }

    fn drop_after(&mut self, step: usize, memory: &mut Memory) {
        self.held.retain(|block, (_, bytes)| {
            let needed = self.last_use.get(block).is_some_and(|&last| last > step);
            if !needed {
                memory.release(*bytes);
            }
            needed
        });
    }

    /// The shapes and types of what the kernel reads in a computation.
    fn inputs(&self, compute: &Compute) -> kernel::Inputs<'a> {
        let mut inputs = self.own;
        let foreign = |block: Block| {
            let (rows, _) = self.held.get(&block).filter(|_| block.owner() != self.rank)?;
            Some((rows.len(), wire_of(self.wire, block, &self.own).dtype()))
        };
        let of_rows = |view: &View<'a>, (tokens, dtype)| shape_of([tokens, view.heads, view.dim], dtype);
        if let Some(keys) = foreign(Block::Keys(compute.keys)) {
            (inputs.k, inputs.v) = (of_rows(&inputs.k, keys), of_rows(&inputs.v, keys));
        }
        if let Some(queries) = foreign(Block::Queries(compute.queries)) {
            inputs.q = of_rows(&inputs.q, queries);
            inputs.bias = inputs.bias.map(|bias| of_rows(&bias, queries));
        }
        inputs
    }
}
