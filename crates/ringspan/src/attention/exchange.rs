//! The Ulysses all-to-all, which turns the tokens of each member into heads, and back (Jacobs et al., 2023).
//!
//! It consists of sends and receives that are started first and waited for later, so that one part of the heads can travel
//! while another is computed.

use super::Group;
use super::block::{payload, send_to};
use super::meter::Meter;
use super::wire::{Wire, floats};
use crate::comm::{Buffer, Communicator, Pending};
use crate::error::Result;
use crate::kernel::{Floats, RowTarget, TensorSlice, View};
use crate::schedule::Rows;
use std::ops::Range;
use std::sync::Arc;

/// A Ulysses group with the number of tokens that each member holds.
pub(super) struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) tokens: Vec<usize>,
}

/// A tensor whose exchange has been started.
pub(super) struct PendingExchange {
    /// The parts from each member; this member's own part is already here.
    parts: Vec<ReceivedPart>,
    sent: Vec<Box<dyn Pending>>,
    heads: Vec<Range<usize>>,
    dim: usize,
    wire: Wire,
    /// Bytes of the messages that were packed for sending.
    bytes: u64,
}

enum ReceivedPart {
    Here(Arc<Buffer>),
    Coming(Box<dyn Pending>),
}

impl<'a> Exchange<'a> {
    /// Number of tokens of all members.
    pub(super) fn all_tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// Starts the exchange of this member's tokens `[T, heads, dim]`, all heads, for its heads of all members' tokens;
    /// member m receives `heads[m]`.
    pub(super) fn to_heads(
        &self,
        local: &View,
        heads: &[Range<usize>],
        wire: Wire,
        tag: u64,
        meter: &mut Meter,
    ) -> Result<PendingExchange> {
        let rows = Rows::all(local.tokens);
        let slice = |heads: &Range<usize>| TensorSlice { view: *local, heads: heads.clone(), rows: rows.ranges() };
        let part = |heads| self.group.kernel().pack(wire.stored(), &[slice(heads)]);
        let parts = heads.iter().map(part).collect::<Result<_>>()?;
        self.start(parts, heads.to_vec(), (local.dim, wire), tag, meter)
    }

    /// Starts the reverse exchange: from this member's heads of all tokens to all heads of its own tokens.
    pub(super) fn to_tokens(
        &self,
        all: Floats,
        heads: &[Range<usize>],
        dim: usize,
        tag: u64,
        meter: &mut Meter,
    ) -> Result<PendingExchange> {
        let row = heads[self.comm().rank()].len() * dim;
        let parts = all.parts(self.tokens.iter().map(|tokens| tokens * row));
        let parts = parts.into_iter().map(Floats::into_message).collect();
        self.start(parts, heads.to_vec(), (dim, Wire::F32), tag, meter)
    }

    fn comm(&self) -> &'a dyn Communicator {
        self.group.ulysses()
    }

    fn start(
        &self,
        parts: Vec<Buffer>,
        heads: Vec<Range<usize>>,
        (dim, wire): (usize, Wire),
        tag: u64,
        meter: &mut Meter,
    ) -> Result<PendingExchange> {
        let bytes = parts.iter().map(Buffer::bytes).sum();
        meter.hold(bytes);
        let (rank, mut sent, mut coming) = (self.comm().rank(), Vec::new(), Vec::new());
        for (member, part) in parts.into_iter().enumerate() {
            if member == rank {
                coming.push(ReceivedPart::Here(Arc::new(part)));
            } else {
                sent.push(send_to(self.group, self.comm(), member, tag, Arc::new(part))?);
                coming.push(ReceivedPart::Coming(self.comm().receive(member, tag)?));
            }
        }
        Ok(PendingExchange { parts: coming, sent, heads, dim, wire, bytes })
    }

    /// Finishes [`to_heads`](Self::to_heads) and returns `[Tg, own heads, dim]`.
    pub(super) fn heads(&self, exchange: PendingExchange, meter: &mut Meter) -> Result<Buffer> {
        let (row, kernel) = (exchange.heads[self.comm().rank()].len() * exchange.dim, self.group.kernel());
        let (mut all, mut filled) = (kernel.room(exchange.wire.stored(), self.all_tokens() * row)?, 0);
        meter.hold(self.all_tokens() as u64 * row as u64 * exchange.wire.width());
        for (part, &tokens) in exchange.parts.into_iter().zip(&self.tokens) {
            let message = part.take(self.group, exchange.wire, meter)?;
            let elements = exchange.wire.read(&message, tokens * row, "the exchange of heads")?;
            kernel.append(&mut all, filled, elements)?;
            filled += elements.len();
        }
        finish(exchange.sent)?;
        meter.release(exchange.bytes);
        Ok(all)
    }

    /// Finishes [`to_tokens`](Self::to_tokens) and adds the result to `local` `[T, heads, dim]`: heads that several members
    /// hold (replicated key-value heads) are summed, in member order.
    pub(super) fn tokens(
        &self,
        exchange: PendingExchange,
        heads: usize,
        local: &mut Floats,
        meter: &mut Meter,
    ) -> Result<()> {
        let (tokens, dim) = (self.tokens[self.comm().rank()], exchange.dim);
        for (part, range) in exchange.parts.into_iter().zip(&exchange.heads) {
            let message = part.take(self.group, exchange.wire, meter)?;
            let width = range.len() * dim;
            let part = floats(&message, tokens * width, "the exchange of tokens")?;
            let rows = Rows::all(tokens);
            let place = RowTarget { rows: rows.ranges(), offset: range.start * dim, stride: heads * dim, width };
            self.group.kernel().add(local.all_mut(), &place, part)?;
        }
        finish(exchange.sent)?;
        meter.release(exchange.bytes);
        Ok(())
    }
}

impl ReceivedPart {
    /// The message of this part. The caller drops it before it takes the next one, so only one is held at a time.
    fn take(self, group: &Group, wire: Wire, meter: &mut Meter) -> Result<Arc<Buffer>> {
        match self {
            Self::Here(message) => Ok(message),
            Self::Coming(pending) => {
                let message = payload(group, pending, wire)?;
                meter.touch(message.bytes());
                Ok(message)
            }
        }
    }
}

fn finish(sent: Vec<Box<dyn Pending>>) -> Result<()> {
    sent.into_iter().try_for_each(|pending| pending.wait().map(drop))
}
