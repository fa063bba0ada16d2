//! The batches of each step, from text or from a file of tokens.

use crate::data::{Batch, Packer, Position};

/// Yields the same batches on every rank; each rank then takes its part.
#[derive(Debug, Clone)]
pub(crate) enum Feed {
    /// Packed text: B sequences a micro-batch.
    Text { packer: Packer, length: usize, batch_size: usize },
    /// The same rows each step.
    Tokens(Batch),
}

impl Feed {
    /// The micro-batches of the next step.
    pub(crate) fn next_step(&mut self, accumulation: usize) -> Vec<Batch> {
        match self {
            Self::Text { packer, length, batch_size } => {
                let sequences = packer.next_sequences(*batch_size * accumulation);
                sequences.chunks(*batch_size).map(|rows| Batch::new(rows, *length)).collect()
            }
            // The whole file in `accumulation` parts: as many micro-batches, and the same sum.
            Self::Tokens(batch) => (0..accumulation).map(|i| batch.part(i, accumulation)).collect(),
        }
    }

    /// A micro-batch as full as any, where they differ.
    pub(crate) fn fullest(&self) -> Option<Batch> {
        match self {
            Self::Text { packer, length, batch_size } => {
                packer.fullest(*batch_size).map(|sequences| Batch::new(&sequences, *length))
            }
            Self::Tokens(_) => None,
        }
    }

    /// Steps of a pass over the text, not rounded; one for a file of tokens.
    pub(crate) fn steps_of_pass(&self, accumulation: usize) -> f64 {
        match self {
            Self::Text { packer, batch_size, .. } => packer.sequences_of_pass() / (batch_size * accumulation) as f64,
            Self::Tokens(_) => 1.0,
        }
    }

    /// Where the next step begins; always the beginning for a file of tokens.
    pub(crate) fn position(&self) -> Position {
        match self {
            Self::Text { packer, .. } => packer.position(),
            Self::Tokens(_) => Position::default(),
        }
    }
}
