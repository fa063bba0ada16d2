//! A block of the transformer: attention of the video to itself, attention to the prompt, feed-forward.

use super::attention::{BlockPrompt, CrossAttention, SelfAttention};
use super::conditioning::TimeCondition;
use super::config::WanConfig;
use super::video_context::VideoContext;
use candle_core::{Result, Tensor};
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, LayerNorm, Mlp};
use ringspan_candle::model::{Init, Layer, Scope};
use ringspan_candle::modulation::{gated_residual, layer_norm};
use ringspan_candle::residual::residual;
use ringspan_candle::shard::ShardSpec;
use std::fmt;

/// A block by its names in checkpoints.
#[derive(Debug)]
pub(super) struct WanBlock {
    attn1: SelfAttention,
    /// The norm before cross-attention, if there is one. In the original checkpoints its name is `norm3`.
    norm2: Option<LayerNorm>,
    attn2: CrossAttention,
    ffn: Mlp,
    scale_shift_table: String,
    eps: f64,
}

impl WanBlock {
    pub(super) fn new(scope: &Scope, config: &WanConfig, index: usize) -> Self {
        let (width, ffn) = (config.width(), scope.at("ffn.net"));
        Self {
            attn1: SelfAttention::new(&scope.at("attn1"), config, index),
            norm2: config.cross_attn_norm.then(|| LayerNorm::new(&scope.at("norm2"), width, config.eps)),
            attn2: CrossAttention::new(&scope.at("attn2"), config, index),
            ffn: Mlp::new(&ffn.at("0.proj"), &ffn.at("2"), width, config.ffn_dim, Activation::GeluTanh),
            scale_shift_table: scope.parameter(
                "scale_shift_table",
                &[1, 6, width],
                ShardSpec::Replicated,
                Init::Normal,
            ),
            eps: config.eps,
        }
    }

    /// Keys and values of a prompt in this block.
    pub(super) fn prompt(&self, text: &Tensor, image: Option<&Tensor>, pass: &ForwardPass) -> Result<BlockPrompt> {
        self.attn2.prompt(text, image, pass)
    }
}

/// The prompt as a block takes it.
#[derive(Clone, Copy)]
pub(super) enum PromptInput<'a> {
    /// Its keys and values, which were computed once for all steps of a run.
    KeysAndValues(&'a BlockPrompt),
    /// Embedded text and images `[B * N, C]`: in training, keys and values are computed with each pass, for their gradients.
    Embedded { text: &'a Tensor, image: Option<&'a Tensor> },
}

/// A block with the conditions under which it computes, which are the same for all its calls in a step.
pub(super) struct ConditionedBlock<'a> {
    pub(super) block: &'a WanBlock,
    pub(super) times: &'a TimeCondition,
    pub(super) prompt: PromptInput<'a>,
    pub(super) video: &'a VideoContext,
}

impl ConditionedBlock<'_> {
    /// The norm of x without parameters of its own, scaled and shifted by time steps.
    fn modulated(&self, x: &Tensor, shift: &Tensor, scale: &Tensor) -> Result<Tensor> {
        layer_norm(x, &(scale + 1.0)?, shift, self.times.rows(), self.block.eps)
    }

    fn factors(&self, pass: &ForwardPass) -> Result<[Tensor; 6]> {
        self.times.of_block(pass.tensor(&self.block.scale_shift_table)?)
    }
}

impl Layer for ConditionedBlock<'_> {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        let [shift, scale, ..] = self.factors(pass)?;
        self.block.attn1.inputs(&self.modulated(x, &shift, &scale)?, self.video, pass)
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let WanBlock { attn1, norm2, attn2, ffn, .. } = self.block;
        let [_, _, gate, ffn_shift, ffn_scale, ffn_gate] = self.factors(pass)?;
        // In scopes of their own, tensors are freed before the feed-forward layer computes.
        let x = {
            let x = gated_residual(x, &attn1.output(attended, pass)?, &gate, self.times.rows())?;
            let normed = norm2.as_ref().map(|norm| norm.forward(&x, pass)).transpose()?;
            let computed;
            let prompt = match self.prompt {
                PromptInput::KeysAndValues(prompt) => prompt,
                PromptInput::Embedded { text, image } => {
                    computed = self.block.prompt(text, image, pass)?;
                    &computed
                }
            };
            residual(&x, &attn2.forward(normed.as_ref().unwrap_or(&x), prompt, self.video, pass)?)?
        };
        let inner = ffn.forward(&self.modulated(&x, &ffn_shift, &ffn_scale)?, pass)?;
        gated_residual(&x, &inner, &ffn_gate, self.times.rows())
    }

    fn attention(&self) -> &Attention {
        self.block.attn1.attention()
    }
}

impl fmt::Debug for ConditionedBlock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ConditionedBlock").field("block", self.block).finish_non_exhaustive()
    }
}
