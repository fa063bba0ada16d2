//! Tests of generation: the tokens are the same on every mesh, and the same as those of a full forward pass for each token.

use crate::support::*;
use ringspan_serve::{BLOCK, Error, Options, Sampling, Stop, generate, owner};
use std::ops::ControlFlow;

#[test]
fn greedy_tokens_are_the_same_on_every_mesh_and_equal_recomputation() {
    let model = qwen3();
    for prompt in [1, 2, 5, 29] {
        let prompt = tokens(prompt, 3);
        let expected = recomputed(&model, &prompt, 12);
        // A model that repeats one token would hide a wrong position.
        for grid in MESHES {
            for (rank, generation) in run(&model, grid, &prompt, &options(12)).into_iter().enumerate() {
                assert_eq!(generation.tokens, expected, "{grid:?}, rank {rank}, prompt of {}", prompt.len());
                assert_eq!(generation.stop, Stop::Length);
            }
        }
    }
}

#[test]
fn decoding_crosses_the_borders_of_blocks_and_ranks() {
    let model = qwen3();
    // The new tokens begin just before a block's border, and go on after the next border.
    let (prompt, new) = (tokens(BLOCK - 3, 9), BLOCK + 6);
    let owners = |ranks| (prompt.len()..prompt.len() + new).map(move |p| owner(p, ranks)).collect::<Vec<_>>();
    assert!([2, 3, 4].iter().all(|ranks| owners(*ranks).windows(2).filter(|w| w[0] != w[1]).count() == 2));
    let expected = recomputed(&model, &prompt, new);
    assert!(expected.iter().collect::<std::collections::BTreeSet<_>>().len() > 4, "{expected:?}");
    for grid in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)] {
        assert_eq!(run(&model, grid, &prompt, &options(new))[0].tokens, expected, "{grid:?}");
    }
}

#[test]
fn sliding_windows_are_kept_while_decoding() {
    let model = mistral(7);
    let prompt = tokens(23, 4);
    let expected = recomputed(&model, &prompt, 20);
    for grid in [(1, 1), (3, 1), (2, 2)] {
        assert_eq!(run(&model, grid, &prompt, &options(20))[0].tokens, expected, "{grid:?}");
    }
    let wide = recomputed(&mistral(4000), &prompt, 20);
    assert_ne!(expected, wide, "the window must matter for this test to mean something");
}

/// Local and global layers have different rotary bases; experts are chosen for one token as for many.
#[test]
fn every_kind_of_layer_decodes_as_it_reads() {
    for (name, model) in [("gemma3", gemma3()), ("qwen3_moe", qwen3_moe())] {
        let prompt = tokens(23, 5);
        let expected = recomputed(&model, &prompt, 14);
        assert!(expected.iter().collect::<std::collections::BTreeSet<_>>().len() > 3, "{name}: {expected:?}");
        for grid in [(1, 1), (3, 1), (2, 2)] {
            assert_eq!(run(&model, grid, &prompt, &options(14))[0].tokens, expected, "{name}, {grid:?}");
        }
    }
}

/// Factors and caps on logits, layers without positions, partial rotary embeddings, and fused projections.
#[test]
fn every_family_decodes_as_it_reads() {
    let families = [
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
        "gpt_oss_mxfp4",
    ];
    for name in families {
        let model = of_fixture(name);
        // A model that repeats one token would hide a wrong position.
        let of_prompt = |seed| {
            let prompt: Vec<u32> = tokens(23, seed).into_iter().map(|token| token % 96).collect();
            let expected = recomputed(&model, &prompt, 14);
            let several = expected.iter().collect::<std::collections::BTreeSet<_>>().len() > 1;
            several.then_some((prompt, expected))
        };
        let (prompt, expected) = (5..40).find_map(of_prompt).expect("a prompt that several tokens follow");
        for grid in [(1, 1), (3, 1), (2, 2)] {
            assert_eq!(run(&model, grid, &prompt, &options(14))[0].tokens, expected, "{name}, {grid:?}");
        }
    }
}

/// A cached key cannot be rotated again, so the base for the final length is used from the first token on.
#[test]
fn a_base_that_depends_on_the_length_is_that_of_the_whole_text() {
    let prompt = tokens(23, 4);
    let model = dynamic(26);
    let expected = recomputed(&model, &prompt, 20);
    for grid in [(1, 1), (3, 1), (2, 2)] {
        assert_eq!(run(&model, grid, &prompt, &options(20))[0].tokens, expected, "{grid:?}");
    }
    assert_ne!(
        expected,
        recomputed(&dynamic(4000), &prompt, 20),
        "the base must matter for this test to mean something"
    );
}

