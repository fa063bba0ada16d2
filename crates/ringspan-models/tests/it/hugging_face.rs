//! Tests of every model against Hugging Face: logits, loss and all gradients, on one device and on many ranks.

use crate::support::{Batch, TestMesh, assert_equal, fixture, load, on_mesh, on_one_device, on_ranks, relative_l2};
use ringspan::LayoutKind;
use ringspan_models::{Config, Decoder, folder};

const MODELS: [&str; 25] = [
    "llama",
    "llama_tied",
    "llama_linear",
    "llama_dynamic",
    "qwen2",
    "qwen2_yarn",
    "qwen3",
    "qwen3_yarn",
    "qwen3_moe",
    "qwen3_moe_balanced",
    "mistral",
    "gemma3",
    "granite",
    "mixtral",
    "gemma2",
    "olmo2",
    "smollm3",
    "glm4",
    "phi3",
    "phi3_longrope",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt_oss",
    "gpt_oss_balanced",
];
const MESHES: [(usize, usize); 6] = [(1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 4)];
const LAYOUTS: [LayoutKind; 3] = [LayoutKind::Zigzag, LayoutKind::Contiguous, LayoutKind::Striped(5)];

#[test]
fn every_model_equals_hugging_face_on_one_device() {
    for name in MODELS {
        let (decoder, weights, batch, wanted) = load(name);
        let (got, _) = on_one_device(&decoder, &weights, &batch);
        assert_equal(name, &got, &wanted);
    }
}

#[test]
fn every_model_equals_hugging_face_on_every_mesh() {
    for name in MODELS {
        let (decoder, weights, batch, wanted) = load(name);
        for (ring, ulysses) in MESHES {
            for kind in LAYOUTS {
                let got = on_mesh(&decoder, &weights, &batch, kind, (ring, ulysses));
                assert_equal(&format!("{name}, {kind}, ring {ring} x ulysses {ulysses}"), &got, &wanted);
            }
        }
    }
}

/// The comparison is sensitive: a window off by one, another scaling or another epsilon give errors far outside its bounds.
#[test]
fn a_model_that_is_slightly_another_differs() {
    let changes: [(&str, &str, serde_json::Value); 34] = [
        ("mistral", "/sliding_window", 10.into()),
        ("mistral", "/sliding_window", 8.into()),
        ("llama", "/rope_parameters/factor", 7.9.into()),
        ("llama", "/rope_parameters/rope_theta", 9900.0.into()),
        ("llama_tied", "/rms_norm_eps", 1e-4.into()),
        ("llama_linear", "/rope_parameters/factor", 2.45.into()),
        ("llama_dynamic", "/max_position_embeddings", 17.into()),
        ("qwen2_yarn", "/rope_parameters/factor", 3.9.into()),
        ("qwen3_yarn", "/rope_parameters/mscale", 0.75.into()),
        ("qwen3_yarn", "/rope_parameters/truncate", true.into()),
        ("gemma3", "/rope_parameters/full_attention/factor", 7.0.into()),
        ("gemma3", "/rope_parameters/sliding_attention/rope_theta", 9900.0.into()),
        ("gemma3", "/query_pre_attn_scalar", 25.into()),
        ("gemma3", "/layer_types/2", "sliding_attention".into()),
        ("qwen3_moe", "/norm_topk_prob", false.into()),
        ("deepseek_v2", "/topk_method", "greedy".into()),
        ("deepseek_v2", "/topk_group", 2.into()),
        ("deepseek_v2", "/routed_scaling_factor", 1.5.into()),
        ("deepseek_v2", "/rope_parameters/mscale", 0.8.into()),
        ("deepseek_v2", "/rope_parameters/mscale_all_dim", 1.2.into()),
        ("deepseek_v2_lite", "/num_experts_per_tok", 1.into()),
        ("deepseek_v3", "/n_group", 1.into()),
        ("deepseek_v3", "/norm_topk_prob", false.into()),
        ("deepseek_v3", "/routed_scaling_factor", 1.5.into()),
        ("deepseek_v3", "/rope_interleave", false.into()),
        ("deepseek_v3", "/rope_parameters/mscale_all_dim", 0.9.into()),
        ("gpt_oss", "/layer_types/0", "full_attention".into()),
        ("gpt_oss", "/layer_types/1", "sliding_attention".into()),
        ("gpt_oss", "/swiglu_limit", 7.0.into()),
        ("gpt_oss", "/swiglu_limit", 0.81.into()),
        ("gpt_oss", "/swiglu_alpha", 1.41.into()),
        ("gpt_oss", "/num_experts_per_tok", 3.into()),
        ("gpt_oss", "/rope_parameters/truncate", true.into()),
        ("gpt_oss", "/rope_parameters/beta_slow", 0.3.into()),
    ];
    for (name, key, value) in changes {
        let (_, weights, batch, wanted) = load(name);
        let mut json = folder::config_json(&fixture(name)).expect("JSON");
        *json.pointer_mut(key).expect("a key") = value;
        let config: Config = serde_json::from_value(json).expect("sizes");
        let (got, _) = on_one_device(&Decoder::new(config).expect("supported"), &weights, &batch);
        let error = relative_l2(&got.logits, &wanted.logits);
        assert!(error > 5e-5, "{name}: another {key} changes the logits by {error:e} only");
    }
}

