//! Every pair of features works together: strategies, layouts, grids, parts of heads, masks, documents, scores, heads,
//! widths.
//!
//! The full product has millions of cases. A greedy cover picks cases until every pair of values of two factors has
//! occurred; each case compares a mesh of ranks with the f64 reference, outputs and all gradients. Full products of
//! strategies with three other factors run with `--ignored`.

use ringspan::attention::Wire;
use ringspan::mask::BlockPairs;
use ringspan::mesh::Grid;
use ringspan::schedule::{Pass, TensorSizes};
use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
use ringspan_testing::mesh::{Answer, MeshSetup, Problem};
use std::collections::HashSet;

const LEN: usize = 37;

const LAYOUTS: [LayoutKind; 7] = [
    LayoutKind::Contiguous,
    LayoutKind::Zigzag,
    LayoutKind::Striped(1),
    LayoutKind::Striped(17),
    LayoutKind::PerDocumentZigzag,
    LayoutKind::Balanced(None),
    LayoutKind::Balanced(Some(5)),
];

fn grids() -> Vec<Grid> {
    let inner = [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (1, 2), (1, 4), (2, 2), (2, 4), (3, 2)].map(Grid::from);
    let outer = [(2, 2), (3, 2)].map(|grid| Grid::from(grid).with_ulysses_outer());
    inner.into_iter().chain(outer).collect()
}

fn masks() -> Vec<Mask> {
    let blocks = || {
        BlockPairs::new(4, 6, (0..10).flat_map(|a| (0..8).map(move |b| (a, b))).filter(|(a, b)| (a + 2 * b) % 3 < 2))
    };
    vec![
        Mask::full(),
        Mask::causal(),
        Mask::causal_bottom_right(),
        Mask::causal().window(Some(7), None),
        Mask::full().window(Some(4), Some(9)),
        Mask::causal_bottom_right().window(Some(5), None),
        Mask::full_bottom_right().window(Some(4), Some(3)),
        Mask::causal().chunked(8).expect("not 0"),
        Mask::full().chunked(11).expect("not 0"),
        Mask::causal().prefix_lm([6]),
        Mask::causal().window(Some(12), None).prefix_lm([9]),
        Mask::full().block_sparse(blocks().expect("not 0")),
        Mask::causal().chunked(16).expect("not 0").prefix_lm([3]).block_sparse(blocks().expect("not 0")),
    ]
}

/// Batch rows, documents of queries and of keys.
fn batches() -> Vec<(usize, Documents, Documents)> {
    let same = |batch, documents: Documents| (batch, documents.clone(), documents);
    let gaps: Vec<i32> = (0..LEN as i32).map(|t| [0, 3, 3, 0, 1, 3, 2][(t / 6) as usize]).collect();
    let left: Vec<i32> = (0..2 * LEN as i32).map(|t| i32::from(t >= LEN as i32 || t > 8)).collect();
    vec![
        same(1, Documents::batch(1, LEN)),
        same(3, Documents::batch(3, 11)),
        same(1, Documents::packed(&[9, 1, 16, 0, 11])),
        same(3, Documents::padded(&[LEN, 5, 0], LEN).expect("fits")),
        same(1, Documents::from_ids(&gaps, LEN).expect("full row")),
        same(2, Documents::from_ids(&left, LEN).expect("full rows")),
        (2, Documents::batch(2, 5), Documents::batch(2, LEN)),
        (1, Documents::batch(1, LEN), Documents::batch(1, 9)),
        (2, Documents::batch(2, 12), Documents::padded(&[LEN, 4], LEN).expect("fits")),
    ]
}

type Change = fn(Problem) -> Problem;

const SCORES: [Change; 11] = [
    |problem| problem,
    Problem::with_softcap,
    Problem::with_alibi,
    Problem::with_buckets,
    |problem| problem.with_bias(1),
    |problem| {
        let heads = problem.heads;
        problem.with_bias(heads)
    },
    Problem::with_sinks,
    |problem| {
        let heads = problem.heads;
        problem.with_score("off by one", |_, score| *score = score.clone().off_by_one(heads))
    },
    Problem::with_dropout,
    |problem| problem.with_softcap().with_alibi().with_sinks(),
    |problem| problem.with_softcap().with_buckets().with_bias(1).with_sinks().with_dropout(),
];

const HEADS: [(usize, usize); 4] = [(4, 2), (4, 4), (6, 1), (6, 3)];
const WIDTHS: [(usize, usize); 4] = [(16, 16), (8, 8), (33, 20), (24, 40)];
const CHUNKS: [usize; 3] = [1, 2, 5];

/// A case: the index of a value for each factor.
type Case = [usize; 9];

/// Random cases until all pairs are covered, each the one of several candidates that covers most new pairs.
fn cover(sizes: Case) -> Vec<Case> {
    let mut state = 12345u64;
    let mut draw = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let all = |case: &Case| -> Vec<(usize, usize, usize, usize)> {
        let case = *case;
        (0..case.len()).flat_map(|a| (0..a).map(move |b| (a, case[a], b, case[b]))).collect()
    };
    let mut missing = HashSet::new();
    for a in 0..sizes.len() {
        for b in 0..a {
            missing.extend((0..sizes[a]).flat_map(|x| (0..sizes[b]).map(move |y| (a, x, b, y))));
        }
    }
    let mut cases = Vec::new();
    while let Some(&(a, x, b, y)) = missing.iter().min() {
        let mut candidate = || {
            let mut case: Case = sizes.map(&mut draw);
            (case[a], case[b]) = (x, y);
            case
        };
        let new = |case: &Case| all(case).iter().filter(|pair| missing.contains(pair)).count();
        let best = (0..40).map(|_| candidate()).max_by_key(new).expect("40 candidates");
        all(&best).iter().for_each(|pair| {
            missing.remove(pair);
        });
        cases.push(best);
    }
    cases
}

