//! Tests of adapters on a base that stays in its stored format, on every mesh.

use crate::common::{Memory, run};
use candle_core::DType;
use ringspan_models::{adapter, folder};
use ringspan_train::Settings;
use safetensors::{Dtype, tensor::TensorView};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../ringspan-models/tests/fixtures")
}

/// Rows of tokens below 96, which all models of this test have.
fn tokens(root: &Path) -> PathBuf {
    let path = root.join("tokens.safetensors");
    let bytes: Vec<u8> = (0..4 * 48u32).flat_map(|i| (i * i * 31 % 96).to_le_bytes()).collect();
    let view = TensorView::new(Dtype::U32, vec![4, 48], &bytes).unwrap();
    safetensors::serialize_to_file([("tokens", view)], None, &path).unwrap();
    path
}

/// Runs three steps with adapters on all linear layers; returns the losses, the plan's line on training, and the adapter.
fn adapted(root: &Path, model: &Path, name: &str, mesh: Settings) -> (Vec<f64>, String, Vec<f32>) {
    let settings = Settings {
        model: Some(model.to_owned()),
        tokens: Some(tokens(root)),
        out: Some(root.join(name)),
        steps: Some(3),
        lr: Some(1e-2),
        warmup: Some(0),
        lora_rank: Some(4),
        ring: mesh.ring.or(Some(1)),
        threads: Some(1),
        ..mesh
    };
    let (outcome, memory): (_, Memory) = run(settings);
    let weights = adapter::load(&outcome.out).unwrap().weights;
    let values = weights.values().flat_map(|matrix| matrix.flatten_all().unwrap().to_vec1::<f32>().unwrap()).collect();
    (memory.losses(), memory.plan.training.clone(), values)
}

fn off(a: &[f32], b: &[f32]) -> f64 {
    let (mut difference, mut size) = (0.0, 0.0);
    for (a, b) in a.iter().zip(b) {
        difference += f64::from(a - b).powi(2);
        size += f64::from(*b).powi(2);
    }
    (difference / size).sqrt()
}

fn meshes() -> [(&'static str, Settings); 5] {
    let s = Settings::default;
    [
        ("ring 2", Settings { ring: Some(2), ..s() }),
        ("ring 3, nothing cut", Settings { ring: Some(3), sharding: Some("none".into()), ..s() }),
        ("tp 2", Settings { tp: Some(2), ..s() }),
        ("tp 2, ring 2", Settings { tp: Some(2), ring: Some(2), recompute: Some("nothing".into()), ..s() }),
        ("dp_shard 2, ulysses 2", Settings { dp_shard: Some(2), ulysses: Some(2), ..s() }),
    ]
}

#[test]
fn every_mesh_learns_what_one_rank_learns_beside_the_decoded_base() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    for family in ["qwen3", "phi3", "glm4"] {
        let stored = fixtures().join("gguf_families").join(format!("{family}.gguf"));
        let decoded = root.join(format!("{family}-decoded"));
        let (_, weights) = ringspan_models::gguf::load(&stored).unwrap();
        folder::save(&decoded, &ringspan_models::gguf::config_json(&stored).unwrap(), &weights).unwrap();
        let (losses, said, adapter) = adapted(root, &decoded, &format!("{family}-f32"), Settings::default());
        assert!(!said.contains("stored"), "{said}");
        assert!(losses[2] < losses[0] - 0.05, "{losses:?}");
        for (name, mesh) in [("one rank", Settings::default())].into_iter().chain(meshes()) {
            let cuts_blocks = mesh.tp.is_some();
            let (got, said, own) = adapted(root, &stored, &format!("{family}-{name}"), mesh);
            for (got, wanted) in got.iter().zip(&losses) {
                assert!((got / wanted - 1.0).abs() < 2e-6, "{family} on {name}: {got} is not {wanted}");
            }
            assert!(off(&own, &adapter) < 1e-3, "{family} on {name}: adapters differ by {:e}", off(&own, &adapter));
            assert!(said.contains("as they are stored (BF16, F16, IQ4_NL, Q4_0, Q5_0, Q8_0)"), "{said}");
            // Two ranks cut 96 inner columns into 48 each, which is no multiple of a block of 32.
            assert_eq!(said.contains("inside their blocks"), cuts_blocks, "{family} on {name}: {said}");
        }
    }
}

