//! Tests of GGUF files: models and tokenizers equal those that the files were converted from.

use crate::support::{assert_equal, fixture, load, on_one_device, relative_l2};
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use half::f16;
use ringspan_candle::Weights;
use ringspan_models::{Decoder, folder, gguf};
use serde_json::json;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::{Path, PathBuf};

fn file(name: &str) -> PathBuf {
    fixture("gguf").join(name)
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().and_then(|t| t.to_vec1()).expect("f32")
}

fn contains(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

#[test]
fn weights_are_those_of_the_folder_as_exactly_as_they_are_stored() {
    for (name, stored) in [("llama_tied", "F32"), ("qwen3", "F16"), ("qwen2", "Q8_0")] {
        let (_, wanted) = folder::load(&fixture(name)).expect("the fixture");
        let (config, got) = gguf::load(&file(&format!("{name}.gguf"))).expect("loads");
        assert_eq!((config.model_type.as_str(), got.len()), (name.trim_end_matches("_tied"), wanted.len()));
        for (name, wanted) in wanted {
            let (shape, got, wanted) = (got[&name].dims(), flat(&got[&name]), (wanted.dims().to_vec(), flat(&wanted)));
            assert_eq!(shape, wanted.0, "{name}");
            match stored {
                "F16" if shape.len() > 1 => {
                    let rounded: Vec<f32> = wanted.1.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
                    assert_eq!(got, rounded, "{name}");
                }
                "Q8_0" if shape.len() > 1 && shape[1] % 32 == 0 => {
                    let error = relative_l2(&got, &wanted.1);
                    assert!(error > 0.0 && error < 1e-2, "{name} differs by {error:e}");
                }
                _ => assert_eq!(got, wanted.1, "{name}"),
            }
        }
    }
}

/// The configuration is made from metadata; heads, positions and epsilons all influence the logits.
#[test]
fn a_model_from_a_file_computes_what_its_folder_computes() {
    for name in ["llama_tied", "qwen2", "qwen3"] {
        let path = file(&format!("{name}.gguf"));
        let (_, exact, batch, wanted) = load(name);
        let (config, weights) = gguf::load(&path).expect("loads");
        let decoder = Decoder::new(config).expect("supported");
        let (got, _) = on_one_device(&decoder, &exact, &batch);
        assert_equal(name, &got, &wanted);

        let saved = tempfile::tempdir().expect("a folder");
        folder::save(saved.path(), &gguf::config_json(&path).expect("JSON"), &weights).expect("saved");
        let (config, again) = folder::load(saved.path()).expect("loads");
        assert!(again.iter().all(|(name, tensor)| flat(tensor) == flat(&weights[name])));
        let (got, _) = on_one_device(&Decoder::new(config).expect("supported"), &exact, &batch);
        assert_equal(name, &got, &wanted);
    }
}

#[test]
fn tokenizers_cut_and_join_text_as_the_ones_they_were_made_from() {
    #[derive(serde::Deserialize)]
    struct ExpectedTokens {
        text: String,
        tokens: Vec<u32>,
        decoded: String,
    }
    for kind in ["llama-bpe", "qwen2", "deepseek-llm", "deepseek-v3"] {
        let tokenizer = gguf::tokenizer(&file(&format!("tokenizer-{kind}.gguf"))).expect("a tokenizer");
        let json = fs::read(file(&format!("tokenizer-{kind}.json"))).expect("the fixture");
        let wanted: Vec<ExpectedTokens> = serde_json::from_slice(&json).expect("JSON");
        assert!(wanted.len() > 4);
        for ExpectedTokens { text, tokens, decoded } in wanted {
            let got = tokenizer.encode(text.as_str(), true).expect("encodes");
            assert_eq!(got.get_ids(), tokens, "{kind}: {text}");
            assert_eq!(tokenizer.decode(&tokens, true).expect("decodes"), decoded, "{kind}: {text}");
        }
        assert!(
            tokenizer.decode(&[tokenizer.token_to_id("<|end|>").expect("known")], true).expect("decodes").is_empty()
        );
    }
}

/// Writes a GGUF file with changed metadata, and without some tensors or with more.
fn changed(name: &str, metadata: &[(&str, Value)], tensors: &[(&str, Option<Tensor>)]) -> tempfile::NamedTempFile {
    let mut source = BufReader::new(File::open(file(name)).expect("the fixture"));
    let content = Content::read(&mut source).expect("whole");
    let mut all: HashMap<&str, Value> =
        content.metadata.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
    all.extend(metadata.iter().cloned());
    let mut stored: HashMap<&str, QTensor> = HashMap::new();
    for name in content.tensor_infos.keys() {
        stored.insert(name, content.tensor(&mut source, name, &Device::Cpu).expect("a tensor"));
    }
    for (name, tensor) in tensors {
        stored.remove(name);
        if let Some(tensor) = tensor {
            stored.insert(name, QTensor::quantize(tensor, GgmlDType::F32).expect("f32"));
        }
    }
    let mut out = tempfile::NamedTempFile::new().expect("a file");
    let metadata: Vec<(&str, &Value)> = all.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> = stored.iter().map(|(key, tensor)| (*key, tensor)).collect();
    gguf_file::write(&mut out, &metadata, &tensors).expect("written");
    out
}

fn zeros(shape: &[usize]) -> Option<Tensor> {
    Some(Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros"))
}

const MODEL: &str = "llama_tied.gguf";

/// Llama 3.1's divisors of frequencies at a base of 500000 and heads of width 8: fast pairs are kept, slow ones scaled.
#[test]
fn the_rope_scaling_of_llama_3_is_found_from_its_factors() {
    let frequencies = [1.0, 500_000f64.powf(-0.25), 500_000f64.powf(-0.5), 500_000f64.powf(-0.75)];
    for factor in [8.0, 32.0] {
        let scaled = |frequency: f64| {
            let turns = 8192.0 * frequency / (2.0 * std::f64::consts::PI);
            let kept = ((turns - 1.0) / 3.0).clamp(0.0, 1.0);
            (1.0 / ((1.0 - kept) / factor + kept)) as f32
        };
        let factors = frequencies.map(scaled);
        assert!(factors[0] == 1.0 && factors[3] > 4.0 && factors[3] < factor as f32 + 0.1, "{factors:?}");
        let write = |factors: &[f32]| {
            let base = ("llama.rope.freq_base", Value::F32(500_000.0));
            let tensor = Tensor::new(factors, &Device::Cpu).expect("factors");
            changed(MODEL, &[base], &[("rope_freqs.weight", Some(tensor))])
        };
        // The slowest pair must be scaled in full, or the factor cannot be derived.
        if (f64::from(factors[3]) - factor).abs() > 1e-3 {
            let message = gguf::config_json(write(&factors).path()).expect_err("no whole factor").to_string();
            contains(&message, &["rope_freqs.weight", "heads of 8"]);
            continue;
        }
        let json = gguf::config_json(write(&factors).path()).expect("JSON");
        let wanted = json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        });
        assert_eq!(json["rope_scaling"], wanted);
        let mut other = factors;
        other[1] = 1.5;
        contains(&gguf::config_json(write(&other).path()).expect_err("others").to_string(), &["rope_freqs.weight"]);
        contains(&gguf::config_json(write(&factors[..3]).path()).expect_err("three").to_string(), &["3 factors"]);
    }
}

