//! Losses and weights do not depend on the mesh that computes them.

use crate::common::{Memory, conversations, of_tiny_model, run, text, tiny_model};
use crate::meshes::{meshes, meshes_of_experts};
use ringspan_candle::Weights;
use ringspan_models::folder;
use ringspan_train::{
    Settings, Tokenizer,
    data::{Batch, Encoder, Overlong, PackableSpans, Packer, PackerPosition, SourceReader, Template, read},
};
use std::path::Path;

fn settings(root: &Path, name: &str) -> Settings {
    Settings {
        sequence_length: Some(97),
        batch_size: Some(8),
        steps: Some(3),
        optimizer: Some("sgd".into()),
        lr: Some(0.5),
        momentum: Some(0.9),
        warmup: Some(0),
        grad_clip: Some(0.0),
        eval_every: Some(2),
        ..of_tiny_model(root, name)
    }
}

#[track_caller]
fn same(name: &str, a: &Memory<'_>, b: &Memory<'_>) {
    for (a, b) in a.steps.iter().zip(&b.steps) {
        assert!((a.loss - b.loss).abs() <= 1e-6 * b.loss, "{name}, step {}: loss {} is not {}", a.step, a.loss, b.loss);
        let off = (a.grad_norm - b.grad_norm).abs();
        assert!(off <= 1e-5 * b.grad_norm, "{name}, step {}: norm {} is not {}", a.step, a.grad_norm, b.grad_norm);
        assert_eq!(a.tokens, b.tokens);
    }
    assert_eq!(a.evaluations.len(), 2);
    for (a, b) in a.evaluations.iter().zip(&b.evaluations) {
        assert_eq!(a.held_out_targets, b.held_out_targets);
        assert!((a.held_out_loss - b.held_out_loss).abs() <= 1e-6 * b.held_out_loss, "{name}: held-out loss");
    }
}

#[track_caller]
fn same_weights(name: &str, a: &Weights, b: &Weights) {
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (key, b) in b {
        let a: Vec<f32> = a[key].flatten_all().unwrap().to_vec1().unwrap();
        let b: Vec<f32> = b.flatten_all().unwrap().to_vec1().unwrap();
        let norm: f64 = b.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
        let off: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
        assert!(off <= 1e-5 * norm, "{name}, {key}: relative difference {:e}", off / norm);
    }
}

#[test]
fn losses_norms_held_out_losses_and_trained_weights_are_those_of_one_rank_on_every_mesh() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (outcome, one) = run(Settings { ring: Some(1), ..settings(root, "one") });
    let (_, before) = folder::load(&root.join("tiny")).unwrap();
    let (_, weights) = folder::load(&outcome.out).unwrap();
    let moved: f64 = (&weights["model.embed_tokens.weight"] - &before["model.embed_tokens.weight"])
        .and_then(|d| d.sqr()?.sum_all()?.to_scalar::<f32>())
        .unwrap()
        .into();
    assert!(moved > 1e-4, "training must move the weights for this comparison to mean something: {moved}");
    for mesh in meshes() {
        let shardings = if mesh.parts == 1 && mesh.ranks() < 5 { vec!["full", "none"] } else { vec!["full"] };
        for sharding in shardings {
            let name = format!("{mesh:?}, sharding {sharding}");
            let settings = Settings { sharding: Some(sharding.into()), ..settings(root, &name) };
            let (outcome, memory) = run(mesh.overriding(settings));
            same(&name, &memory, &one);
            same_weights(&name, &folder::load(&outcome.out).unwrap().1, &weights);
        }
    }
}

/// Experts are distributed over ranks, cut by their width and copied, and an auxiliary loss balances their load over all ranks.
#[test]
fn a_sparse_model_learns_the_same_on_every_mesh_of_its_experts() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let path = tiny_model(root);
    text(root);
    crate::common::sparse(&path);
    let (outcome, one) = run(Settings { ring: Some(1), ..settings(root, "one") });
    let (_, weights) = folder::load(&outcome.out).unwrap();
    for mesh in meshes_of_experts() {
        let name = format!("{mesh:?}");
        let (outcome, memory) = run(mesh.overriding(settings(root, &name)));
        same(&name, &memory, &one);
        same_weights(&name, &folder::load(&outcome.out).unwrap().1, &weights);
    }
}

#[test]
fn layouts_and_strategies_train_alike() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (_, one) = run(Settings { ring: Some(1), ..settings(root, "one") });
    for layout in ["contiguous", "striped:1", "striped:5", "per-document-zigzag"] {
        for strategy in ["ring", "all-gather"] {
            let name = format!("{layout} {strategy}");
            let (_, memory) = run(Settings {
                ring: Some(3),
                layout: Some(layout.into()),
                strategy: Some(strategy.into()),
                ..settings(root, &name)
            });
            same(&name, &memory, &one);
        }
    }
}

#[test]
fn micro_batches_add_up_to_one_batch() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let (_, one) = run(Settings { ring: Some(1), batch_size: Some(16), ..settings(root, "one") });
    let (_, two) = run(Settings { ring: Some(2), grad_accumulation: Some(2), ..settings(root, "two") });
    same("2 x 8 sequences", &two, &one);
}

