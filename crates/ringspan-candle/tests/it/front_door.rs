//! Tests of everything that attention can do, through a context on several meshes, against candle's operations in f64.

use crate::support::whole_sequences::{Case, HEADS, Terms, assert_close, distance};
use ringspan::attention::Wire;
use ringspan::schedule::StrategyChoice;
use ringspan::{LayoutKind, Mask, StrategyKind};
use ringspan_candle::{ContextBuilder, QkvFormat};

/// Sizes of the ring and Ulysses axes. The four heads are not divisible by three ranks.
const GRIDS: [(usize, usize); 8] = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (2, 2), (1, 4)];

/// The relative error (L2) of f32 against f64.
const F32: f64 = 1e-5;

/// Documents of several lengths in rows of one length, two of them padded at the end; three ranks hold different
/// numbers.
const PACKED: [&[usize]; 3] = [&[7, 4], &[11], &[2, 1, 5]];

#[track_caller]
fn check(case: &Case, what: &str) {
    check_as(case, F32, what, |builder| builder);
}

/// Compares the case on all meshes, each in one of the formats.
#[track_caller]
fn check_as(case: &Case, most: f64, what: &str, build: impl Fn(ContextBuilder) -> ContextBuilder + Sync) {
    let expected = case.expected();
    for (index, grid) in GRIDS.into_iter().enumerate() {
        let format = if index % 2 == 0 { QkvFormat::Bshd } else { QkvFormat::Bhsd };
        let what = format!("{what}, {} x {} ranks, {format:?}", grid.0, grid.1);
        let actual = case
            .on_ranks(grid.0 * grid.1, |builder| build(builder.grid(grid).qkv_format(format)))
            .unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_close(&actual, &expected, most, &what);
    }
}

fn all_terms() -> Terms {
    Terms {
        softcap: Some(1.5),
        buckets: Some(true),
        sinks: true,
        bias_heads: Some(HEADS),
        dropout: Some(0.3),
        ..Terms::default()
    }
}

#[test]
fn rows_of_any_lengths_give_what_whole_sequences_give() {
    check(&Case::causal(&[&[13], &[13]], 13), "two rows");
    check(&Case::causal(&PACKED, 11), "packed documents");
    check(&Case::causal(&[&[11], &[4]], 11), "a padded row");
    check(&Case::causal(&[&[2]], 2), "two tokens, so that ranks have none");
    check(&Case::causal(&[&[1], &[0]], 3), "one token");
}

#[test]
fn each_term_of_the_score_gives_what_whole_sequences_give() {
    let terms = Terms::default;
    let cases = [
        ("scale", Terms { scale: 0.9, ..terms() }),
        ("softcap", Terms { softcap: Some(0.7), ..terms() }),
        ("ALiBi", Terms { alibi: true, ..terms() }),
        ("T5's buckets", Terms { buckets: Some(false), ..terms() }),
        ("T5's buckets for both directions", Terms { buckets: Some(true), ..terms() }),
        ("sinks", Terms { sinks: true, ..terms() }),
        ("a bias for each head", Terms { bias_heads: Some(HEADS), ..terms() }),
        ("a bias for all heads", Terms { bias_heads: Some(1), ..terms() }),
        ("dropout", Terms { dropout: Some(0.4), ..terms() }),
        ("all at once", all_terms()),
    ];
    for (what, terms) in cases {
        check(&Case::causal(&PACKED, 11).with(terms.clone()), what);
        check(&Case::new(&[&[2]], 2, Mask::full(), |_, _| true).with(terms), &format!("{what}, two tokens"));
    }
}

#[test]
fn each_mask_gives_what_whole_sequences_give() {
    let window = Mask::causal().window(Some(3), None);
    check(&Case::new(&PACKED, 11, window, |i, j| j <= i && i <= j + 3), "a causal window");
    let window = Mask::full().window(Some(2), Some(1));
    check(&Case::new(&PACKED, 11, window, |i, j| j <= i + 1 && i <= j + 2), "a window to both sides");
    let chunks = Mask::causal().chunked(4).expect("chunks");
    check(&Case::new(&PACKED, 11, chunks, |i, j| j <= i && i / 4 == j / 4), "chunks");
    let prefix = Mask::causal().prefix_lm([3]);
    check(&Case::new(&PACKED, 11, prefix, |i, j| j <= i || j < 3), "a prefix");
}

