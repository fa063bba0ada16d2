//! The residual block: two causal convolutions, each after a norm and SiLU, and a shortcut.

use super::block::Block;
use super::convolution::Convolution;
use super::delay::Delay;
use super::norm::ChannelNorm;
use super::streamed::{Source, StreamedConvolution};
use super::strip::Strip;
use crate::error::Result;
use std::sync::Arc;

/// `x + conv2(silu(norm2(conv1(silu(norm1(x))))))`; the shortcut has a convolution of one position where channels change.
#[derive(Clone)]
pub(crate) struct ResidualBlock {
    pub(crate) norm1: Arc<ChannelNorm>,
    pub(crate) conv1: StreamedConvolution,
    pub(crate) norm2: Arc<ChannelNorm>,
    pub(crate) conv2: StreamedConvolution,
    pub(crate) shortcut: Option<Arc<Convolution>>,
    /// The shortcut's rows, which wait for those of the second convolution.
    pub(crate) delay: Delay,
}

impl ResidualBlock {
    pub(crate) fn push(&mut self, strip: &Strip, x: Block) -> Result<Block> {
        let inner = self.conv1.push(strip, &x, Source::Activated(&self.norm1), None)?;
        let shortcut = match &self.shortcut {
            Some(shortcut) => x.with(shortcut.sizes().outputs, shortcut.pointwise(&x.data)),
            None => x,
        };
        let rows = self.conv2.out_rows(&inner.rows, inner.height);
        let shortcut = self.delay.push(shortcut, rows);
        self.conv2.push(strip, &inner, Source::Activated(&self.norm2), Some(&shortcut.data))
    }
}