#[test]
fn a_linear_or_yarn_scaling_is_read() {
    let entry = |key: &'static str, value: Value| (key, value);
    let kind = |name: &str| entry("llama.rope.scaling.type", Value::String(name.into()));
    let factor = entry("llama.rope.scaling.factor", Value::F32(4.0));
    let length = entry("llama.rope.scaling.original_context_length", Value::U32(64));
    let scaling = |metadata: &[(&str, Value)]| {
        let file = changed(MODEL, metadata, &[]);
        gguf::load(file.path()).expect("supported");
        gguf::config_json(file.path()).expect("JSON")["rope_scaling"].clone()
    };
    assert_eq!(scaling(&[kind("none")]), serde_json::Value::Null);
    assert_eq!(scaling(&[kind("linear"), factor.clone()]), json!({ "rope_type": "linear", "factor": 4.0 }));
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    assert_eq!(scaling(&[kind("yarn"), factor.clone(), length.clone()]), yarn);
    let slow = entry("llama.rope.scaling.yarn_beta_slow", Value::F32(0.5));
    assert_eq!(scaling(&[kind("yarn"), factor.clone(), length.clone(), slow])["beta_slow"], 0.5);
    let message = |metadata: &[(&str, Value)]| {
        gguf::load(changed(MODEL, metadata, &[]).path()).expect_err("must be refused").to_string()
    };
    let sharper = entry("llama.rope.scaling.yarn_attn_factor", Value::F32(1.5));
    contains(&message(&[kind("yarn"), factor.clone(), length, sharper]), &["yarn_attn_factor is 1.5", "possible is 1"]);
    contains(&message(&[kind("longrope"), factor]), &["longrope", "none, linear, yarn"]);
    contains(&message(&[kind("linear")]), &["linear", "factor"]);
}

