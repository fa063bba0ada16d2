//! The output: a norm that depends on the time step, and a projection to patches of the velocity.

use super::conditioning::TimeCondition;
use super::config::WanConfig;
use candle_core::{DType, Result, Tensor};
use ringspan_candle::cast::cast;
use ringspan_candle::layers::{ForwardPass, ReplicatedLinear};
use ringspan_candle::model::{Init, Scope};
use ringspan_candle::modulation::layer_norm;
use ringspan_candle::shard::ShardSpec;

/// `scale_shift_table` and `proj_out`.
#[derive(Debug)]
pub(super) struct OutputHead {
    scale_shift_table: String,
    proj_out: ReplicatedLinear,
    eps: f64,
}

impl OutputHead {
    pub(super) fn new(scope: &Scope, config: &WanConfig) -> Self {
        let width = config.width();
        let outputs = config.out_channels() * config.patch();
        Self {
            scale_shift_table: scope.parameter(
                "scale_shift_table",
                &[1, 2, width],
                ShardSpec::Replicated,
                Init::Normal,
            ),
            proj_out: ReplicatedLinear::new(&scope.at("proj_out"), width, outputs, true),
            eps: config.eps,
        }
    }

    /// x `[T, C]` to patches `[T, patch * out_channels]` in f32.
    pub(super) fn forward(&self, x: &Tensor, times: &TimeCondition, pass: &ForwardPass) -> Result<Tensor> {
        let [shift, scale] = times.of_output(pass.tensor(&self.scale_shift_table)?)?;
        let normed = layer_norm(x, &(scale + 1.0)?, &shift, times.rows(), self.eps)?;
        cast(&self.proj_out.forward(&normed, pass)?, DType::F32)
    }
}
