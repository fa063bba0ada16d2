//! Decoding: every rank has the same few queries, and the keys are spread over the ranks.
//!
//! Each rank attends to the keys it holds. The softmax states, a few numbers a head, are merged by their maxima and sums
//! (Dao et al., 2023, "flash decoding", across ranks). A rank whose keys are not visible contributes nothing.

use super::block::{payload, send_to};
use super::wire::{Wire, floats};
use super::{Group, Inputs};
use crate::comm::Buffer;
use crate::documents::{Run, Strand};
use crate::error::{Error, Result};
use crate::kernel::{self, Floats, HeadMap, SoftmaxState, Statistics, Tile, TilePosition};
use crate::mask::{Band, Mask, VisiblePairs};
use crate::schedule::{DecodeSchedule, Merge, Step, Transfer};
use std::sync::Arc;

/// The tokens of a decoding step.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// The queries, which are the same on every rank.
    pub queries: &'a [Run],
    /// The keys this rank holds, in the order of their rows.
    pub keys: &'a [Run],
    /// Sequence lengths of the queries and of the keys, in positions; only masks that are aligned to the end read them.
    pub seq_lens: (usize, usize),
}

/// Limit on positions, so that sums and differences of a few of them cannot overflow.
const POSITIONS: usize = usize::MAX / 16;

