//! Attention over a group of ranks: one executor runs the plans of any schedule, forward and backward.
//!
//! Tensors and results are in the memory of the CPU or, with the calls of [`on_device`], on the device of the group's
//! kernel. The executor is the same for both: every operation on tensors is a call of the kernel.
//!
//! Shape letters: T tokens on this rank, Tg tokens of its ring rank (its Ulysses group), H query heads, G key-value
//! heads, D and Dv head widths, Sk keys of a batch row.

mod backward;
mod block;
mod decode;
mod device_inputs;
mod exchange;
mod forward;
mod group;
mod memory;
mod ulysses;
mod wire;

pub use crate::schedule::Merge;
pub use backward::{Gradients, backward};
pub use decode::{DecodeTiles, Tokens, decode};
pub use forward::{Forward, forward};
pub use group::Group;
pub use memory::{backward_bytes, forward_bytes};
pub use wire::Wire;

/// Attention calls that leave their results on the device of the group's kernel. On a GPU they copy nothing of the size of
/// a tensor to the CPU, read inputs in place that are on the GPU already, and may return while the last kernels still run.
/// On a CPU they are the plain calls.
pub mod on_device {
    pub use super::backward::on_device as backward;
    pub use super::backward::{delta, with_delta as backward_with_delta};
    pub use super::decode::{on_device as decode, tiles_on_device as decode_tiles};
    pub use super::forward::on_device as forward;
}

use crate::error::{Error, Result};
use crate::kernel::{self, Score, View};
use crate::schedule::{Schedule, Tiling};

/// The inputs of one attention call on this rank.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Queries `[T, H, D]`.
    pub q: View<'a>,
    /// Keys `[Tk, G, D]`.
    pub k: View<'a>,
    /// Values `[Tk, G, Dv]`.
    pub v: View<'a>,
    /// Scale, softcap, sinks and other parameters that turn products into weights, for all H heads.
    pub score: &'a Score,
    /// A term that is added to the score of each query of this rank and each key of its batch row: `[T, H, Sk]`, or `[T, 1,
    /// Sk]` for all heads.
    ///
    /// A large negative term, such as the least f32, hides its pair from a query that sees other keys; -inf hides it
    /// always. If all visible pairs of a query have the same large term, rounding leaves little of their scores, as in any
    /// softmax in f32.
    pub bias: Option<View<'a>>,
}

impl<'a> Inputs<'a> {
    /// Queries, keys and values, without a bias.
    pub fn new(q: View<'a>, k: View<'a>, v: View<'a>, score: &'a Score) -> Self {
        Self { q, k, v, score, bias: None }
    }

    /// Adds a bias to the inputs.
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
        }
        Ok(())
    }

    fn check_shapes(&self, operation: &'static str, rank: usize, queries: usize, keys: usize) -> Result<()> {
        let Self { q, k, v, score, bias } = self;
        let shape = |what, view, tokens, heads, dim| check_shape(operation, rank, what, view, [tokens, heads, dim]);
        shape("q", q, queries, q.heads, q.dim.max(1))?;
        shape("k", k, keys, k.heads, q.dim)?;
        shape("v", v, keys, k.heads, v.dim.max(1))?;
        score.check(q.heads)?;
        let heads = |bias: &View| if bias.heads == 1 { 1 } else { q.heads };
        bias.iter().try_for_each(|bias| shape("the bias", bias, queries, heads(bias), bias.dim))
    }
}

/// Checks that a tensor is `[tokens, heads, dim]` and that all its rows are inside its elements, so no device reads out of
/// bounds.
fn check_shape(operation: &'static str, rank: usize, what: &'static str, view: &View, shape: [usize; 3]) -> Result<()> {
    let (given, held) = ([view.tokens, view.heads, view.dim], view.data.len());
    let elements = |shape: [usize; 3]| shape.into_iter().fold(1, usize::saturating_mul);
    if given != shape {
        return Err(Error::Shape {
            operation,
            what,
            expected: elements(shape),
            actual: elements(given),
            shape: format!("{shape:?} on rank {rank}, given {given:?}"),
        });
    }
    let end = view.end().filter(|&end| end <= held);
    // Results and blocks have as many elements as the tensor's shape, whatever its strides are.
    if end.is_none() || elements(shape.map(|size| size.max(1))) > isize::MAX as usize / 16 {
        return Err(Error::Shape {
            operation,
            what,
            expected: view.end().unwrap_or(usize::MAX),
            actual: held,
            shape: format!(
                "{shape:?} with strides {} and {} on rank {rank}, whose rows must lie in its elements",
                view.token_stride, view.head_stride
            ),
        });
    }
    Ok(())
}

/// The kind of tiles that a kernel needs for these inputs: scores that count positions need each tile's position.
fn tiling(inputs: &kernel::Inputs) -> Tiling {
    if inputs.counts_positions() { Tiling::WithPositions } else { Tiling::Joined }
}

/// Maximum number of tiles in one kernel call, so that the list of tiles takes only a few megabytes.
const MAX_TILES_PER_CALL: usize = 1 << 16;

/// Bytes of a tensor's elements in its storage type.
fn stored_bytes(view: &View) -> u64 {
    (view.tokens * view.heads * view.dim * view.data.dtype().width()) as u64
}

/// Bytes of `elements` numbers in f32.
fn f32_bytes(elements: usize) -> u64 {
    elements as u64 * 4
}
