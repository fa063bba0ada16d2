//! New models of the user's shape: every family that can be read can be begun, trained, resumed and exported.

use crate::common::{Memory, run, text, tiny_config};
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{Settings, Tokenizer, TrainArgs, TrainConfig, plan, train};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// Writes the tiny model's `config.json`, with some keys changed, to a folder of its own.
fn shape(root: &Path, more: Value) -> PathBuf {
    let mut json = tiny_config();
    json.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let path = root.join("shape/config.json");
    fs::create_dir_all(root.join("shape")).unwrap();
    fs::write(&path, json.to_string()).unwrap();
    path
}

fn experts() -> Value {
    json!({
        "model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": true, "mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": false,
    })
}

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        model_config: Some(root.join("shape/config.json")),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        sample_tokens: Some(0),
        sequence_length: Some(96),
        batch_size: Some(2),
        steps: Some(6),
        save_every: Some(3),
        ring: Some(1),
        ..Settings::default()
    }
}

fn bytes(folder: &Path) -> Vec<u8> {
    fs::read(folder.join("model.safetensors")).unwrap()
}

#[test]
fn every_mesh_begins_and_trains_the_same_new_model() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let mesh = |dp_shard, ring, tp, ep| Settings {
        dp_shard: Some(dp_shard),
        ring: Some(ring),
        tp: Some(tp),
        ep,
        ..Settings::default()
    };
    for (model, more) in [("llama", json!({ "initializer_range": 0.1 })), ("experts", experts())] {
        shape(root, more);
        let (_, expected) = run(settings(root, &format!("{model}-one")));
        assert!(expected.steps[5].loss < expected.steps[0].loss, "{:?}", expected.losses());
        let ep = (model == "experts").then_some(2);
        for (n, mesh) in [mesh(1, 2, 1, ep), mesh(2, 1, 2, ep)].iter().enumerate() {
            let (_, memory) = run(mesh.overriding(&settings(root, &format!("{model}-{n}"))).unwrap());
            for (a, b) in memory.losses().iter().zip(expected.losses()) {
                assert!((a - b).abs() <= 1e-5 * b, "{model} on mesh {n}: {a} is not {b}");
            }
        }
    }
}

#[test]
fn a_new_model_is_resumed_bit_for_bit_and_exported_as_its_configuration_says() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    // The ids belong to another tokenizer: 128001 is no byte.
    let more = json!({ "initializer_range": 0.05, "eos_token_id": 128_001, "bos_token_id": 1, "mine": [1, 2] });
    let file = shape(root, more);
    let (whole, memory) = run(settings(root, "whole"));
    assert!(memory.plan.model.contains("new (seed 0) as in"), "{}", memory.plan.model);
    assert!(memory.plan.model.contains("tokenizer byte-level of 257 tokens"), "{}", memory.plan.model);
    let (cut, _) = run(settings(root, "cut"));
    fs::remove_dir_all(cut.out.join("checkpoints/step-000006")).unwrap();
    let resume = Settings { resume: Some(cut.out.clone()), ..Settings::default() };
    let args = TrainArgs { settings: resume, ..TrainArgs::default() };
    train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut Memory::default()).unwrap();
    assert_eq!(bytes(&cut.out), bytes(&whole.out));

    let (config, _) = folder::load(&whole.out).unwrap();
    assert_eq!((config.model_type.as_str(), config.hidden_size), ("llama", 32));
    let json = folder::config_json(&whole.out).unwrap();
    assert_eq!((&json["eos_token_id"], &json["bos_token_id"]), (&json!(256), &Value::Null));
    assert_eq!((&json["mine"], &json["initializer_range"]), (&json!([1, 2]), &json!(0.05)));
    assert_eq!(Tokenizer::read(&whole.out.join("tokenizer.json")).unwrap().vocabulary_size(), 257);

    // `--model-config` may name the file's folder, and another seed makes another model.
    let parent = Settings { model_config: file.parent().map(PathBuf::from), ..settings(root, "folder") };
    assert_eq!(bytes(&run(parent).0.out), bytes(&whole.out));
    assert_ne!(bytes(&run(Settings { seed: Some(1), ..settings(root, "other") }).0.out), bytes(&whole.out));
}