impl Tokens<'_> {
    /// Checks that all positions and the number of tokens are below the limit.
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
        match self.seq_lens.0.max(self.seq_lens.1) {
            seq_len if seq_len > POSITIONS => {
                Err(Error::Layout(format!("a sequence of {seq_len} tokens: positions end before {POSITIONS}")))
            }
            _ => Ok(()),
        }
    }

    /// The tiles of visible pairs; positions count inside documents. Queries whose step differs from that of the keys make
    /// one tile per query: this happens when consecutive queries meet a cache with a striped layout.
    ///
    /// # Errors
    /// Runs with positions above the limit.
    pub fn tiles(&self, mask: &Mask) -> Result<Vec<Tile>> {
        self.check()?;
        let (mut tiles, mut q_row) = (Vec::new(), 0);
        for q in self.queries {
            let mut k_row = 0;
            for k in self.keys {
                let together = if q.step == k.step || k.len <= 1 { q.len } else { 1 };
                for first in (0..q.len).step_by(together.max(1)) {
                    let queries = q.part(&(first..first + together));
                    for banded in mask.banded_tiles(&queries, k, self.seq_lens.0, self.seq_lens.1)? {
                        let (q_part, k_part) = (queries.part(&banded.q), k.part(&banded.k));
                        tiles.push(Tile {
                            q: q_row + first + banded.q.start..q_row + first + banded.q.end,
                            k: k_row + banded.k.start..k_row + banded.k.end,
                            band: banded.band,
                            position: TilePosition {
                                query: q_part.start,
                                key: k_part.start,
                                distance: mask.distance(q_part.start, k_part.start, self.seq_lens.0, self.seq_lens.1),
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

/// The visible pairs of a decoding step. All layers with the same mask can share it.
#[derive(Debug, Clone)]
pub struct DecodeTiles {
    tiles: Vec<Tile>,
    queries: usize,
    keys: usize,
    /// Whether the tiles have valid positions.
    has_positions: bool,
}

impl DecodeTiles {
    /// Tiles with the positions of their tokens, for scores that depend on them.
    ///
    /// # Errors
    /// As for [`Tokens::tiles`].
    pub fn with_positions(tokens: &Tokens, mask: &Mask) -> Result<Self> {
        Ok(Self {
            tiles: tokens.tiles(mask)?,
            queries: count(tokens.queries),
            keys: count(tokens.keys),
            has_positions: true,
        })
    }

    /// As few tiles as possible, for scores that do not depend on positions. Keys of a query that lie in adjacent rows are one
    /// tile, whatever their runs; the time does not depend on the number of runs that are hidden or completely visible, nor on
    /// the number of other documents.
    ///
    /// # Errors
    /// Runs with positions above the limit, or a mask that contradicts itself.
    pub fn joined(tokens: &Tokens, mask: &Mask) -> Result<Self> {
        tokens.check()?;
        mask.check_window()?;
        let strands = Strand::by_document(tokens.keys);
        let (mut tiles, mut row) = (Vec::<Tile>::new(), 0);
        for q in tokens.queries {
            for strand in strands.get(&q.document).into_iter().flatten() {
                mask.search(q, strand.runs(), tokens.seq_lens, |seen| {
                    let (queries, keys, band) = match seen {
                        VisiblePairs::Whole { q, runs } => {
                            let keys = strand.rows(&runs);
                            (q.clone(), keys.clone(), Band::whole(q.len(), keys.len()))
                        }
                        VisiblePairs::BandedTile { run, tile } => {
                            let first = strand.rows(&(run..run + 1)).start;
                            (tile.q, first + tile.k.start..first + tile.k.end, tile.band)
                        }
                    };
                    let queries = row + queries.start..row + queries.end;
                    push_joined(&mut tiles, Tile { q: queries, k: keys, band, position: TilePosition::START });
                });
            }
            row += q.len;
        }
        Ok(Self { tiles, queries: row, keys: count(tokens.keys), has_positions: false })
    }

    /// Number of tiles.
    pub fn len(&self) -> usize {
        self.tiles.len()
    }

    /// Whether no query sees a key.
    pub fn is_empty(&self) -> bool {
        self.tiles.is_empty()
    }
}

/// Appends a tile. A tile of one query is reduced to the keys that it sees, and extends the last one if these follow it.
fn push_joined(tiles: &mut Vec<Tile>, tile: Tile) {
    if tile.q.len() != 1 {
        return tiles.push(tile);
    }
    let seen = tile.band.keys(0, tile.k.len());
    let k = tile.k.start + seen.start..tile.k.start + seen.end;
    match tiles.last_mut() {
        Some(last) if last.q == tile.q && last.k.end == k.start => last.k.end = k.end,
        _ => tiles.push(Tile { band: Band::whole(1, k.len()), k, ..tile }),
    }
    if let Some(last) = tiles.last_mut() {
        last.band = Band::whole(1, last.k.len());
    }
}

/// Number of tokens in runs.
fn count(runs: &[Run]) -> usize {
    runs.iter().map(|run| run.len).sum()
}

/// Attention of `inputs.q` `[Tq, H, D]`, the same on every rank, over the keys of all ranks; `inputs.k` and `inputs.v` hold
/// this rank's. Returns the output `[Tq, H, Dv]` and the natural log-sum-exp `[H, Tq]`. All ranks of the group must call
/// this.
///
/// To grow a cache evenly, give position p to rank `(p / block) mod P`, as the layout
/// [`Striped(block)`](crate::LayoutKind::Striped) does.
///
/// # Errors
/// Shapes that do not fit the tokens, or failures of other ranks.
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

/// Like [`decode()`], but leaves output and softmax statistics on the kernel's device; [`Statistics::lse`] gives the
/// log-sum-exp.
///
/// # Errors
/// Like those of [`decode()`].
pub fn on_device(
    group: &Group,
    mask: &Mask,
    tokens: &Tokens,
    inputs: &Inputs,
    merge: Merge,
) -> Result<(Floats, Statistics<Floats>)> {
    tokens.check()?;
    inputs.check_shapes(DECODE, group.rank(), count(tokens.queries), count(tokens.keys))?;
    tiles_on_device(group, &DecodeTiles::with_positions(tokens, mask)?, inputs, merge)
}

/// Like [`on_device`], for tiles that were made before.
///
/// # Errors
/// Like those of [`decode()`]; [joined](DecodeTiles::joined) tiles for scores that depend on positions.
pub fn tiles_on_device(
    group: &Group,
    visible: &DecodeTiles,
    inputs: &Inputs,
    merge: Merge,
) -> Result<(Floats, Statistics<Floats>)> {
    inputs.check_shapes(DECODE, group.rank(), visible.queries, visible.keys)?;
    let (kernel, held) = (group.kernel(), inputs.to_device(group.kernel())?);
    let Inputs { q, k, v, score, bias } = held.inputs();
    let heads = &HeadMap::grouped(q.heads, k.heads)?;
    let inputs = kernel::Inputs { q, k, v, heads, score, bias };
    if inputs.counts_positions() && !visible.has_positions {
        return Err(Error::Layout(format!(
            "{DECODE}: joined tiles have no positions, and these scores depend on them"
        )));
    }
    let sizes = (q.tokens, q.heads, v.dim);
    let mut state = kernel.state_to_send(q.tokens, q.heads, v.dim)?;
    let tiles = &visible.tiles;
    if let Some(bias) = bias {
        let last = |tile: &Tile| tile.position.key + (tile.k.len().max(1) - 1) * tile.position.step + 1;
        let needed = tiles.iter().map(last).max().unwrap_or(0);
        if bias.dim < needed {
            return Err(Error::Shape {
                operation: DECODE,
                what: "the bias",
                expected: needed,
                actual: bias.dim,
                shape: "a row of it: one element for each position up to the last visible key's".into(),
            });
        }
    }
    if !tiles.is_empty() {
        kernel.decode_into(&inputs, tiles, &mut state)?;
    }
    let state = merged(group, state, sizes, merge)?;
    kernel.finish(state, score.sinks.as_deref())
}

const DECODE: &str = "attention decode";

const OPERATION: &str = "the merge of softmax states";

/// Number of query tokens, number of heads, width of a value.
type Sizes = (usize, usize, usize);

/// Runs this rank's plan of the merge, and returns the state of all keys.
fn merged(group: &Group, state: SoftmaxState, (tokens, heads, v_dim): Sizes, merge: Merge) -> Result<SoftmaxState> {
    let (kernel, comm, len) = (group.kernel(), &**group.cp(), tokens * heads * (v_dim + 2));
    if comm.size() == 1 {
        return Ok(state);
    }
    let (mut own, mut result) = (Some(state), None::<Arc<Buffer>>);
    let take_own = |own: &mut Option<SoftmaxState>| own.take().ok_or_else(|| broken("a state that was sent already"));
    for Step { send, receive, .. } in DecodeSchedule::new(merge, comm.size(), tokens).plan(comm.rank()) {
        if !send.is_empty() && !receive.is_empty() {
            return exchanged(group, take_own(&mut own)?, (tokens, heads, v_dim));
        }
        for Transfer { block, peer, .. } in send {
            // The receiver merges a state of its own copy of the queries; any other state is the result.
            let (tag, message) = match block.owner() == peer {
                true => (UP, Arc::new(take_own(&mut own)?.into_message())),
                false => (DOWN, result_of(&mut own, &mut result)?),
            };
            send_to(group, comm, peer, tag, message)?.wait()?;
        }
        for Transfer { block, peer, .. } in receive {
            if block.owner() == comm.rank() {
                let message = payload(group, comm.receive(peer, UP)?, Wire::F32)?;
                let state = own.as_mut().ok_or_else(|| broken("a state that was sent already"))?;
                kernel.merge(state, floats(&message, len, OPERATION)?)?;
            } else {
                result = Some(payload(group, comm.receive(peer, DOWN)?, Wire::F32)?);
            }
        }
    }
    let result = result_of(&mut own, &mut result)?;
    let mut merged = kernel.state(tokens, heads, v_dim)?;
    kernel.merge(&mut merged, floats(&result, len, OPERATION)?)?;
    Ok(merged)
}

/// The state of all keys: the one that was received, or else this rank's own.
fn result_of(own: &mut Option<SoftmaxState>, result: &mut Option<Arc<Buffer>>) -> Result<Arc<Buffer>> {
    if result.is_none() {
        *result = own.take().map(|own| Arc::new(own.into_message()));
    }
    result.clone().ok_or_else(|| broken("a result that is not there"))
}

/// The error for a plan that needs what is not there; the tests of plans show that none does.
fn broken(what: &str) -> Error {
    Error::Layout(format!("the plan of a merge uses {what}"))
}

/// Merges the states of all ranks in rank order.
fn exchanged(group: &Group, state: SoftmaxState, (tokens, heads, v_dim): Sizes) -> Result<SoftmaxState> {
    let (kernel, comm) = (group.kernel(), &**group.cp());
    let own = kernel.outgoing(Arc::new(state.into_message()), comm)?;
    let states = comm.all_gather(Arc::unwrap_or_clone(own))?;
    let mut merged = kernel.state(tokens, heads, v_dim)?;
    for state in states {
        let state = kernel.incoming(state, Wire::F32.dtype())?;
        kernel.merge(&mut merged, floats(&state, tokens * heads * (v_dim + 2), OPERATION)?)?;
    }
    Ok(merged)
}

const UP: u64 = u64::MAX - 1;
const DOWN: u64 = u64::MAX;
