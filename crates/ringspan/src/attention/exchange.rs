//! Ulysses: an all-to-all that turns each member's tokens into each member's heads, and back (Jacobs et al., 2023).

use super::{Wire, f32_bytes, meter::Meter};
use crate::comm::{Buffer, Communicator};
use crate::error::Result;
use crate::kernel::View;
use crate::layout::Layout;
use std::ops::Range;

/// One exchange between the members of a Ulysses group: who holds how many tokens, who computes which heads.
pub(super) struct Exchange<'a> {
    pub(super) comm: &'a dyn Communicator,
    pub(super) tokens: Vec<usize>,
    pub(super) heads: Vec<Range<usize>>,
}

impl<'a> Exchange<'a> {
    /// The members of `rank`'s group hold what `layout` says.
    pub(super) fn new(comm: &'a dyn Communicator, layout: &Layout, rank: usize, heads: Vec<Range<usize>>) -> Self {
        let first = rank - comm.rank();
        let tokens = (first..first + comm.size()).map(|member| layout.tokens(member)).collect();
        Self { comm, tokens, heads }
    }

    /// Tokens of all members.
    pub(super) fn all_tokens(&self) -> usize {
        self.tokens.iter().sum()
    }

    /// Heads of this member.
    pub(super) fn own_heads(&self) -> usize {
        self.heads[self.comm.rank()].len()
    }

    /// From all heads of this member's tokens `[T, heads, dim]` to its heads of all tokens `[Tg, own heads, dim]`.
    pub(super) fn to_heads(&self, local: &View, wire: Wire, meter: &mut Meter) -> Result<Vec<f32>> {
        let parts = self.heads.iter().map(|heads| {
            let mut part = Vec::with_capacity(local.tokens * heads.len() * local.dim);
            for token in 0..local.tokens {
                for head in heads.clone() {
                    part.extend_from_slice(local.row(token, head));
                }
            }
            wire.pack(part)
        });
        let received = self.comm.all_to_all(parts.collect())?;
        let row = self.own_heads() * local.dim;
        let mut all = Vec::with_capacity(self.all_tokens() * row);
        for (message, &tokens) in received.iter().zip(&self.tokens) {
            all.extend_from_slice(&wire.unpack(message, tokens * row, "the exchange of heads")?);
        }
        meter.hold(f32_bytes(all.len()));
        Ok(all)
    }

    /// Back: from this member's heads of all tokens to all `heads` heads of its own tokens `[T, heads, dim]`.
    ///
    /// Heads that several members hold (replicated key-value heads) are summed, in member order.
    pub(super) fn to_tokens(&self, all: &[f32], heads: usize, dim: usize) -> Result<Vec<f32>> {
        let row = self.own_heads() * dim;
        let mut parts = Vec::with_capacity(self.tokens.len());
        let mut rest = all;
        for &tokens in &self.tokens {
            let (part, later) = rest.split_at(tokens * row);
            parts.push(Buffer::F32(part.to_vec()));
            rest = later;
        }
        let received = self.comm.all_to_all(parts)?;
        let tokens = self.tokens[self.comm.rank()];
        let mut local = vec![0.0; tokens * heads * dim];
        for (message, range) in received.iter().zip(&self.heads) {
            let part = Wire::F32.unpack(message, tokens * range.len() * dim, "the exchange of tokens")?;
            let width = range.len() * dim;
            for token in 0..tokens {
                let at = (token * heads + range.start) * dim;
                for (sum, x) in local[at..at + width].iter_mut().zip(&part[token * width..]) {
                    *sum += x;
                }
            }
        }
        Ok(local)
    }
}

/// `[rows, columns]` to `[columns, rows]`.
pub(super) fn transpose(values: &[f32], rows: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for column in 0..columns {
        out.extend((0..rows).map(|row| values[row * columns + column]));
    }
    out
}
