//! Tests of expert parallelism: experts sharded over ranks, whole or by their width, compute what Hugging Face computes on one
//! device.

use crate::support::{Batch, TestMesh, adapted, assert_equal, load, on_one_device, on_ranks};
use ringspan::LayoutKind;

#[test]
fn experts_spread_over_ranks_equal_hugging_face() {
    let models = [
        "qwen3_moe",
        "qwen3_moe_balanced",
        "mixtral",
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "gpt_oss",
        "gpt_oss_balanced",
    ];
    for name in models {
        let (decoder, weights, batch, wanted) = load(name);
        for (ring, ulysses, ep, moe_tp) in
            [(2, 1, 2, 1), (3, 1, 3, 1), (2, 1, 1, 2), (4, 1, 2, 1), (2, 2, 2, 2), (4, 1, 4, 1), (3, 1, 1, 3)]
        {
            let test_mesh = TestMesh { ring, ulysses, ep, moe_tp, ..TestMesh::default() };
            let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
            assert_equal(&format!("{name}, {test_mesh:?}"), &got, &wanted);
        }
    }
}

/// Ranks without tokens compute experts for other ranks, forward and backward, and take part in every collective in the same
/// order.
#[test]
fn ranks_without_tokens_compute_the_experts_of_others() {
    for name in ["qwen3_moe", "deepseek_v2", "gpt_oss"] {
        let (decoder, weights, whole, _) = load(name);
        let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
        let (one, _) = on_one_device(&decoder, &weights, &short);
        for (ring, ulysses, ep, moe_tp) in [(6, 1, 3, 1), (6, 1, 3, 2), (3, 2, 2, 3), (1, 4, 4, 1), (4, 1, 1, 4)] {
            let test_mesh = TestMesh { ring, ulysses, ep, moe_tp, ..TestMesh::default() };
            let many = on_ranks(&decoder, &weights, &short, LayoutKind::Contiguous, test_mesh);
            assert_equal(&format!("{name}, 3 tokens, {test_mesh:?}"), &many, &one);
        }
    }
}

/// An adapter is on the ranks of its expert, and sharded as its expert is.
#[test]
fn adapters_of_experts_go_where_their_experts_go() {
    for name in ["qwen3_moe", "qwen3_moe_balanced", "mixtral", "deepseek_v3"] {
        let (decoder, weights, batch) = adapted(name, &["all-linear"], 0.0);
        let (one, _) = on_one_device(&decoder, &weights, &batch);
        for (ring, ulysses, tp, ep, moe_tp) in [
            (2, 1, 1, 2, 1),
            (3, 1, 1, 3, 1),
            (2, 1, 1, 1, 2),
            (2, 2, 1, 2, 2),
            (3, 1, 1, 1, 3),
            (1, 1, 2, 1, 2),
            (2, 1, 2, 2, 2),
        ] {
            let test_mesh = TestMesh { ring, ulysses, tp, ep, moe_tp, ..TestMesh::default() };
            let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
            assert_equal(&format!("{name}, {test_mesh:?}"), &got, &one);
        }
    }
}
