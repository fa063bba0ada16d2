//! DeepSeek-V2 and V3 (DeepSeek-AI, 2024, arXiv:2405.04434 and 2412.19437): multi-head latent attention, in which keys and values
//! of all heads are computed from one latent vector per token, and mixtures of experts with shared experts that see every token.
//!
//! As in transformers, there is no load-balancing loss, whatever `aux_loss_alpha` says.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::family::{Family, causal_lm, family_keys, with_defaults};
use crate::rope::{self, yarn};
use candle_core::Tensor;
use ringspan::{Mask, Score};
use ringspan_candle::LanguageModel;
use ringspan_candle::activation::Activation;
use ringspan_candle::layers::{
    Attention, ExpertGroups, ForwardPass, GatedMlp, LatentAttention, LatentWidths, MixtureOfExperts, RmsNorm,
    RotaryEmbedding, Router, Scoring,
};
use ringspan_candle::model::{Layer, ModelBuilder, Scope};
use serde_json::{Value, json};
use std::sync::Arc;

family_keys! {
    struct Keys {
        q_lora_rank: Option<usize>,
        kv_lora_rank: usize,
        qk_nope_head_dim: usize,
        qk_rope_head_dim: usize,
        v_head_dim: usize,
        rope_interleave: Option<bool>,
        first_k_dense_replace: Option<usize>,
        moe_layer_freq: Option<usize>,
        moe_intermediate_size: usize,
        n_routed_experts: Option<usize>,
        n_shared_experts: Option<usize>,
        num_experts_per_tok: Option<usize>,
        n_group: Option<usize>,
        topk_group: Option<usize>,
        topk_method: Option<String>,
        scoring_func: Option<String>,
        norm_topk_prob: Option<bool>,
        routed_scaling_factor: Option<f64>,
    }
}

pub(crate) const V2: Family =
    Family { model_type: "deepseek_v2", keys: Keys::NAMES, fill_defaults: |json| fill_defaults(json, of_v2()), model };

pub(crate) const V3: Family =
    Family { model_type: "deepseek_v3", keys: Keys::NAMES, fill_defaults: |json| fill_defaults(json, of_v3()), model };

/// The defaults that transformers uses for keys that a `config.json` of DeepSeek-V2 lacks.
fn of_v2() -> Value {
    json!({
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 0, "moe_intermediate_size": 1407, "n_routed_experts": 64, "n_shared_experts": 2,
        "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": false, "routed_scaling_factor": 1.0,
    })
}

fn of_v3() -> Value {
    json!({
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_interleave": true, "first_k_dense_replace": 3, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
        "scoring_func": "sigmoid", "norm_topk_prob": true, "routed_scaling_factor": 2.5,
    })
}

/// Fills in absent keys. The rotary embedding has the width of `qk_rope_head_dim`, so this is what `head_dim` means here, whatever
/// the file says.
fn fill_defaults(json: Value, defaults: Value) -> Value {
    let mut json = with_defaults(json, defaults);
    json["head_dim"] = json["qk_rope_head_dim"].clone();
    json
}

fn model(config: &Config, builder: &ModelBuilder) -> Result<Arc<dyn LanguageModel>> {
    config.check_activation(config.hidden_act.as_deref(), "silu")?;
    let keys: Keys = config.keys()?;
    check(config, &keys)?;
    let router = router(config, &keys)?;
    let widths = LatentWidths {
        hidden: config.hidden_size,
        queries: keys.q_lora_rank,
        key_values: keys.kv_lora_rank,
        nope: keys.qk_nope_head_dim,
        rope: keys.qk_rope_head_dim,
        value: keys.v_head_dim,
    };
    let score = Score::new((yarn::on_scores(config)? / (widths.query_key() as f64).sqrt()) as f32);
    let (heads, bias, dropout) = (config.heads(), config.attention_bias, config.attention_dropout());
    // DeepSeek-V2 always rotates neighbouring elements as a pair.
    let interleaved = keys.rope_interleave.unwrap_or(true) || config.model_type == V2.model_type;
    let rope = Arc::new(RotaryEmbedding { interleaved, ..rope::of_all_layers(config)? });
    let norm = |scope: &Scope| RmsNorm::new(scope, config.hidden_size, config.rms_norm_eps);
    let dense = keys.first_k_dense_replace.unwrap_or(0);
    let layer = |index: usize, scope: &Scope| {
        let (hidden, mlp) = (config.hidden_size, scope.at("mlp"));
        let gated = |scope: &Scope, width| Box::new(GatedMlp::new(scope, hidden, width, false, Activation::Silu));
        let attention = scope.at("self_attn");
        let own = Attention::new(&attention, index, heads, Mask::causal(), score.clone()).with_dropout(dropout);
        DeepseekLayer {
            input_layernorm: norm(&scope.at("input_layernorm")),
            self_attn: LatentAttention::new(&attention, widths, bias, own, rope.clone()),
            post_attention_layernorm: norm(&scope.at("post_attention_layernorm")),
            mlp: match (index < dense, keys.moe_intermediate_size, keys.n_shared_experts.unwrap_or(1)) {
                (true, ..) => FeedForward::Dense(gated(&mlp, config.intermediate_size)),
                (false, width, shared) => FeedForward::Sparse {
                    experts: Box::new(MixtureOfExperts::new(&mlp, index, hidden, width, router)),
                    shared_experts: gated(&mlp.at("shared_experts"), shared * width),
                },
            },
        }
    };
    Ok(Arc::new(causal_lm(config, builder, norm, layer)))
}

