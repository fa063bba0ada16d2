//! Tests of model folders: saved models are read back unchanged, and errors name what is wrong.

use candle_core::{DType, Device, Tensor};
use ringspan_candle::Weights;
use ringspan_models::folder::{SavedType, Writer};
use ringspan_models::{Decoder, folder};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;
use tempfile::TempDir;

mod writing;

fn config(tied: bool) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 12, "hidden_size": 8,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "tie_word_embeddings": tied, "torch_dtype": "bfloat16", "a_key_of_others": [1, 2]
    })
}

fn decoder(config: &Value) -> Decoder {
    Decoder::new(serde_json::from_value(config.clone()).expect("sizes")).expect("supported")
}

/// A model that is saved in a temporary folder.
fn model(tied: bool) -> (TempDir, Weights) {
    let folder = tempfile::tempdir().expect("a folder");
    let weights = decoder(&config(tied)).init(7).expect("weights");
    folder::save(folder.path(), &config(tied), &weights).expect("saved");
    (folder, weights)
}

fn bits(weights: &Weights) -> HashMap<String, (Vec<usize>, Vec<u32>)> {
    let bits = |tensor: &Tensor| {
        let values: Vec<f32> = tensor.flatten_all().and_then(|t| t.to_vec1()).expect("f32");
        (tensor.dims().to_vec(), values.into_iter().map(f32::to_bits).collect())
    };
    weights.iter().map(|(name, tensor)| (name.clone(), bits(tensor))).collect()
}

/// Writes weights over the model's file without any check.
fn write(path: &Path, weights: &Weights) {
    let tensors: HashMap<String, Tensor> = weights.clone().into_iter().collect();
    candle_core::safetensors::save(&tensors, path).expect("written");
}

fn refusal(folder: &Path) -> String {
    folder::load(folder).expect_err("must be refused").to_string()
}

fn contains(message: &str, words: &[&str]) {
    for word in words {
        assert!(message.contains(word), "'{word}' is not in: {message}");
    }
}

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const Q: &str = "model.layers.1.self_attn.q_proj.weight";

#[test]
fn a_saved_model_comes_back_bit_by_bit() {
    for tied in [false, true] {
        let (folder, weights) = model(tied);
        let (read, loaded) = folder::load(folder.path()).expect("loads");
        assert_eq!(bits(&loaded), bits(&weights));
        assert_eq!(read.tie_word_embeddings, tied);
        assert_eq!(loaded.contains_key("lm_head.weight"), !tied);
        let json = folder::config_json(folder.path()).expect("JSON");
        assert_eq!((&json["torch_dtype"], &json["a_key_of_others"]), (&json!("float32"), &json!([1, 2])));
        let names: Vec<_> =
            fs::read_dir(folder.path()).expect("a folder").map(|file| file.expect("a file").file_name()).collect();
        assert_eq!(names.len(), 2, "nothing temporary stays: {names:?}");
    }
}

#[cfg(unix)]
#[test]
fn half_precision_is_widened_exactly() {
    for dtype in [DType::BF16, DType::F16] {
        let (folder, weights) = model(false);
        let narrow: Weights = weights.iter().map(|(k, v)| (k.clone(), v.to_dtype(dtype).expect("narrow"))).collect();
        write(&folder.path().join(SINGLE), &narrow);
        let (_, loaded) = folder::load(folder.path()).expect("loads");
        let wide: Weights = narrow.iter().map(|(k, v)| (k.clone(), v.to_dtype(DType::F32).expect("wide"))).collect();
        assert_eq!(bits(&loaded), bits(&wide));
    }
}

#[test]
fn a_tied_head_and_rotary_buffers_may_be_in_the_file() {
    let (folder, weights) = model(true);
    let mut more = weights.clone();
    more.insert("lm_head.weight".into(), weights["model.embed_tokens.weight"].copy().expect("copied"));
    more.insert(
        "model.layers.0.self_attn.rotary_emb.inv_freq".into(),
        Tensor::zeros(2, DType::F32, &Device::Cpu).expect("zeros"),
    );
    write(&folder.path().join(SINGLE), &more);
    assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));
}

#[test]
fn tensors_that_do_not_fit_are_named_with_their_shapes() {
    let (folder, weights) = model(false);
    let path = folder.path().join(SINGLE);
    let zeros = |shape: &[usize]| Tensor::zeros(shape, DType::F32, &Device::Cpu).expect("zeros");

    let mut missing = weights.clone();
    missing.remove(Q);
    write(&path, &missing);
    contains(&refusal(folder.path()), &["needs", Q, "[8, 8]"]);

    let mut shaped = weights.clone();
    shaped.insert(Q.into(), zeros(&[4, 8]));
    write(&path, &shaped);
    contains(&refusal(folder.path()), &[Q, "[4, 8]", "[8, 8]"]);

    let mut unknown = weights.clone();
    unknown.insert("model.layers.2.mlp.up_proj.weight".into(), zeros(&[16, 8]));
    write(&path, &unknown);
    contains(&refusal(folder.path()), &["model.layers.2.mlp.up_proj.weight", "[16, 8]"]);

    let mut typed = weights;
    typed.insert(Q.into(), zeros(&[8, 8]).to_dtype(DType::U32).expect("u32"));
    write(&path, &typed);
    contains(&refusal(folder.path()), &[SINGLE, Q, "U32", "F32, BF16, F16"]);
}