#[test]
fn every_two_features_work_together() {
    let sizes = [
        StrategyKind::ALL.len(),
        LAYOUTS.len(),
        grids().len(),
        CHUNKS.len(),
        masks().len(),
        batches().len(),
        SCORES.len(),
        HEADS.len(),
        WIDTHS.len(),
    ];
    let cases = cover(sizes);
    assert!(cases.len() >= masks().len() * grids().len(), "{} cases", cases.len());
    cases.into_iter().enumerate().for_each(|(seed, case)| check(seed, case));
}

#[test]
#[ignore = "takes a minute"]
fn every_strategy_carries_every_mask_and_documents_in_every_layout() {
    let mut seed = 0;
    for strategy in 0..StrategyKind::ALL.len() {
        for (layout, mask) in (0..LAYOUTS.len()).flat_map(|layout| (0..masks().len()).map(move |mask| (layout, mask))) {
            for batch in 0..batches().len() {
                seed += 1;
                check(seed, [strategy, layout, 2 + 5 * (seed % 2), 0, mask, batch, 0, 0, 0]);
            }
        }
    }
}

#[test]
#[ignore = "takes a minute"]
fn every_strategy_carries_every_score_on_every_grid() {
    let mut seed = 0;
    for strategy in 0..StrategyKind::ALL.len() {
        for (grid, score) in (0..grids().len()).flat_map(|grid| (0..SCORES.len()).map(move |score| (grid, score))) {
            for heads in 0..HEADS.len() {
                seed += 1;
                check(seed, [strategy, 1, grid, seed % CHUNKS.len(), 1, seed % 5, score, heads, seed % WIDTHS.len()]);
            }
        }
    }
}

fn check(seed: usize, [strategy, layout, grid, chunks, mask, batch, score, heads, widths]: Case) {
    let (rows, queries, keys) = batches().swap_remove(batch);
    let ((heads, kv_heads), (dim, v_dim)) = (HEADS[heads], WIDTHS[widths]);
    let mut problem = Problem::with_documents(queries, rows, heads, kv_heads, dim, masks().swap_remove(mask));
    problem.keys = keys.row_len();
    problem.k_documents = keys;
    problem.v_dim = v_dim;
    let problem = SCORES[score](problem);
    let on = MeshSetup {
        head_chunks: CHUNKS[chunks],
        ..MeshSetup::new(LAYOUTS[layout], StrategyKind::ALL[strategy], grids().swap_remove(grid))
    };
    let inputs = problem.inputs(seed as u64);
    let what = format!("{}, {on:?}", problem.name);
    let got = problem.on_mesh(&inputs, on).unwrap_or_else(|error| panic!("{what}: {error}"));
    if let Some((name, error)) = problem.reference(&inputs).difference(&got, 1e-5) {
        panic!("{what}: {name} differs by {error:e}");
    }
    check_bytes(&what, &problem, on, &got);
}

#[test]
fn queries_of_16_bits_with_a_bias_are_counted_in_f32() {
    for (heads, grid) in [(1, (3, 1)), (4, (2, 2))] {
        let problem = Problem::cross(2, 11, 37, 4, 2, 16, Mask::causal_bottom_right()).with_bias(heads);
        let on = MeshSetup::new(LayoutKind::Contiguous, StrategyKind::PassQ, grid);
        let on = MeshSetup { stored: Wire::Bf16, wire: Wire::Bf16, ..on };
        let inputs = problem.inputs_of(Wire::Bf16, 5);
        let got = problem.on_mesh(&inputs, on).expect("computed");
        assert_eq!(problem.reference(&inputs).difference(&got, 8e-3), None, "{}", problem.name);
        check_bytes(&problem.name, &problem, on, &got);
    }
}

/// Checks that the bytes that the transport counts are those of the schedule.
fn check_bytes(what: &str, problem: &Problem, on: MeshSetup, got: &Answer) {
    let Problem { heads, kv_heads, dim, v_dim, bias_heads, .. } = *problem;
    let ranks = on.grid.size().expect("a small grid");
    let layouts = Layout::pair(on.kind, &problem.q_documents, &problem.k_documents, &problem.mask, ranks);
    let (query, key) = layouts.expect("was computed");
    let schedule = Schedule::new(on.strategy, &query, &key, &problem.mask, on.grid).expect("was computed");
    let schedule = schedule.with_head_chunks(on.head_chunks);
    let wire = if on.wire == Wire::F32 { 4 } else { 2 };
    let sizes = TensorSizes { heads, kv_heads, dim, v_dim, wire, bias_heads };
    for (pass, sent) in [(Pass::Forward, &got.bytes_forward), (Pass::Backward, &got.bytes_backward)] {
        let counted: Vec<u64> =
            (0..ranks).map(|rank| schedule.bytes_sent(pass, rank, &sizes).expect("heads fit")).collect();
        assert_eq!(sent, &counted, "{what}: {pass:?}");
    }
}
