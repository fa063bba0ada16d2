//! A plan needs neither weights nor data, only a specification.

use super::*;
use crate::{
    data::Segment,
    mesh::RunMesh,
    settings::Settings,
    spec::{BatchSpec, RunSpec},
};

/// 10,000 ranks: 25 groups of data-parallel ranks, rings of 50, and 8 ranks of Ulysses in each of their places.
#[test]
fn a_plan_for_ten_thousand_ranks_is_made_of_shapes_alone() {
    let model = serde_json::json!({
        "model_type": "llama", "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 5e5,
        "hidden_act": "silu", "max_position_embeddings": 131_072,
    });
    let decoder = Decoder::new(serde_json::from_value(model).unwrap()).unwrap();
    let settings = Settings {
        tokens: Some("not read".into()),
        dp_shard: Some(25),
        ring: Some(50),
        ulysses: Some(8),
        threads: Some(1),
        ..Settings::default()
    };
    let mut config = TrainConfig::resolve(settings).unwrap();
    config.local_ranks = Some(1);
    let (rows, length) = (25, 100_000);
    let batch = Batch {
        rows,
        length,
        tokens: vec![0; rows * length],
        targets: vec![0; rows * length],
        segments: (0..rows).map(|row| Segment { row, start: 0, len: length }).collect(),
    };
    let spec = RunSpec {
        mesh: RunMesh::new(&config, &decoder).unwrap(),
        shapes: decoder.shapes(),
        lr: config.lr(100).unwrap(),
        first_step: 0,
        batches: BatchSpec { first_step: vec![batch.clone()], fullest: Some(batch), ..BatchSpec::default() },
        model: "a model".into(),
        data: "shapes".into(),
        starts_from_adapter: false,
        tokenizer: None,
        notes: Vec::new(),
        warnings: Vec::new(),
        decoder,
    };
    let plan = Plan::with_recompute(&config, &spec, Recompute::Full, &[]).unwrap();
    assert_eq!(plan.tokens_per_rank.len(), 10_000);
    assert_eq!(plan.tokens_per_rank.iter().sum::<usize>(), rows * length);
    assert_eq!(plan.tokens_per_step, 2_500_000);
    // The shards of 16 bytes for each of 8 billion parameters, and a few layers: no rank holds the model.
    let shard = 16 * 8_000_000_000 / 10_000;
    assert!(plan.rank_bytes() > shard && plan.rank_bytes() < 8_000_000_000, "{:?}", plan.memory);
    assert!(!plan.traffic.is_empty());
}
