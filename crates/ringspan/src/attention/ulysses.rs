//! One part of the heads of a Ulysses group: its inputs travel to the member that computes it, and its results come back.

use super::block::{shape_of, stored};
use super::exchange::{Exchange, ExchangeShape, PendingExchange};
use super::wire::{Wire, floats};
use super::{Group, Inputs, f32_bytes};
use crate::comm::Buffer;
use crate::error::{Error, Result};
use crate::kernel::{self, DType, Data, Floats, HeadMap, Kernel, Saved, Score, Statistics, View};
use crate::schedule::{HeadShare, Schedule};
use std::ops::Range;

/// The exchanges of queries and of keys in a Ulysses group, and the heads that each member computes in this part.
pub(super) struct HeadPart<'a> {
    pub(super) queries: Exchange<'a>,
    pub(super) keys: Exchange<'a>,
    query_heads: Vec<Range<usize>>,
    key_heads: Vec<Range<usize>>,
    share: HeadShare,
    wire: Wire,
    /// First message tag of this part.
    tag: u64,
}

/// Number of tags reserved for one part.
const TAGS: u64 = 16;

/// The inputs of a part whose exchange has been started.
pub(super) struct PendingInputs {
    q: PendingExchange,
    k: PendingExchange,
    v: PendingExchange,
    bias: Option<PendingExchange>,
    saved: Option<[PendingExchange; 4]>,
}

/// The inputs of a part after the exchange: this member's heads of all tokens of the group.
pub(super) struct ExchangedInputs {
    q: Buffer,
    k: Buffer,
    v: Buffer,
    wire: Wire,
    bias: Option<Buffer>,
    /// d_out `[Tg, heads, Dv]`, softmax statistics and delta, `[heads, Tg]` each.
    saved: Option<(Buffer, Statistics<Floats>, Floats)>,
    map: HeadMap,
    score: Score,
    tokens: (usize, usize),
}

impl<'a> HeadPart<'a> {
    /// All parts, in the order in which the group computes them.
    pub(super) fn all(group: &'a Group, schedule: &Schedule, inputs: &Inputs) -> Result<Vec<Self>> {
        let grid = schedule.grid();
        let members = &grid.members()[group.ring().rank()];
        let parts = HeadShare::parts(inputs.q.heads, inputs.k.heads, grid, schedule.head_chunks())?;
        let wire = group.wire(&inputs.q, &inputs.k, &inputs.v);
        let part = |(number, shares): (usize, Vec<HeadShare>)| Self {
            queries: Exchange {
                group,
                tokens: members.iter().map(|&member| schedule.query().tokens(member)).collect(),
            },
            keys: Exchange { group, tokens: members.iter().map(|&member| schedule.key().tokens(member)).collect() },
            query_heads: shares.iter().map(|share| share.query.clone()).collect(),
            key_heads: shares.iter().map(|share| share.kv.clone()).collect(),
            share: shares[group.ulysses().rank()].clone(),
            wire,
            tag: wire.mark() | (number as u64 * TAGS),
        };
        Ok(parts.into_iter().enumerate().map(part).collect())
    }

    /// Starts the exchange of the inputs, and in the backward pass of the saved values, from tokens to heads.
    pub(super) fn send(&self, inputs: &Inputs, saved: Option<&Saved>) -> Result<PendingInputs> {
        let (q_heads, k_heads) = (&self.query_heads, &self.key_heads);
        let saved = match saved {
            None => None,
            Some(Saved { statistics: Statistics { max, sum }, delta, d_out }) => {
                // Statistics are stored by head, `[H, T]`, and packed by token, like all other tensors.
                let View { tokens, heads, .. } = *d_out;
                let statistic = |data: Data, tag| {
                    let by_token = View {
                        data,
                        tokens,
                        heads,
                        dim: 1,
                        token_stride: 1,
                        head_stride: tokens,
                        rows: None,
                        computes_in_f32: false,
                    };
                    self.queries.to_heads(&by_token, q_heads, Wire::F32, tag)
                };
                let (max, sum) = (statistic(*max, self.tag + 5)?, statistic(*sum, self.tag + 6)?);
                let delta = statistic(*delta, self.tag + 7)?;
                Some([self.queries.to_heads(d_out, q_heads, Wire::F32, self.tag + 4)?, max, sum, delta])
            }
        };
        let bias =
            inputs.bias.map(|bias| self.queries.to_heads(&bias, &self.bias_heads(&bias), Wire::F32, self.tag + 3));
        Ok(PendingInputs {
            q: self.queries.to_heads(&inputs.q, q_heads, self.wire, self.tag)?,
            k: self.keys.to_heads(&inputs.k, k_heads, self.wire, self.tag + 1)?,
            v: self.keys.to_heads(&inputs.v, k_heads, self.wire, self.tag + 2)?,
            bias: bias.transpose()?,
            saved,
        })
    }