#[test]
fn broken_files_are_named() {
    let (folder, _) = model(false);
    let path = folder.path().join(SINGLE);
    let whole = fs::read(&path).expect("bytes");
    // A file cut inside the length, the header and the data; a header longer than the file; bytes that are not a header.
    let mut long = whole.clone();
    long[7] = 0x7f;
    let noise: Vec<u8> =
        whole.iter().enumerate().map(|(i, b)| if (8..40).contains(&i) { b ^ 0x5a } else { *b }).collect();
    for bytes in [&whole[..0], &whole[..5], &whole[..100], &whole[..whole.len() - 1], &long, &noise] {
        fs::write(&path, bytes).expect("written");
        contains(&refusal(folder.path()), &[SINGLE]);
    }
    fs::remove_file(&path).expect("removed");
    contains(&refusal(folder.path()), &[SINGLE]);

    fs::write(folder.path().join("config.json"), "{\"model_type\": ").expect("written");
    contains(&refusal(folder.path()), &["config.json"]);
    fs::write(folder.path().join("config.json"), config(false).to_string().replace("vocab_size", "size"))
        .expect("written");
    contains(&refusal(folder.path()), &["config.json", "vocab_size"]);
    fs::write(folder.path().join("config.json"), config(false).to_string().replace("llama", "mamba")).expect("written");
    contains(&refusal(folder.path()), &[folder.path().to_str().expect("a name"), "mamba", "qwen3"]);
    contains(&refusal(&folder.path().join("nowhere")), &["nowhere"]);
}

#[test]
fn shards_are_read_and_their_faults_named() {
    let (folder, weights) = model(false);
    let at = |name: &str| folder.path().join(name);
    fs::remove_file(at(SINGLE)).expect("removed");
    let index = |map: Vec<(&str, &str)>| {
        let map: HashMap<_, _> = map.into_iter().collect();
        fs::write(at("model.safetensors.index.json"), json!({ "weight_map": map }).to_string()).expect("written");
    };
    let half = weights.len() / 2;
    let part = |from: usize, to: usize| weights.clone().into_iter().skip(from).take(to - from).collect::<Weights>();
    write(&at("a.safetensors"), &part(0, half));
    write(&at("b.safetensors"), &part(half, weights.len()));
    index(vec![("one", "a.safetensors"), ("two", "b.safetensors"), ("three", "b.safetensors")]);
    assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));

    write(&at("b.safetensors"), &part(half - 1, weights.len()));
    let twice = weights.keys().nth(half - 1).expect("a name");
    contains(&refusal(folder.path()), &["b.safetensors", twice, "another file"]);

    fs::remove_file(at("b.safetensors")).expect("removed");
    contains(&refusal(folder.path()), &["b.safetensors"]);

    let outside = tempfile::tempdir().expect("a folder");
    write(&outside.path().join("c.safetensors"), &weights);
    let absolute = outside.path().join("c.safetensors");
    for name in [absolute.to_str().expect("a name"), "../c.safetensors", "..", ""] {
        index(vec![("one", name)]);
        contains(&refusal(folder.path()), &["index.json", "plain file name"]);
    }
}

/// Each file has at most `limit` bytes of data or a single tensor, and no other file stays in the folder.
#[test]
fn rows_are_read_alone_from_files_of_every_type() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let (path, weights) = model(false);
        let narrow: Weights = weights.iter().map(|(k, v)| (k.clone(), v.to_dtype(dtype).expect("narrow"))).collect();
        write(&path.path().join(SINGLE), &narrow);
        let folder = folder::open(path.path()).expect("opens");
        assert!(folder.shapes().iter().all(|(name, shape)| weights[name].dims() == shape));
        assert_eq!(folder.shapes().len(), weights.len());
        for (name, rows) in [(Q, 2..5), (Q, 0..8), (Q, 3..3), ("model.norm.weight", 1..7), ("lm_head.weight", 11..12)] {
            let whole = narrow[name].to_dtype(DType::F32).expect("wide");
            let wanted = whole.narrow(0, rows.start, rows.len()).expect("rows");
            let got = folder.read(name, rows.clone()).expect("read");
            let one = |tensor: Tensor| bits(&Weights::from([(name.to_owned(), tensor)]));
            assert_eq!(one(got), one(wanted), "{name} {rows:?} of {dtype:?}");
        }
        contains(&folder.read(Q, 5..9).expect_err("too many").to_string(), &[Q, "5..9", "[8, 8]"]);
        #[allow(clippy::reversed_empty_ranges)]
        let backwards = 5..2;
        contains(&folder.read(Q, backwards).expect_err("backwards").to_string(), &[Q, "5..2"]);
        contains(&folder.read("other", 0..1).expect_err("unknown").to_string(), &["other"]);

        // Damage to the file after it was opened is an error of the read.
        fs::write(path.path().join(SINGLE), "").expect("emptied");
        contains(&folder.read(Q, 0..8).expect_err("empty").to_string(), &[SINGLE]);
    }
}

