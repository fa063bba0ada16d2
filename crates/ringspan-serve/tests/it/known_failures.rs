//! Failures found in another system's context parallelism, where tests with a few tokens hid them: all real tokens were on one
//! rank. In these tests every rank has some.

use crate::support::*;
use ringspan::{Documents, LayoutKind, StrategyKind};
use ringspan_serve::{Batch, score};

const LAYOUTS: [LayoutKind; 4] =
    [LayoutKind::Contiguous, LayoutKind::Zigzag, LayoutKind::Striped(3), LayoutKind::PerDocumentZigzag];

/// B3: each rank took the last of its own tokens for the last token of the prompt.
#[test]
fn b3_the_first_new_token_follows_the_last_token_of_the_whole_prompt() {
    let model = qwen3();
    for len in [28, 29, 31, 3, 1] {
        let prompt = tokens(len, len as u64);
        let expected = recomputed(&model, &prompt, 1);
        for grid in MESHES {
            for (rank, part) in run(&model, grid, &prompt, &options(1)).into_iter().enumerate() {
                assert_eq!(part.tokens, expected, "{grid:?}, rank {rank}, prompt of {len}");
            }
        }
    }
}

/// B4: ranks counted positions in a cache padded to the whole length, so keys of later ranks were never seen again.
#[test]
fn b4_every_key_of_the_prompt_is_seen_while_decoding() {
    let model = qwen3();
    let prompt = tokens(28, 6);
    let n = 8;
    let expected = recomputed(&model, &prompt, n);
    for grid in MESHES {
        assert_eq!(run(&model, grid, &prompt, &options(n))[0].tokens, expected, "{grid:?}");
    }
    // Tokens of every part of the prompt must influence the logits, or the comparison shows nothing.
    let all: Vec<u32> = prompt.iter().chain(&expected).copied().collect();
    let last = logits(&model, &all).pop().expect("tokens");
    for quarter in 0..4 {
        let mut other = all.clone();
        other[quarter * 7 + 3] = (other[quarter * 7 + 3] + 1) % VOCABULARY as u32;
        let changed = logits(&model, &other).pop().expect("tokens");
        assert!(relative_l2(&changed, &last) > 1e-3, "quarter {quarter} of the prompt does not matter");
    }
}

/// B5: targets were shifted inside each rank, so the target at the border was lost and the rows were misaligned.
#[test]
fn b5_log_probabilities_at_the_borders_of_ranks_are_those_of_the_next_token() {
    let model = qwen3();
    let (rows, len) = (2, 31);
    let tokens = tokens(rows * len, 8);
    let lengths = [31, 18];
    let documents = Documents::padded(&lengths, len).expect("lengths");
    for grid in MESHES {
        for layout in LAYOUTS {
            let batch = Batch { tokens: &tokens, documents: &documents };
            let scores = score(&model, &mesh(grid.0, grid.1), batch, layout, StrategyKind::Ring, true);
            let scores = scores.expect("scores").expect("rank 0 is here");
            assert_eq!(scores.predicted, 30 + 17);
            let all_logits = scores.logits.expect("asked for");
            for (row, length) in lengths.into_iter().enumerate() {
                let tokens = &tokens[row * len..][..length];
                let expected = logits(&model, tokens);
                for t in 0..len {
                    let got = scores.log_probs[row * len + t];
                    let grid = format!("{grid:?}, {layout}, row {row}, token {t}");
                    if t + 1 >= length {
                        assert_eq!(got, 0.0, "{grid}");
                        continue;
                    }
                    let max = expected[t].iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let sum: f64 = expected[t].iter().map(|x| f64::from(x - max).exp()).sum();
                    let exact = f64::from(expected[t][tokens[t + 1] as usize] - max) - sum.ln();
                    assert!((f64::from(got) - exact).abs() < 1e-4, "{grid}: {got} for {exact}");
                }
                let got = &all_logits[row * len * VOCABULARY..][..length * VOCABULARY];
                let apart = relative_l2(got, &expected.concat());
                assert!(apart < 1e-5, "{grid:?}, {layout}, row {row}: logits are {apart:.1e} apart");
            }
            assert!(all_logits[(len + 18) * VOCABULARY..].iter().all(|x| *x == 0.0), "padding has no logits");
        }
    }
}

/// B7: some mesh sizes failed outright, and lengths had to be divisible.
#[test]
fn b7_any_length_runs_on_any_mesh() {
    let model = qwen3();
    for len in [1, 2, 3, 4, 5, 7, 8, 9, 127] {
        let prompt = tokens(len, 2);
        let expected = run(&model, (1, 1), &prompt, &options(2))[0].tokens.clone();
        for grid in MESHES {
            assert_eq!(run(&model, grid, &prompt, &options(2))[0].tokens, expected, "{grid:?}, prompt of {len}");
        }
    }
}

/// B8: rows without tokens gave NaN.
#[test]
fn b8_empty_rows_give_no_nan() {
    let model = qwen3();
    let (len, lengths) = (9, [0, 9, 0, 1]);
    let tokens = tokens(4 * len, 3);
    let documents = Documents::padded(&lengths, len).expect("lengths");
    for grid in MESHES {
        let batch = Batch { tokens: &tokens, documents: &documents };
        let scores = score(&model, &mesh(grid.0, grid.1), batch, LayoutKind::Zigzag, StrategyKind::AllGather, true);
        let scores = scores.expect("scores").expect("rank 0 is here");
        assert_eq!(scores.predicted, 8);
        assert!(scores.log_probs.iter().chain(&scores.logits.expect("asked for")).all(|x| x.is_finite()));
    }
}
