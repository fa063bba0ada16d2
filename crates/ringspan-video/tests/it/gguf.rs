//! Transformers in GGUF files.

use crate::support::{distance, fixture, message, on_ranks};
use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, Tensor};
use ringspan_video::Result;
use ringspan_video::denoise::DenoiseFolder;
use ringspan_video::transformer::{TokenGrid, VideoContext, WanConfig, WanFolder, WanTransformer, WeightType};
use serde_json::{Value as Json, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The shapes of tensors by their names.
type Shapes = BTreeMap<String, Vec<usize>>;

fn file() -> PathBuf {
    fixture("../gguf/wan.gguf")
}

fn velocity(folder: &WanFolder, weights: WeightType, mesh: (usize, usize)) -> Result<Tensor> {
    let reference = fixture("../gguf/reference.safetensors");
    let inputs: HashMap<String, Tensor> = candle_core::safetensors::load(reference, &Device::Cpu)?;
    let weights = folder.load(weights)?;
    let of_ranks = on_ranks(mesh, |group, alone| {
        let (transformer, x) = (folder.transformer(), &inputs["hidden_states"]);
        let (batch, _, frames, height, width) = x.dims5()?;
        let grid = TokenGrid::new([frames, height, width], transformer.config().patch_size)?;
        let video = VideoContext::new(transformer.config(), group, alone, batch, grid)?;
        let times = video.timesteps(&inputs["timestep"].to_vec1()?)?;
        let prompt = transformer.prompt(&weights, &inputs["encoder_hidden_states"], None, &video)?;
        transformer.velocity(&weights, x, &times, &prompt, None, &video)
    })?;
    let far = distance(&of_ranks[0], &inputs["out"]);
    assert!(far < 1e-4, "{mesh:?}: {far:e}");
    Ok(of_ranks[0].clone())
}

#[test]
fn a_file_without_a_configuration_gives_the_velocity_of_diffusers() -> Result<()> {
    let folder = WanFolder::open(&file())?;
    let config = folder.transformer().config();
    let sizes = [config.num_attention_heads, config.num_layers, config.ffn_dim, config.freq_dim, config.text_dim];
    assert_eq!((sizes, config.in_channels, config.out_channels()), ([1, 1, 64, 32, 32], 4, 4));
    velocity(&folder, WeightType::AsStored, (1, 1))?;
    velocity(&folder, WeightType::AsStored, (3, 1))?;
    velocity(&folder, WeightType::F32, (1, 1))?;
    // Quantized matrices stay as they are stored.
    let (stored, decoded) = (folder.bytes(WeightType::AsStored), folder.bytes(WeightType::F32));
    assert!(stored < decoded / 3, "{stored}, {decoded}");
    let weights = folder.load(WeightType::AsStored)?;
    let dense = |name: &str| matches!(weights[name], ringspan_candle::Weight::Dense(_));
    assert!(!dense("blocks.0.attn1.to_q.weight") && !dense("blocks.0.attn1.to_out.0.weight"));
    assert!(dense("blocks.0.attn1.to_q.bias") && dense("patch_embedding.weight"));
    assert!(dense("blocks.0.ffn.net.0.proj.weight"), "Q4_1 is decoded");
    Ok(())
}

#[test]
fn a_folder_may_have_a_file_instead_of_safetensors() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let transformer = folder.path().join("transformer");
    std::fs::create_dir(&transformer).expect("a folder");
    std::fs::copy(file(), transformer.join("wan-q4.gguf")).expect("copied");
    let config = json!({
        "_class_name": "WanTransformer3DModel", "num_attention_heads": 1, "num_layers": 1, "ffn_dim": 64, "freq_dim": 32,
        "text_dim": 32, "in_channels": 4, "out_channels": 4,
    });
    let write = |config: &Json| {
        std::fs::write(transformer.join("config.json"), config.to_string()).expect("written");
    };
    write(&config);
    assert_eq!(WeightType::default_of(folder.path()), WeightType::AsStored);
    assert_eq!(WeightType::default_of(&fixture("t2v")), WeightType::F32);
    let pipeline = DenoiseFolder::open(folder.path(), WeightType::AsStored)?;
    assert_eq!(pipeline.transformer(0).config().num_layers, 1);
    let one = velocity(&WanFolder::open(&transformer)?, WeightType::AsStored, (1, 1))?;
    assert!(distance(&one, &velocity(&WanFolder::open(&file())?, WeightType::AsStored, (1, 1))?) == 0.0);
    // The configuration beside a file counts.
    let mut other = config;
    other["num_attention_heads"] = json!(2);
    other["attention_head_dim"] = json!(64);
    write(&other);
    assert_eq!(WanFolder::open(&transformer.join("wan-q4.gguf"))?.transformer().config().num_attention_heads, 2);
    other["num_layers"] = json!(2);
    write(&other);
    let found = message(WanFolder::open(&transformer));
    assert!(found.contains("blocks.1.") && found.contains("is missing"), "{found}");
    std::fs::copy(file(), transformer.join("another.gguf")).expect("copied");
    let found = message(WanFolder::open(&transformer));
    assert!(found.contains("another.gguf, wan-q4.gguf") && found.contains("several"), "{found}");
    std::fs::remove_file(transformer.join("another.gguf")).expect("removed");
    std::fs::write(transformer.join("diffusion_pytorch_model.safetensors"), "").expect("written");
    let found = message(WanFolder::open(&transformer));
    assert!(found.contains("weights twice: wan-q4.gguf and diffusion_pytorch_model.safetensors"), "{found}");
    Ok(())
}

