//! Qwen3-MoE (Yang et al., 2025): Qwen3 whose feed-forward parts are mixtures of experts.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys};
use crate::qwen3::Qwen3Attention;
use crate::rope;
use candle_core::Tensor;
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{Attention, ForwardPass, GatedMlp, MixtureOfExperts, RmsNorm, Router};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use std::sync::Arc;

family_keys! {
    struct Keys {
        use_sliding_window: Option<bool>,
        num_experts_per_tok: Option<usize>,
        moe_intermediate_size: Option<usize>,
        norm_topk_prob: Option<bool>,
        decoder_sparse_step: Option<usize>,
        mlp_only_layers: Option<Vec<usize>>,
    }
}

pub(crate) const FAMILY: Family =
    Family { model_type: "qwen3_moe", keys: Keys::NAMES, fill_defaults: |json| json, model };

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    let (router, width) = router(config, &keys)?;
    let (step, dense) = (keys.decoder_sparse_step.unwrap_or(1), keys.mlp_only_layers.unwrap_or_default());
    if step == 0 {
        return Err(Error::Config("decoder_sparse_step is 0; the least is 1, every layer is sparse".into()));
    }
    if let Some(layer) = dense.iter().find(|layer| **layer >= config.num_hidden_layers) {
        let problem = format!("mlp_only_layers names layer {layer} of {}", config.num_hidden_layers);
        return Err(Error::Config(problem));
    }
    // Unlike in Qwen3, a window that is in use applies to all layers.
    let mask = config.causal_mask(config.window()?.filter(|_| keys.use_sliding_window == Some(true)));
    let rope = Arc::new(rope::of_all_layers(config)?);
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let layer = |index: usize, scope: &Scope| {
        let sparse = router.experts > 0 && !dense.contains(&index) && (index + 1).is_multiple_of(step);
        let (hidden, mlp) = (config.hidden_size, scope.at("mlp"));
        Qwen3MoeLayer {
            input_layernorm: norm(&scope.at("input_layernorm")),
            self_attn: Qwen3Attention::new(config, index, &scope.at("self_attn"), rope.clone(), mask.clone()),
            post_attention_layernorm: norm(&scope.at("post_attention_layernorm")),
            mlp: match sparse {
                true => FeedForward::Sparse(Box::new(MixtureOfExperts::new(&mlp, index, hidden, width, router))),
                false => FeedForward::Dense(Box::new(GatedMlp::new(
                    &mlp,
                    hidden,
                    config.intermediate_size,
                    false,
                    Activation::Silu,
                ))),
            },
        }
    };
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// How the router chooses experts, and the inner width of an expert.
fn router(config: &Config, keys: &Keys) -> Result<(Router, usize)> {
    let (experts, top) = (config.num_experts().unwrap_or(128), keys.num_experts_per_tok.unwrap_or(8));
    let width = keys.moe_intermediate_size.unwrap_or(768);
    if width == 0 {
        return Err(Error::Config("moe_intermediate_size is 0; the least is 1".into()));
    }
    if experts > 0 && !(1..=experts).contains(&top) {
        let problem = format!("num_experts_per_tok is {top}; with {experts} experts possible are 1 to {experts}");
        return Err(Error::Config(problem));
    }
    Ok((Router { normalised: keys.norm_topk_prob.unwrap_or(false), ..Router::new(experts, top) }, width))
}

#[derive(Debug)]
struct Qwen3MoeLayer {
    input_layernorm: RmsNorm,
    self_attn: Qwen3Attention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Box<GatedMlp>),
    Sparse(Box<MixtureOfExperts>),
}

impl Layer for Qwen3MoeLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        self.self_attn.inputs(&self.input_layernorm.forward(x, pass)?, pass)
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.self_attn.o_proj.forward(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        match &self.mlp {
            FeedForward::Dense(mlp) => mlp.add_to(&x, &h, pass),
            FeedForward::Sparse(experts) => experts.add_to(&x, &h, pass),
        }
    }

    fn attention(&self) -> &Attention {
        &self.self_attn.attention
    }

    fn experts(&self) -> Option<&MixtureOfExperts> {
        match &self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Sparse(experts) => Some(experts),
        }
    }
}