#[test]
fn queries_attend_to_keys_of_other_lengths_and_layouts() {
    let full = |rows: &[&[usize]], len| Case::new(rows, len, Mask::full(), |_, _| true);
    check(&full(&[&[5], &[5]], 5).with_keys(&[&[23], &[23]], 23), "more keys than queries");
    check(&full(&[&[23]], 23).with_keys(&[&[2]], 2), "fewer keys than ranks");
    let cross = full(&[&[3, 6], &[9]], 9).with_keys(&[&[8, 1], &[4]], 12);
    let terms = Terms { sinks: true, bias_heads: Some(HEADS), softcap: Some(1.5), ..Terms::default() };
    check(&cross.with(terms), "packed queries and padded keys, with sinks and a bias");
    let keys_apart = Case::causal(&PACKED, 11).with(Terms { sinks: true, bias_heads: Some(1), ..Terms::default() });
    for (queries, keys) in [("zigzag", "contiguous"), ("striped:1", "zigzag"), ("balanced:2", "striped:2")] {
        let [of_queries, of_keys] = [queries, keys].map(|kind| kind.parse::<LayoutKind>().expect("a layout"));
        let what = format!("queries {queries}, keys {keys}");
        check_as(&keys_apart, F32, &what, |builder| builder.layout(of_queries).key_layout(of_keys));
    }
    let unseen = full(&[&[4], &[3]], 4).with_keys(&[&[0], &[5]], 5);
    check(&unseen, "queries without any key");
}

#[test]
fn every_strategy_and_layout_computes_every_term() {
    let case = Case::new(&PACKED, 11, Mask::causal().window(Some(5), None), |i, j| j <= i && i <= j + 5);
    let case = case.with(all_terms());
    for strategy in StrategyKind::ALL.map(StrategyChoice::from).into_iter().chain([StrategyChoice::Auto]) {
        check_as(&case, F32, &strategy.to_string(), |builder| builder.strategy(strategy.clone()));
    }
    for kind in ["contiguous", "striped:1", "striped:3", "per-document-zigzag", "balanced:2"] {
        let layout: LayoutKind = kind.parse().expect("a layout");
        check_as(&case, F32, kind, |builder| builder.layout(layout));
    }
    // Ranks without queries compute those of others, whose gradient of the bucket table is theirs to give.
    let few = Case::new(&[&[2]], 2, Mask::full(), |_, _| true).with_keys(&[&[9]], 9).with(all_terms());
    check_as(&few, F32, "pass-q of two queries", |builder| builder.strategy(StrategyKind::PassQ));
}

#[test]
fn heads_are_exchanged_in_chunks() {
    let (case, grids) = (Case::causal(&PACKED, 11).with(all_terms()), [(1, 2), (2, 2), (1, 3)]);
    let expected = case.expected();
    for grid in grids {
        let actual = case.on_ranks(grid.0 * grid.1, |builder| builder.grid(grid).head_chunks(2)).expect("attention");
        assert_close(&actual, &expected, F32, &format!("{grid:?}"));
    }
}

#[test]
fn messages_are_rounded_to_the_wire_type_and_nothing_else_is() {
    let case = Case::causal(&PACKED, 11).with(Terms { sinks: true, ..Terms::default() });
    let expected = case.expected();
    // The inputs are exact in bf16, so sending them so loses nothing; f16 has their bits, too, except of the smallest.
    for wire in [Wire::Bf16, Wire::F16, Wire::F32] {
        check_as(&case, F32, &format!("{wire:?}"), |builder| builder.wire(wire));
    }
    // A scaled query is not exact in bf16: what travels is rounded, what stays is not.
    let scaled = Case::causal(&PACKED, 11).scaled(1.0 / 3.0);
    let (one, sent) = (
        scaled.on_ranks(1, |builder| builder.wire(Wire::Bf16)).expect("one rank"),
        scaled.on_ranks(3, |builder| builder.wire(Wire::Bf16)).expect("three ranks"),
    );
    let exact = scaled.expected();
    assert_close(&one, &exact, F32, "one rank sends nothing");
    assert_close(&sent, &exact, 2e-2, "keys in bf16");
    assert!(distance(&sent[0].1, &exact[0].1) > 1e-5, "messages in bf16 are rounded");
    assert_close(&case.on_ranks(2, |builder| builder).expect("two ranks"), &expected, F32, "no wire type");
}

#[test]
fn tensors_in_bf16_give_what_whole_sequences_give() {
    let case = Case::causal(&PACKED, 11).with(Terms { sinks: true, softcap: Some(1.5), ..Terms::default() }).in_bf16();
    check_as(&case, 1e-2, "bf16", |builder| builder);
}