/// Only answers are learned, so some rows, and the parts of some ranks, have no target.
#[test]
fn conversations_train_alike_where_rows_and_ranks_have_nothing_to_learn() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    let (data, template) = conversations(root);
    let settings = |name: &str| Settings {
        data: Some(vec![data.clone()]),
        chat_template: Some(template.clone()),
        overlong: Some("split".into()),
        sequence_length: Some(40),
        batch_size: Some(3),
        ..settings(root, name)
    };
    // These are the batches of the three steps, of three rows each.
    let tokenizer = Tokenizer::read(&root.join("tiny/tokenizer.json")).unwrap();
    let parsed = Template::read(&template, None).unwrap();
    let encoder = Encoder::new(&tokenizer, Some(&parsed));
    let reading = SourceReader {
        source: &data,
        exclude: &[],
        held_out: 0.05,
        encoder,
        cache_folder: &root.join("kept"),
        check_contents: false,
        deadline: std::time::Duration::from_secs(60),
        on_progress: &ringspan_train::data::ignore_progress,
    };
    let corpus = reading.load_or_tokenize().unwrap().0;
    let fit = PackableSpans::new(&corpus.train, 40, true, Overlong::Split);
    let mut packer = Packer::new(corpus.train, 40, 0, PackerPosition::default()).with_spans(fit);
    let steps: Vec<Batch> = (0..3).map(|_| Batch::new(&packer.next_sequences(3), 40)).collect();
    let rows = |step: &Batch| (0..3).map(|row| step.chunk(row, 3).real_tokens()).collect::<Vec<_>>();
    assert!(steps.iter().any(|step| rows(step).iter().any(|&tokens| tokens < 40)), "a row with padding");
    let learned: u64 = steps.iter().map(Batch::valid_targets).sum();
    assert!((10..120).contains(&learned), "{learned} of 360 tokens are learned");

    let (_, one) = run(Settings { ring: Some(1), ..settings("one") });
    assert!(one.evaluations.iter().all(|e| e.held_out_targets > 0));
    for (ring, ulysses, dp_replicate) in [(2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 1, 3), (2, 1, 2), (1, 4, 1)] {
        let name = format!("ring {ring}, ulysses {ulysses}, copies {dp_replicate}");
        let mesh =
            Settings { ring: Some(ring), ulysses: Some(ulysses), dp_replicate: Some(dp_replicate), ..settings(&name) };
        same(&name, &run(mesh).1, &one);
    }
    // The loss over answers alone is not the loss over all words.
    let all = root.join("all.jsonl");
    let line = |d: &ringspan_train::data::SourceDocument| match &d.content {
        ringspan_train::data::Content::Chat { messages, tools } => {
            serde_json::json!({ "text": parsed.render(messages, tools).unwrap().text }).to_string()
        }
        other => panic!("{other:?}"),
    };
    let lines: Vec<String> = read(&data, &[]).unwrap().documents.iter().map(line).collect();
    std::fs::write(&all, lines.join("\n")).unwrap();
    let (_, whole) = run(Settings { data: Some(vec![all]), chat_template: None, ring: Some(1), ..settings("whole") });
    assert!((whole.steps[0].loss - one.steps[0].loss).abs() > 1e-3);
}

#[test]
fn balanced_packing_learns_from_the_same_tokens_on_every_mesh() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    tiny_model(root);
    text(root);
    let settings =
        |name: &str| Settings { packing: Some("balanced".into()), batch_size: Some(6), ..settings(root, name) };
    let (_, one) = run(Settings { ring: Some(1), ..settings("one") });
    for (ring, dp_replicate) in [(3, 1), (1, 2), (2, 3)] {
        let name = format!("ring {ring}, copies {dp_replicate}");
        same(&name, &run(Settings { ring: Some(ring), dp_replicate: Some(dp_replicate), ..settings(&name) }).1, &one);
    }
    let micro = Settings { batch_size: Some(2), grad_accumulation: Some(3), ring: Some(2), ..settings("micro") };
    same("3 micro-batches", &run(micro).1, &one);
    let (_, in_order) = run(Settings { packing: None, ring: Some(1), ..settings("in order") });
    assert_ne!(in_order.losses()[0], one.losses()[0]);
    assert_eq!(in_order.steps[2].tokens, one.steps[2].tokens);
}

/// A rotary base that depends on the sequence length takes the length of the batch's rows, not that of a rank's part of them.
#[test]
fn a_dynamic_rotary_base_is_the_same_on_every_mesh() {
    let folder_ = tempfile::tempdir().unwrap();
    let root = folder_.path();
    let path = tiny_model(root);
    // The longest documents of the rows differ.
    let line = |i: usize| serde_json::json!({ "text": "abcdefg ".repeat(1 + i * 5 % 11) }).to_string();
    std::fs::write(root.join("text.jsonl"), (0..120).map(line).collect::<Vec<_>>().join("\n")).unwrap();
    let mut json = crate::common::tiny_config();
    json["max_position_embeddings"] = 16.into();
    json["rope_scaling"] = serde_json::json!({ "rope_type": "dynamic", "factor": 4.0 });
    std::fs::write(path.join("config.json"), json.to_string()).unwrap();
    let (_, one) = run(Settings { ring: Some(1), ..settings(root, "one") });
    for [copies, parts, ring, micro_batches] in [[2, 1, 1, 1], [1, 8, 1, 1], [2, 2, 2, 1], [1, 1, 2, 4]] {
        let name = format!("copies {copies}, parts {parts}, ring {ring}, micro-batches {micro_batches}");
        let (_, memory) = run(Settings {
            dp_replicate: Some(copies),
            dp_shard: Some(parts),
            ring: Some(ring),
            grad_accumulation: Some(micro_batches),
            batch_size: Some(8 / micro_batches),
            ..settings(root, &name)
        });
        same(&name, &memory, &one);
    }
}
