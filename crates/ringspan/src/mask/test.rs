//! Tests tiles against the definition of visibility, pair by pair.

use super::*;
use crate::documents::Run;
use proptest::prelude::*;

fn side() -> impl Strategy<Value = Option<usize>> {
    proptest::option::of(0usize..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn tiles_hold_every_visible_pair_once(
        (left, right, causal, end) in (side(), side(), any::<bool>(), any::<bool>()),
        (qs, ql, ks, kl, step) in (0usize..30, 0usize..9, 0usize..30, 0usize..9, 1usize..6),
        (q_seq_len, k_seq_len) in (75usize..95, 75usize..95),
        (chunk, prefix) in (proptest::option::of(1usize..20), proptest::option::of(0usize..50)),
        blocks in proptest::option::of((1usize..9, 1usize..9, prop::collection::vec((0usize..12, 0usize..12), 0..40))),
    ) {
        let base = match (causal, end) {
            (true, true) => Mask::causal_bottom_right(),
            (true, false) => Mask::causal(),
            (false, true) => Mask::full_bottom_right(),
            (false, false) => Mask::full(),
        };
        let mut mask = base.window(left, right.filter(|_| !causal));
        if let Some(chunk) = chunk {
            mask = mask.chunked(chunk).expect("not 0");
        }
        if let Some(prefix) = prefix {
            mask = mask.prefix_lm([prefix / 2, prefix]);
        }
        if let Some((q, k, pairs)) = blocks {
            mask = mask.block_sparse(BlockPairs::new(q, k, pairs).expect("not 0"));
        }
        let q = Run { document: 1, start: qs, len: ql, step };
        let k = Run { document: 1, start: ks, len: kl, step };
        let tiles = mask.banded_tiles(&q, &k, q_seq_len, k_seq_len).expect("equal steps");
        for i in 0..ql {
            for j in 0..kl {
                let holds = |p: &&BandedTile| p.q.contains(&i) && p.k.contains(&j) && p.band.sees(i - p.q.start, j - p.k.start);
                let seen = tiles.iter().filter(holds).count();
                let sees = mask.sees(1, qs + i * step, ks + j * step, q_seq_len, k_seq_len);
                prop_assert_eq!(seen, usize::from(sees), "query {} key {} of {:?}", i, j, &tiles);
            }
        }
    }
}

/// The engine keeps as many keys of a sequence as its layers' masks look back.
#[test]
fn a_mask_looks_back_as_far_as_it_sees() {
    let chunked = |mask: Mask, size| mask.chunked(size).expect("a size");
    for (mask, lookback) in [
        (Mask::causal(), None),
        (Mask::full(), None),
        (Mask::causal().window(Some(5), None), Some(5)),
        (Mask::causal().window(Some(0), None), Some(0)),
        (Mask::full().window(Some(3), Some(4)), Some(3)),
        (Mask::full().window(None, Some(4)), None),
        (chunked(Mask::causal(), 7), Some(6)),
        (chunked(Mask::causal(), 1), Some(0)),
        (chunked(Mask::causal().window(Some(3), None), 7), Some(3)),
        (chunked(Mask::causal().window(Some(9), None), 7), Some(6)),
        (Mask::causal().prefix_lm([4]), None),
        (Mask::causal().window(Some(5), None).prefix_lm([30]), Some(5)),
        (chunked(Mask::causal(), 7).prefix_lm([30]), Some(6)),
    ] {
        assert_eq!(mask.lookback(), lookback, "{mask}");
        let pairs = (0..40_usize).flat_map(|i| (0..=i).map(move |j| (i, j)));
        let farthest = pairs.filter(|(i, j)| mask.sees(0, *i, *j, 40, 40)).map(|(i, j)| i - j).max();
        assert_eq!(farthest, Some(lookback.unwrap_or(39)), "{mask}");
    }
}

#[test]
fn another_document_is_never_seen() {
    let q = Run { document: 0, start: 0, len: 4, step: 1 };
    let k = Run { document: 1, ..q };
    assert_eq!(Mask::full().banded_tiles(&q, &k, 4, 4), Ok(vec![]));
}

#[test]
fn unequal_steps_are_refused() {
    let q = Run { document: 0, start: 0, len: 4, step: 1 };
    let k = Run { step: 2, ..q };
    assert!(Mask::causal().banded_tiles(&q, &k, 8, 8).is_err());
}

#[test]
fn limits_beyond_any_position_are_no_limits() {
    let run = Run { document: 0, start: 0, len: 9, step: 1 };
    let seen = |mask: Mask| -> u64 {
        let tiles = mask.banded_tiles(&run, &run, 9, 9).expect("one step");
        let pairs = tiles.iter().map(|p| p.band.pairs(p.q.len(), p.k.len())).sum();
        let wanted = (0..81).filter(|at| mask.sees(0, at / 9, at % 9, 9, 9)).count();
        assert_eq!(pairs, wanted as u64, "{mask}");
        pairs
    };
    assert_eq!(seen(Mask::full().window(Some(usize::MAX), Some(usize::MAX))), 81);
    assert_eq!(seen(Mask::causal().prefix_lm([usize::MAX])), 81);
    assert_eq!(seen(Mask::causal().chunked(usize::MAX).expect("not 0")), 45);
}

#[test]
fn a_token_alone_has_any_step() {
    let one = Run { document: 0, start: 6, len: 1, step: 1 };
    let many = Run { document: 0, start: 0, len: 4, step: 3 };
    let seen = |q: &Run, k: &Run| -> u64 {
        let tiles = Mask::causal().banded_tiles(q, k, 12, 12).expect("one of them is alone");
        tiles.iter().map(|p| p.band.pairs(p.q.len(), p.k.len())).sum()
    };
    assert_eq!((seen(&one, &many), seen(&many, &one)), (3, 2));
}

#[test]
fn impossible_masks_name_their_numbers() {
    assert!(Mask::full().chunked(0).is_err());
    let message = Mask::causal().prefix_lm([3, 4]).check(3).expect_err("two for three").to_string();
    assert!(message.contains("2 prefix lengths for 3 documents"), "{message}");
    let none = Mask::causal().prefix_lm([]);
    assert!(none.check(0).is_ok() && none.check(2).expect_err("none for two").to_string().contains("0 prefix lengths"));
    assert!(Mask::causal().prefix_lm([3]).check(9).is_ok() && Mask::causal().check(0).is_ok());
}

#[test]
fn a_mask_says_what_it_is() {
    let pairs = BlockPairs::new(8, 4, [(0, 0), (3, 2)]).expect("not 0");
    let mask = Mask::causal().window(Some(5), None).chunked(16).expect("not 0").prefix_lm([7]).block_sparse(pairs);
    let words = "causal, window 5 back, 0 ahead, chunks of 16, prefix 7, 2 visible blocks of 8 x 4";
    assert_eq!(mask.to_string(), words);
    assert_eq!(Mask::full().window(None, Some(2)).to_string(), "full, window any back, 2 ahead");
    let bottom_right = Mask::full_bottom_right().window(Some(9), Some(2));
    assert_eq!(bottom_right.to_string(), "full-bottom-right, window 9 back, 2 ahead");
}

#[test]
fn a_window_to_both_sides_counts_from_the_last_key() {
    // Three queries after a cache of four keys are at the positions of keys 4, 5 and 6.
    let mask = Mask::full_bottom_right().window(Some(2), Some(1));
    let row = |i| (0..7).map(|j| if mask.sees(0, i, j, 3, 7) { '#' } else { '.' }).collect::<String>();
    assert_eq!([0, 1, 2].map(row), ["..####.", "...####", "....###"]);
}

#[test]
fn a_causal_mask_with_keys_ahead_is_refused_wherever_it_is_used() {
    let run = Run { document: 0, start: 0, len: 4, step: 1 };
    for causal in [Mask::causal(), Mask::causal_bottom_right(), Mask::full().window(None, Some(0))] {
        for mask in [causal.clone().window(None, Some(3)), causal.clone().window(None, Some(3)).window(Some(1), None)] {
            for error in [mask.check(1).expect_err("ahead"), mask.banded_tiles(&run, &run, 4, 4).expect_err("ahead")] {
                let message = error.to_string();
                assert!(message.contains("asks for 3") && message.contains("full-bottom-right"), "{message}");
            }
        }
        assert!(
            causal.clone().window(Some(3), Some(0)).check(1).is_ok() && causal.window(Some(3), None).check(1).is_ok()
        );
    }
    assert!(Mask::full().window(None, Some(3)).window(None, Some(2)).check(1).is_ok());
}