#[test]
fn each_rank_keeps_its_share_of_the_cache() {
    let model = qwen3();
    let (prompt, new) = (tokens(1000, 1), 2 * BLOCK * 4 + 1);
    for (ring, ulysses) in [(1, 1), (2, 1), (4, 1), (2, 2)] {
        let ranks = ring * ulysses;
        let parts = run(&model, (ring, ulysses), &prompt, &options(new));
        let held: Vec<usize> = parts.iter().map(|part| part.cached).collect();
        // The last generated token never passes through the model.
        let total = prompt.len() + new - 1;
        assert_eq!(held.iter().sum::<usize>(), total, "{held:?}");
        assert!(held.iter().all(|held| held.abs_diff(total / ranks) <= BLOCK + 2), "{held:?}");
        // Keys and values of 2 layers with 2 heads of width 8, in f32.
        assert!(parts.iter().all(|part| part.cached_bytes == part.cached * 2 * 2 * 2 * 8 * 4));
    }
}

#[test]
fn sampled_tokens_are_the_same_on_every_mesh() {
    let model = qwen3();
    let prompt = tokens(19, 2);
    let sampling = Sampling { temperature: 1.3, top_k: Some(40), top_p: Some(0.95), seed: 11 };
    let options = Options { sampling, ..options(40) };
    let expected = run(&model, (1, 1), &prompt, &options)[0].tokens.clone();
    for grid in MESHES {
        assert_eq!(run(&model, grid, &prompt, &options)[0].tokens, expected, "{grid:?}");
    }
    let other = Options { sampling: Sampling { seed: 12, ..sampling }, ..options };
    assert_ne!(run(&model, (1, 1), &prompt, &other)[0].tokens, expected);
}

#[test]
fn a_stop_token_ends_the_text_on_every_rank_and_is_no_part_of_it() {
    let model = qwen3();
    let prompt = tokens(9, 2);
    let all = recomputed(&model, &prompt, 16);
    let stop = all[7];
    let first = all.iter().position(|token| *token == stop).expect("it is there");
    let options = Options { stop_tokens: vec![stop], ..options(16) };
    for grid in [(1, 1), (3, 1), (2, 2)] {
        for part in run(&model, grid, &prompt, &options) {
            assert_eq!((part.tokens.as_slice(), part.stop), (&all[..first], Stop::Token));
        }
    }
}

#[test]
fn the_caller_hears_each_token_once_and_may_stop() {
    let model = qwen3();
    let prompt = tokens(9, 2);
    let all = recomputed(&model, &prompt, 5);
    for (ring, ulysses) in [(1, 1), (2, 2)] {
        let mut answer = Vec::new();
        let parts = generate(&model, &mesh(ring, ulysses), &prompt, &options(5), |token| {
            answer.push(token);
            Ok(if answer.len() == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) })
        });
        assert!(parts.expect("generation").iter().all(|part| part.tokens == all[..3] && part.stop == Stop::Caller));
        assert_eq!(answer, all[..3]);
    }
}

#[test]
fn an_error_of_the_caller_ends_all_ranks() {
    let model = qwen3();
    let result = generate(&model, &mesh(3, 1), &tokens(4, 1), &options(5), |_| Err(Error::Tokenizer("broken".into())));
    assert_eq!(result.expect_err("must fail").to_string(), "tokenizer: broken");
}

#[test]
fn prompts_and_options_that_make_no_sense_are_refused() {
    let model = qwen3();
    let refusal = |prompt: &[u32], options: &Options| {
        let result = generate(&model, &mesh(2, 1), prompt, options, |_| Ok(ControlFlow::Continue(())));
        result.expect_err("must be refused").to_string()
    };
    assert!(refusal(&[], &options(3)).contains("no tokens"));
    let message = refusal(&[1, 2, VOCABULARY as u32], &options(3));
    assert!(message.contains("token 97 at position 2") && message.contains("0 to 96"), "{message}");
    let hot = Options { sampling: Sampling { temperature: -1.0, ..Sampling::greedy() }, ..options(3) };
    assert!(refusal(&[1], &hot).contains("temperature -1"));
    let result = generate(&model, &mesh(1, 5), &[1], &options(3), |_| Ok(ControlFlow::Continue(())));
    let message = result.expect_err("4 heads").to_string();
    assert!(message.contains("ulysses 5") && message.contains('4'), "{message}");
}

/// Memory is allocated for the tokens that a text has, not for those that it may have.
#[test]
fn a_text_may_have_more_tokens_than_anybody_has_memory_for() {
    let model = qwen3();
    let prompt = tokens(9, 2);
    let expected = recomputed(&model, &prompt, 3);
    for max_tokens in [2_000_000_000, usize::MAX] {
        for (ring, ulysses) in [(1, 1), (3, 1)] {
            let mut seen = 0;
            let generations = generate(&model, &mesh(ring, ulysses), &prompt, &options(max_tokens), |_| {
                seen += 1;
                Ok(if seen < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) })
            });
            assert_eq!(generations.expect("generates")[0].tokens, expected, "{max_tokens}");
        }
    }
}
