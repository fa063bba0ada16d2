//! What a training keeps in memory: parameters, gradients and optimiser state once for all ranks that share them.

mod common;
mod counting;

use common::text;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{Settings, Tokenizer};
use std::path::Path;

use std::sync::{Mutex, PoisonError};

/// Layers of 0.4 million parameters, so that tokens weigh little.
fn model(root: &Path, layers: usize) -> (usize, usize) {
    let path = root.join(format!("layers-{layers}"));
    let mut json = common::tiny_config();
    for (key, value) in [("hidden_size", 128), ("intermediate_size", 512), ("num_hidden_layers", layers)] {
        json[key] = value.into();
    }
    (json["num_attention_heads"], json["num_key_value_heads"], json["head_dim"]) = (8.into(), 8.into(), 32.into());
    let decoder = Decoder::new(serde_json::from_value::<Config>(json.clone()).unwrap()).unwrap();
    folder::save(&path, &json, &decoder.init(3).unwrap()).unwrap();
    let tokenizer = Tokenizer::byte_level(Path::new("byte-level")).unwrap();
    std::fs::write(path.join("tokenizer.json"), tokenizer.to_json().unwrap()).unwrap();
    let sizes: Vec<usize> = decoder
        .units()
        .map(|unit| decoder.unit_shapes(unit).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum())
        .collect();
    (sizes.iter().sum(), sizes.into_iter().max().unwrap_or(0))
}

fn peak(root: &Path, layers: usize, change: Settings) -> usize {
    let settings = Settings {
        model: Some(root.join(format!("layers-{layers}"))),
        data: Some(root.join("text.jsonl")),
        out: Some(root.join("out")),
        sample_tokens: Some(0),
        sequence_length: change.sequence_length.or(Some(32)),
        batch_size: Some(4),
        steps: Some(4),
        save_every: Some(0),
        ..change
    };
    let peak = counting::peak(settings);
    peak.most
}

/// One allocator counts for the process, so one test runs at a time.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn ranks_share_parameters_gradients_and_optimiser_state() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let sizes = [4, 12].map(|layers| (layers, model(root, layers)));
    let mesh = |dp_shard, ring| Settings { dp_shard: Some(dp_shard), ring: Some(ring), ..Settings::default() };
    for (ranks, settings) in [(1, mesh(1, 1)), (4, mesh(2, 2)), (4, mesh(1, 4)), (8, mesh(4, 2))] {
        let [few, many] = sizes.map(|(layers, _)| peak(root, layers, settings.clone()) as f64);
        let [(fewer, layer), (more, _)] = sizes.map(|(_, sizes)| sizes);
        // What a further layer costs all ranks together: parameter, gradient and two moments, and the layer's inputs.
        let each = (many - few) / (more - fewer) as f64;
        assert!((15.9..17.0).contains(&each), "{ranks} ranks: {each:.2} bytes a parameter");
        // What does not grow with the layers: whole layers, two of weights and two of gradients a rank, and the tokens.
        let whole = (few - 16.0 * fewer as f64) / (4 * layer * ranks) as f64;
        assert!(whole < if ranks == 1 { 7.0 } else { 5.0 }, "{ranks} ranks: {whole:.2} layers a rank");
    }
}

#[test]
fn activations_in_bf16_take_half_the_memory_on_every_mesh() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let (few, many) = (4, 8);
    for layers in [few, many] {
        model(root, layers);
    }
    let (length, rows) = (512, 4);
    // Hidden size, heads and head width, inner width of the model.
    let (hidden, heads, dim, wide) = (128, 8, 32, 512);
    for (recompute, numbers, (ring, ulysses)) in [
        ("keep-attention", hidden + heads * dim, (1, 1)),
        ("nothing", 2 * hidden + 4 * heads * dim + 2 * wide, (1, 1)),
        ("nothing", 2 * hidden + 4 * heads * dim + 2 * wide, (2, 2)),
    ] {
        let of_layers = |activations: &str| {
            let settings = Settings {
                recompute: Some(recompute.into()),
                activations: Some(activations.into()),
                sequence_length: Some(length),
                ring: Some(ring),
                ulysses: Some(ulysses),
                ..Settings::default()
            };
            let [few, many] = [few, many].map(|layers| peak(root, layers, settings.clone()) as f64);
            many - few
        };
        let saved = (of_layers("f32") - of_layers("bf16")) / (2 * (many - few) * rows * length * numbers) as f64;
        assert!((0.9..1.1).contains(&saved), "recompute {recompute}, ring {ring}, ulysses {ulysses}: {saved:.2}");
    }
}
