//! Ranks that share parameters, gradients and optimiser state keep them in memory once.

use crate::common::{self, text};
use crate::counting;
use ringspan_models::{Config, Decoder, folder};
use ringspan_train::{Settings, Tokenizer};
use std::path::Path;

/// Saves a model whose layers have 0.4 million parameters each, so that tokens take little; returns the number of its parameters,
/// and that of its largest unit.
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

/// Peak bytes of all ranks, and the part of them that the plan counts for tokens.
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
        ["stored activations", "a layer's activations and their gradients", "blocks of other ranks"].contains(&part.0)
    };
    let tokens: u64 = peak.plan.memory.iter().filter(of_tokens).map(|(_, bytes)| bytes).sum();
    (peak.most - peak.before, tokens as usize * peak.plan.tokens_per_rank.len())
}

/// Number of ranks, `dp_shard`, `ring`.
type Mesh = (usize, usize, usize);

#[test]
fn ranks_share_parameters_gradients_and_optimiser_state() {
    ranks_share(&[(1, 1, 1), (4, 2, 2)]);
}

#[test]
#[ignore = "takes a minute"]
fn ranks_of_more_meshes_share_parameters_gradients_and_optimiser_state() {
    ranks_share(&[(4, 1, 4), (8, 4, 2)]);
}

fn ranks_share(meshes: &[Mesh]) {
    let _alone = counting::alone();
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let sizes = [4, 12].map(|layers| (layers, model(root, layers)));
    let mesh = |dp_shard, ring| Settings { dp_shard: Some(dp_shard), ring: Some(ring), ..Settings::default() };
    let mut wrong = Vec::new();
    for &(ranks, dp_shard, ring) in meshes {
        // The peaks of ranks need not coincide in each step.
        let settings = Settings { steps: Some(6), sequence_length: Some(8), threads: Some(1), ..mesh(dp_shard, ring) };
        let [(fewer, layer), (more, _)] = sizes.map(|(_, sizes)| sizes);
        let (mut few, mut many, mut tokens, mut each) = (0.0_f64, 0.0_f64, 0.0, 0.0);
        // Nor need they coincide in a run: the largest peaks count.
        for _ in 0..12 {
            let [(of_few, of_tokens), (of_many, _)] = sizes.map(|(layers, _)| peak(root, layers, settings.clone()));
            (few, many, tokens) = (few.max(of_few as f64), many.max(of_many as f64), of_tokens as f64);
            // Bytes that a further layer costs all ranks together: parameter, gradient and two moments, and the layer's inputs.
            each = (many - few) / (more - fewer) as f64;
            if (15.8..16.5).contains(&each) {
                break;
            }
        }
        assert!((15.8..16.5).contains(&each), "{ranks} ranks: {each:.2} bytes a parameter");
        // A constant part: gathered layers, and buffers that a thread keeps after matrix products.
        let kept = (ranks * counting::kept_by_products()) as f64;
        let whole = (few - tokens - kept - 16.0 * fewer as f64) / (4 * layer * ranks) as f64;
        // Each rank has two layers of gradients, whose sums are in the 16 bytes already for one of them, and the ranks together one or
        // two of weights. On a single rank nothing is under way; tokenizer and text take a third of a layer instead.
        let most = if ranks == 1 { 1.7 } else { 2.4 };
        let line = format!("{ranks} ranks: {whole:.2} layers a rank, of at most {most}");
        println!("{line}; {each:.2} bytes a parameter");
        if whole >= most {
            wrong.push(line);
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn activations_in_bf16_take_half_the_memory() {
    of_activations_in_bf16("keep-attention", (1, 1));
}

#[test]
#[ignore = "takes a minute"]
fn activations_in_bf16_take_half_the_memory_where_all_are_kept() {
    of_activations_in_bf16("nothing", (1, 1));
    of_activations_in_bf16("nothing", (2, 2));
}

fn of_activations_in_bf16(recompute: &str, (ring, ulysses): (usize, usize)) {
    let _alone = counting::alone();
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    text(root);
    let (few, many) = (4, 8);
    for layers in [few, many] {
        model(root, layers);
    }
    let (length, rows) = (512, 4);
    // Hidden size, heads, head width and inner width of the model.
    let (hidden, heads, dim, wide) = (128, 8, 32, 512);
    let kept = match recompute {
        "keep-attention" => hidden + heads * dim,
        _ => 2 * hidden + 4 * heads * dim + 2 * wide,
    };
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
    let saved = (of_layers("f32") - of_layers("bf16")) / (2 * (many - few) * rows * length * kept) as f64;
    assert!((0.9..1.1).contains(&saved), "recompute {recompute}, ring {ring}, ulysses {ulysses}: {saved:.2}");
}
