//! Information on each row of their input that low-rank adapters read: in training, which elements are dropped, and in serving, which of
//! several adapters the row selects.

use crate::dropout::InputDropout;
use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// The adapter that each row selects, by its slot among several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterSelection(Arc<[Option<u64>]>);

impl AdapterSelection {
    /// For each row of this rank, its adapter, or `None` for a row of the base model.
    #[must_use]
    pub fn new(adapters: Vec<Option<u64>>) -> Self {
        Self(adapters.into())
    }

    /// The adapter of each row.
    #[must_use]
    pub fn adapters(&self) -> &[Option<u64>] {
        &self.0
    }
}

/// Information on the rows of their input that adapters read.
#[derive(Debug, Clone)]
pub enum AdapterRows {
    /// Elements of the input are dropped in training.
    Dropout(InputDropout),
    /// Each row selects one of several adapters.
    Selection(AdapterSelection),
}

impl AdapterRows {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Dropout(dropout) => dropout.tokens().len(),
            Self::Selection(selection) => selection.0.len(),
        }
    }

    /// Whether there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The same for some of the rows, in this order.
    ///
    /// # Panics
    /// If a row is out of range.
    #[must_use]
    pub fn of_rows(&self, rows: &[u32]) -> Self {
        match self {
            Self::Dropout(dropout) => Self::Dropout(dropout.of_rows(rows)),
            Self::Selection(AdapterSelection(all)) => {
                Self::Selection(AdapterSelection(rows.iter().map(|row| all[*row as usize]).collect()))
            }
        }
    }

    /// The same for consecutive rows.
    ///
    /// # Panics
    /// If the range is out of bounds.
    #[must_use]
    pub fn narrow(&self, rows: Range<usize>) -> Self {
        match self {
            Self::Dropout(dropout) => Self::Dropout(dropout.of(dropout.tokens()[rows].to_vec())),
            Self::Selection(AdapterSelection(all)) => Self::Selection(AdapterSelection(all[rows].into())),
        }
    }

    /// A number for each row, from which [`with_numbers`](Self::with_numbers) makes the same rows on another rank.
    pub(crate) fn numbers(&self) -> Vec<u64> {
        match self {
            Self::Dropout(dropout) => dropout.tokens().iter().map(|token| *token as u64).collect(),
            Self::Selection(AdapterSelection(all)) => all.iter().map(|slot| slot.map_or(0, |slot| slot + 1)).collect(),
        }
    }

    /// The same kind of rows, of these numbers, which may be of other ranks.
    pub(crate) fn with_numbers(&self, numbers: Vec<u64>) -> Self {
        match self {
            Self::Dropout(dropout) => Self::Dropout(dropout.of(numbers.iter().map(|token| *token as usize).collect())),
            Self::Selection(_) => {
                Self::Selection(AdapterSelection(numbers.iter().map(|number| number.checked_sub(1)).collect()))
            }
        }
    }

    pub(crate) fn dropout(&self) -> Option<&InputDropout> {
        match self {
            Self::Dropout(dropout) => Some(dropout),
            Self::Selection(_) => None,
        }
    }

    /// The adapters of `rows` rows.
    ///
    /// # Errors
    /// Rows without a selection, and another number of rows.
    pub(crate) fn selection(rows: Option<&Self>, expected: usize) -> Result<&AdapterSelection> {
        match rows {
            Some(Self::Selection(selection)) if selection.0.len() == expected => Ok(selection),
            Some(Self::Selection(selection)) => {
                bail!("{expected} rows ask for adapters, but a selection of {} is at hand", selection.0.len())
            }
            _ => bail!("{expected} rows do not say which of several adapters they ask for"),
        }
    }
}

impl From<InputDropout> for AdapterRows {
    fn from(dropout: InputDropout) -> Self {
        Self::Dropout(dropout)
    }
}
