//! Decoding: a few queries that every rank has, over keys that are spread over the ranks.
//!
//! Each rank attends to the keys it holds; the softmax states, a few numbers a head, are merged by their maxima and
//! sums (Dao et al., 2023, "flash decoding", across ranks). A rank that sees nothing contributes nothing.

use super::block::{payload, send_to};
use super::wire::{Wire, floats};
use super::{Group, Inputs};
use crate::documents::Run;
use crate::error::{Error, Result};
use crate::kernel::{self, Floats, HeadMap, Place, State, Statistics, Tile};
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

/// Positions lie below this, so that differences and sums of some of them can be counted.
const POSITIONS: usize = usize::MAX / 16;

impl Tokens<'_> {
    /// Whether all positions and their number can be counted with.
    fn check(&self) -> Result<()> {
        let mut tokens = 0;
        for &Run { start, len, step, .. } in self.queries.iter().chain(self.keys) {
            let end = len.checked_mul(step).and_then(|length| length.checked_add(start));
            tokens = len.saturating_add(tokens);
            if step == 0 || tokens > POSITIONS || end.is_none_or(|end| end > POSITIONS) {
                return Err(Error::Layout(format!(
                    "a run of {len} tokens from {start} in steps of {step}: steps begin with 1, and positions end before {POSITIONS}"
                )));
            }
        }
        match self.frames.0.max(self.frames.1) {
            frame if frame > POSITIONS => {
                Err(Error::Layout(format!("a frame of {frame} tokens: positions end before {POSITIONS}")))
            }
            _ => Ok(()),
        }
    }

    /// What the queries see of the keys, in places inside their documents. Queries beside keys of another step are taken
    /// one by one: a few queries in a row meet a cache dealt in stripes.
    ///
    /// # Errors
    /// Runs beyond what positions count.
    pub fn tiles(&self, mask: &Mask) -> Result<Vec<Tile>> {
        self.check()?;
        let (mut tiles, mut q_row) = (Vec::new(), 0);
        for q in self.queries {
            let mut k_row = 0;
            for k in self.keys {
                let together = if q.step == k.step || k.len <= 1 { q.len } else { 1 };
                for first in (0..q.len).step_by(together.max(1)) {
                    let queries = q.part(&(first..first + together));
                    for piece in mask.pieces(&queries, k, self.frames.0, self.frames.1)? {
                        let (q_part, k_part) = (queries.part(&piece.q), k.part(&piece.k));
                        tiles.push(Tile {
                            q: q_row + first + piece.q.start..q_row + first + piece.q.end,
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
    let (out, statistics) = on_device(group, mask, tokens, inputs, merge)?;
    Ok((group.kernel().to_host(out)?, statistics.to_host(group.kernel())?.lse()))
}

/// [`decode()`] whose results are left where the group's kernel computes; [`Statistics::lse`] makes a log-sum-exp of the second.
///
/// # Errors
/// As of [`decode()`].
pub fn on_device(
    group: &Group,
    mask: &Mask,
    tokens: &Tokens,
    inputs: &Inputs,
    merge: Merge,
) -> Result<(Floats, Statistics<Floats>)> {
    tokens.check()?;
    let count = |runs: &[Run]| runs.iter().map(|run| run.len).sum();
    inputs.check_shapes("attention decode", group.rank(), count(tokens.queries), count(tokens.keys))?;
    let (kernel, held) = (group.kernel(), inputs.hold(group.kernel())?);
    let Inputs { q, k, v, score, bias } = held.inputs();
    let heads = &HeadMap::grouped(q.heads, k.heads)?;
    let sizes = (q.tokens, q.heads, v.dim);
    let mut state = kernel.state_to_send(q.tokens, q.heads, v.dim)?;
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
        kernel.decode_into(&kernel::Inputs { q, k, v, heads, score, bias }, &tiles, &mut state)?;
    }
    let state = match merge {
        _ if group.size() == 1 => state,
        Merge::AllGather => all_gather(group, state, sizes)?,
        Merge::Tree => tree(group, state, sizes)?,
    };
    kernel.finish(state, score.sinks.as_deref())
}

const OPERATION: &str = "the merge of softmax states";

/// Tokens, heads, width of values.
type Sizes = (usize, usize, usize);

fn all_gather(group: &Group, state: State, (tokens, heads, v_dim): Sizes) -> Result<State> {
    let (kernel, comm) = (group.kernel(), &**group.cp());
    let own = kernel.outgoing(Arc::new(state.into_message()), comm)?;
    let states = comm.all_gather(Arc::unwrap_or_clone(own))?;
    let mut merged = kernel.state(tokens, heads, v_dim)?;
    for state in states {
        let state = kernel.incoming(state, Wire::F32.stored())?;
        kernel.merge(&mut merged, floats(&state, tokens * heads * (v_dim + 2), OPERATION)?)?;
    }
    Ok(merged)
}

/// Rank r merges what comes from r + 1, r + 2, r + 4, .. as long as these bits of r are 0, and sends the rest up.
fn tree(group: &Group, mut state: State, (tokens, heads, v_dim): Sizes) -> Result<State> {
    let (kernel, comm) = (group.kernel(), &**group.cp());
    let (rank, size, len) = (comm.rank(), comm.size(), tokens * heads * (v_dim + 2));
    let mut below = Vec::new();
    let mut step = 1;
    while step < size && rank & step == 0 {
        if rank + step < size {
            let message = payload(group, comm.receive(rank + step, UP)?, Wire::F32)?;
            kernel.merge(&mut state, floats(&message, len, OPERATION)?)?;
            below.push(rank + step);
        }
        step *= 2;
    }
    let own = Arc::new(state.into_message());
    let result = if rank == 0 {
        own
    } else {
        send_to(group, comm, rank - step, UP, own)?.wait()?;
        payload(group, comm.receive(rank - step, DOWN)?, Wire::F32)?
    };
    // The farthest first: it has most ranks of its own to tell.
    for peer in below.into_iter().rev() {
        send_to(group, comm, peer, DOWN, result.clone())?.wait()?;
    }
    let mut merged = kernel.state(tokens, heads, v_dim)?;
    kernel.merge(&mut merged, floats(&result, len, OPERATION)?)?;
    Ok(merged)
}

const UP: u64 = u64::MAX - 1;
const DOWN: u64 = u64::MAX;
