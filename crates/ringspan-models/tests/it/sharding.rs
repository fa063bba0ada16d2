//! Tests of how the parameters of a model are sharded over ranks.

use ringspan_candle::ParallelRank;
use ringspan_models::{Decoder, Lora};

fn decoder(heads: usize, kv_heads: usize) -> Decoder {
    let config = serde_json::json!({
        "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 10,
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": true,
        "decoder_sparse_step": 2, "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
    });
    Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
}

/// Experts in one tensor for each parameter, and heads with sinks.
fn stacked() -> Decoder {
    let config = serde_json::json!({
        "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 6,
        "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
        "num_local_experts": 5, "num_experts_per_tok": 2,
    });
    Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
}

/// Every element of every parameter is held by one replica group, and by all of its ranks.
#[test]
fn the_partitions_of_all_ranks_are_the_model() {
    for (heads, kv_heads, tp, ep, moe_tp) in
        [(6, 3, 1, 1, 1), (6, 3, 2, 3, 1), (6, 2, 3, 1, 3), (6, 2, 5, 5, 2), (4, 1, 4, 2, 2), (6, 3, 3, 1, 1)]
    {
        let targets = ringspan_models::TARGETS.map(str::to_owned).to_vec();
        let lora = Lora::new(3, 1.0, targets).expect("possible");
        let adapted = decoder(heads, kv_heads).with_lora(lora).expect("possible");
        for (decoder, unit) in [adapted, stacked()].iter().flat_map(|it| it.units().map(move |unit| (it, unit))) {
            decoder.all_parameters().check(tp, ep, moe_tp).expect("possible");
            for (name, shape) in decoder.unit_shapes(unit) {
                let mut held = vec![None; shape.iter().product()];
                for at in 0..tp * ep * moe_tp {
                    let (t, e, m) = (at / (ep * moe_tp), at / moe_tp % ep, at % moe_tp);
                    let rank = ParallelRank { tp: (t, tp), ep: (e, ep), moe_tp: (m, moe_tp) };
                    let partitions = decoder.all_parameters().partitions(unit, rank).expect("possible");
                    for partition in partitions.iter().filter(|partition| partition.name == name) {
                        let groups = decoder.all_parameters().replica_groups(rank).expect("possible");
                        assert!(groups.contains(&partition.replicas), "{name}");
                        assert!(!partition.is_empty(), "{name} at {rank:?}");
                        for row in partition.rows.clone() {
                            for column in partition.columns.clone() {
                                let before = held[row * partition.width() + column].replace(partition.replicas);
                                assert!(before.is_none_or(|before| before == partition.replicas), "{name}");
                            }
                        }
                    }
                }
                assert!(held.iter().all(Option::is_some), "{name} of {tp} x {ep} x {moe_tp}");
            }
        }
    }
}

#[test]
fn more_ranks_than_parts_are_refused_with_the_numbers() {
    let message =
        |tp, ep, moe_tp| decoder(6, 2).all_parameters().check(tp, ep, moe_tp).expect_err("too many").to_string();
    assert!(message(7, 1, 1).contains("7 ranks cannot share 6 query heads over 2"), "{}", message(7, 1, 1));
    assert!(message(1, 6, 1).contains("ep 6 leaves ranks without one of the 5 experts"));
    assert!(message(1, 1, 7).contains("width 6 of an expert"));
}
