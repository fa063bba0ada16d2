use super::*;
use crate::documents::Documents;
use crate::layout::{Layout, LayoutKind};
use crate::mask::Mask;
use crate::schedule::StrategyKind;
use crate::schedule::test::{documents, kinds, masks, strategies, visible_pairs};
use proptest::prelude::*;
use std::collections::HashSet;

const SIZES: TensorSizes = TensorSizes { heads: 8, kv_heads: 2, dim: 64, v_dim: 64, wire: 2, bias_heads: 0 };

type Point = (f64, f64);

fn edges(outline: &[Point]) -> impl Iterator<Item = (Point, Point)> {
    outline.iter().copied().zip(outline.iter().copied().cycle().skip(1))
}

fn area(outline: &[Point]) -> f64 {
    edges(outline).map(|((x1, y1), (x2, y2))| x1 * y2 - x2 * y1).sum::<f64>() / 2.0
}

/// Whether a point lies inside: a ray to the right crosses the border an odd number of times.
fn holds(outline: &[Point], (x, y): Point) -> bool {
    let crosses =
        |&((x1, y1), (x2, y2)): &(Point, Point)| (y1 > y) != (y2 > y) && x < x1 + (y - y1) / (y2 - y1) * (x2 - x1);
    edges(outline).filter(crosses).count() % 2 == 1
}

fn single(kind: LayoutKind, tokens: usize, ranks: usize, mask: &Mask) -> Schedule {
    let layout = Layout::new(kind, &Documents::batch(1, tokens), ranks).expect("ranks");
    Schedule::new(StrategyKind::Ring, &layout, &layout, mask, (ranks, 1)).expect("fits")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn every_visible_pair_lies_in_exactly_one_cell_and_areas_count_pairs(
        kind in kinds(), strategy in strategies(), mask in masks(), (q_docs, k_docs) in documents(),
        ring in 1usize..5, ulysses in 1usize..3,
    ) {
        let (query, key) = Layout::pair(kind, &q_docs, &k_docs, &mask, ring * ulysses).expect("ranks");
        let schedule = Schedule::new(strategy, &query, &key, &mask, (ring, ulysses)).expect("fits");
        let mut seen = HashSet::new();
        for cell in schedule.cells().expect("few cells") {
            let exact = cell.outline(true);
            let mut inside = 0;
            // Every pair around the cell is tried by the middle of its square.
            let (left, right) = exact.iter().fold((f64::MAX, f64::MIN), |(a, b), p| (a.min(p.0), b.max(p.0)));
            let (top, bottom) = exact.iter().fold((f64::MAX, f64::MIN), |(a, b), p| (a.min(p.1), b.max(p.1)));
            for i in top as usize..bottom as usize {
                for j in left as usize..right as usize {
                    if holds(&exact, (j as f64 + 0.5, i as f64 + 0.5)) {
                        prop_assert!(seen.insert((i, j)), "pair ({}, {}) lies in two cells", i, j);
                        inside += 1;
                    }
                }
            }
            prop_assert_eq!(inside, cell.pairs);
            for outline in [exact, cell.outline(false)] {
                prop_assert!((area(&outline) - cell.pairs as f64).abs() < 1e-6, "{:?}", outline);
            }
            let ((x, y), half) = cell.middle();
            prop_assert!(half > 0.0 && (left..right).contains(&x) && (top..bottom).contains(&y));
        }
        prop_assert_eq!(seen, visible_pairs(&q_docs, &k_docs, &mask));
    }

    #[test]
    fn any_picture_is_well_formed_and_inside_its_frame(
        kind in kinds(), strategy in strategies(), mask in masks(), (q_docs, k_docs) in documents(),
        ring in 1usize..10, ulysses in 1usize..3,
    ) {
        prop_assume!(q_docs.size() > 0 && k_docs.size() > 0);
        let (query, key) = Layout::pair(kind, &q_docs, &k_docs, &mask, ring * ulysses).expect("ranks");
        let schedule = Schedule::new(strategy, &query, &key, &mask, (ring, ulysses)).expect("fits");
        let svg = schedule.draw(&SIZES).expect("few cells");
        well_formed(&svg).map_err(TestCaseError::fail)?;
        let numbers = |name: &str| -> Vec<f64> {
            let start = format!(" {name}=\"");
            let after = svg.split(start.as_str()).skip(1);
            after.map(|rest| rest.split('"').next().and_then(|number| number.parse().ok()).unwrap_or(f64::NAN)).collect()
        };
        for (position, length) in [("x", "width"), ("y", "height")] {
            let frame = numbers(length)[0];
            prop_assert!(numbers(position).iter().all(|at| (0.0..frame).contains(at)), "{} of {}", position, svg);
        }
    }
}

