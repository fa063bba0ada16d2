//! What computes the steps of the engine on a rank.

use super::step::Step;
use crate::error::Result;
use candle_core::Tensor;
use std::path::Path;

/// Computes steps on one rank. The engine calls the same methods in the same order on all ranks.
///
/// Shape letters: N rows that a step outputs, n rows of them, C width of a hidden state, V vocabulary.
pub trait Executor {
    /// Computes a step with the weights of the adapter that was loaded as `adapter`, or those of the base model. On rank 0,
    /// returns the hidden states `[N, C]` that the step's sequences output, in their order, after the last norm.
    ///
    /// # Errors
    /// Failures of this or another rank: the engine ends then.
    fn execute(&mut self, adapter: Option<u64>, step: &Step) -> Result<Option<Tensor>>;

    /// The logits `[n, V]` of `rows` hidden states, which rank 0 gives as `[n, C]`, on rank 0.
    ///
    /// # Errors
    /// As for [`execute`](Self::execute).
    fn logits(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<f32>>>;

    /// Reads an adapter from a PEFT folder.
    ///
    /// # Errors
    /// An adapter that cannot be read or does not fit the model; the engine goes on without it.
    fn load_adapter(&mut self, slot: u64, folder: &Path) -> Result<()>;

    /// Forgets an adapter.
    fn unload_adapter(&mut self, slot: u64);
}
