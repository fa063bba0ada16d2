//! The trait `Executor`, which computes the steps of the engine on one rank.

use super::row_parts::RowPart;
use super::step::{CachePage, Step};
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use ringspan::comm::Buffer;
use std::path::Path;

/// How the keys and values of a token are stored in a saved session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvRowLayout {
    /// Type of the numbers.
    pub dtype: DType,
    /// Numbers W of a token in all layers, on all ranks that share heads and layers: for each layer its keys, then its values.
    pub width: usize,
    /// The numbers of a row that belong to full-attention layers.
    pub full: RowPart,
    /// The part of a row that each rank holds, for the ranks that share the pages of one context-parallel rank, ordered by stage and
    /// then tensor-parallel rank. Ranks with equal parts hold the same numbers.
    pub parts: Vec<RowPart>,
}

/// Computes steps on one rank. The engine calls the same methods in the same order on all ranks.
///
/// Shape letters: N rows that a step outputs, n rows of them, C width of a hidden state, V vocabulary.
pub trait Executor {
    /// Computes a step, each sequence with the weights of its adapter or those of the base model. On rank 0, returns the hidden states
    /// `[N, C]` that the step's sequences output, in their order, after the last norm.
    ///
    /// # Errors
    /// Failures of this or another rank: the engine ends then.
    fn execute(&mut self, step: &Step) -> Result<Option<Tensor>>;

    /// The logits `[n, V]` of `rows` hidden states, which rank 0 gives as `[n, C]`, on rank 0.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    fn logits(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<f32>>>;

    /// The most likely token after each of `rows` hidden states, which rank 0 gives as `[n, C]`, on rank 0: of equally likely ones the
    /// lowest, or why there is none. Ranks exchange the greatest logit of their share of the vocabulary, not all logits.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    fn most_likely(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<Result<u32>>>>;

    /// Reads an adapter from a PEFT folder.
    ///
    /// # Errors
    /// An adapter that cannot be read or does not fit the model; the engine goes on without it.
    fn load_adapter(&mut self, slot: u64, folder: &Path) -> Result<()>;

    /// Forgets an adapter.
    fn unload_adapter(&mut self, slot: u64);

    /// How a row of keys and values is stored; `None` if sessions cannot be saved.
    fn row_layout(&self) -> Option<KvRowLayout> {
        None
    }

    /// This rank's part of the first `rows` rows of a page; zeros in sliding-window layers, if these have freed the
    /// page.
    ///
    /// # Errors
    /// A page that does not exist, and caches that cannot be saved.
    fn read_page(&self, page: CachePage, rows: usize) -> Result<Buffer> {
        Err(Error::Step(format!("{rows} rows of {page:?} cannot be saved")))
    }

    /// Overwrites the first rows of a page with this rank's part of them.
    ///
    /// # Errors
    /// As for [`read_page`](Self::read_page).
    fn write_page(&mut self, page: CachePage, rows: &Buffer) -> Result<()> {
        Err(Error::Step(format!("{} numbers for {page:?} cannot be restored", rows.len())))
    }
}
