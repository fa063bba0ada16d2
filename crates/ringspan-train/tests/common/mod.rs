//! A tiny model, a small text, and an observer that records what happens, for all tests.
#![allow(dead_code)] // Each test file uses its part.

use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{
    EvaluationMetrics, Observer, Outcome, Plan, Settings, StepMetrics, Tokenizer, TrainConfig, train,
};
use std::{
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

pub(crate) fn tiny_config() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 257, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "attention_bias": false, "tie_word_embeddings": true,
    })
}

pub(crate) fn tiny_model(folder_path: &Path) -> PathBuf {
    let path = folder_path.join("tiny");
    let json = tiny_config();
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    folder::save(&path, &json, &decoder.init(3).unwrap()).unwrap();
    let tokenizer = Tokenizer::byte_level(Path::new("byte-level")).unwrap();
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_json().unwrap()).unwrap();
    path
}

/// The keys that turn the tiny model into a mixture of experts with an auxiliary loss.
pub(crate) fn experts() -> serde_json::Value {
    serde_json::json!({
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": true, "output_router_logits": true, "router_aux_loss_coef": 0.5, "mlp_only_layers": [],
        "decoder_sparse_step": 1, "tie_word_embeddings": false,
    })
}

/// Replaces the tiny model in a folder by a mixture of experts.
pub(crate) fn sparse(path: &Path) {
    let mut json = tiny_config();
    json.as_object_mut().unwrap().extend(experts().as_object().unwrap().clone());
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    folder::save(path, &json, &decoder.init(5).unwrap()).unwrap();
}

/// Replaces the tiny model in a folder by one with latent attention, whose experts are chosen with a correction that is not
/// trained.
pub(crate) fn latent(path: &Path) {
    let json = serde_json::json!({
        "model_type": "deepseek_v3", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 10,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
        "max_position_embeddings": 512,
    });
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    let mut weights = decoder.init(5).unwrap();
    let correction = candle_core::Tensor::new(&CORRECTION, &candle_core::Device::Cpu).unwrap();
    assert!(weights.insert(CORRECTED.into(), correction).is_some());
    folder::save(path, &json, &weights).unwrap();
}

/// The parameter that is never trained, and its values.
pub(crate) const CORRECTED: &str = "model.layers.1.mlp.gate.e_score_correction_bias";
pub(crate) const CORRECTION: [f32; 6] = [0.2, -0.1, 0.05, 0.3, -0.2, 0.1];

/// Replaces the tiny model in a folder by one whose experts are one tensor per parameter, and whose heads have sinks.
pub(crate) fn stacked(path: &Path) {
    let json = serde_json::json!({
        "model_type": "gpt_oss", "vocab_size": 257, "hidden_size": 32, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 0.5,
    });
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    folder::save(path, &json, &decoder.init(5).unwrap()).unwrap();
}

/// Settings of a run on the tiny model and the text in `root`, whose output folder is `name` there.
pub(crate) fn of_tiny_model(root: &Path, name: &str) -> Settings {
    Settings {
        model: Some(root.join("tiny")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        sample_tokens: Some(0),
        sequence_length: Some(64),
        ..Settings::default()
    }
}

/// Documents of many lengths, shorter and longer than the tests' sequences.
pub(crate) fn text(folder_path: &Path) -> PathBuf {
    let path = folder_path.join("text.jsonl");
    let lines: Vec<String> = (0..40)
        .map(|i| {
            let words: String = (0..1 + i * 7 % 60).map(|w| format!("word {} of {i}; ", w * i % 13)).collect();
            serde_json::json!({ "text": words }).to_string()
        })
        .collect();
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

/// Conversations of long questions and short answers, and their chat template.
pub(crate) fn conversations(folder_path: &Path) -> (PathBuf, PathBuf) {
    let (data, template) = (folder_path.join("chat.jsonl"), folder_path.join("template.jinja"));
    let say = |role: &str, words: String| serde_json::json!({ "role": role, "content": words });
    let turn = |i: usize| {
        [say("user", format!("what is {i}? ").repeat(1 + i * 5 % 14)), say("assistant", format!("it is {}", i * i))]
    };
    let line = |i: usize| {
        let messages = [turn(i), turn(i + 3)].concat();
        serde_json::json!({ "messages": messages }).to_string()
    };
    std::fs::write(&data, (0..40).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}\
                  {% if add_generation_prompt %}assistant: {% endif %}";
    std::fs::write(&template, source).unwrap();
    (data, template)
}

/// Records the events of a run; stops it after the step in `stop_after`.
#[derive(Debug, Default)]
pub(crate) struct Memory<'a> {
    pub(crate) plan: Plan,
    pub(crate) steps: Vec<StepMetrics>,
    pub(crate) evaluations: Vec<EvaluationMetrics>,
    pub(crate) stop_after: Option<(u64, &'a AtomicBool)>,
}

impl Observer for Memory<'_> {
    fn planned(&mut self, plan: &Plan) {
        self.plan = plan.clone();
    }
    fn stepped(&mut self, metrics: &StepMetrics) {
        self.steps.push(metrics.clone());
        if let Some((step, stop)) = self.stop_after
            && metrics.step == step
        {
            stop.store(true, Ordering::SeqCst);
        }
    }
    fn evaluated(&mut self, metrics: &EvaluationMetrics) {
        self.evaluations.push(metrics.clone());
    }
}

impl Memory<'_> {
    pub(crate) fn losses(&self) -> Vec<f64> {
        self.steps.iter().map(|m| m.loss).collect()
    }
}

pub(crate) fn run(settings: Settings) -> (Outcome, Memory<'static>) {
    let mut memory = Memory::default();
    let outcome = train(&TrainConfig::resolve(settings).unwrap(), &AtomicBool::new(false), &mut memory).unwrap();
    (outcome, memory)
}