    /// The heads of the bias that each member needs; a bias shared by all heads is sent whole to every member.
    fn bias_heads(&self, bias: &View) -> Vec<Range<usize>> {
        if bias.heads == 1 { vec![0..1; self.query_heads.len()] } else { self.query_heads.clone() }
    }

    /// Waits for the exchange that [`send`](Self::send) started.
    pub(super) fn receive(&self, sent: PendingInputs, score: &Score) -> Result<ExchangedInputs> {
        let saved = match sent.saved {
            None => None,
            Some([d_out, max, sum, delta]) => {
                let d_out = self.queries.heads(d_out)?;
                let (tokens, heads) = (self.queries.all_tokens(), self.share.query.len());
                let by_head = |values: PendingExchange| {
                    let values = self.queries.heads(values)?;
                    self.kernel().transpose(floats(&values, tokens * heads, "the exchange of heads")?, tokens, heads)
                };
                let statistics = Statistics { max: by_head(max)?, sum: by_head(sum)? };
                Some((d_out, statistics, by_head(delta)?))
            }
        };
        let (map, score) = self.heads(score)?;
        Ok(ExchangedInputs {
            q: self.queries.heads(sent.q)?,
            k: self.keys.heads(sent.k)?,
            v: self.keys.heads(sent.v)?,
            bias: sent.bias.map(|bias| self.queries.heads(bias)).transpose()?,
            wire: self.wire,
            saved,
            map,
            score,
            tokens: (self.queries.all_tokens(), self.keys.all_tokens()),
        })
    }

    /// Starts the exchange of a result per query, `[Tg, heads, dim]`, back from heads to tokens.
    pub(super) fn return_queries(&self, all: Floats, dim: usize, number: u64) -> Result<PendingExchange> {
        self.queries.to_tokens(all, &self.query_heads, dim, self.tag + 8 + number)
    }

    /// Starts the exchange of a result per key, `[Tg, kv heads, dim]`, back from heads to tokens.
    pub(super) fn return_keys(&self, all: Floats, dim: usize, number: u64) -> Result<PendingExchange> {
        self.keys.to_tokens(all, &self.key_heads, dim, self.tag + 8 + number)
    }

    /// Starts the exchange of the bias gradient back to tokens; the gradients of a bias shared by all heads are summed over
    /// members.
    pub(super) fn return_bias(&self, all: Floats, bias: &View, number: u64) -> Result<PendingExchange> {
        self.queries.to_tokens(all, &self.bias_heads(bias), bias.dim, self.tag + 8 + number)
    }