/// Refuses sizes of 0, and settings that transformers does not compute.
fn check(config: &Config, keys: &Keys) -> Result<()> {
    let refuse = |problem: String| Err(Error::Config(problem));
    let sizes = [
        ("q_lora_rank", keys.q_lora_rank.unwrap_or(1)),
        ("kv_lora_rank", keys.kv_lora_rank),
        ("qk_nope_head_dim", keys.qk_nope_head_dim),
        ("v_head_dim", keys.v_head_dim),
        ("moe_intermediate_size", keys.moe_intermediate_size),
        ("n_shared_experts", keys.n_shared_experts.unwrap_or(1)),
    ];
    if let Some((name, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return refuse(format!("{name} is 0; the least is 1"));
    }
    if let Some(every) = keys.moe_layer_freq.filter(|every| *every != 1) {
        return refuse(format!("moe_layer_freq is {every}: possible is 1, experts in all layers after the dense ones"));
    }
    if config.mlp_bias {
        return refuse("mlp_bias is true: possible is false, experts without biases".into());
    }
    match (config.num_attention_heads, config.num_key_value_heads()) {
        (heads, key_values) if heads != key_values => {
            refuse(format!("num_key_value_heads is {key_values}: possible is {heads}, as many as there are heads"))
        }
        _ => Ok(()),
    }
}

/// How the router chooses experts.
fn router(config: &Config, keys: &Keys) -> Result<Router> {
    let refuse = |problem: String| Err(Error::Config(problem));
    let experts = keys.n_routed_experts.unwrap_or(0);
    let top = keys.num_experts_per_tok.unwrap_or(0);
    if !(1..=1 << 16).contains(&experts) || !(1..=experts).contains(&top) {
        let problem = format!("num_experts_per_tok is {top} of n_routed_experts {experts}: possible are 1 to all");
        return refuse(problem);
    }
    let (method, scoring) = (keys.topk_method.as_deref().unwrap_or(""), keys.scoring_func.as_deref().unwrap_or(""));
    let normalised = keys.norm_topk_prob.unwrap_or(false);
    let (best, scoring) = match (config.model_type.as_str(), method, scoring) {
        ("deepseek_v2", "greedy", "softmax") if !normalised => (None, Scoring::Softmax),
        ("deepseek_v2", "group_limited_greedy", "softmax") if !normalised => (Some(1), Scoring::Softmax),
        ("deepseek_v3", "noaux_tc", "sigmoid") => (Some(2), Scoring::Sigmoid),
        (model, ..) => {
            return refuse(format!(
                "topk_method is '{method}', scoring_func '{scoring}', norm_topk_prob {normalised}: {model} is computed {}",
                match model {
                    "deepseek_v2" => "with greedy or group_limited_greedy, softmax, false",
                    _ => "with noaux_tc, sigmoid, and either",
                }
            ));
        }
    };
    let (count, chosen) = (keys.n_group.unwrap_or(0), keys.topk_group.unwrap_or(0));
    let groups = best.map(|best| ExpertGroups { count, top: chosen, best });
    if let Some(ExpertGroups { best, .. }) = groups {
        let possible = count > 0 && experts.is_multiple_of(count) && (1..=count).contains(&chosen);
        if !possible || experts / count < best || chosen * (experts / count) < top {
            return refuse(format!(
                "n_group is {count} and topk_group {chosen}: {experts} experts stand in groups of as many, at least {best}, and a \
                 token's {top} experts fit into its groups"
            ));
        }
    }
    let (scale, correction) = (keys.routed_scaling_factor.unwrap_or(1.0), scoring == Scoring::Sigmoid);
    // The router's weight is not a linear layer in transformers.
    Ok(Router { scoring, normalised, scale, groups, correction, adaptable: false, ..Router::new(experts, top) })
}

#[derive(Debug)]
struct DeepseekLayer {
    input_layernorm: RmsNorm,
    self_attn: LatentAttention,
    post_attention_layernorm: RmsNorm,
    mlp: FeedForward,
}

#[derive(Debug)]
enum FeedForward {
    Dense(Box<GatedMlp>),
    Sparse { experts: Box<MixtureOfExperts>, shared_experts: Box<GatedMlp> },
}

impl Layer for DeepseekLayer {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> candle_core::Result<[Tensor; 3]> {
        self.self_attn.inputs(&self.input_layernorm.forward(x, pass)?, pass)
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> candle_core::Result<Tensor> {
        let attended = self.self_attn.output(attended, pass)?;
        let (x, h) = self.post_attention_layernorm.add_and_norm(x, &attended, pass)?;
        match &self.mlp {
            FeedForward::Dense(mlp) => mlp.add_to(&x, &h, pass),
            FeedForward::Sparse { experts, shared_experts } => {
                experts.add_to(&shared_experts.add_to(&x, &h, pass)?, &h, pass)
            }
        }
    }

    fn attention(&self) -> &Attention {
        self.self_attn.attention()
    }

    fn experts(&self) -> Option<&MixtureOfExperts> {
        match &self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Sparse { experts, .. } => Some(experts),
        }
    }
}
