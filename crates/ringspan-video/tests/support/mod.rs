//! What tests in programs of their own share.

use candle_core::Tensor;
use ringspan_video::noise::noise;
use ringspan_video::transformer::{WanConfig, WanTransformer};
use serde_json::Value;
use std::collections::HashMap;

/// A folder with a transformer of this configuration and random weights.
pub(crate) fn random_transformer(config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let transformer = WanTransformer::new(WanConfig::read(folder.path()).expect("a configuration"));
    let random = |(index, (name, shape)): (usize, (String, Vec<usize>))| {
        (name, (noise(index as u64, &shape).expect("numbers") * 0.05).expect("numbers"))
    };
    let weights: HashMap<String, Tensor> = transformer.shapes().into_iter().enumerate().map(random).collect();
    let file = folder.path().join("diffusion_pytorch_model.safetensors");
    candle_core::safetensors::save(&weights, file).expect("written");
    folder
}
