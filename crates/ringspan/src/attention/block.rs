//! Keys and values as they travel, and the transfers of a step.

use super::{Group, Inputs, Wire};
use crate::comm::{Buffer, Pending};
use crate::error::{Error, Result};
use crate::kernel::View;
use crate::schedule::{Block, Transfer};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// Widths of a block of keys and values.
#[derive(Clone, Copy)]
pub(super) struct Widths {
    pub(super) heads: usize,
    pub(super) dim: usize,
    pub(super) v_dim: usize,
}

impl Widths {
    pub(super) fn of(inputs: &Inputs) -> Self {
        Self { heads: inputs.k.heads, dim: inputs.k.dim, v_dim: inputs.v.dim }
    }

    /// Elements of the keys of `rows` tokens.
    pub(super) fn keys(self, rows: usize) -> usize {
        rows * self.heads * self.dim
    }

    /// Elements of the keys and values of `rows` tokens.
    pub(super) fn both(self, rows: usize) -> usize {
        rows * self.heads * (self.dim + self.v_dim)
    }
}

/// The key blocks a rank holds besides its own, by owner.
pub(super) struct Blocks<'a> {
    own: Inputs<'a>,
    owner: usize,
    wire: Wire,
    widths: Widths,
    message: Option<Arc<Buffer>>,
    others: HashMap<usize, (usize, Arc<Buffer>)>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(own: Inputs<'a>, owner: usize, wire: Wire) -> Self {
        Self { own, owner, wire, widths: Widths::of(&own), message: None, others: HashMap::new() }
    }

    /// The block of `owner` as a message; the own one is packed when it is first sent.
    pub(super) fn message(&mut self, owner: usize) -> Result<Arc<Buffer>> {
        if owner != self.owner {
            return self.others.get(&owner).map(|(_, message)| message.clone()).ok_or_else(|| missing(owner));
        }
        let (wire, own) = (self.wire, &self.own);
        let message = self.message.get_or_insert_with(|| {
            let mut values = rows(&own.k);
            values.extend(rows(&own.v));
            Arc::new(wire.pack(values))
        });
        Ok(message.clone())
    }

    pub(super) fn insert(&mut self, owner: usize, rows: usize, message: Arc<Buffer>) {
        self.others.insert(owner, (rows, message));
    }

    pub(super) fn remove(&mut self, owner: usize) {
        self.others.remove(&owner);
    }

    /// Calls `compute` with the keys and values of `owner`.
    pub(super) fn with<T>(&self, owner: usize, compute: impl FnOnce(View, View) -> T) -> Result<T> {
        if owner == self.owner {
            return Ok(compute(self.own.k, self.own.v));
        }
        let (rows, message) = self.others.get(&owner).ok_or_else(|| missing(owner))?;
        let Widths { heads, dim, v_dim } = self.widths;
        let values: Cow<[f32]> = self.wire.unpack(message, self.widths.both(*rows), "attention")?;
        let (k, v) = values.split_at(self.widths.keys(*rows));
        let views = View::new(k, *rows, heads, dim).zip(View::new(v, *rows, heads, v_dim));
        let (k, v) = views.ok_or_else(|| missing(owner))?;
        Ok(compute(k, v))
    }
}

/// A plan that uses a block it does not hold; the schedule's tests exclude it.
fn missing(owner: usize) -> Error {
    Error::Layout(format!("the schedule uses the keys of rank {owner} before they arrived"))
}

/// The elements of a view, row after row.
pub(super) fn rows(view: &View) -> Vec<f32> {
    let mut values = Vec::with_capacity(view.tokens * view.heads * view.dim);
    for token in 0..view.tokens {
        for head in 0..view.heads {
            values.extend_from_slice(view.row(token, head));
        }
    }
    values
}

pub(super) fn send(group: &Group, transfer: &Transfer, message: Arc<Buffer>) -> Result<Box<dyn Pending>> {
    group.ring().send(transfer.peer, tag(transfer.block), message)
}

pub(super) fn receive(group: &Group, transfer: &Transfer) -> Result<(Block, Box<dyn Pending>)> {
    Ok((transfer.block, group.ring().receive(transfer.peer, tag(transfer.block))?))
}

/// The payload of a receive.
pub(super) fn payload(pending: Box<dyn Pending>) -> Result<Arc<Buffer>> {
    pending.wait()?.ok_or_else(|| Error::Layout("a receive ended without a payload".into()))
}

fn tag(block: Block) -> u64 {
    match block {
        Block::Keys(owner) => 2 * owner as u64,
        Block::Gradients(owner) => 2 * owner as u64 + 1,
    }
}
