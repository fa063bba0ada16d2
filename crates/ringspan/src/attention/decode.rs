//! Decoding: a few queries that every rank has, over keys that are spread over the ranks.
//!
//! Each rank attends to the keys it holds; the softmax states, a few numbers a head, are merged by their maxima and
//! sums (Dao et al., 2023, "flash decoding", across ranks). A rank that sees nothing contributes nothing.

use super::block::payload;
use super::wire::floats;
use super::{Group, Inputs};
use crate::comm::{Buffer, Communicator};
use crate::documents::Run;
use crate::error::{Error, Result};
use crate::kernel::{self, HeadMap, Partial, Place, Tile};
use crate::mask::Mask;
use std::sync::Arc;

/// How the states of the ranks become one; every rank ends with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Merge {
    /// Every rank sends its state to all others: one exchange, P - 1 messages a rank.
    #[default]
    AllGather,
    /// States go up a binary tree and the result comes down: 2 log2(P) exchanges, at most as many messages a rank
    /// (Shyam et al., 2024, arXiv:2408.04093).
    Tree,
}

/// Which tokens a decoding step is about.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// The queries, on every rank the same.
    pub queries: &'a [Run],
    /// The keys this rank holds, in the order of their rows.
    pub keys: &'a [Run],
    /// Length of the frame in which the positions of queries and of keys count; masks aligned to the end look at it.
    pub frames: (usize, usize),
}

impl Tokens<'_> {
    /// What the queries see of the keys, in places inside their documents.
    ///
    /// # Errors
    /// Runs of several tokens with unequal steps.
    pub fn tiles(&self, mask: &Mask) -> Result<Vec<Tile>> {
        let (mut tiles, mut q_row) = (Vec::new(), 0);
        for q in self.queries {
            let mut k_row = 0;
            for k in self.keys {
                for piece in mask.pieces(q, k, self.frames.0, self.frames.1)? {
                    let (q_part, k_part) = (q.part(&piece.q), k.part(&piece.k));
                    tiles.push(Tile {
                        q: q_row + piece.q.start..q_row + piece.q.end,
                        k: k_row + piece.k.start..k_row + piece.k.end,
                        band: piece.band,
                        place: Place {
                            query: q_part.start,
                            key: k_part.start,
                            distance: mask.distance(q_part.start, k_part.start, self.frames.0, self.frames.1),
                            step: if q_part.len == 1 { k_part.step } else { q_part.step },
                        },
                    });
                }
                k_row += k.len;
            }
            q_row += q.len;
        }
        Ok(tiles)
    }
}

/// Output `[Tq, H, Dv]` and natural log-sum-exp `[H, Tq]` of `inputs.q` `[Tq, H, D]`, which every rank has, over the keys
/// of all ranks, of which `inputs.k` and `inputs.v` are this rank's. All ranks of the group must call this.
///
/// A cache that grows evenly gives position p to rank `(p / block) mod P`, the layout
/// [`Striped(block)`](crate::LayoutKind::Striped).
///
/// # Errors
/// Shapes that do not fit the tokens, failures of other ranks.
pub fn decode(
    group: &Group,
    mask: &Mask,
    tokens: &Tokens,
    inputs: &Inputs,
    merge: Merge,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let count = |runs: &[Run]| runs.iter().map(|run| run.len).sum();
    inputs.check_shapes("attention decode", group.rank(), count(tokens.queries), count(tokens.keys))?;
    let Inputs { q, k, v, score, bias } = *inputs;
    let heads = &HeadMap::grouped(q.heads, k.heads)?;
    let mut partial = Partial::new(q.tokens, q.heads, v.dim);
    let tiles = tokens.tiles(mask)?;
    if let Some(bias) = bias {
        let last = |tile: &Tile| tile.place.key + (tile.k.len().max(1) - 1) * tile.place.step + 1;
        let needed = tiles.iter().map(last).max().unwrap_or(0);
        if bias.dim < needed {
            return Err(Error::Shape {
                operation: "attention decode",
                what: "the bias",
                expected: needed,
                actual: bias.dim,
                shape: "a row of it: one element for each position up to the last visible key's".into(),
            });
        }
    }
    if !tiles.is_empty() {
        group.kernel().forward(&kernel::Inputs { q, k, v, heads, score, bias }, &tiles, &mut partial)?;
    }
    let partial = match merge {
        _ if group.size() == 1 => partial,
        Merge::AllGather => all_gather(&**group.cp(), partial, q.tokens, q.heads, v.dim)?,
        Merge::Tree => tree(&**group.cp(), partial, q.tokens, q.heads, v.dim)?,
    };
    Ok(partial.finish(q.tokens, q.heads, v.dim, score.sinks.as_deref()))
}

const OPERATION: &str = "the merge of softmax states";

fn all_gather(comm: &dyn Communicator, partial: Partial, tokens: usize, heads: usize, v_dim: usize) -> Result<Partial> {
    let states = comm.all_gather(Buffer::F32(partial.into_message()))?;
    let mut merged = Partial::new(tokens, heads, v_dim);
    for state in states {
        merged.merge(tokens, heads, v_dim, floats(&state, tokens * heads * (v_dim + 2), OPERATION)?);
    }
    Ok(merged)
}

/// Rank r merges what comes from r + 1, r + 2, r + 4, .. as long as these bits of r are 0, and sends the rest up.
fn tree(comm: &dyn Communicator, mut partial: Partial, tokens: usize, heads: usize, v_dim: usize) -> Result<Partial> {
    let (rank, size, len) = (comm.rank(), comm.size(), tokens * heads * (v_dim + 2));
    let mut below = Vec::new();
    let mut step = 1;
    while step < size && rank & step == 0 {
        if rank + step < size {
            let state = payload(comm.receive(rank + step, UP)?)?;
            partial.merge(tokens, heads, v_dim, floats(&state, len, OPERATION)?);
            below.push(rank + step);
        }
        step *= 2;
    }
    let result = if rank == 0 {
        Arc::new(Buffer::F32(partial.into_message()))
    } else {
        comm.send(rank - step, UP, Arc::new(Buffer::F32(partial.into_message())))?.wait()?;
        payload(comm.receive(rank - step, DOWN)?)?
    };
    // The farthest first: it has most ranks of its own to tell.
    for peer in below.into_iter().rev() {
        comm.send(peer, DOWN, result.clone())?.wait()?;
    }
    let mut merged = Partial::new(tokens, heads, v_dim);
    merged.merge(tokens, heads, v_dim, floats(&result, len, OPERATION)?);
    Ok(merged)
}

const UP: u64 = u64::MAX - 1;
const DOWN: u64 = u64::MAX;
