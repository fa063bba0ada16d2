//! Layers whose width is spread over ranks (Shoeybi et al., 2019, arXiv:1909.08053), with the tokens between them dealt to
//! the same ranks (Korthikanti et al., 2022, arXiv:2205.05198).
//!
//! The ranks of a group have the same T tokens. Between layers each holds its rows of them. A layer gathers the rows, and
//! each rank multiplies all of them with its part of the weights; the results are partial sums, which are added up while
//! the rows are dealt again. So a parameter that all ranks hold whole sees other tokens, or another part of a sum, on each
//! of them: its gradient is the sum over the ranks.

use crate::collective;
use candle_core::{Result, Tensor};
use ringspan::comm::{Communicator, numbers};
use std::ops::Range;
use std::sync::Arc;

/// The ranks that share the width of layers.
#[derive(Clone, Default)]
pub struct TensorParallel {
    /// None where layers are whole.
    comm: Option<Arc<dyn Communicator>>,
}

/// Layers are whole.
pub static WHOLE: TensorParallel = TensorParallel { comm: None };

impl TensorParallel {
    /// The ranks of `comm` share layers. They use it for nothing else.
    pub fn new(comm: Arc<dyn Communicator>) -> Self {
        Self { comm: Some(comm).filter(|comm| comm.size() > 1) }
    }

    /// This rank's place among the ranks that share layers, and their number.
    pub fn place(&self) -> (usize, usize) {
        self.comm.as_ref().map_or((0, 1), |comm| (comm.rank(), comm.size()))
    }

    /// This rank's part of something of size `whole`: rows, heads, a vocabulary. Parts are equal to within one.
    pub fn part(&self, whole: usize) -> Range<usize> {
        self.comm.as_ref().map_or(0..whole, |comm| part(whole, comm.rank(), comm.size()))
    }

    /// The rows of all ranks, `tokens` of them, from this rank's: `[T of rank, C]` to `[T, C]`. Differentiable: gradients
    /// are summed and dealt.
    ///
    /// # Errors
    /// Other rows than this rank's part, failures of other ranks.
    pub fn gather(&self, x: &Tensor, tokens: usize) -> Result<Tensor> {
        match &self.comm {
            Some(comm) => collective::all_gather_of(comm, x, self.counts(tokens)),
            None => Ok(x.clone()),
        }
    }

    /// This rank's rows of the sum over the ranks: `[T, C]` to `[T of rank, C]`. Differentiable: gradients are gathered.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn reduce(&self, x: &Tensor) -> Result<Tensor> {
        match &self.comm {
            Some(comm) => collective::reduce_scatter(comm, x, self.counts(x.dim(0)?)),
            None => Ok(x.clone()),
        }
    }

    /// The numbers of all ranks, in rank order.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn exchange(&self, own: &[f64]) -> Result<Vec<Vec<f64>>> {
        let Some(comm) = &self.comm else { return Ok(vec![own.to_vec()]) };
        numbers::all_gather(&**comm, own).map_err(candle_core::Error::wrap)
    }

    /// Whether layers are whole.
    pub fn is_whole(&self) -> bool {
        self.comm.is_none()
    }

    fn counts(&self, tokens: usize) -> Vec<usize> {
        let ranks = self.comm.as_ref().map_or(1, |comm| comm.size());
        (0..ranks).map(|rank| part(tokens, rank, ranks).len()).collect()
    }
}

/// The part of something of size `whole` that one of `ranks` ranks has: neighbours in rank order, equal to within one.
pub fn part(whole: usize, rank: usize, ranks: usize) -> Range<usize> {
    let at = |rank: usize| (whole as u128 * rank as u128 / ranks.max(1) as u128) as usize;
    at(rank)..at(rank + 1)
}
