//! Llama 2 and 3 (Touvron et al., 2023; Grattafiori et al., 2024).

use crate::config::Config;
use crate::error::Result;
use crate::family::{Family, causal_lm};
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use std::sync::Arc;

pub(crate) const FAMILY: Family = Family { model_type: "llama", keys: &[], fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    let biases = Biases { attention: config.attention_bias, mlp: config.mlp_bias };
    with(config, builder, &Mask::causal(), biases)
}

/// Which linear layers have biases.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Biases {
    /// Whether the projections of attention have biases.
    pub(crate) attention: bool,
    /// Whether the projections of the feed-forward part have biases.
    pub(crate) mlp: bool,
}

/// A Llama model with the same `mask` in every layer.
pub(crate) fn with(
    config: &Config,
    builder: &ModelBuilder,
    mask: &Mask,
    biases: Biases,
) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let rope = Arc::new(rope::of_all_layers(config)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index, scope: &Scope| LlamaLayer::new(config, index, scope, rope.clone(), mask.clone(), biases);
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

#[derive(Debug)]
struct LlamaLayer {
    input_layernorm: RmsNorm,
    qkv_proj: QkvLinear,
    rope: Arc<RotaryEmbedding>,
    attention: Attention,
    o_proj: RowLinear,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl LlamaLayer {
    fn new(
        config: &Config,
        index: usize,
        scope: &Scope,
        rope: Arc<RotaryEmbedding>,
        mask: Mask,
        biases: Biases,
    ) -> Self {
        let Config { hidden_size: hidden, intermediate_size, rms_norm_eps: eps, .. } = *config;
        let (heads, dim, attention) = (config.heads(), config.head_dim(), scope.at("self_attn"));
        let score = Score::new(1.0 / (dim as f32).sqrt());
        Self {
            input_layernorm: RmsNorm::new(&scope.at("input_layernorm"), hidden, eps),
            qkv_proj: QkvLinear::new(&attention, hidden, heads, dim, biases.attention),
            rope,
            attention: Attention::new(&attention, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&attention.at("o_proj"), heads, dim, hidden, biases.attention),
            post_attention_layernorm: RmsNorm::new(&scope.at("post_attention_layernorm"), hidden, eps),
            mlp: GatedMlp::new(&scope.at("mlp"), hidden, intermediate_size, biases.mlp, Activation::Silu),
        }
    }
}

impl Layer for LlamaLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(&self.input_layernorm.forward(x, pass)?, pass)?;
        Ok([self.rope.forward(q, pass)?, self.rope.forward(k, pass)?, v])
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.o_proj.forward(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        self.mlp.add_to(&x, &h, pass)
    }

    fn attention(&self) -> &Attention {
        &self.attention
    }
}
