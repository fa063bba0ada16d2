//! Attention over a group of ranks: runs the plans of a schedule, forward and backward.
//!
//! Shape letters: T tokens on this rank, Tg tokens of its ring rank (its Ulysses group), H query heads, G key-value
//! heads, D and Dv head widths, Sk keys of a batch row.

mod backward;
mod block;
mod decode;
mod exchange;
mod forward;
mod group;
mod meter;
mod ulysses;
mod wire;

pub use backward::{Gradients, backward};
pub use decode::{Merge, Tokens, decode};
pub use forward::{Forward, forward};
pub use group::Group;
pub use wire::Wire;

use crate::error::{Error, Result};
use crate::kernel::{Data, Score, View};
use crate::schedule::{Schedule, Strategy};

/// The inputs of one attention call on this rank.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries `[T, H, D]`.
    pub q: View<'a>,
    /// Keys `[Tk, G, D]`.
    pub k: View<'a>,
    /// Values `[Tk, G, Dv]`.
    pub v: View<'a>,
    /// From products to weights, for all H heads.
    pub score: &'a Score,
    /// A term for each query of this rank, head, and key of the query's batch row: `[T, H, Sk]`, or `[T, 1, Sk]` for all
    /// heads.
    pub bias: Option<View<'a>>,
}

impl<'a> Inputs<'a> {
    /// Queries, keys and values, without a bias.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>, score: &'a Score) -> Self {
        Self { q, k, v, score, bias: None }
    }

    /// The same with a bias.
    pub fn with_bias(self, bias: View<'a>) -> Self {
        Self { bias: Some(bias), ..self }
    }

    fn check(&self, operation: &'static str, group: &Group, schedule: &Schedule) -> Result<()> {
        if schedule.grid() != group.grid() {
            return Err(Error::MeshSize {
                mesh: format!("{} (the schedule's; the group's is {})", schedule.grid(), group.grid()),
                needed: schedule.query().ranks(),
                ranks: group.size(),
            });
        }
        let rank = group.rank();
        self.check_shapes(operation, rank, schedule.query().tokens(rank), schedule.key().tokens(rank))?;
        if let Some(bias) = &self.bias {
            let (given, keys) = (bias.dim, schedule.key().documents().row_len());
            if given != keys {
                return Err(Error::Shape {
                    operation,
                    what: "the bias",
                    expected: keys,
                    actual: given,
                    shape: "a row of it: one element for each key of a batch row".into(),
                });
            }
            supports_bias(schedule.strategy())?;
        }
        Ok(())
    }

    fn check_shapes(&self, operation: &'static str, rank: usize, queries: usize, keys: usize) -> Result<()> {
        let Self { q, k, v, score, bias } = self;
        let shape = |what, view: &View, tokens: usize, heads: usize, dim: usize| {
            if (view.tokens, view.heads, view.dim) == (tokens, heads, dim) {
                return Ok(());
            }
            Err(Error::Shape {
                operation,
                what,
                expected: tokens * heads * dim,
                actual: view.tokens * view.heads * view.dim,
                shape: format!(
                    "[{tokens}, {heads}, {dim}] on rank {rank}, given [{}, {}, {}]",
                    view.tokens, view.heads, view.dim
                ),
            })
        };
        shape("q", q, queries, q.heads, q.dim)?;
        shape("k", k, keys, k.heads, q.dim)?;
        shape("v", v, keys, k.heads, v.dim)?;
        score.check(q.heads)?;
        let heads = |bias: &View| if bias.heads == 1 { 1 } else { q.heads };
        bias.iter().try_for_each(|bias| shape("the bias", bias, queries, heads(bias), bias.dim))
    }
}

/// Whether a strategy can carry a bias.
///
/// # Errors
/// The reason why not.
pub fn supports_bias(strategy: Strategy) -> Result<()> {
    match strategy {
        Strategy::PassQ => Err(Error::Unsupported {
            what: "a bias",
            with: "pass-q",
            why: "its rows stay with their queries, which would travel without them; use a strategy that moves keys",
        }),
        _ => Ok(()),
    }
}

/// Bytes of the elements of a tensor, in the type they are stored in.
fn stored_bytes(view: &View) -> u64 {
    let width = if matches!(view.data, Data::F32(_)) { 4 } else { 2 };
    (view.tokens * view.heads * view.dim * width) as u64
}

/// Bytes of f32 elements.
fn f32_bytes(elements: usize) -> u64 {
    elements as u64 * 4
}