    fn kernel(&self) -> &'a Kernel {
        self.queries.group.kernel()
    }

    /// The key-value head that each of this member's query heads reads, and the score parameters of these heads.
    pub(super) fn heads(&self, score: &Score) -> Result<(HeadMap, Score)> {
        let map = HeadMap::new(self.share.kv_of.clone(), self.share.kv.len())?;
        Ok((map, score.heads(self.share.query.clone())))
    }

    /// The shapes of the kernel's inputs after the exchange.
    pub(super) fn shapes<'s>(&self, whole: &Inputs, heads: &'s HeadMap, score: &'s Score) -> kernel::Inputs<'s> {
        let (dtype, share) = (self.wire.dtype(), &self.share);
        let (queries, keys) = (self.queries.all_tokens(), self.keys.all_tokens());
        let bias = |bias: View| {
            let heads = if bias.heads == 1 { 1 } else { share.query.len() };
            shape_of([queries, heads, bias.dim], DType::F32)
        };
        let shape = |whole: &View, tokens: usize, heads: usize| View {
            computes_in_f32: whole.data.dtype() != dtype,
            ..shape_of([tokens, heads, whole.dim], dtype)
        };
        kernel::Inputs {
            q: shape(&whole.q, queries, share.query.len()),
            k: shape(&whole.k, keys, share.kv.len()),
            v: shape(&whole.v, keys, share.kv.len()),
            heads,
            score,
            bias: whole.bias.map(bias),
        }
    }

    /// The shape of an exchanged tensor of all query heads of this part, `[T, H, dim]`.
    pub(super) fn query_exchange(&self, dim: usize, wire: Wire) -> ExchangeShape {
        self.shape_in(&self.queries, &self.query_heads, dim as u64 * wire.width())
    }

    /// The shape of an exchanged tensor of all key-value heads of this part, `[Tk, G, dim]`.
    pub(super) fn key_exchange(&self, dim: usize, wire: Wire) -> ExchangeShape {
        self.shape_in(&self.keys, &self.key_heads, dim as u64 * wire.width())
    }

    /// The shape of an exchanged bias.
    pub(super) fn bias_exchange(&self, bias: &View) -> ExchangeShape {
        self.shape_in(&self.queries, &self.bias_heads(bias), f32_bytes(bias.dim))
    }

    fn shape_in(&self, exchange: &Exchange, heads: &[Range<usize>], width: u64) -> ExchangeShape {
        let member = exchange.group.ulysses().rank();
        ExchangeShape { tokens: exchange.tokens.clone(), heads: heads.to_vec(), member, width }
    }

    /// The type in which queries, keys and values are exchanged.
    pub(super) fn wire(&self) -> Wire {
        self.wire
    }

    /// This member's query heads.
    pub(super) fn own_heads(&self) -> Range<usize> {
        self.share.query.clone()
    }
}

impl ExchangedInputs {
    /// The inputs of the kernel; `whole` gives the widths of the tensors.
    pub(super) fn inputs(&self, whole: &Inputs) -> Result<kernel::Inputs<'_>> {
        let (queries, keys) = self.tokens;
        let (heads, kv_heads) = (self.map.heads(), self.map.kv_heads());
        let view = |wire: Wire, message, tokens: usize, heads: usize, dim: usize| {
            stored(wire.read(message, tokens * heads * dim, "the exchange of heads")?, tokens, heads, dim)
        };
        let bias = |values| {
            let (heads, dim) = whole.bias.map_or((1, 0), |bias| (if bias.heads == 1 { 1 } else { heads }, bias.dim));
            view(Wire::F32, values, queries, heads, dim)
        };
        let exchanged = |whole: &View, message, tokens: usize, heads: usize| {
            let view = view(self.wire, message, tokens, heads, whole.dim)?;
            Ok::<_, Error>(View { computes_in_f32: whole.data.dtype() != self.wire.dtype(), ..view })
        };
        Ok(kernel::Inputs {
            q: exchanged(&whole.q, &self.q, queries, heads)?,
            k: exchanged(&whole.k, &self.k, keys, kv_heads)?,
            v: exchanged(&whole.v, &self.v, keys, kv_heads)?,
            heads: &self.map,
            score: &self.score,
            bias: self.bias.as_ref().map(bias).transpose()?,
        })
    }

    /// The saved values that the backward kernel reads in addition.
    pub(super) fn saved(&self, v_dim: usize) -> Result<Option<Saved<'_>>> {
        match &self.saved {
            None => Ok(None),
            Some((d_out, statistics, delta)) => {
                let (tokens, heads) = (self.tokens.0, self.map.heads());
                let d_out = floats(d_out, tokens * heads * v_dim, "the exchange of heads")?;
                let d_out = stored(d_out, tokens, heads, v_dim)?;
                Ok(Some(Saved { statistics: statistics.data(), delta: delta.data(), d_out }))
            }
        }
    }
}