#[test]
fn files_that_cannot_be_read_say_why() {
    let refusal = |path: &Path| gguf::load(path).expect_err("must be refused").to_string();
    let message = |metadata: &[(&str, Value)], tensors: &[(&str, Option<Tensor>)]| {
        refusal(changed(MODEL, metadata, tensors).path())
    };
    contains(&refusal(Path::new("nowhere.gguf")), &["nowhere.gguf"]);
    let arch = ("general.architecture", Value::String("mamba".into()));
    contains(&message(&[arch], &[]), &["mamba", "llama, qwen2, qwen3"]);
    let all = "gemma2, gemma3, olmo2, glm4, phi3, smollm3, granite";
    contains(&message(&[("general.architecture", Value::String("mamba".into()))], &[]), &[all]);
    contains(&message(&[("llama.block_count", Value::F32(1.5))], &[]), &["llama.block_count"]);
    contains(&message(&[("llama.block_count", Value::U64(u64::MAX))], &[]), &["num_hidden_layers"]);
    contains(&message(&[("llama.attention.head_count", Value::U32(0))], &[]), &["num_attention_heads is 0"]);
    contains(&message(&[("llama.attention.head_count", Value::U32(5))], &[]), &["self_attn", "[32, 32]", "[32, 40]"]);
    contains(&message(&[("llama.block_count", Value::U32(3))], &[]), &["model.layers.2", "needs"]);
    contains(&message(&[], &[("token_embd.weight", None)]), &["token_embd.weight"]);
    contains(&message(&[], &[("blk.1.ffn_up.weight", None)]), &["model.layers.1.mlp.up_proj.weight", "[48, 32]"]);
    contains(&message(&[], &[("blk.1.ffn_up.weight", zeros(&[8, 32]))]), &["[8, 32]", "[48, 32]"]);
    contains(&message(&[], &[("blk.0.ffn_gate_exps.weight", zeros(&[2, 2]))]), &["blk.0.ffn_gate_exps.weight"]);

    // A tensor without elements claims so many experts that creating them would take all memory of the machine.
    let mut bytes = fs::read(fixture("gguf_families").join("mixtral.gguf")).expect("bytes");
    let name = b"blk.0.ffn_gate_exps.weight";
    let at = bytes.windows(name.len()).position(|window| window == name).expect("in the file") + name.len() + 4;
    // After the number of dimensions, the sizes follow, innermost first.
    bytes[at + 8..at + 16].copy_from_slice(&0u64.to_le_bytes());
    bytes[at + 16..at + 24].copy_from_slice(&100_000u64.to_le_bytes());
    let empty = tempfile::NamedTempFile::new().expect("a file");
    fs::write(empty.path(), bytes).expect("written");
    contains(&refusal(empty.path()), &["blk.0.ffn_gate_exps.weight", "a shape of [100000, 0, "]);

    let whole = fs::read(file(MODEL)).expect("bytes");
    let cut = tempfile::NamedTempFile::new().expect("a file");
    for length in [0, 3, 20, 300, 1500, whole.len() / 2, whole.len() - 40] {
        fs::write(cut.path(), &whole[..length]).expect("written");
        contains(&refusal(cut.path()), &[cut.path().to_str().expect("a name")]);
    }
}

/// The error for a family's file in which the bytes after some names are replaced: after a tensor's name its number of
/// dimensions and their sizes, innermost first; after a key its type and value.
fn refusal_of(name: &str, changes: &[(&str, &[u8])]) -> String {
    let mut bytes = fs::read(fixture("gguf_families").join(name)).expect("bytes");
    for (after, change) in changes {
        let after = after.as_bytes();
        let at = bytes.windows(after.len()).position(|window| window == after).expect("in the file") + after.len();
        bytes[at..at + change.len()].copy_from_slice(change);
    }
    refusal(&bytes)
}

fn refusal(bytes: &[u8]) -> String {
    let file = tempfile::NamedTempFile::new().expect("a file");
    fs::write(file.path(), bytes).expect("written");
    gguf::load(file.path()).expect_err("must be refused").to_string()
}

/// A number as the metadata store it: its type, then its value.
fn number(value: u32) -> Vec<u8> {
    [4, value].map(u32::to_le_bytes).concat()
}