/// Whether tags nest, attributes are quoted once each, and nothing is left unescaped.
fn well_formed(xml: &str) -> std::result::Result<(), String> {
    let mut open: Vec<&str> = Vec::new();
    let mut rest = xml.trim_end();
    while let Some(start) = rest.find('<') {
        let words = &rest[..start];
        if words.contains('>') || words.split('&').skip(1).any(|entity| !entity.contains(';')) {
            return Err(format!("unescaped: {words}"));
        }
        let end = rest[start..].find('>').ok_or("a tag without an end")? + start;
        let tag = &rest[start + 1..end];
        rest = &rest[end + 1..];
        if let Some(name) = tag.strip_prefix('/') {
            if open.pop() != Some(name) {
                return Err(format!("</{name}> closes nothing"));
            }
        } else {
            let (body, alone) = tag.strip_suffix('/').map_or((tag, false), |body| (body, true));
            let name = body.split_whitespace().next().ok_or("a tag without a name")?;
            // Outside quotes there are names and equals signs only.
            let parts: Vec<&str> = body[name.len()..].split('"').collect();
            let mut names: Vec<&str> = parts.iter().step_by(2).map(|part| part.trim()).collect();
            if parts.len().is_multiple_of(2) || names.pop() != Some("") || !names.iter().all(|n| n.ends_with('=')) {
                return Err(format!("attributes: {tag}"));
            }
            if names.iter().collect::<HashSet<_>>().len() < names.len() {
                return Err(format!("an attribute twice: {tag}"));
            }
            if !alone {
                open.push(name);
            }
        }
        if open.is_empty() && !rest.is_empty() {
            return Err(format!("after the end: {rest}"));
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("open: {open:?}")) }
}

#[test]
fn the_checker_of_xml_finds_what_is_wrong() {
    assert_eq!(well_formed("<a b=\"1\"><c/>x &amp; y</a>"), Ok(()));
    for bad in ["<a>", "<a></b>", "<a b=1/>", "<a b=\"1\" b=\"2\"/>", "<a>& x</a>", "<a/><b/>", "<a b=\"/>"] {
        assert!(well_formed(bad).is_err(), "{bad}");
    }
}

#[test]
fn a_long_sequence_is_as_small_a_file_as_a_short_one() {
    let bytes = |tokens| single(LayoutKind::Zigzag, tokens, 8, &Mask::causal()).draw(&SIZES).expect("few cells").len();
    assert!(bytes(1 << 24) < 2 * bytes(1024), "{} {}", bytes(1 << 24), bytes(1024));
    assert!(bytes(1 << 24) < 100_000, "{}", bytes(1 << 24));
}

#[test]
fn the_members_of_a_ulysses_group_are_drawn_as_one() {
    let documents = Documents::batch(1, 4096);
    for kind in [LayoutKind::Zigzag, LayoutKind::Contiguous, LayoutKind::Striped(64)] {
        let cells = |grid: (usize, usize)| {
            let layout = Layout::new(kind, &documents, grid.0 * grid.1).expect("ranks");
            let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), grid);
            schedule.expect("fits").cells().expect("few cells").len()
        };
        let alone = if matches!(kind, LayoutKind::Striped(_)) { 32 * 33 / 2 } else { cells((4, 1)) };
        assert_eq!(cells((4, 2)), alone, "{kind}");
    }
}

#[test]
fn stripes_of_many_tokens_are_refused_with_the_number_of_cells() {
    let message = |result: Result<String>| result.err().map(|error| error.to_string()).unwrap_or_default();
    let striped = single(LayoutKind::Striped(1), 1000, 4, &Mask::full()).draw(&SIZES);
    assert!(message(striped).contains("1000000 cells of 1000 queries"));
    let long = single(LayoutKind::Striped(32), 1 << 19, 4, &Mask::full()).cells().map(|_| String::new());
    assert!(message(long).contains("268435456 cells"));
    assert!(message(single(LayoutKind::Zigzag, 100, 17, &Mask::full()).draw(&SIZES)).contains("17 ring ranks"));
    assert!(message(single(LayoutKind::Zigzag, 0, 2, &Mask::full()).draw(&SIZES)).contains("0 queries"));
}

#[test]
fn the_words_name_strategy_layout_mask_balance_and_bytes() {
    let schedule = single(LayoutKind::Zigzag, 256, 4, &Mask::causal());
    let svg = schedule.draw(&SIZES).expect("few cells");
    for words in
        ["Ring over 4 ranks: zigzag layout, mask causal", "256 tokens, 32,896 visible pairs", "Balance 100.0 %"]
    {
        assert!(svg.contains(words), "'{words}' is missing");
    }
    let sent = schedule.bytes_sent(Pass::Forward, 0, &SIZES).expect("fits");
    assert!(svg.contains(&in_words(sent)), "{sent}");
}

#[test]
fn numbers_are_written_for_people() {
    assert_eq!([grouped(0), grouped(999), grouped(1000), grouped(1_234_567)], ["0", "999", "1,000", "1,234,567"]);
    assert_eq!([in_words(512), in_words(12_345), in_words(25_165_824)], ["512 bytes", "12.3 kB", "25.2 MB"]);
    assert_eq!(wrapped("a bc def", 4), ["a bc", "def"]);
}
