//! The blocks that a rank holds while a plan runs, and the messages that carry them.

use super::Group;
use super::wire::{Wire, floats};
use crate::comm::{Buffer, Communicator, Pending};
use crate::error::{Error, Result};
use crate::kernel::{DType, Data, Inputs, Kernel, Saved, Statistics, TensorSlice, View};
use crate::schedule::{Block, Compute, Plan, RowRanges, Step, Transfer};
use std::collections::HashMap;
use std::sync::Arc;

/// The blocks of this rank and of others: keys, queries, and the saved values of queries that the backward pass needs.
pub(super) struct Blocks<'a> {
    kernel: &'a Kernel,
    own: Inputs<'a>,
    saved: Option<Saved<'a>>,
    rank: usize,
    wire: Wire,
    /// Messages from other ranks, and this rank's own blocks until they have been sent.
    held: HashMap<Block, (RowRanges, Arc<Buffer>)>,
    /// For each block, the last step that needs it.
    last_use: HashMap<Block, usize>,
}

impl<'a> Blocks<'a> {
    /// Starts with this rank's own blocks only. `own` are the inputs of its ring rank, and `saved` is needed backward only.
    pub(super) fn new(group: &'a Group, own: Inputs<'a>, saved: Option<Saved<'a>>, wire: Wire, plan: &Plan) -> Self {
        let rank = group.ring().rank();
        Self { kernel: group.kernel(), own, saved, rank, wire, held: HashMap::new(), last_use: last_uses(plan) }
    }

    /// A block as a message. This rank's own block is packed here, unless the same rows were already packed.
    pub(super) fn message(&mut self, transfer: &Transfer) -> Result<Arc<Buffer>> {
        let Transfer { block, rows, .. } = transfer;
        if let Some((held, message)) = self.held.get(block)
            && (held == rows || block.owner() != self.rank)
        {
            return Ok(message.clone());
        }
        if block.owner() != self.rank {
            return Err(missing(*block));
        }
        let Inputs { q, k, v, bias, .. } = &self.own;
        let slice = |view: &View<'a>| TensorSlice { view: *view, heads: 0..view.heads, rows: rows.ranges() };
        let message = match (block, self.saved) {
            (Block::Keys(_), _) => self.kernel.pack(self.wire.dtype(), &[slice(k), slice(v)])?,
            (Block::Queries(_), _) => match bias {
                Some(bias) => self.kernel.pack(DType::F32, &[slice(q), slice(bias)])?,
                None => self.kernel.pack(self.wire.dtype(), &[slice(q)])?,
            },
            (Block::Saved(_), Some(Saved { statistics: Statistics { max, sum }, delta, d_out })) => {
                let all = |data: Data<'a>| -> Result<TensorSlice> {
                    Ok(TensorSlice { view: stored(data, 1, 1, data.len())?, heads: 0..1, rows: ONE })
                };
                self.kernel.pack(DType::F32, &[slice(&d_out), all(max)?, all(sum)?, all(delta)?])?
            }
            _ => return Err(missing(*block)),
        };
        let message = Arc::new(message);
        self.insert(transfer, message.clone());
        Ok(message)
    }

    pub(super) fn insert(&mut self, transfer: &Transfer, message: Arc<Buffer>) {
        self.held.insert(transfer.block, (transfer.rows.clone(), message));
    }

    /// Drops the blocks that no step after `step` needs.
    pub(super) fn drop_after(&mut self, step: usize) {
        let last_use = &self.last_use;
        self.held.retain(|block, _| last_use.get(block).is_some_and(|&last| last > step));
    }

    /// The tensors that the kernel reads in a computation, forward and backward.
    pub(super) fn inputs(&self, compute: &Compute) -> Result<Inputs<'_>> {
        let mut inputs = self.own;
        let Inputs { q, k, v, .. } = self.own;
        if let Some((rows, message)) = self.foreign(Block::Keys(compute.keys))? {
            let (keys, both) = (rows * k.heads * k.dim, rows * k.heads * (k.dim + v.dim));
            let data = self.wire.read(message, both, "attention")?;
            inputs.k = stored(data.slice(0..keys), rows, k.heads, k.dim)?;
            inputs.v = stored(data.slice(keys..both), rows, k.heads, v.dim)?;
        }
        if let Some((rows, message)) = self.foreign(Block::Queries(compute.queries))? {
            let queries = rows * q.heads * q.dim;
            let all = queries + self.own.bias.map_or(0, |bias| rows * bias.heads * bias.dim);
            let data =
                wire_of(self.wire, Block::Queries(compute.queries), &self.own).read(message, all, "attention")?;
            inputs.q = stored(data.slice(0..queries), rows, q.heads, q.dim)?;
            let terms = |bias: View<'a>| stored(data.slice(queries..all), rows, bias.heads, bias.dim);
            inputs.bias = self.own.bias.map(terms).transpose()?;
        }
        Ok(inputs)
    }

    /// The saved values that the backward kernel reads in addition.
    pub(super) fn saved(&self, compute: &Compute) -> Result<Saved<'_>> {
        let Inputs { q, v, .. } = self.own;
        match (self.foreign(Block::Saved(compute.queries))?, self.saved) {
            (Some((rows, message)), _) => {
                let each = rows * q.heads;
                let values = floats(message, each * (v.dim + 3), "attention backward")?;
                let statistic = |number: usize| values.slice(each * (v.dim + number)..each * (v.dim + number + 1));
                Ok(Saved {
                    statistics: Statistics { max: statistic(0), sum: statistic(1) },
                    delta: statistic(2),
                    d_out: stored(values.slice(0..each * v.dim), rows, q.heads, v.dim)?,
                })
            }
            (None, Some(saved)) => Ok(saved),
            (None, None) => Err(missing(Block::Saved(compute.queries))),
        }
    }

    /// The message of another rank's block and its number of rows; `None` for this rank's own block.
    fn foreign(&self, block: Block) -> Result<Option<(usize, &Buffer)>> {
        if block.owner() == self.rank {
            return Ok(None);
        }
        let (rows, message) = self.held.get(&block).ok_or_else(|| missing(block))?;
        Ok(Some((rows.len(), message)))
    }
}