/// A model saved after a step with learning rate 0 has the weights of the decoder's own initialisation.
#[test]
fn the_first_weights_are_those_of_a_new_decoder() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let file = shape(root, json!({ "initializer_range": 0.3 }));
    let frozen = Settings { steps: Some(1), warmup: Some(0), lr: Some(0.0), ..settings(root, "frozen") };
    let (_, got) = folder::load(&run(Settings { seed: Some(9), dp_shard: Some(2), ..frozen }).0.out).unwrap();
    let json: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    let wanted = Decoder::new(serde_json::from_value::<Config>(json).unwrap()).unwrap().init(9).unwrap();
    for (name, wanted) in wanted {
        let flat = |t: &candle_core::Tensor| t.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(flat(&got[&name]), flat(&wanted), "{name}");
    }
}

#[test]
fn a_tokenizer_lies_beside_the_configuration_or_is_named() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    shape(root, json!({ "vocab_size": 300, "eos_token_id": 256 }));
    let tokenizer = Tokenizer::byte_level(Path::new("mine")).unwrap().to_json().unwrap();
    let fewer = tokenizer.replace("<|endoftext|>", "</s>");
    fs::create_dir(root.join("elsewhere")).unwrap();
    fs::write(root.join("elsewhere/tokenizer.json"), &fewer).unwrap();
    fs::write(root.join("shape/tokenizer.json"), &tokenizer).unwrap();
    let planned = |tokenizer: Option<PathBuf>| {
        let settings = Settings { tokenizer, ..settings(root, "none") };
        plan(&TrainConfig::resolve(settings).unwrap()).map(|plan| plan.model).map_err(|error| error.to_string())
    };
    assert!(planned(None).unwrap().contains("shape/tokenizer.json"));
    assert!(planned(Some(root.join("elsewhere"))).unwrap().contains("elsewhere/tokenizer.json"));
    let (outcome, _) = run(Settings {
        tokenizer: Some(root.join("elsewhere/tokenizer.json")),
        steps: Some(1),
        ..settings(root, "named")
    });
    assert!(fs::read_to_string(outcome.out.join("tokenizer.json")).unwrap().contains("</s>"));

    shape(root, json!({ "vocab_size": 200 }));
    let message = planned(None).unwrap_err();
    assert!(message.contains("has 257 tokens") && message.contains("vocabulary is 200"), "{message}");
    fs::remove_file(root.join("shape/tokenizer.json")).unwrap();
    let message = planned(None).unwrap_err();
    for word in ["shape/tokenizer.json", "vocab_size 200", "257", "--tokenizer"] {
        assert!(message.contains(word), "`{word}` is not in: {message}");
    }
    let message = planned(Some(root.join("nowhere.json"))).unwrap_err();
    assert!(message.contains("nowhere.json"), "{message}");
}

