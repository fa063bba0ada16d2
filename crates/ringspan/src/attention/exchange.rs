//! Ulysses: an all-to-all that turns each member's tokens into each member's heads, and back (Jacobs et al., 2023).
//!
//! It is made of sends and receives that are started at one time and waited for at another, so that one part of the
//! heads can travel while another is computed.

use super::block::payload;
use super::meter::Meter;
use super::wire::{Wire, append, floats};
use crate::comm::{Buffer, Communicator, Pending};
use crate::error::Result;
use crate::kernel::View;
use std::ops::Range;
use std::sync::Arc;

/// The members of a Ulysses group: who holds how many tokens.
pub(super) struct Exchange<'a> {
    pub(super) comm: &'a dyn Communicator,
    pub(super) tokens: Vec<usize>,
}

/// One tensor under way.
pub(super) struct Moving {
    /// From each member; this member's own part is at hand.
    parts: Vec<Part>,
    sent: Vec<Box<dyn Pending>>,
    heads: Vec<Range<usize>>,
    dim: usize,
    wire: Wire,
}

enum Part {
    Here(Arc<Buffer>),
    Coming(Box<dyn Pending>),
}

impl Exchange<'_> {
    /// Tokens of all members.
    pub(super) fn all_tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// Starts turning all heads of this member's tokens `[T, heads, dim]` into its heads of all tokens; member m gets
    /// `heads[m]`.
    pub(super) fn to_heads(&self, local: &View, heads: &[Range<usize>], wire: Wire, tag: u64) -> Result<Moving> {
        let part = |heads: &Range<usize>| wire.pack([(local, heads.clone())], 0..local.tokens);
        let parts = heads.iter().map(part).collect();
        self.start(parts, heads.to_vec(), local.dim, wire, tag)
    }

    /// Starts the way back: from this member's heads of all tokens to all heads of its own tokens.
    pub(super) fn to_tokens(&self, all: &[f32], heads: &[Range<usize>], dim: usize, tag: u64) -> Result<Moving> {
        let row = heads[self.comm.rank()].len() * dim;
        let mut rest = all;
        let part = |&tokens: &usize| {
            let (part, later) = rest.split_at(tokens * row);
            rest = later;
            Buffer::F32(part.to_vec())
        };
        let parts = self.tokens.iter().map(part).collect();
        self.start(parts, heads.to_vec(), dim, Wire::F32, tag)
    }

    fn start(&self, parts: Vec<Buffer>, heads: Vec<Range<usize>>, dim: usize, wire: Wire, tag: u64) -> Result<Moving> {
        let (rank, mut sent, mut coming) = (self.comm.rank(), Vec::new(), Vec::new());
        for (member, part) in parts.into_iter().enumerate() {
            if member == rank {
                coming.push(Part::Here(Arc::new(part)));
            } else {
                sent.push(self.comm.send(member, tag, Arc::new(part))?);
                coming.push(Part::Coming(self.comm.receive(member, tag)?));
            }
        }
        Ok(Moving { parts: coming, sent, heads, dim, wire })
    }

    /// What [`to_heads`](Self::to_heads) started: `[Tg, own heads, dim]`.
    pub(super) fn heads(&self, moving: Moving, meter: &mut Meter) -> Result<Buffer> {
        let row = moving.heads[self.comm.rank()].len() * moving.dim;
        let mut all = moving.wire.empty();
        for (part, &tokens) in moving.parts.into_iter().zip(&self.tokens) {
            let message = part.take()?;
            moving.wire.read(&message, tokens * row, "the exchange of heads")?;
            append(&mut all, &message);
        }
        meter.hold(all.bytes());
        finish(moving.sent)?;
        Ok(all)
    }

    /// What [`to_tokens`](Self::to_tokens) started, added to `local` `[T, heads, dim]`: heads that several members hold
    /// (replicated key-value heads) are summed, in member order.
    pub(super) fn tokens(&self, moving: Moving, heads: usize, local: &mut [f32]) -> Result<()> {
        let (tokens, dim) = (self.tokens[self.comm.rank()], moving.dim);
        for (part, range) in moving.parts.into_iter().zip(&moving.heads) {
            let message = part.take()?;
            let width = range.len() * dim;
            let part = floats(&message, tokens * width, "the exchange of tokens")?;
            for token in 0..tokens {
                let at = (token * heads + range.start) * dim;
                for (sum, x) in local[at..at + width].iter_mut().zip(&part[token * width..]) {
                    *sum += x;
                }
            }
        }
        finish(moving.sent)
    }
}

impl Part {
    fn take(self) -> Result<Arc<Buffer>> {
        match self {
            Self::Here(message) => Ok(message),
            Self::Coming(pending) => payload(pending),
        }
    }
}

fn finish(sent: Vec<Box<dyn Pending>>) -> Result<()> {
    sent.into_iter().try_for_each(|pending| pending.wait().map(drop))
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for column in 0..columns {
        out.extend((0..rows).map(|row| values[row * columns + column]));
    }
    out
}
