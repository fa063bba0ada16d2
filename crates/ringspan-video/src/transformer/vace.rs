//! VACE (Jiang et al., 2025, arXiv:2503.07598): parallel control blocks whose projected outputs are added to the
//! main stream.

use super::block::{ConditionedBlock, WanBlock};
use super::config::WanConfig;
use crate::error::Result;
use candle_core::Tensor;
use ringspan_candle::layers::{ForwardPass, ReplicatedLinear, scaled};
use ringspan_candle::model::{Layer, Scope};
use ringspan_candle::residual::residual;

/// A control block: a block like the others, with a projection of what it adds to the video.
#[derive(Debug)]
pub(super) struct ControlBlock {
    block: WanBlock,
    /// The projection by which the first control block takes the control.
    proj_in: Option<ReplicatedLinear>,
    proj_out: ReplicatedLinear,
    number: usize,
}

/// The hidden states of the control blocks, `[T, C]`, which one block passes to the next.
#[derive(Clone)]
pub(super) struct ControlStream<'a> {
    stream: Tensor,
    /// The video before its first block, until the first control block has taken it.
    video: Option<Tensor>,
    scale: &'a [f32],
}

impl<'a> ControlStream<'a> {
    /// The stream of an embedded control and the video before its first block.
    pub(super) fn new(control: Tensor, video: Tensor, scale: &'a [f32]) -> Self {
        Self { stream: control, video: Some(video), scale }
    }
}

impl ControlBlock {
    /// Control block `number`, whose attention is that of layer `index`.
    pub(super) fn new(scope: &Scope, config: &WanConfig, index: usize, number: usize) -> Self {
        let linear = |name| ReplicatedLinear::new(&scope.at(name), config.width(), config.width(), true);
        Self {
            block: WanBlock::new(scope, config, index),
            proj_in: (number == 0).then(|| linear("proj_in")),
            proj_out: linear("proj_out"),
            number,
        }
    }

    pub(super) fn block(&self) -> &WanBlock {
        &self.block
    }

    pub(super) fn number(&self) -> usize {
        self.number
    }

    /// Passes the stream through the block, and returns what is added to the video.
    pub(super) fn forward(
        &self,
        control: &mut ControlStream,
        conditioned: &ConditionedBlock,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        let mut stream = control.stream.clone();
        if let (Some(proj_in), Some(video)) = (&self.proj_in, control.video.take()) {
            stream = residual(&proj_in.forward(&stream, pass)?, &video)?;
        }
        control.stream = conditioned.forward(&stream, pass)?;
        let added = self.proj_out.forward(&control.stream, pass)?;
        Ok(scaled(&added, f64::from(control.scale[self.number]))?)
    }
}
