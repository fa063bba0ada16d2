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

/// Bytes of all ranks, and those of them that are there for the sake of tokens, by the plan.
fn peak(root: &Path, layers: usize, change: Settings) -> (usize, usize) {
    let settings = Settings {
        model: Some(root.join(format!("layers-{layers}"))),
        data: Some(vec![root.join("text.jsonl")]),
        out: Some(root.join("out")),
        sample_tokens: Some(0),
        sequence_length: change.sequence_length.or(Some(32)),
        batch_size: Some(4),
        steps: change.steps.or(Some(4)),
        save_every: Some(0),
        ..change
    };
    let peak = counting::peak(settings);
    let of_tokens = |part: &&(&str, u64)| {
        ["kept of the layers", "a layer's activations and their gradients", "blocks of other ranks"].contains(&part.0)
    };
    let tokens: u64 = peak.plan.memory.iter().filter(of_tokens).map(|(_, bytes)| bytes).sum();
    (peak.most - peak.before, tokens as usize * peak.plan.tokens_per_rank.len())
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
    let mut wrong = Vec::new();
    for (ranks, settings) in [(1, mesh(1, 1)), (4, mesh(2, 2)), (4, mesh(1, 4)), (8, mesh(4, 2))] {
        // The peaks of ranks need not meet in each step.
        let settings = Settings { steps: Some(6), sequence_length: Some(8), ..settings };
        let [(few, tokens), (many, _)] = sizes.map(|(layers, _)| peak(root, layers, settings.clone()));
        let (few, many, tokens) = (few as f64, many as f64, tokens as f64);
        let [(fewer, layer), (more, _)] = sizes.map(|(_, sizes)| sizes);
        // What a further layer costs all ranks together: parameter, gradient and two moments, and the layer's inputs.
        let each = (many - few) / (more - fewer) as f64;
        assert!((15.8..16.5).contains(&each), "{ranks} ranks: {each:.2} bytes a parameter");
        // What does not grow with the layers, nor with tokens: whole layers.
        let whole = (few - tokens - 16.0 * fewer as f64) / (4 * layer * ranks) as f64;
        // Two of weights and two of gradients on each rank, of one of which the sums are in the 16 bytes already. Nothing is
        // under way on a rank alone; it has tokenizer and text instead, a third of a layer.
        let most = if ranks == 1 { 3.3 } else { 4.0 };
        let line = format!("{ranks} ranks: {whole:.2} layers a rank, of at most {most}");
        println!("{line}; {each:.2} bytes a parameter");
        if whole >= most {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
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
            let [few, many] = [few, many].map(|layers| peak(root, layers, settings.clone()).0 as f64);
            many - few
        };
        let saved = (of_layers("f32") - of_layers("bf16")) / (2 * (many - few) * rows * length * numbers) as f64;
        assert!((0.9..1.1).contains(&saved), "recompute {recompute}, ring {ring}, ulysses {ulysses}: {saved:.2}");
    }
}
