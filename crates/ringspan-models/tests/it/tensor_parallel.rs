//! Tests of tensor parallelism: layers whose width is sharded over ranks compute what Hugging Face computes on one device.

use crate::support::{Batch, TestMesh, adapted, assert_equal, load, on_one_device, on_ranks};
use ringspan::LayoutKind;
use ringspan_models::TARGETS;

/// Covers every model: with fewer key-value heads than ranks, with as many, with biases, tied heads, norms after layers.
#[test]
fn layers_spread_over_ranks_equal_hugging_face() {
    let models = [
        "llama",
        "qwen2",
        "qwen3",
        "mistral",
        "gemma3",
        "qwen3_moe",
        "qwen3_moe_balanced",
        "granite",
        "mixtral",
        "gemma2",
        "olmo2",
        "smollm3",
        "glm4",
        "phi3",
        "phi3_longrope",
        "deepseek_v2",
        "deepseek_v2_lite",
        "deepseek_v3",
        "gpt_oss",
        "gpt_oss_balanced",
    ];
    for name in models {
        let (decoder, weights, batch, wanted) = load(name);
        for (ring, ulysses, tp) in [(1, 1, 2), (1, 1, 3), (2, 1, 2), (1, 2, 2), (1, 1, 4), (2, 2, 2)] {
            let most = decoder.head_counts().of_rank((0, tp)).map_or(0, |heads| heads.queries.len());
            if most < ulysses {
                continue;
            }
            let sparse = decoder.experts() > 0;
            // The experts are sharded by their width, or distributed over ranks as a whole.
            let (ep, moe_tp) = match (sparse, ring * ulysses) {
                (false, _) => (1, 1),
                (true, 1) => (1, tp),
                (true, more) => (more, tp),
            };
            let test_mesh = TestMesh { ring, ulysses, tp, ep, moe_tp, dropout: None };
            let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
            assert_equal(&format!("{name}, {test_mesh:?}"), &got, &wanted);
        }
    }
}

/// There are fewer tokens than ranks: some ranks have no row of their own, some not even a token.
#[test]
fn ranks_without_tokens_take_part() {
    for name in ["qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss"] {
        let (decoder, weights, whole, _) = load(name);
        let short = Batch { tokens: whole.tokens[..3].to_vec(), rows: 1, len: 3 };
        let (one, _) = on_one_device(&decoder, &weights, &short);
        for (ring, ulysses, tp) in [(1, 1, 4), (2, 1, 2), (5, 1, 2), (2, 1, 4)] {
            let ep = if decoder.experts() > 0 { ring.min(2) } else { 1 };
            let ep = if (ring * tp) % ep == 0 { ep } else { 1 };
            let test_mesh = TestMesh { ring, ulysses, tp, ep, ..TestMesh::default() };
            let many = on_ranks(&decoder, &weights, &short, LayoutKind::Contiguous, test_mesh);
            assert_equal(&format!("{name}, 3 tokens, {test_mesh:?}"), &many, &one);
        }
    }
}

/// Adapters of layers that are sharded by rows, and by columns.
#[test]
fn adapters_are_cut_as_their_layers_are() {
    let attention = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj"];
    for (name, targets) in [("qwen3", TARGETS), ("deepseek_v2", attention)] {
        let (decoder, weights, batch) = adapted(name, &targets, 0.0);
        let (one, _) = on_one_device(&decoder, &weights, &batch);
        for (ring, tp) in [(1, 2), (2, 2), (1, 4)] {
            let test_mesh = TestMesh { ring, tp, ..TestMesh::default() };
            let got = on_ranks(&decoder, &weights, &batch, LayoutKind::Zigzag, test_mesh);
            assert_equal(&format!("{name}, {test_mesh:?}"), &got, &one);
        }
    }
}