#[test]
fn a_folder_whose_experts_are_in_one_tensor_is_the_same() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen3_moe");
    let (_, weights) = folder::load(&fixture).expect("loads");
    let (mut fused, experts): (Weights, Weights) =
        weights.clone().into_iter().partition(|(name, _)| !name.contains(".experts."));
    for layer in [0, 2] {
        let stacked = |parts: &[&str]| -> Tensor {
            let expert = |e: usize| {
                let name = |part: &&str| format!("model.layers.{layer}.mlp.experts.{e}.{part}.weight");
                let parts: Vec<&Tensor> = parts.iter().map(|part| &experts[&name(part)]).collect();
                Tensor::cat(&parts, 0).expect("parts of one width")
            };
            Tensor::stack(&(0..6).map(expert).collect::<Vec<_>>(), 0).expect("experts of one shape")
        };
        let prefix = format!("model.layers.{layer}.mlp.experts");
        fused.insert(format!("{prefix}.gate_up_proj"), stacked(&["gate_proj", "up_proj"]));
        fused.insert(format!("{prefix}.down_proj"), stacked(&["down_proj"]));
    }
    let folder = tempfile::tempdir().expect("a folder");
    fs::copy(fixture.join("config.json"), folder.path().join("config.json")).expect("copied");
    write(&folder.path().join(SINGLE), &fused);
    assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));
}

/// The language model of Gemma 3 is read from a multimodal folder and saved alone; parameter names of both generations are
/// known.
#[test]
fn the_language_model_is_read_from_the_folder_of_a_vision_model() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gemma3");
    let (plain, weights) = folder::load(&fixture).expect("loads");
    let text = folder::config_json(&fixture).expect("JSON");
    let json = json!({ "model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106] });
    let rename: [fn(&str) -> String; 2] =
        [|name| format!("language_model.{name}"), |name| name.replace("model.", "model.language_model.")];
    for rename in rename {
        let folder = tempfile::tempdir().expect("a folder");
        fs::write(folder.path().join("config.json"), json.to_string()).expect("written");
        let mut tensors: Weights = weights.iter().map(|(name, tensor)| (rename(name), tensor.clone())).collect();
        tensors.insert("vision_tower.embeddings.weight".into(), weights["model.norm.weight"].clone());
        tensors.insert("model.multi_modal_projector.weight".into(), weights["model.norm.weight"].clone());
        write(&folder.path().join(SINGLE), &tensors);
        let (read, loaded) = folder::load(folder.path()).expect("loads");
        assert_eq!((&read, bits(&loaded)), (&plain, bits(&weights)));

        folder::save(folder.path(), &json, &loaded).expect("saved");
        let saved = folder::config_json(folder.path()).expect("JSON");
        assert_eq!(
            (&saved["model_type"], &saved["architectures"]),
            (&json!("gemma3_text"), &json!(["Gemma3ForCausalLM"]))
        );
        assert_eq!((&saved["hidden_size"], &saved["vision_config"]), (&json!(32), &Value::Null));
        assert_eq!(bits(&folder::load(folder.path()).expect("loads").1), bits(&weights));
    }
}

/// The error names the half of an MXFP4 parameter whose other half is missing, and shapes that do not fit.
#[test]
fn halves_of_matrices_in_mxfp4_are_refused() {
    let whole = crate::support::fixture("gpt_oss_mxfp4");
    let tensors = candle_core::safetensors::load(whole.join("model.safetensors"), &Device::Cpu).expect("the fixture");
    let name = "model.layers.0.mlp.experts.down_proj";
    let refused = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let folder = tempfile::tempdir().expect("a folder");
        fs::copy(whole.join("config.json"), folder.path().join("config.json")).expect("copied");
        let mut tensors = tensors.clone();
        change(&mut tensors);
        candle_core::safetensors::save(&tensors, folder.path().join("model.safetensors")).expect("saved");
        refusal(folder.path())
    };
    let [codes, exponents] = ["blocks", "scales"].map(|end| format!("{name}_{end}"));
    contains(&refused(&|all| drop(all.remove(&exponents))), &[&codes, "no exponents"]);
    contains(&refused(&|all| drop(all.remove(&codes))), &[&exponents, "no codes"]);
    let fewer = |all: &mut HashMap<String, Tensor>| {
        let narrow = all[&exponents].narrow(0, 0, 3).and_then(|tensor| tensor.contiguous()).expect("three experts");
        all.insert(exponents.clone(), narrow);
    };
    contains(&refused(&fewer), &[&codes, "[3, 32, 2]"]);
}
