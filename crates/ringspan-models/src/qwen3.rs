//! Qwen3 (Yang et al., 2025): Qwen2 with norms of queries and keys in place of their biases.

use crate::config::Config;
use crate::error::Result;
use crate::family::{Family, causal_lm};
use crate::qwen2;
use crate::rope;
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, QkvLinear, RmsNorm, RotaryEmbedding, RowLinear};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use std::sync::Arc;

pub(crate) const FAMILY: Family =
    Family { model_type: "qwen3", keys: qwen2::Keys::NAMES, fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let (rope, masks) = (Arc::new(rope::of_all_layers(config)?), qwen2::masks(config)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index: usize, scope: &Scope| Qwen3Layer {
        input_layernorm: norm(&scope.at("input_layernorm")),
        self_attn: Qwen3Attention::new(config, index, &scope.at("self_attn"), rope.clone(), masks[index].clone()),
        post_attention_layernorm: norm(&scope.at("post_attention_layernorm")),
        mlp: GatedMlp::new(&scope.at("mlp"), config.hidden_size, config.intermediate_size, false, Activation::Silu),
    };
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

#[derive(Debug)]
struct Qwen3Layer {
    input_layernorm: RmsNorm,
    self_attn: Qwen3Attention,
    post_attention_layernorm: RmsNorm,
    mlp: GatedMlp,
}

impl Layer for Qwen3Layer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        self.self_attn.inputs(&self.input_layernorm.forward(x, pass)?, pass)
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.self_attn.o_proj.forward(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        self.mlp.add_to(&x, &h, pass)
    }

    fn attention(&self) -> &Attention {
        &self.self_attn.attention
    }
}

/// Attention with norms on queries and keys, head by head.
#[derive(Debug)]
pub(crate) struct Qwen3Attention {
    qkv_proj: QkvLinear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    rope: Arc<RotaryEmbedding>,
    pub(crate) attention: Attention,
    pub(crate) o_proj: RowLinear,
}

impl Qwen3Attention {
    pub(crate) fn new(config: &Config, index: usize, scope: &Scope, rope: Arc<RotaryEmbedding>, mask: Mask) -> Self {
        let Config { hidden_size: hidden, rms_norm_eps: eps, attention_bias: bias, .. } = *config;
        let (heads, dim) = (config.heads(), config.head_dim());
        let score = Score::new(1.0 / (dim as f32).sqrt());
        Self {
            qkv_proj: QkvLinear::new(scope, hidden, heads, dim, bias),
            q_norm: RmsNorm::new(&scope.at("q_norm"), dim, eps),
            k_norm: RmsNorm::new(&scope.at("k_norm"), dim, eps),
            rope,
            attention: Attention::new(scope, index, heads, mask, score).with_dropout(config.attention_dropout()),
            o_proj: RowLinear::from_heads(&scope.at("o_proj"), heads, dim, hidden, bias),
        }
    }

    /// Queries, keys and values of x, with norms and rotations.
    pub(crate) fn inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        let [q, k, v] = self.qkv_proj.forward(x, pass)?;
        let q = self.rope.forward(self.q_norm.forward(&q, pass)?, pass)?;
        let k = self.rope.forward(self.k_norm.forward(&k, pass)?, pass)?;
        Ok([q, k, v])
    }
}