#[test]
fn gradients_come_from_the_head_to_the_embedding() {
    for name in MODELS {
        let (decoder, weights, batch, _) = load(name);
        let (_, order) = on_one_device(&decoder, &weights, &batch);
        assert_eq!(order, decoder.units().rev().collect::<Vec<_>>(), "{name}");
    }
}

/// With more ranks than tokens, some ranks hold none, and must still take part.
#[test]
fn ranks_without_tokens_take_part() {
    for name in ["llama", "llama_tied", "qwen3", "qwen3_moe_balanced", "gemma3", "deepseek_v2", "gpt_oss"] {
        let (decoder, weights, whole, _) = load(name);
        let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
        let (one, _) = on_one_device(&decoder, &weights, &short);
        for (ring, ulysses) in [(5, 1), (3, 2), (1, 4)] {
            let many = on_mesh(&decoder, &weights, &short, LayoutKind::Contiguous, (ring, ulysses));
            assert_equal(&format!("{name}, 3 tokens, ring {ring} x ulysses {ulysses}"), &many, &one);
        }
    }
}

/// Experts in MXFP4, as in the published files, are decoded when they are read, and saved decoded.
#[test]
fn experts_in_mxfp4_equal_hugging_face() {
    let (decoder, weights, batch, wanted) = load("gpt_oss_mxfp4");
    for (ring, ep, moe_tp) in [(1, 1, 1), (2, 2, 1), (2, 1, 2)] {
        let test_mesh = TestMesh { ring, ep, moe_tp, ..TestMesh::default() };
        let mut got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
        // Transformers does not train matrices that are stored in MXFP4.
        let quantised = |name: &String| name.ends_with("gate_up_proj") || name.ends_with("down_proj");
        assert_eq!(got.gradients.keys().filter(|name| quantised(name)).count(), 4);
        got.gradients.retain(|name, _| !quantised(name));
        assert_equal(&format!("gpt_oss_mxfp4, {test_mesh:?}"), &got, &wanted);
    }
    let out = tempfile::tempdir().expect("a folder");
    let config = folder::config_json(&fixture("gpt_oss_mxfp4")).expect("JSON");
    folder::save(out.path(), &config, &weights).expect("saved");
    let saved = folder::config_json(out.path()).expect("JSON");
    assert!(config.get("quantization_config").is_some() && saved.get("quantization_config").is_none(), "{saved}");
    let (_, again) = folder::load(out.path()).expect("a model");
    for (name, tensor) in &weights {
        let values = |tensor: &candle_core::Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
        assert_eq!((tensor.dims(), values(tensor)), (again[name].dims(), values(&again[name])), "{name}");
    }
}