/// Writes a file with these tensors of zeros.
fn write(path: &Path, architecture: &str, shapes: &BTreeMap<String, Vec<usize>>) {
    let zeros = |shape: &Vec<usize>| {
        let zeros = Tensor::zeros(shape.as_slice(), DType::F32, &Device::Cpu).expect("zeros");
        QTensor::quantize(&zeros, GgmlDType::F32).expect("f32")
    };
    let tensors: Vec<(String, QTensor)> = shapes.iter().map(|(name, shape)| (name.clone(), zeros(shape))).collect();
    let tensors: Vec<(&str, &QTensor)> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let architecture = Value::String(architecture.into());
    let mut to = std::fs::File::create(path).expect("a file");
    gguf_file::write(&mut to, &[("general.architecture", &architecture)], &tensors).expect("written");
}

fn config(more: Json) -> WanConfig {
    let mut keys = json!({
        "_class_name": "WanTransformer3DModel", "num_attention_heads": 1, "num_layers": 4, "ffn_dim": 8, "freq_dim": 6,
        "text_dim": 10, "in_channels": 36, "out_channels": 16,
    });
    keys.as_object_mut().expect("keys").extend(more.as_object().expect("keys").clone());
    WanConfig::from_json(keys.as_object().expect("keys").clone()).expect("a configuration")
}

#[test]
fn shapes_tell_the_configuration_of_every_kind_of_model() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    for more in [
        json!({}),
        json!({ "patch_size": [1, 1, 3], "cross_attn_norm": false }),
        json!({ "image_dim": 5, "added_kv_proj_dim": 128 }),
        json!({ "image_dim": 5, "added_kv_proj_dim": 128, "pos_embed_seq_len": 14 }),
        json!({ "_class_name": "WanVACETransformer3DModel", "vace_layers": [0, 2], "vace_in_channels": 96 }),
    ] {
        let config = config(more);
        let shapes = WanTransformer::new(config.clone()).shapes();
        // The names of diffusers are taken, too, also behind what some converters leave before them.
        for prefix in ["", "model.diffusion_model."] {
            let shapes = shapes.iter().map(|(name, shape)| (format!("{prefix}{name}"), shape.clone())).collect();
            write(&path, "wan", &shapes);
            assert_eq!(WanFolder::open(&path)?.transformer().config(), &config);
        }
    }
    Ok(())
}

#[test]
fn files_that_are_no_whole_model_are_refused_by_name() -> Result<()> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let shapes = WanTransformer::new(config(json!({}))).shapes();
    let refused = |architecture: &str, change: &dyn Fn(&mut Shapes), words: &[&str]| {
        let mut shapes = shapes.clone();
        change(&mut shapes);
        write(&path, architecture, &shapes);
        let found = message(WanFolder::open(&path));
        assert!(words.iter().all(|word| found.contains(word)) && found.contains("model.gguf"), "{words:?}: {found}");
    };
    refused("llama", &|_| {}, &["general.architecture is llama", "wan"]);
    refused("wan", &|all| drop(all.remove("blocks.2.norm2.bias")), &["blocks.2.norm2.bias [128] is missing"]);
    refused("wan", &|all| drop(all.remove("patch_embedding.weight")), &["patch_embedding.weight", "a file of its own"]);
    refused("wan", &|all| drop(all.insert("new.weight".into(), vec![3])), &["new.weight [3] belongs to no part"]);
    refused(
        "wan",
        &|all| drop(all.insert("blocks.1.attn1.to_q.weight".into(), vec![128, 4])),
        &["blocks.1.attn1.to_q.weight has shape [128, 4]", "[128, 128]"],
    );
    refused(
        "wan",
        &|all| drop(all.insert("patch_embedding.weight".into(), vec![24, 4, 1, 2, 2])),
        &["width is 24", "heads of 128", "attention_head_dim"],
    );
    std::fs::write(&path, "not a model").expect("written");
    assert!(message(WanFolder::open(&path)).contains("does not begin with GGUF"));
    let other = folder.path().join("model.safetensors");
    std::fs::write(&other, "").expect("written");
    let found = message(DenoiseFolder::open(&other, WeightType::F32));
    assert!(found.contains("neither a folder nor a .gguf file"), "{found}");
    // A file that ends before its tensors do, as after an interrupted download, is refused when it is opened.
    let whole = std::fs::read(file()).expect("a file");
    std::fs::write(&path, &whole[..whole.len() - 100]).expect("written");
    let found = message(WanFolder::open(&path));
    assert!(found.contains("not a whole GGUF file"), "{found}");
    Ok(())
}
