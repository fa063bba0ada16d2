//! Tests of adapters on a GGUF file: they equal those on the same weights in a folder.

use crate::common::{Memory, run, text};
use candle_core::quantized::gguf_file::{self, Content, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use ringspan_candle::Weights;
use ringspan_models::{Base, Config, Decoder, ModelSource, adapter, folder, gguf};
use ringspan_testing::gguf::stored_name;
use ringspan_train::{Settings, TrainArgs, TrainConfig, train};
use serde_json::json;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::AtomicBool;

/// Writes a Qwen3 of 8 bits to `root/model.gguf`, with the tokenizer of a fixture, and its decoded weights to `root/folder`.
fn models(root: &Path) {
    let fixture =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures/gguf/tokenizer-qwen2.gguf");
    let tokenizer = gguf::tokenizer(&fixture).unwrap();
    let vocabulary = tokenizer.get_vocab_size(true);
    let config: Config = serde_json::from_value(json!({
        "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "initializer_range": 0.1,
    }))
    .unwrap();
    let mut metadata = Content::read(&mut File::open(&fixture).unwrap()).unwrap().metadata;
    metadata.insert("general.architecture".into(), Value::String("qwen3".into()));
    for (key, value) in [
        ("block_count", 2),
        ("context_length", 512),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 4),
        ("attention.head_count_kv", 2),
        ("attention.key_length", 8),
    ] {
        metadata.insert(format!("qwen3.{key}"), Value::U32(value));
    }
    let tensors: Vec<(String, QTensor)> = Decoder::new(config)
        .unwrap()
        .init(4)
        .unwrap()
        .iter()
        .map(|(name, tensor)| {
            let kind = if tensor.rank() == 1 { GgmlDType::F32 } else { GgmlDType::Q8_0 };
            (stored_name(name), QTensor::quantize(tensor, kind).unwrap())
        })
        .collect();
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let path = root.join("model.gguf");
    gguf_file::write(&mut File::create(&path).unwrap(), &metadata, &tensors).unwrap();

    let (_, weights) = gguf::load(&path).unwrap();
    folder::save(&root.join("folder"), &gguf::config_json(&path).unwrap(), &weights).unwrap();
    tokenizer.save(root.join("folder/tokenizer.json"), false).unwrap();
}

fn settings(root: &Path, model: &str, name: &str) -> Settings {
    Settings {
        model: Some(root.join(model)),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join(name)),
        sample_tokens: Some(20),
        // With more than 128 tokens on a rank, products have the bits of those with decoded weights.
        sequence_length: Some(320),
        batch_size: Some(2),
        ring: Some(2),
        steps: Some(6),
        save_every: Some(3),
        lr: Some(1e-2),
        warmup: Some(0),
        lora_rank: Some(4),
        ..Settings::default()
    }
}

fn values(weights: &Weights) -> Vec<f32> {
    weights.values().flat_map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect()
}

#[test]
fn an_adapter_beside_a_gguf_file_is_that_beside_its_weights_in_a_folder() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    models(root);
    text(root);
    let (_, expected) = run(settings(root, "folder", "of-folder"));
    let (of_file, memory) = run(settings(root, "model.gguf", "of-file"));
    assert!(expected.steps[5].loss < expected.steps[0].loss - 0.1, "{:?}", expected.losses());
    assert_eq!(memory.losses(), expected.losses());
    // In two layers of width 32, A and B of rank 4 belong to matrices of 32, 16 and 64 rows.
    let training = &memory.plan.training;
    assert!(training.starts_with("a new LoRA adapter of rank 4, 4,096 of "), "{training}");
    assert_eq!(of_file.base_model, Some(root.join("model.gguf")));
    let saved = adapter::load(&of_file.out).unwrap();
    assert_eq!(saved.base, Base::Gguf(root.join("model.gguf").canonicalize().unwrap()));
    assert_eq!(values(&saved.weights), values(&adapter::load(&root.join("of-folder")).unwrap().weights));

    // A reader of the adapter finds its model and its tokenizer.
    let origin = ModelSource::at(&of_file.out).unwrap();
    assert!(origin.tokenizer().unwrap().is_some());
    let (config, merged) = origin.load().unwrap();
    assert_eq!(config.model_type, "qwen3");
    let of_folder = ModelSource::at(&root.join("of-folder")).unwrap().load().unwrap().1;
    assert_eq!(values(&merged), values(&of_folder));
}

#[test]
fn few_tokens_on_a_rank_give_the_losses_of_the_folder_up_to_rounding() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    models(root);
    text(root);
    let losses = |model, name| run(Settings { sequence_length: Some(64), ..settings(root, model, name) }).1.losses();
    let (expected, got) = (losses("folder", "of-folder"), losses("model.gguf", "of-file"));
    assert_eq!(got.len(), 6);
    for (got, expected) in got.iter().zip(&expected) {
        assert!((got - expected).abs() < 1e-6 * expected, "{got} and {expected}");
    }
}

#[test]
fn it_is_resumed_bit_for_bit_and_merged_into_a_folder_with_the_files_tokenizer() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    models(root);
    text(root);
    let merging = |name| Settings { lora_merge: Some(true), ..settings(root, "model.gguf", name) };
    let (whole, _) = run(merging("whole"));
    assert_eq!(whole.base_model, None, "the model is there, too");
    let (cut, _) = run(merging("cut"));
    fs::remove_dir_all(cut.out.join("checkpoints/step-000006")).unwrap();
    let resume = Settings { resume: Some(cut.out.clone()), ..Settings::default() };
    let args = TrainArgs { settings: resume, ..TrainArgs::default() };
    train(&TrainConfig::from_args(&args).unwrap(), &AtomicBool::new(false), &mut Memory::default()).unwrap();
    for name in ["adapter_model.safetensors", "model.safetensors", "tokenizer.json"] {
        assert_eq!(fs::read(cut.out.join(name)).unwrap(), fs::read(whole.out.join(name)).unwrap(), "{name}");
    }
    let (_, merged) = folder::load(&whole.out).unwrap();
    let adapter = adapter::load(&whole.out).unwrap();
    let (_, base) = gguf::load(&root.join("model.gguf")).unwrap();
    let expected = adapter.lora.merge(base.into_iter().chain(adapter.weights).collect()).unwrap();
    let off = values(&merged).iter().zip(values(&expected)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(off < 1e-6, "{off:e} apart");
    let ids = |tokenizer: tokenizers::Tokenizer| tokenizer.encode("The quick fox", false).unwrap().get_ids().to_vec();
    let read = tokenizers::Tokenizer::from_file(whole.out.join("tokenizer.json")).unwrap();
    assert_eq!(ids(read), ids(gguf::tokenizer(&root.join("model.gguf")).unwrap()));
}

#[test]
fn an_adapter_beside_a_gguf_file_is_trained_on_beside_it() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    models(root);
    text(root);
    let (first, _) = run(Settings { steps: Some(1), ..settings(root, "model.gguf", "first") });
    let before = adapter::load(&first.out).unwrap();
    let second = Settings { model: Some(first.out), lr: Some(0.0), steps: Some(1), ..settings(root, "", "second") };
    let (second, _) = run(second);
    let after = adapter::load(&second.out).unwrap();
    assert_eq!((after.base, after.lora), (before.base, before.lora));
    assert_eq!(values(&after.weights), values(&before.weights));
}
