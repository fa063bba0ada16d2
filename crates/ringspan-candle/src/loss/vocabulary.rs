//! The vocabulary of an output head, whose rows tensor-parallel ranks may share.

use super::row::RowStatistics;
use crate::tensor_parallel::TensorParallel;
use crate::weight::Weight;
use candle_core::{Result, bail};
use std::ops::Range;

/// The vocabulary, of which this rank may hold a shard.
pub(super) struct Vocabulary<'a> {
    /// The number of token ids V, over all ranks.
    pub(super) size: usize,
    /// The range of token ids whose logits are computed on this rank.
    pub(super) known: Range<usize>,
    pub(super) softcap: Option<f32>,
    pub(super) shared: &'a TensorParallel,
}

impl<'a> Vocabulary<'a> {
    pub(super) fn new(head: &Weight, softcap: Option<f32>, shared: &'a TensorParallel) -> Result<Self> {
        let own = head.dims().first().copied().unwrap_or(0);
        if shared.is_single_rank() {
            return Ok(Self { size: own, known: 0..own, softcap, shared });
        }
        let rows = shared.exchange(&[own as f64])?;
        let size = rows.concat().iter().map(|rows| *rows as usize).sum();
        match shared.shard_range(size) {
            known if known.len() == own => Ok(Self { size, known, softcap, shared }),
            known => {
                bail!("loss: this rank's part of a vocabulary of {size} is {known:?}, but its head has {own} rows")
            }
        }
    }

    /// The index of a target's logit in this rank's rows of logits; `None` if another rank has it.
    pub(super) fn index_of(&self, target: u32) -> Option<usize> {
        (target as usize).checked_sub(self.known.start).filter(|index| *index < self.known.len())
    }

    /// The statistics of rows over the whole vocabulary, combined from those of the ranks' shards.
    pub(super) fn totals(&self, own: &[RowStatistics]) -> Result<Vec<RowStatistics>> {
        if self.shared.is_single_rank() {
            return Ok(own.to_vec());
        }
        let numbers: Vec<f64> = own.iter().flat_map(|sums| [f64::from(sums.max), sums.sum, sums.of_target]).collect();
        let mut totals = vec![RowStatistics::NONE; own.len()];
        for of_rank in self.shared.exchange(&numbers)? {
            for (total, numbers) in totals.iter_mut().zip(of_rank.chunks_exact(3)) {
                total.add(&RowStatistics { max: numbers[0] as f32, sum: numbers[1], of_target: numbers[2] });
            }
        }
        Ok(totals)
    }
}