/// The ids in the saved configuration must be the named tokenizer's: with those of another one, generation would stop anywhere or
/// never.
#[test]
fn a_named_tokenizer_says_which_tokens_end_a_text() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let named = root.join("named");
    fs::create_dir(&named).unwrap();
    fs::write(named.join("tokenizer.json"), Tokenizer::byte_level(Path::new("mine")).unwrap().to_json().unwrap())
        .unwrap();
    shape(root, json!({ "eos_token_id": 100, "bos_token_id": 1, "pad_token_id": 2 }));
    let exported = |name: &str, tokenizer: Option<&PathBuf>| {
        let settings = Settings { tokenizer: tokenizer.cloned(), steps: Some(1), ..settings(root, name) };
        let json = folder::config_json(&run(settings).0.out).unwrap();
        ["eos", "bos", "pad"].map(|kind| json[format!("{kind}_token_id")].clone())
    };
    assert_eq!(exported("by-name", Some(&named)), [json!(256), Value::Null, Value::Null]);
    // The files in the tokenizer's folder name the end of a text, too, and win over its usual names.
    fs::write(named.join("tokenizer_config.json"), r#"{"eos_token": {"content": "a"}}"#).unwrap();
    assert_eq!(exported("by-folder", Some(&named)), [json!(97), Value::Null, Value::Null]);
    fs::write(named.join("tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
    assert_eq!(exported("by-both", Some(&named.join("tokenizer.json"))), [json!(256), Value::Null, Value::Null]);
    // The tokenizer next to the configuration is the one that the configuration's ids belong to.
    fs::copy(named.join("tokenizer.json"), root.join("shape/tokenizer.json")).unwrap();
    assert_eq!(exported("beside", None), [json!(100), json!(1), json!(2)]);
}

/// A chat template next to the configuration was written for the tokenizer next to it.
#[test]
fn the_chat_template_is_that_of_the_tokenizer() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let (data, template) = crate::common::conversations(root);
    let template = fs::read_to_string(template).unwrap();
    let tokenizer = Tokenizer::byte_level(Path::new("mine")).unwrap().to_json().unwrap();
    shape(root, json!({}));
    fs::create_dir(root.join("named")).unwrap();
    fs::write(root.join("named/tokenizer.json"), &tokenizer).unwrap();
    fs::write(root.join("shape/chat_template.jinja"), "{{ raise_exception('of another tokenizer') }}").unwrap();
    fs::write(root.join("shape/tokenizer_config.json"), r#"{"eos_token": "</s>"}"#).unwrap();
    let started = |name: &str, tokenizer: Option<PathBuf>| {
        let data = Some(vec![data.clone()]);
        let settings = Settings { tokenizer, data, steps: Some(1), ..settings(root, name) };
        let config = TrainConfig::resolve(settings).unwrap();
        train(&config, &AtomicBool::new(false), &mut Memory::default()).map_err(|error| error.to_string())
    };
    let message = started("none", Some(root.join("named"))).unwrap_err();
    assert!(message.contains("has no chat template") && message.contains("--chat-template"), "{message}");
    // The byte-level tokenizer has no chat template.
    let message = started("bytes", None).unwrap_err();
    assert!(message.contains("has no chat template"), "{message}");
    fs::write(root.join("named/chat_template.jinja"), &template).unwrap();
    fs::write(root.join("named/tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
    for (name, tokenizer) in [("folder", "named"), ("file", "named/tokenizer.json")] {
        let out = started(name, Some(root.join(tokenizer))).unwrap().out;
        assert_eq!(fs::read_to_string(out.join("chat_template.jinja")).unwrap(), template);
        assert!(fs::read_to_string(out.join("tokenizer_config.json")).unwrap().contains("endoftext"));
    }
    // With the byte-level tokenizer, no file that belongs to another tokenizer is written.
    text(root);
    let (bytes, _) = run(Settings { steps: Some(1), ..settings(root, "text") });
    assert!(bytes.out.join("tokenizer.json").exists());
    assert!(!bytes.out.join("tokenizer_config.json").exists() && !bytes.out.join("chat_template.jinja").exists());

    // With its tokenizer next to the configuration, the template there is the model's.
    fs::write(root.join("shape/tokenizer.json"), &tokenizer).unwrap();
    let message = started("beside", None).unwrap_err();
    assert!(message.contains("of another tokenizer"), "{message}");
}

/// The plan of a model too large for any machine is made at once: no weights are drawn for it.
#[test]
fn the_plan_of_a_large_new_model_takes_no_weights() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    shape(root, json!({ "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 120, "head_dim": 128 }));
    let plan = plan(&TrainConfig::resolve(settings(root, "none")).unwrap()).unwrap();
    assert!(plan.rank_bytes() > 4 << 40, "{plan}");
    assert!(plan.refusal.is_some(), "{plan}");
}

#[test]
fn a_shape_that_cannot_be_begun_is_refused_with_its_file() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let refused = |words: &[&str]| {
        let config = TrainConfig::resolve(settings(root, "none")).unwrap();
        let message = plan(&config).unwrap_err().to_string();
        for word in words {
            assert!(message.contains(word), "`{word}` is not in: {message}");
        }
    };
    refused(&["shape/config.json"]);
    let file = shape(root, json!({ "model_type": "gpt2" }));
    refused(&["'gpt2'", "llama, qwen2"]);
    shape(root, json!({ "initializer_range": 0.0 }));
    refused(&["initializer_range is 0"]);
    shape(root, json!({ "num_attention_heads": 3 }));
    refused(&["num_attention_heads 3", "num_key_value_heads 2"]);
    fs::write(&file, "{\"model_type\": \"llama\"}").unwrap();
    refused(&["shape/config.json", "vocab_size"]);
    fs::write(&file, "{").unwrap();
    refused(&["shape/config.json"]);

    shape(root, json!({ "max_position_embeddings": 64 }));
    let warned = plan(&TrainConfig::resolve(settings(root, "none")).unwrap()).unwrap().warning;
    assert!(warned.contains("96 tokens pass the 64") && warned.contains("raise max_position_embeddings"), "{warned}");
    // A resumed run could not follow that advice.
    let (begun, _) = run(Settings { steps: Some(1), warmup: Some(0), ..settings(root, "begun") });
    let resume = Settings { resume: Some(begun.out), steps: Some(2), ..Settings::default() };
    let args = TrainArgs { settings: resume, ..TrainArgs::default() };
    let warned = plan(&TrainConfig::from_args(&args).unwrap()).unwrap().warning;
    assert!(warned.contains("96 tokens pass the 64") && !warned.contains("raise"), "{warned}");
}
