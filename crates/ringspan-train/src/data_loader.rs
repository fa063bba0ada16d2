//! The batches of each step, packed from text or read from a file of tokens.

use crate::data::{Batch, Mixture, SourcePosition};

/// Yields the same batches on every rank; each rank then takes its shard of them.
#[derive(Debug, Clone)]
pub(crate) enum DataLoader {
    /// Packed text: `batch_size` sequences of `length` tokens per micro-batch.
    Text { mixture: Mixture, length: usize, batch_size: usize },
    /// Rows of a token file, the same in every step.
    Tokens(Batch),
}

impl DataLoader {
    /// The micro-batches of the next step.
    pub(crate) fn next_step(&mut self, accumulation: usize) -> Vec<Batch> {
        match self {
            Self::Text { mixture, length, batch_size } => {
                let sequences = mixture.next_sequences(*batch_size * accumulation);
                sequences.chunks(*batch_size).map(|rows| Batch::new(rows, *length)).collect()
            }
            // The file is split into `accumulation` micro-batches, whose gradients add up to that of the whole file.
            Self::Tokens(batch) => (0..accumulation).map(|i| batch.chunk(i, accumulation)).collect(),
        }
    }

    /// A micro-batch with as many tokens as any can have; none where all have equally many.
    pub(crate) fn fullest_batch(&self) -> Option<Batch> {
        match self {
            Self::Text { mixture, length, batch_size } => {
                mixture.fullest_sequences(*batch_size).map(|sequences| Batch::new(&sequences, *length))
            }
            Self::Tokens(_) => None,
        }
    }

    /// Number of steps in one pass (epoch) over the text, not rounded; 1 for a file of tokens.
    pub(crate) fn steps_per_epoch(&self, accumulation: usize) -> f64 {
        match self {
            Self::Text { mixture, batch_size, .. } => {
                mixture.sequences_per_epoch().0 / (batch_size * accumulation) as f64
            }
            Self::Tokens(_) => 1.0,
        }
    }

    /// Number of passes (epochs) over each source in `steps` steps; empty for a file of tokens.
    pub(crate) fn epochs(&self, steps: u64, accumulation: usize) -> Vec<f64> {
        match self {
            Self::Text { mixture, batch_size, .. } => {
                let sequences_taken = steps as f64 * (batch_size * accumulation) as f64;
                let each = mixture.sequences_per_epoch().1.into_iter();
                each.map(|(sequences, share)| sequences_taken * share / sequences).collect()
            }
            Self::Tokens(_) => Vec::new(),
        }
    }

    /// The position in each source at which the next step begins; empty for a file of tokens.
    pub(crate) fn positions(&self) -> Vec<SourcePosition> {
        match self {
            Self::Text { mixture, .. } => mixture.positions(),
            Self::Tokens(_) => Vec::new(),
        }
    }

    /// This loader, continued from other positions in its sources.
    pub(crate) fn resume_at(self, positions: &[SourcePosition]) -> Self {
        match self {
            Self::Text { mixture, length, batch_size } => {
                Self::Text { mixture: mixture.resume_at(positions), length, batch_size }
            }
            tokens @ Self::Tokens(_) => tokens,
        }
    }
}
