//! The tokens of a video that a rank holds, and the contexts in which they attend.

use super::config::WanConfig;
use super::grid::TokenGrid;
use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::{Documents, Layout, LayoutKind, Mask, StrategyKind};
use ringspan_candle::Context;
use ringspan_candle::modulation::TableRows;
use ringspan_candle::rope::RotaryTable;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A batch of videos whose tokens are distributed over ranks: which tokens this rank holds, their rotary angles, and attention of
/// them to the tokens of all ranks and to prompts.
pub struct VideoContext {
    grid: TokenGrid,
    batch: usize,
    /// This rank's tokens, as rows of `[B * S]`.
    rows: Vec<usize>,
    rotary: RotaryTable,
    attention: Context,
    /// A group of this rank alone, for attention to prompts, which every rank holds whole.
    alone: Arc<Group>,
    /// Attention to prompts by the number of their embeddings.
    to_prompts: Mutex<BTreeMap<usize, Arc<Context>>>,
}

impl VideoContext {
    /// The context of this rank of `group`, for `batch` videos on a grid; `alone` is a group of this rank alone.
    ///
    /// # Errors
    /// A grid with more tokens on an axis than the model has positions, more Ulysses ranks than heads.
    pub fn new(
        config: &WanConfig,
        group: Arc<Group>,
        alone: Arc<Group>,
        batch: usize,
        grid: TokenGrid,
    ) -> Result<Self> {
        grid.check_positions(config.rope_max_seq_len)?;
        let heads = config.num_attention_heads;
        ringspan::schedule::HeadShare::all(heads, heads, group.grid())?;
        let rank = group.rank();
        let documents = Documents::batch(batch, grid.tokens());
        let layout = Arc::new(Layout::new(LayoutKind::Contiguous, &documents, group.size())?);
        let rows = layout.rows(rank);
        let coordinates: Vec<_> = rows.iter().map(|row| grid.at(row % grid.tokens())).collect();
        let frequencies = frequencies(config.attention_head_dim);
        Ok(Self {
            grid,
            batch,
            rows,
            rotary: RotaryTable::on_grid(&coordinates, frequencies.each_ref().map(Vec::as_slice)),
            attention: Context::new(group, layout, StrategyKind::Ring)?,
            alone,
            to_prompts: Mutex::default(),
        })
    }

    /// Cuts the exchange of heads between Ulysses ranks into up to `chunks` parts, of which one travels while another is computed.
    #[must_use]
    pub fn with_head_chunks(self, chunks: usize) -> Self {
        Self { attention: self.attention.with_head_chunks(chunks), ..self }
    }

    /// The grid of tokens.
    pub fn grid(&self) -> TokenGrid {
        self.grid
    }

    /// Number B of videos.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// This rank's tokens, as rows of `[B * S]`.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Attention to the tokens of all ranks.
    pub fn attention(&self) -> &Context {
        &self.attention
    }

    pub(super) fn rotary(&self) -> &RotaryTable {
        &self.rotary
    }

    /// Attention of this rank's tokens to the `keys` vectors of their prompt; `None` if this rank has no tokens.
    pub(super) fn to_prompt(&self, keys: usize) -> Result<Option<Arc<Context>>> {
        if self.rows.is_empty() {
            return Ok(None);
        }
        let mut known = self.to_prompts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = known.get(&keys) {
            return Ok(Some(context.clone()));
        }
        let mut tokens = vec![0; self.batch];
        self.rows.iter().for_each(|row| tokens[row / self.grid.tokens()] += 1);
        let queries = Documents::packed(&tokens);
        let of_prompts = Documents::packed(&vec![keys; self.batch]);
        let layouts = Layout::pair(LayoutKind::Contiguous, &queries, &of_prompts, &Mask::full(), 1)?;
        let context = Arc::new(Context::between(self.alone.clone(), layouts, StrategyKind::Ring)?);
        known.insert(keys, context.clone());
        Ok(Some(context))
    }

    /// The conditions of time steps, as [`Timesteps`] of this rank's tokens.
    ///
    /// # Errors
    /// Another number of time steps than one, one for each of the B videos, or one for each token.
    pub fn timesteps(&self, timesteps: &[f32]) -> Result<Timesteps> {
        let tokens = self.grid.tokens();
        let of_row = |row: usize| match timesteps.len() {
            1 => Some(0),
            rows if rows == self.batch => Some(row / tokens),
            all if all == self.batch * tokens => Some(row),
            _ => None,
        };
        let mut values: Vec<f32> = Vec::new();
        let mut rows = Vec::with_capacity(self.rows.len());
        let mut last = None;
        for row in &self.rows {
            let Some(at) = of_row(*row) else {
                let problem =
                    format!("{} time steps for {} videos of {tokens} tokens each", timesteps.len(), self.batch);
                return Err(Error::Input(problem));
            };
            // Neighbours mostly share a time step, and there are few different ones.
            let time = timesteps[at];
            let index = match last {
                Some((value, index)) if value == time => index,
                _ => values.iter().position(|value| *value == time).unwrap_or_else(|| {
                    values.push(time);
                    values.len() - 1
                }),
            };
            last = Some((time, index));
            rows.push(index as u32);
        }
        if values.is_empty() {
            // A rank without tokens runs the same layers, with no rows.
            values.extend(timesteps.first());
        }
        let rows = if values.len() == 1 { TableRows::one() } else { TableRows::each(rows) };
        Ok(Timesteps { values, rows })
    }

    /// The whole `[B, S, ..]` of which each rank has the rows of its tokens, `[T, ..]`. All ranks must call this, and all get it.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn gathered(&self, x: &Tensor) -> Result<Tensor> {
        let whole = self.attention.unshard_rows(x)?;
        Ok(whole.reshape([&[self.batch, self.grid.tokens()], &whole.dims()[1..]].concat())?)
    }
}

/// The different time steps of this rank's tokens, and which token has which.
#[derive(Debug, Clone)]
pub struct Timesteps {
    pub(super) values: Vec<f32>,
    pub(super) rows: TableRows,
}

/// The frequencies of the pairs that turn with frame, row and column: rows and columns have a third of the pairs each, rounded down,
/// and frames the rest.
fn frequencies(head_dim: usize) -> [Vec<f64>; 3] {
    let of_plane = head_dim / 6;
    let of_axis = |pairs: usize| (0..pairs).map(|pair| 1e4f64.powf(-(pair as f64) / pairs as f64)).collect();
    [of_axis(head_dim / 2 - 2 * of_plane), of_axis(of_plane), of_axis(of_plane)]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The widths 44, 42 and 42 of a head of 128, and 4, 4 and 4 of one of 12.
    #[test]
    fn the_pairs_of_a_head_are_those_of_three_axes() {
        for (dim, pairs) in [(128, [22, 21, 21]), (12, [2, 2, 2]), (8, [2, 1, 1]), (2, [1, 0, 0])] {
            assert_eq!(frequencies(dim).map(|of_axis| of_axis.len()), pairs);
        }
        assert_eq!(frequencies(12)[0], [1.0, 1e-2]);
    }
}