/// For each block, the last step of a plan that needs it.
pub(super) fn last_uses(plan: &Plan) -> HashMap<Block, usize> {
    let mut last_use = HashMap::new();
    for (at, Step { send, compute, .. }) in plan.iter().enumerate() {
        last_use.extend(send.iter().map(|transfer| (transfer.block, at)));
        if let Some(Compute { queries, keys, .. }) = compute {
            let used = [Block::Keys(*keys), Block::Queries(*queries), Block::Saved(*queries)];
            last_use.extend(used.map(|block| (block, at)));
        }
    }
    last_use
}

/// The row range of a tensor of one row, for packing a plain list of numbers.
#[allow(clippy::single_range_in_vec_init)] // Packing takes a list of ranges, here of one.
const ONE: &[std::ops::Range<usize>] = &[0..1];

/// The error for a plan that uses a block before it arrived; the schedule's tests show that no plan does.
fn missing(block: Block) -> Error {
    Error::Layout(format!("the schedule uses {block:?} before it arrived"))
}

/// A contiguous tensor `[tokens, heads, dim]` over `data`, or an error if `data` has another length.
pub(super) fn stored(data: Data<'_>, tokens: usize, heads: usize, dim: usize) -> Result<View<'_>> {
    View::stored(data, tokens, heads, dim).ok_or_else(|| Error::Shape {
        operation: "attention",
        what: "a received tensor",
        expected: tokens * heads * dim,
        actual: data.len(),
        shape: format!("[{tokens}, {heads}, {dim}]"),
    })
}

/// A tensor of this shape and type without elements: sizes of buffers depend on nothing else.
pub(super) fn shape_of<'a>([tokens, heads, dim]: [usize; 3], dtype: DType) -> View<'a> {
    let data = match dtype {
        DType::F32 => Data::F32(&[]),
        DType::Bf16 => Data::Bf16(&[]),
        DType::F16 => Data::F16(&[]),
    };
    View { data, tokens, heads, dim, token_stride: heads * dim, head_stride: dim, rows: None, computes_in_f32: false }
}

/// Starts sending a block to another ring rank.
pub(super) fn send(group: &Group, transfer: &Transfer, wire: Wire, message: Arc<Buffer>) -> Result<Box<dyn Pending>> {
    send_to(group, group.ring(), transfer.peer, tag(transfer.block, wire), message)
}

/// Starts sending a message that this rank's kernel has packed.
pub(super) fn send_to(
    group: &Group,
    comm: &dyn Communicator,
    peer: usize,
    tag: u64,
    message: Arc<Buffer>,
) -> Result<Box<dyn Pending>> {
    comm.send(peer, tag, group.kernel().outgoing(message, comm)?)
}

pub(super) fn receive(group: &Group, transfer: &Transfer, wire: Wire) -> Result<Box<dyn Pending>> {
    group.ring().receive(transfer.peer, tag(transfer.block, wire))
}

/// Waits for a receive and returns its message on the device of this rank's kernel.
pub(super) fn payload(group: &Group, pending: Box<dyn Pending>, wire: Wire) -> Result<Arc<Buffer>> {
    let message = pending.wait()?.ok_or_else(|| Error::Layout("a receive ended without a payload".into()))?;
    group.kernel().incoming(message, wire.dtype())
}

/// The wire type of a block, where `wire` is the type for keys and for queries without a bias.
pub(super) fn wire_of(wire: Wire, block: Block, inputs: &Inputs) -> Wire {
    match block {
        Block::Queries(_) if inputs.bias.is_some() => Wire::F32,
        Block::Keys(_) | Block::Queries(_) => wire,
        Block::KeyGradients(_) | Block::Saved(_) | Block::Partial(_) | Block::QueryGradients(_) => Wire::F32,
    }
}

fn tag(block: Block, wire: Wire) -> u64 {
    let kind = match block {
        Block::Keys(_) => 0,
        Block::KeyGradients(_) => 1,
        Block::Queries(_) => 2,
        Block::Saved(_) => 3,
        Block::Partial(_) => 4,
        Block::QueryGradients(_) => 5,
    };
    wire.mark() | (6 * block.owner() as u64 + kind)
}

/// Number of elements of keys and values together, and of keys alone, for `rows` tokens.
pub(super) fn key_elements(inputs: &Inputs, rows: usize) -> (usize, usize) {
    let Inputs { k, v, .. } = inputs;
    (rows * k.heads * (k.dim + v.dim), rows * k.heads * k.dim)
}