#[test]
fn files_of_deepseek_that_cannot_be_read_say_why() {
    let of_v3 = |after: &str, change: &[u8]| refusal_of("deepseek3.gguf", &[(after, change)]);
    let gating = |value: u32| of_v3("deepseek2.expert_gating_func", &number(value));
    contains(&gating(3), &["expert_gating_func is 3", "1, softmax, and 2, sigmoid"]);
    // DeepSeek-V2's softmax weights are not normalised to sum to 1.
    contains(&gating(1), &["norm_topk_prob true", "deepseek_v2"]);
    let heads = of_v3("deepseek2.attention.key_length_mla", &number(16));
    contains(&heads, &["16 elements", "rope.dimension_count 16"]);
    contains(&of_v3("deepseek2.expert_count", &number(0)), &["deepseek2.expert_count is 0"]);
    // The name of one tensor is changed to that of a layer that does not exist.
    let elsewhere = |layer: &str, tensor: &str| {
        let mut bytes = fs::read(fixture("gguf_families").join("deepseek3.gguf")).expect("bytes");
        let name = format!("blk.{layer}.{tensor}");
        let at = bytes.windows(name.len()).position(|window| window == name.as_bytes()).expect("in the file");
        bytes[at + 4] = b'9';
        refusal(&bytes)
    };
    contains(&elsewhere("0", "attn_v_b.weight"), &["blk.0.attn_v_b.weight is missing"]);
    let alone = elsewhere("0", "attn_k_b.weight");
    contains(&alone, &["blk.0.attn_k_b.weight is missing", "blk.0.attn_v_b.weight"]);
    contains(&elsewhere("1", "exp_probs_b.bias"), &["model.layers.1.mlp.gate.e_score_correction_bias"]);
    let heads = [&3u32.to_le_bytes()[..], &[32u64, 32, 2].map(u64::to_le_bytes).concat()].concat();
    contains(&of_v3("blk.0.attn_k_b.weight", &heads), &["blk.0.attn_k_b.weight", "[2, 32, 32] and [4, 32, 32]"]);
}

#[test]
fn files_of_gpt_oss_that_cannot_be_read_say_why() {
    let dims = |dims: &[u64]| {
        let sizes: Vec<u8> = dims.iter().flat_map(|size| size.to_le_bytes()).collect();
        [&(dims.len() as u32).to_le_bytes()[..], &sizes].concat()
    };
    let changed = |tensor: &str, sizes: &[u64]| refusal_of("gpt-oss.gguf", &[(tensor, &dims(sizes))]);
    let narrow = changed("blk.1.ffn_up_exps.weight", &[64, 32, 4]);
    contains(&narrow, &["blk.1.ffn_gate_exps.weight", "[4, 64, 64] and [4, 32, 64]"]);
    contains(&changed("blk.0.attn_sinks.weight", &[3]), &["model.layers.0.self_attn.sinks", "[3]", "[4]"]);
    let turned = changed("blk.0.ffn_down_exps.weight", &[32, 128, 4]);
    contains(&turned, &["model.layers.0.mlp.experts.down_proj", "[4, 32, 128]", "[4, 64, 64]"]);
    contains(&refusal_of("gpt-oss.gguf", &[("gpt-oss.expert_count", &number(0))]), &["gpt-oss.expert_count is 0"]);
}

#[test]
fn tokenizers_that_would_cut_otherwise_are_refused() {
    let message = |metadata: &[(&str, Value)]| {
        let file = changed("tokenizer-qwen2.gguf", metadata, &[]);
        gguf::tokenizer(file.path()).expect_err("must be refused").to_string()
    };
    let text = |text: &str| Value::String(text.into());
    contains(&message(&[("tokenizer.ggml.model", text("llama"))]), &["tokenizer.ggml.scores"]);
    contains(&message(&[("tokenizer.ggml.model", text("rwkv"))]), &["'rwkv'", "gpt2", "llama"]);
    contains(&message(&[("tokenizer.ggml.pre", text("falcon"))]), &["'falcon'", "llama-bpe", "qwen2"]);
    contains(&message(&[("tokenizer.ggml.tokens", Value::U32(1))]), &["tokenizer.ggml.tokens"]);
    contains(&gguf::tokenizer(&file(MODEL)).expect_err("none there").to_string(), &["tokenizer.ggml.model"]);
    let weights: Weights = gguf::load(&file(MODEL)).expect("a model all the same").1;
    assert!(!weights.is_empty());
}