/// Meshes whose ranks share experts, their width, or both.
fn meshes_of_experts() -> [(&'static str, Settings); 5] {
    let s = Settings::default;
    [
        ("ring 2, ep 2", Settings { ring: Some(2), ep: Some(2), ..s() }),
        ("ring 3, all experts on each", Settings { ring: Some(3), ..s() }),
        ("tp 2", Settings { tp: Some(2), ..s() }),
        ("tp 2, ring 2, ep 2", Settings { tp: Some(2), ring: Some(2), ep: Some(2), ..s() }),
        ("ring 2, nothing cut", Settings { ring: Some(2), sharding: Some("none".into()), ..s() }),
    ]
}

#[test]
fn experts_stay_as_they_are_stored_on_every_mesh() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let gguf = |name: &str| fixtures().join(format!("gguf_families/{name}.gguf"));
    let in_bf16 = root.join("gpt-oss-bf16");
    rounded(&fixtures().join("gpt_oss"), &in_bf16);
    // Two ranks cut 96 inner columns into 48 each, which is no multiple of a block of 32.
    for (name, stored, formats, cut_inside) in [
        ("mixtral", gguf("mixtral"), "BF16, F16, IQ4_NL, Q4_0, Q5_0, Q8_0", true),
        ("qwen3moe", gguf("qwen3moe"), "BF16, F16, IQ4_NL, Q4_0, Q5_0, Q8_0", true),
        ("gpt_oss", in_bf16, "BF16", false),
        ("gpt_oss_mxfp4", fixtures().join("gpt_oss_mxfp4"), "BF16, MXFP4", false),
    ] {
        let decoded = root.join(format!("{name}-decoded"));
        let (weights, json) = match stored.is_file() {
            true => (ringspan_models::gguf::load(&stored).unwrap().1, ringspan_models::gguf::config_json(&stored)),
            false => (folder::load(&stored).unwrap().1, folder::config_json(&stored)),
        };
        folder::save(&decoded, &json.unwrap(), &weights).unwrap();
        let (losses, said, adapter) = adapted(root, &decoded, &format!("{name}-f32"), Settings::default());
        assert!(!said.contains("stored"), "{said}");
        for (mesh_name, mesh) in [("one rank", Settings::default())].into_iter().chain(meshes_of_experts()) {
            let cuts_width = mesh.tp.is_some();
            let (got, said, own) = adapted(root, &stored, &format!("{name}-{mesh_name}"), mesh);
            for (got, wanted) in got.iter().zip(&losses) {
                assert!((got / wanted - 1.0).abs() < 2e-6, "{name} on {mesh_name}: {got} is not {wanted}");
            }
            assert!(off(&own, &adapter) < 1e-3, "{name} on {mesh_name}: adapters differ by {:e}", off(&own, &adapter));
            assert!(said.contains(&format!("as they are stored ({formats})")), "{name} on {mesh_name}: {said}");
            assert_eq!(said.contains("inside their blocks"), cuts_width && cut_inside, "{name} on {mesh_name}: {said}");
        }
    }
}

/// Writes a copy of a folder in bf16.
fn rounded(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    let (_, weights) = folder::load(from).unwrap();
    let weights: HashMap<_, _> =
        weights.into_iter().map(|(name, tensor)| (name, tensor.to_dtype(DType::BF16).unwrap())).collect();
    candle_core::safetensors::save(&weights, to.join("model.safetensors")).unwrap();
    std::fs::copy(from.join("config.json"), to.join("config.json")).unwrap();
}

#[test]
fn a_folder_in_bf16_is_held_so() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let narrow = root.join("narrow");
    rounded(&fixtures().join("gemma2"), &narrow);
    let wide = root.join("wide");
    let json = folder::config_json(&narrow).unwrap();
    folder::save(&wide, &json, &folder::load(&narrow).unwrap().1).unwrap();
    let (losses, _, adapter) = adapted(root, &wide, "f32", Settings::default());
    for (name, mesh) in [("one rank", Settings::default())].into_iter().chain(meshes()) {
        let (got, said, own) = adapted(root, &narrow, name, mesh);
        assert!(said.ends_with("stay as they are, held as they are stored (BF16)"), "{said}");
        for (got, wanted) in got.iter().zip(&losses) {
            assert!((got / wanted - 1.0).abs() < 2e-6, "{name}: {got} is not {wanted}");
        }
        assert!(off(&own, &adapter) < 1e-3, "{name}: adapters differ by {:e}", off(&own, &adapter));
    }
}
