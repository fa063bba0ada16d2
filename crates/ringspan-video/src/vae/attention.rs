//! Self-attention of one head over the positions of each frame, whose columns are cut over the ranks.

use super::block::Block;
use super::convolution::Convolution;
use super::norm::ChannelNorm;
use super::strip::Strip;
use crate::error::Result;
use ringspan::attention::{self, Inputs};
use ringspan::kernel::{Data, View};
use ringspan::{Documents, Layout, Mask, Schedule, Score, StrategyKind};
use ringspan_candle::pool;
use std::sync::Arc;

/// `x + proj(attention(qkv(norm(x))))`, frame by frame.
#[derive(Clone)]
pub(crate) struct FrameAttention {
    pub(crate) norm: Arc<ChannelNorm>,
    pub(crate) qkv: Arc<Convolution>,
    pub(crate) proj: Arc<Convolution>,
}

impl FrameAttention {
    /// Attends in a block of whole frames.
    pub(crate) fn push(&self, strip: &Strip, x: Block) -> Result<Block> {
        let (channels, tokens) = (x.channels, x.frames.len() * x.rows.len() * x.cols);
        let mut normed = vec![0.0; x.data.len()];
        let part = pool::part(tokens, channels) * channels;
        let parts = normed.chunks_mut(part).zip(x.data.chunks(part)).collect();
        pool::map(parts, |(out, x): (&mut [f32], &[f32])| {
            pool::vectorized(
                #[inline(always)]
                || self.norm.write(x, out),
            )
        });
        let qkv = self.qkv.pointwise(&normed);
        drop(normed);
        let attended = self.attend(strip, &x, &qkv, tokens)?;
        let mut out = self.proj.pointwise(&attended);
        out.iter_mut().zip(&x.data).for_each(|(out, x)| *out += x);
        Ok(x.with(channels, out))
    }

    /// A frame is a document. No position matters in attention without a mask, so its tokens may be counted rank by rank.
    fn attend(&self, strip: &Strip, x: &Block, qkv: &[f32], tokens: usize) -> Result<Vec<f32>> {
        let split = strip.split();
        let documents = Documents::batch(x.frames.len(), x.rows.len() * split.width);
        let layout = Layout::paged(&documents, x.rows.len() * split.most(), split.ranks)?;
        let grid = strip.group().grid();
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid)?;
        let view = |index: usize| View {
            data: Data::F32(qkv.get(index * x.channels..).unwrap_or_default()),
            tokens,
            heads: 1,
            dim: x.channels,
            token_stride: 3 * x.channels,
            head_stride: x.channels,
            rows: None,
            computes_in_f32: false,
        };
        let score = Score::new(1.0 / (x.channels as f32).sqrt());
        let inputs = Inputs::new(view(0), view(1), view(2), &score);
        Ok(attention::forward(strip.group(), &schedule, &inputs)?.out)
    }
}
