//! The tokens of a chunk: their logits, and the gradients that overwrite these.

use super::CHUNK;
use super::row::{RowStatistics, capped, gradient, row_statistics};
use super::vocabulary::Vocabulary;
use crate::matmul::Matrix;
use crate::number::Number;
use crate::pool;
use crate::slices::elements_of;
use crate::weight::Weight;
use crate::weight_matrix::WeightMatrix;
use candle_core::{Result, Tensor};
use std::ops::Range;

/// Tokens with a target whose logits are in memory at once, and the factors of these logits.
pub(super) struct Chunk<'a, T> {
    pub(super) rows: &'a [usize],
    pub(super) targets: &'a [u32],
    /// Number of logits of a token on this rank.
    pub(super) vocabulary: usize,
    /// The hidden states of these tokens alone.
    pub(super) hidden: Matrix<'a, T>,
    pub(super) head: WeightMatrix<'a>,
}

/// Rows of logits and the targets of these rows.
type LogitRows<'a> = (&'a mut [f32], &'a [u32]);

impl<T: Number> Chunk<'_, T> {
    /// The logits and targets of the chunk, split for the threads.
    fn parts<'b>(&'b self, logits: &'b mut [f32]) -> Vec<LogitRows<'b>> {
        let part = pool::part(self.targets.len(), self.vocabulary);
        logits.chunks_mut(part * self.vocabulary).zip(self.targets.chunks(part)).collect()
    }

    /// Turns logits into exponentials relative to their row's maximum, row by row; returns the sums of each row.
    pub(super) fn statistics(&self, logits: &mut [f32], vocabulary: &Vocabulary) -> Vec<RowStatistics> {
        let sums: Vec<Vec<RowStatistics>> = pool::map(self.parts(logits), |(logits, targets)| {
            let of = |row: &mut [f32], target: u32| {
                pool::vectorized(
                    #[inline(always)]
                    || row_statistics(row, vocabulary.index_of(target)),
                )
            };
            logits.chunks_exact_mut(self.vocabulary).zip(targets).map(|(row, target)| of(row, *target)).collect()
        });
        sums.concat()
    }

    /// Turns the logits of each token into `scale` times the gradient of its negative log-likelihood; returns the sum of the
    /// negative log-likelihoods.
    pub(super) fn differentiate(&self, logits: &mut [f32], vocabulary: &Vocabulary, scale: f32) -> Result<f64> {
        if vocabulary.shared.is_single_rank() {
            // Each row is finished while it is in the cache.
            let of_rows = pool::map(self.parts(logits), |(logits, targets)| {
                let rows = logits.chunks_exact_mut(self.vocabulary).zip(targets);
                let one = |row: &mut [f32], target: u32| {
                    let index = vocabulary.index_of(target);
                    let sums = row_statistics(row, index);
                    gradient(row, index, scale, &sums, &sums, vocabulary.softcap);
                    sums.nll()
                };
                rows.map(|(row, target)| {
                    pool::vectorized(
                        #[inline(always)]
                        || one(row, *target),
                    )
                })
                .sum::<f64>()
            });
            return Ok(of_rows.into_iter().sum());
        }
        let sums = self.statistics(logits, vocabulary);
        let totals = vocabulary.totals(&sums)?;
        let part = pool::part(self.targets.len(), self.vocabulary);
        let of_rows = sums.chunks(part).zip(totals.chunks(part));
        pool::map(self.parts(logits).into_iter().zip(of_rows).collect(), |((logits, targets), (sums, totals))| {
            let rows = logits.chunks_exact_mut(self.vocabulary).zip(targets);
            for ((row, target), (sums, totals)) in rows.zip(sums.iter().zip(totals)) {
                let index = vocabulary.index_of(*target);
                pool::vectorized(
                    #[inline(always)]
                    || gradient(row, index, scale, sums, totals, vocabulary.softcap),
                );
            }
        });
        Ok(totals.iter().map(RowStatistics::nll).sum())
    }
}

/// Calls `work` with the logits `[.., V]` of each chunk of the tokens with a target, which are given by their row indices and
/// targets. The logits are in one buffer, which `work` may overwrite.
pub(super) fn for_each_chunk<T: Number>(
    hidden: &Tensor,
    head: &Weight,
    (rows, targets): (&[usize], &[u32]),
    softcap: Option<f32>,
    mut work: impl FnMut(&Chunk<T>, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let (tokens, width) = hidden.dims2()?;
    elements_of::<T, _>(hidden, |hidden| {
        WeightMatrix::read(head, |head| {
            let (hidden, vocabulary) = (Matrix::new(hidden, tokens, width), head.rows());
            let mut logits = vec![0.0; rows.len().min(CHUNK) * vocabulary];
            let mut gathered = Vec::new();
            for (rows, targets) in rows.chunks(CHUNK).zip(targets.chunks(CHUNK)) {
                let hidden = match span(rows) {
                    Some(rows) => hidden.rows(rows),
                    None => {
                        gathered.clear();
                        let row = |row: &usize| &hidden.data()[row * width..(row + 1) * width];
                        rows.iter().for_each(|index| gathered.extend_from_slice(row(index)));
                        Matrix::new(&gathered, rows.len(), width)
                    }
                };
                let logits = &mut logits[..targets.len() * vocabulary];
                head.forward(hidden, logits);
                if let Some(cap) = softcap {
                    let part = pool::part(logits.len(), 1);
                    pool::map(logits.chunks_mut(part).collect(), |part: &mut [f32]| {
                        pool::vectorized(
                            #[inline(always)]
                            || part.iter_mut().for_each(|x| *x = capped(*x, cap)),
                        );
                    });
                }
                work(&Chunk { rows, targets, vocabulary, hidden, head }, logits)?;
            }
            Ok(())
        })
    })
}

/// Ascending row indices as a range, if none is missing between the first and the last.
pub(super) fn span(rows: &[usize]) -> Option<Range<usize>> {
    let (first, last) = (*rows.first()?, *rows.last()?);
    (last - first + 1 == rows.len()).then_some(first..last + 1)
}
