//! The batches of each step, from text or from a file of tokens.

use crate::data::{Batch, Dealt, Mixture};

/// Yields the same batches on every rank; each rank then takes its part.
#[derive(Debug, Clone)]
pub(crate) enum Feed {
    /// Packed text: B sequences a micro-batch.
    Text { mixture: Mixture, length: usize, batch_size: usize },
    /// The same rows each step.
    Tokens(Batch),
}

impl Feed {
    /// The micro-batches of the next step.
    pub(crate) fn next_step(&mut self, accumulation: usize) -> Vec<Batch> {
        match self {
            Self::Text { mixture, length, batch_size } => {
                let sequences = mixture.next_sequences(*batch_size * accumulation);
                sequences.chunks(*batch_size).map(|rows| Batch::new(rows, *length)).collect()
            }
            // The whole file in `accumulation` parts: as many micro-batches, and the same sum.
            Self::Tokens(batch) => (0..accumulation).map(|i| batch.part(i, accumulation)).collect(),
        }
    }

    /// A micro-batch as full as any, where they differ.
    pub(crate) fn fullest(&self) -> Option<Batch> {
        match self {
            Self::Text { mixture, length, batch_size } => {
                mixture.fullest(*batch_size).map(|sequences| Batch::new(&sequences, *length))
            }
            Self::Tokens(_) => None,
        }
    }

    /// Steps of a pass over the text, not rounded; one for a file of tokens.
    pub(crate) fn steps_of_pass(&self, accumulation: usize) -> f64 {
        match self {
            Self::Text { mixture, batch_size, .. } => {
                mixture.sequences_of_pass().0 / (batch_size * accumulation) as f64
            }
            Self::Tokens(_) => 1.0,
        }
    }

    /// Passes over each source that so many steps are; none for a file of tokens.
    pub(crate) fn passes(&self, steps: u64, accumulation: usize) -> Vec<f64> {
        match self {
            Self::Text { mixture, batch_size, .. } => {
                let dealt = steps as f64 * (batch_size * accumulation) as f64;
                let each = mixture.sequences_of_pass().1.into_iter();
                each.map(|(sequences, share)| dealt * share / sequences).collect()
            }
            Self::Tokens(_) => Vec::new(),
        }
    }

    /// Where each source stands when the next step begins; nowhere for a file of tokens.
    pub(crate) fn dealt(&self) -> Vec<Dealt> {
        match self {
            Self::Text { mixture, .. } => mixture.dealt(),
            Self::Tokens(_) => Vec::new(),
        }
    }

    /// The same from other places on.
    pub(crate) fn at(self, places: &[Dealt]) -> Self {
        match self {
            Self::Text { mixture, length, batch_size } => {
                Self::Text { mixture: mixture.at(places), length, batch_size }
            }
            tokens @ Self::Tokens(_) => tokens,
        }
    }
}
