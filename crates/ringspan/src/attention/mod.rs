//! Attention over a group of ranks: runs the plans of a schedule, forward and backward.
//!
//! Shape letters: T tokens on this rank, Tg tokens of its ring rank (its Ulysses group), H query heads, G key-value
//! heads, D and Dv head widths.

mod backward;
mod block;
mod exchange;
mod forward;
mod group;
mod meter;
mod wire;

pub use backward::{Gradients, backward};
pub use forward::{Forward, forward};
pub use group::Group;
pub use wire::Wire;

use crate::error::{Error, Result};
use crate::kernel::View;
use crate::schedule::{HeadShare, Schedule};

/// The inputs of one attention call on this rank, checked against the schedule.
#[derive(Clone, Copy)]
struct Inputs<'a> {
    /// `[T, H, D]`
    q: View<'a>,
    /// `[Tk, G, D]`
    k: View<'a>,
    /// `[Tk, G, Dv]`
    v: View<'a>,
}

impl<'a> Inputs<'a> {
    fn new(
        operation: &'static str,
        group: &Group,
        schedule: &Schedule,
        q: View<'a>,
        k: View<'a>,
        v: View<'a>,
    ) -> Result<Self> {
        if (schedule.ring(), schedule.ulysses()) != (group.ring().size(), group.ulysses().size()) {
            return Err(Error::MeshSize {
                mesh: format!("ring {} x ulysses {} (the schedule's)", schedule.ring(), schedule.ulysses()),
                needed: schedule.ring() * schedule.ulysses(),
                ranks: group.size(),
            });
        }
        let rank = group.rank();
        let (queries, keys) = (schedule.query().tokens(rank), schedule.key().tokens(rank));
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
        shape("q", &q, queries, q.heads, q.dim)?;
        shape("k", &k, keys, k.heads, q.dim)?;
        shape("v", &v, keys, k.heads, v.dim)?;
        Ok(Self { q, k, v })
    }

    /// Who computes which heads inside a Ulysses group.
    fn shares(&self, schedule: &Schedule) -> Result<Vec<HeadShare>> {
        HeadShare::all(self.q.heads, self.k.heads, schedule.ring(), schedule.ulysses())
    }
}

/// Bytes of f32 elements.
fn f32_bytes(elements: usize) -> u64 {
    elements as u64 * 4
}
