//! The Ulysses all-to-all, which turns the tokens of each member into heads, and back (Jacobs et al., 2023).
//!
//! It consists of sends and receives that are started first and waited for later, so that one part of the heads can travel
//! while another is computed.

use super::Group;
use super::wire::{Wire, floats};
use crate::comm::{Buffer, Communicator, PendingAllToAll};
use crate::error::{Error, Result};
use crate::kernel::{Floats, RowTarget, TensorSlice, View};
use crate::schedule::RowRanges;
use std::ops::Range;
use std::sync::Arc;

/// A Ulysses group with the number of tokens that each member holds.
pub(super) struct Exchange<'a> {
    pub(super) group: &'a Group,
    pub(super) tokens: Vec<usize>,
}

/// A tensor whose exchange has been started.
pub(super) struct PendingExchange {
    /// The parts from each member, in the order of members.
    parts: PendingAllToAll,
    heads: Vec<Range<usize>>,
    dim: usize,
    wire: Wire,
}

/// A tensor `[tokens, heads, dim]` in an exchange of the Ulysses group, which turns tokens into heads or back.
pub(super) struct ExchangeShape {
    /// Number of tokens of each member.
    pub(super) tokens: Vec<usize>,
    /// The heads that each member computes.
    pub(super) heads: Vec<Range<usize>>,
    /// This rank's number in the Ulysses group.
    pub(super) member: usize,
    /// Bytes of a head of a token.
    pub(super) width: u64,
}

impl ExchangeShape {
    /// Bytes of this member's tokens with the heads of all members: heads that several members need count once for each.
    pub(super) fn local(&self) -> u64 {
        let heads: usize = self.heads.iter().map(ExactSizeIterator::len).sum();
        (self.tokens[self.member] * heads) as u64 * self.width
    }

    /// Bytes of all members' tokens with this member's heads.
    pub(super) fn gathered(&self) -> u64 {
        (self.tokens.iter().sum::<usize>() * self.heads[self.member].len()) as u64 * self.width
    }

    /// Bytes of the largest message that another member sends.
    pub(super) fn largest_message(&self, of_member: impl Fn(usize) -> usize) -> u64 {
        let others = (0..self.tokens.len()).filter(|&member| member != self.member);
        others.map(of_member).max().unwrap_or(0) as u64 * self.width
    }
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
    ) -> Result<PendingExchange> {
        let rows = RowRanges::all(local.tokens);
        let slice = |heads: &Range<usize>| TensorSlice { view: *local, heads: heads.clone(), rows: rows.ranges() };
        let part = |heads| self.group.kernel().pack(wire.dtype(), &[slice(heads)]);
        let parts = heads.iter().map(part).collect::<Result<_>>()?;
        self.start(parts, heads.to_vec(), (local.dim, wire), tag)
    }

    /// Starts the reverse exchange: from this member's heads of all tokens to all heads of its own tokens.
    pub(super) fn to_tokens(
        &self,
        all: Floats,
        heads: &[Range<usize>],
        dim: usize,
        tag: u64,
    ) -> Result<PendingExchange> {
        let row = heads[self.comm().rank()].len() * dim;
        let parts = all.parts(self.tokens.iter().map(|tokens| tokens * row));
        let parts = parts.into_iter().map(Floats::into_message).collect();
        self.start(parts, heads.to_vec(), (dim, Wire::F32), tag)
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
    ) -> Result<PendingExchange> {
        let (comm, kernel) = (self.comm(), self.group.kernel());
        let outgoing = |(member, part)| match member == comm.rank() {
            true => Ok(Arc::new(part)),
            false => kernel.outgoing(Arc::new(part), comm),
        };
        let parts = parts.into_iter().enumerate().map(outgoing).collect::<Result<_>>()?;
        Ok(PendingExchange { parts: comm.start_all_to_all(tag, parts)?, heads, dim, wire })
    }

    /// Waits for the part of a member, on this rank's device. The caller drops it before it takes the next one.
    fn part(&self, exchange: &mut PendingExchange, member: usize) -> Result<Arc<Buffer>> {
        let Some(message) = exchange.parts.next_part()? else {
            return Err(Error::Layout(format!("the exchange of heads ended before the part of member {member}")));
        };
        if member == self.comm().rank() {
            return Ok(message);
        }
        let message = self.group.kernel().incoming(message, exchange.wire.dtype())?;
        Ok(message)
    }

    /// Finishes [`to_heads`](Self::to_heads) and returns `[Tg, own heads, dim]`.
    pub(super) fn heads(&self, mut exchange: PendingExchange) -> Result<Buffer> {
        let (row, kernel) = (exchange.heads[self.comm().rank()].len() * exchange.dim, self.group.kernel());
        let (mut all, mut filled) = (kernel.allocate_message(exchange.wire.dtype(), self.all_tokens() * row)?, 0);
        for (member, &tokens) in self.tokens.iter().enumerate() {
            let message = self.part(&mut exchange, member)?;
            let elements = exchange.wire.read(&message, tokens * row, "the exchange of heads")?;
            kernel.append(&mut all, filled, elements)?;
            filled += elements.len();
        }
        exchange.parts.finish()?;
        Ok(all)
    }

    /// Finishes [`to_tokens`](Self::to_tokens) and adds the result to `local` `[T, heads, dim]`: heads that several members
    /// hold (replicated key-value heads) are summed, in member order.
    pub(super) fn tokens(&self, mut exchange: PendingExchange, heads: usize, local: &mut Floats) -> Result<()> {
        let (tokens, dim) = (self.tokens[self.comm().rank()], exchange.dim);
        for member in 0..self.tokens.len() {
            let message = self.part(&mut exchange, member)?;
            let range = &exchange.heads[member];
            let width = range.len() * dim;
            let part = floats(&message, tokens * width, "the exchange of tokens")?;
            let rows = RowRanges::all(tokens);
            let place = RowTarget { rows: rows.ranges(), offset: range.start * dim, stride: heads * dim, width };
            self.group.kernel().add(local.all_mut(), &place, part)?;
        }
        exchange.parts.finish()?;
        Ok(())
    }
}
