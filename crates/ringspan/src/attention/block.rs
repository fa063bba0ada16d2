//! The blocks a rank holds while a plan runs, and how they travel.

use super::meter::Meter;
use super::wire::{Wire, floats};
use super::{Group, f32_bytes};
use crate::comm::{Buffer, Pending};
use crate::error::{Error, Result};
use crate::kernel::{Data, Inputs, Saved, View};
use crate::schedule::{Block, Compute, Plan, Rows, Step, Transfer};
use std::collections::HashMap;
use std::sync::Arc;

/// What a rank has of its own and of others: keys, queries, and what the backward pass needs of queries.
pub(super) struct Blocks<'a> {
    own: Inputs<'a>,
    saved: Option<Saved<'a>>,
    rank: usize,
    wire: Wire,
    /// Messages of others, and of this rank's own blocks while they are still to be sent.
    held: HashMap<Block, (Rows, Arc<Buffer>)>,
    /// The last step that needs a block.
    last_use: HashMap<Block, usize>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(own: Inputs<'a>, saved: Option<Saved<'a>>, rank: usize, wire: Wire, plan: &Plan) -> Self {
        let mut last_use = HashMap::new();
        for (at, Step { send, compute, .. }) in plan.iter().enumerate() {
            last_use.extend(send.iter().map(|transfer| (transfer.block, at)));
            if let Some(Compute { queries, keys, .. }) = compute {
                let used = [Block::Keys(*keys), Block::Queries(*queries), Block::Saved(*queries)];
                last_use.extend(used.map(|block| (block, at)));
            }
        }
        Self { own, saved, rank, wire, held: HashMap::new(), last_use }
    }

    /// A block as a message; of this rank's own it is packed now, unless the same rows were sent before.
    pub(super) fn message(&mut self, transfer: &Transfer, meter: &mut Meter) -> Result<Arc<Buffer>> {
        let Transfer { block, rows, .. } = transfer;
        if let Some((held, message)) = self.held.get(block)
            && (held == rows || block.owner() != self.rank)
        {
            return Ok(message.clone());
        }
        if block.owner() != self.rank {
            return Err(missing(*block));
        }
        let Inputs { q, k, v, .. } = &self.own;
        let tokens = rows.ranges().iter().flat_map(Clone::clone);
        let message = match (block, self.saved) {
            (Block::Keys(_), _) => self.wire.pack([(k, 0..k.heads), (v, 0..v.heads)], tokens),
            (Block::Queries(_), _) => self.wire.pack([(q, 0..q.heads)], tokens),
            (Block::Saved(_), Some(Saved { lse, delta, d_out })) => {
                let mut message = Wire::F32.pack([(&d_out, 0..d_out.heads)], tokens);
                if let Buffer::F32(values) = &mut message {
                    values.extend_from_slice(lse);
                    values.extend_from_slice(delta);
                }
                message
            }
            _ => return Err(missing(*block)),
        };
        let message = Arc::new(message);
        self.insert(transfer, message.clone(), meter);
        Ok(message)
    }

    pub(super) fn insert(&mut self, transfer: &Transfer, message: Arc<Buffer>, meter: &mut Meter) {
        meter.hold(message.bytes());
        if let Some((_, old)) = self.held.insert(transfer.block, (transfer.rows.clone(), message)) {
            meter.release(old.bytes());
        }
    }

    /// Drops what no step after `step` needs.
    pub(super) fn drop_after(&mut self, step: usize, meter: &mut Meter) {
        let last_use = &self.last_use;
        self.held.retain(|block, (_, message)| {
            let needed = last_use.get(block).is_some_and(|&last| last > step);
            if !needed {
                meter.release(message.bytes());
            }
            needed
        });
    }

    /// What the kernel reads in a computation.
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
            let data = self.wire.read(message, rows * q.heads * q.dim, "attention")?;
            inputs.q = stored(data, rows, q.heads, q.dim)?;
            inputs.bias = None;
        }
        Ok(inputs)
    }

    /// What the backward kernel reads besides.
    pub(super) fn saved(&self, compute: &Compute) -> Result<Saved<'_>> {
        let Inputs { q, v, .. } = self.own;
        match (self.foreign(Block::Saved(compute.queries))?, self.saved) {
            (Some((rows, message)), _) => {
                let values = floats(message, rows * q.heads * (v.dim + 2), "attention backward")?;
                let (d_out, statistics) = values.split_at(rows * q.heads * v.dim);
                let (lse, delta) = statistics.split_at(rows * q.heads);
                Ok(Saved { lse, delta, d_out: stored(Data::F32(d_out), rows, q.heads, v.dim)? })
            }
            (None, Some(saved)) => Ok(saved),
            (None, None) => Err(missing(Block::Saved(compute.queries))),
        }
    }

    /// The message of a block, with its rows; `None` for this rank's own.
    fn foreign(&self, block: Block) -> Result<Option<(usize, &Buffer)>> {
        if block.owner() == self.rank {
            return Ok(None);
        }
        let (rows, message) = self.held.get(&block).ok_or_else(|| missing(block))?;
        Ok(Some((rows.len(), message)))
    }
}

/// A plan that uses a block it does not hold; the schedule's tests exclude it.
fn missing(block: Block) -> Error {
    Error::Layout(format!("the schedule uses {block:?} before it arrived"))
}

/// A contiguous tensor of a size that is known to fit.
pub(super) fn stored(data: Data<'_>, tokens: usize, heads: usize, dim: usize) -> Result<View<'_>> {
    View::stored(data, tokens, heads, dim).ok_or_else(|| Error::Shape {
        operation: "attention",
        what: "a received tensor",
        expected: tokens * heads * dim,
        actual: data.len(),
        shape: format!("[{tokens}, {heads}, {dim}]"),
    })
}

pub(super) fn send(group: &Group, transfer: &Transfer, message: Arc<Buffer>) -> Result<Box<dyn Pending>> {
    group.ring().send(transfer.peer, tag(transfer.block), message)
}

pub(super) fn receive(group: &Group, transfer: &Transfer) -> Result<Box<dyn Pending>> {
    group.ring().receive(transfer.peer, tag(transfer.block))
}

/// The payload of a receive.
pub(super) fn payload(pending: Box<dyn Pending>) -> Result<Arc<Buffer>> {
    pending.wait()?.ok_or_else(|| Error::Layout("a receive ended without a payload".into()))
}

fn tag(block: Block) -> u64 {
    let kind = match block {
        Block::Keys(_) => 0,
        Block::KeyGradients(_) => 1,
        Block::Queries(_) => 2,
        Block::Saved(_) => 3,
        Block::Partial(_) => 4,
        Block::QueryGradients(_) => 5,
    };
    6 * block.owner() as u64 + kind
}

/// Elements of keys and values of `rows` tokens, of these those of the keys.
pub(super) fn key_elements(inputs: &Inputs, rows: usize) -> (usize, usize) {
    let Inputs { k, v, .. } = inputs;
    (rows * k.heads * (k.dim + v.dim), rows * k.heads * k.dim)
}

/// Zeros that the meter knows of.
pub(super) fn zeros(len: usize, meter: &mut Meter) -> Vec<f32> {
    meter.hold(f32_bytes(len));
    vec![0.0; len]
}
