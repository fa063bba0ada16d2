//! Encoders of prompts and of images, whose tokens are shared by a ring of all ranks.

use crate::error::{Error, Result};
use crate::ranks::VideoRanks;
use candle_core::{Device, Tensor};
use ringspan::attention::{self, Inputs};
use ringspan::kernel::View;
use ringspan::{Documents, Group, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};

/// A rank of an encoder: which tokens it has, and attention to the tokens of all ranks.
pub(crate) struct EncoderRank<'a> {
    /// This rank's tokens, as rows of all sequences.
    pub(crate) rows: Vec<usize>,
    group: Group,
    schedule: &'a Schedule,
}

/// Runs `work` on every rank, which returns `width` numbers for each of its tokens, and puts them together in the order of the
/// tokens. Returns `None` in a process without rank 0.
///
/// # Errors
/// The error of the rank that failed first.
pub(crate) fn encode(
    ranks: &mut VideoRanks,
    documents: &Documents,
    width: usize,
    work: impl Fn(&EncoderRank) -> Result<Vec<f32>> + Sync,
) -> Result<Option<Vec<f32>>> {
    let grid = (ranks.size(), 1);
    let layout = Layout::new(LayoutKind::Contiguous, documents, ranks.size())?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid)?;
    let parts = ranks.gather(|rank| {
        let group = Group::new(rank.communicator().clone(), grid, rank.kernel())?;
        work(&EncoderRank { rows: layout.rows(rank.index()), group, schedule: &schedule })
    })?;
    let Some(parts) = parts else { return Ok(None) };
    let tokens: usize = (0..layout.ranks()).map(|rank| layout.tokens(rank)).sum();
    let mut states = vec![0.0; tokens * width];
    for (rank, part) in parts.iter().enumerate() {
        for (row, state) in layout.rows(rank).into_iter().zip(part.f32()?.chunks_exact(width)) {
            states[row * width..][..width].copy_from_slice(state);
        }
    }
    Ok(Some(states))
}

impl EncoderRank<'_> {
    /// What queries `[T, heads * dim]` of this rank's tokens take from the keys and values of all ranks, `[T, heads * dim]`.
    pub(crate) fn attend(&self, [q, k, v]: [&Tensor; 3], heads: usize, score: &Score) -> Result<Tensor> {
        let (tokens, width) = q.dims2()?;
        let values = |x: &Tensor| -> Result<Vec<f32>> { Ok(x.flatten_all()?.to_vec1()?) };
        let (q, k, v) = (values(q)?, values(k)?, values(v)?);
        let view = |values| {
            View::new(values, tokens, heads, width / heads.max(1))
                .ok_or_else(|| Error::Input(format!("{tokens} tokens of {heads} heads in a width of {width}")))
        };
        let inputs = Inputs::new(view(&q)?, view(&k)?, view(&v)?, score);
        let out = attention::forward(&self.group, self.schedule, &inputs)?.out;
        Ok(Tensor::from_vec(out, (tokens, width), &Device::Cpu)?)
    }
}
