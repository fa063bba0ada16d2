//! Tensor parallelism: layers whose width is sharded over ranks (Shoeybi et al., 2019, arXiv:1909.08053), with sequence
//! parallelism between them (Korthikanti et al., 2022, arXiv:2205.05198).
//!
//! The ranks of a group have the same T tokens. Between layers, each holds its rows of them. A layer all-gathers the rows,
//! and each rank multiplies all of them with its shard of the weights; the results are partial sums, which a reduce-scatter
//! adds and distributes by rows again. So a parameter that all ranks hold whole is applied to other tokens, or to another
//! part of a sum, on each of them: its gradient is the sum over the ranks.

use crate::collective;
use candle_core::{Result, Tensor};
use ringspan::comm::{Communicator, numbers};
use std::ops::Range;
use std::sync::Arc;

/// A tensor-parallel group, whose ranks share the width of layers.
#[derive(Clone, Default)]
pub struct TensorParallel {
    /// The communicator of the group; `None` if each rank holds layers whole.
    comm: Option<Arc<dyn Communicator>>,
}

/// The group of one rank: layers are not sharded.
pub static NO_TENSOR_PARALLEL: TensorParallel = TensorParallel { comm: None };

impl TensorParallel {
    /// The group of the ranks of `comm`, which must be used for nothing else.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm: Some(comm).filter(|comm| comm.size() > 1) }
    }

    /// This rank's index in the group, and the group's size.
    pub fn rank_and_size(&self) -> (usize, usize) {
        self.comm.as_ref().map_or((0, 1), |comm| (comm.rank(), comm.size()))
    }

    /// This rank's range of something of size `whole`: rows, heads, a vocabulary. Ranges differ in size by one at most.
    pub fn shard_range(&self, whole: usize) -> Range<usize> {
        self.comm.as_ref().map_or(0..whole, |comm| part(whole, comm.rank(), comm.size()))
    }

    /// All-gathers the rows of all ranks, `tokens` in all: `[T of rank, C]` to `[T, C]`. The backward pass is a
    /// reduce-scatter.
    ///
    /// # Errors
    /// A number of rows that differs from this rank's part, failures of other ranks.
    pub fn gather(&self, x: &Tensor, tokens: usize) -> Result<Tensor> {
        match &self.comm {
            Some(comm) => collective::all_gather_of(comm, x, self.counts(tokens)),
            None => Ok(x.clone()),
        }
    }

    /// Reduce-scatters the rows, so that this rank receives its rows of the sum: `[T, C]` to `[T of rank, C]`. The backward
    /// pass is an all-gather.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn reduce(&self, x: &Tensor) -> Result<Tensor> {
        match &self.comm {
            Some(comm) => collective::reduce_scatter(comm, x, self.counts(x.dim(0)?)),
            None => Ok(x.clone()),
        }
    }

    /// All-gathers numbers: those of each rank, in rank order.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn exchange(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let Some(comm) = &self.comm else { return Ok(vec![own.to_vec()]) };
        numbers::all_gather(&**comm, own).map_err(candle_core::Error::wrap)
    }

    /// Whether layers are not sharded, since the group is one rank.
    pub fn is_single_rank(&self) -> bool {
        self.comm.is_none()
    }

    fn counts(&self, tokens: usize) -> Vec<usize> {
        let ranks = self.comm.as_ref().map_or(1, |comm| comm.size());
        (0..ranks).map(|rank| part(tokens, rank, ranks).len()).collect()
    }
}

/// The range of something of size `whole` that belongs to one of `ranks` ranks: consecutive in rank order, with sizes that
/// differ by one at most.
pub fn part(whole: usize, rank: usize, ranks: usize) -> Range<usize> {
    let at = |rank: usize| (whole as u128 * rank as u128 / ranks.max(1) as u128) as usize;
    at(rank)..at(rank + 1)
}
