//! The embedding of patches: a convolution whose stride is its kernel, so that it is one linear layer for each token.

use super::config::WanConfig;
use super::video_context::VideoContext;
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use ringspan_candle::cast::cast;
use ringspan_candle::layers::ForwardPass;
use ringspan_candle::linear::linear;
use ringspan_candle::model::{Init, Scope};
use ringspan_candle::shard::ShardSpec;

/// Embeds patches of latents, `weight` `[C, channels, frames, rows, columns]` and `bias` `[C]`.
#[derive(Debug)]
pub(super) struct PatchEmbedding {
    weight: String,
    bias: String,
    channels: usize,
}

impl PatchEmbedding {
    pub(super) fn new(scope: &Scope, config: &WanConfig, channels: usize) -> Self {
        let [frames, rows, columns] = config.patch_size;
        let shape = [config.width(), channels, frames, rows, columns];
        Self {
            weight: scope.parameter("weight", &shape, ShardSpec::Replicated, Init::Normal),
            bias: scope.parameter("bias", &shape[..1], ShardSpec::Replicated, Init::Constant(0.0)),
            channels,
        }
    }

    /// The type in which the model computes.
    pub(super) fn dtype(&self, pass: &ForwardPass) -> Result<DType> {
        Ok(pass.weight(&self.weight)?.computed_in())
    }

    /// This rank's tokens `[T, C]` of latents `[B, channels, F, H, W]`.
    pub(super) fn forward(&self, latents: &Tensor, video: &VideoContext, pass: &ForwardPass) -> Result<Tensor> {
        let wanted = (video.batch(), self.channels);
        if latents.dims().get(..2) != Some(&[wanted.0, wanted.1]) {
            let problem = format!("the model takes [{}, {}, F, H, W], given {:?}", wanted.0, wanted.1, latents.shape());
            return Err(Error::Input(problem));
        }
        let weight = pass.tensor(&self.weight)?.flatten_from(1)?;
        let patches = cast(&video.grid().patches(latents, video.rows())?, weight.dtype())?;
        Ok(linear(&patches, &weight, Some(pass.tensor(&self.bias)?))?)
    }
}
