use super::StrategyKind;
use super::*;
use crate::documents::Documents;
use crate::kernel::Tile;
use crate::layout::LayoutKind;
use crate::mask::BlockPairs;
use proptest::prelude::{Strategy as Generator, *};
use std::collections::HashSet;

pub(super) fn kinds() -> impl Generator<Value = LayoutKind> {
    prop_oneof![
        Just(LayoutKind::Contiguous),
        Just(LayoutKind::Zigzag),
        Just(LayoutKind::PerDocumentZigzag),
        (1usize..20).prop_map(LayoutKind::Striped),
        Just(LayoutKind::Balanced(None)),
        (1usize..9).prop_map(|block| LayoutKind::Balanced(Some(block))),
    ]
}

pub(super) fn masks() -> impl Generator<Value = Mask> {
    let base = prop_oneof![
        Just((Mask::full(), true)),
        Just((Mask::full_bottom_right(), true)),
        Just((Mask::causal(), false)),
        Just((Mask::causal_bottom_right(), false)),
    ];
    let side = || proptest::option::of(0usize..20);
    let chunk = proptest::option::of(1usize..20);
    let blocks = proptest::option::of(proptest::collection::vec((0usize..5, 0usize..5), 0..14));
    (base, side(), side(), chunk, proptest::option::of(0usize..9), blocks).prop_map(
        |((mask, ahead), left, right, chunk, prefix, blocks)| {
            let mut mask = mask.window(left, right.filter(|_| ahead));
            if let Some(chunk) = chunk {
                mask = mask.chunked(chunk).expect("not 0");
            }
            if let Some(prefix) = prefix {
                mask = mask.prefix_lm([prefix]);
            }
            match blocks {
                Some(pairs) => mask.block_sparse(BlockPairs::new(6, 7, pairs).expect("not 0")),
                None => mask,
            }
        },
    )
}

/// Documents of queries and of keys: the same for packed and padded batches, of different lengths for cross attention.
pub(super) fn documents() -> impl Generator<Value = (Documents, Documents)> {
    prop_oneof![
        proptest::collection::vec(0usize..24, 1..5).prop_map(|l| (Documents::packed(&l), Documents::packed(&l))),
        (1usize..3, 0usize..30, 0usize..30).prop_map(|(b, q, k)| (Documents::batch(b, q), Documents::batch(b, k))),
        proptest::collection::vec(0i32..4, 40).prop_map(|ids| {
            let documents = Documents::from_ids(&ids, 20).expect("full rows");
            (documents.clone(), documents)
        }),
        // Queries of a document with gaps meet keys of a document without gaps.
        proptest::collection::vec(0i32..2, 30).prop_filter_map("a token", |ids| {
            let queries = Documents::from_ids(&ids, 30).expect("a row");
            (queries.len() == 1).then(|| (queries, Documents::packed(&[37])))
        }),
    ]
}

pub(super) fn strategies() -> impl Generator<Value = StrategyKind> {
    proptest::sample::select(&StrategyKind::ALL[..])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_visible_pair_is_computed_exactly_once_and_every_block_sent_is_used(
        kind in kinds(), strategy in strategies(), mask in masks(), (q_docs, k_docs) in documents(),
        ring in 1usize..6, ulysses in 1usize..4, outer in any::<bool>(),
    ) {
        let grid = Grid { ring, ulysses, ulysses_outer: outer };
        let (query, key) = Layout::pair(kind, &q_docs, &k_docs, &mask, ring * ulysses).expect("ranks");
        let schedule = Schedule::new(strategy, &query, &key, &mask, grid).expect("fits");
        for pass in [Pass::Forward, Pass::Backward] {
            let plans: Vec<Plan> = (0..ring).map(|rank| schedule.plan(pass, rank)).collect();
            let mut seen = HashSet::new();
            for compute in plans.iter().flatten().filter_map(|step| step.compute.as_ref()) {
                check_tiles(&schedule, compute, &mut seen)?;
            }
            prop_assert_eq!(&seen, &visible_pairs(&q_docs, &k_docs, &mask));
            let mut joined = HashSet::new();
            for compute in plans.iter().flatten().filter_map(|step| step.compute.as_ref()) {
                check_joined_tiles(&schedule, compute, &mut joined)?;
            }
            prop_assert_eq!(seen, joined);
            if strategy == StrategyKind::Halo {
                check_halo(&schedule, &plans)?;
            }
        }
        prop_assert_eq!(schedule.validate(), Ok(()));
    }
}

/// Adds the pairs of a computation; each must be new, and its tile must have the right position in the batch.
fn check_tiles(
    schedule: &Schedule,
    compute: &Compute,
    seen: &mut HashSet<(usize, usize)>,
) -> std::result::Result<(), TestCaseError> {
    let (queries, keys) = (schedule.query_groups().rows(compute.queries), schedule.key_groups().rows(compute.keys));
    let keys: Vec<usize> = compute.rows.ranges().iter().flat_map(Clone::clone).map(|row| keys[row]).collect();
    let row_len = schedule.key().documents().row_len().max(1);
    for Tile { q, k, band, position } in &compute.tiles {
        for (i, j) in q.clone().flat_map(|i| k.clone().map(move |j| (i, j))) {
            let (a, b) = (i - q.start, j - k.start);
            if !band.sees(a, b) {
                continue;
            }
            prop_assert!(seen.insert((queries[i], keys[j])), "pair computed twice");
            prop_assert_eq!(position.query + a * position.step, queries[i]);
            prop_assert_eq!(position.key + b * position.step, keys[j] % row_len);
            let in_document = |layout: &Layout, row: usize| {
                let inside = |d: &&crate::documents::Document| {
                    d.spans.iter().any(|s| (d.offset + s.start..d.offset + s.end).contains(&row))
                };
                let document = layout.documents().iter().find(inside).expect("in a document");
                (row - document.offset, document.seq_len)
            };
            let (i, queries) = in_document(schedule.query(), queries[i]);
            let (j, keys) = in_document(schedule.key(), keys[j]);
            let distance = position.distance + (a as i64 - b as i64) * position.step as i64;
            prop_assert_eq!(distance, schedule.mask().distance(i, j, queries, keys));
        }
    }
    Ok(())
}

/// Adds the pairs of a computation as joined tiles; each must be new, and their number must be what is counted without
/// tiles. Batches must hold the same tiles.
fn check_joined_tiles(
    schedule: &Schedule,
    compute: &Compute,
    seen: &mut HashSet<(usize, usize)>,
) -> std::result::Result<(), TestCaseError> {
    let (queries, keys) = (schedule.query_groups().rows(compute.queries), schedule.key_groups().rows(compute.keys));
    let keys: Vec<usize> = compute.rows.ranges().iter().flat_map(Clone::clone).map(|row| keys[row]).collect();
    let joined = schedule.with_tiles(compute, Tiling::Joined);
    let before = seen.len();
    for Tile { q, k, band, .. } in &joined.tiles {
        for (i, j) in q.clone().flat_map(|i| k.clone().map(move |j| (i, j))) {
            if band.sees(i - q.start, j - k.start) {
                prop_assert!(seen.insert((queries[i], keys[j])), "pair computed twice");
            }
        }
    }
    prop_assert_eq!(schedule.pairs_of(compute), (seen.len() - before) as u64);
    let mut batches = Vec::new();
    let in_batches = schedule.in_batches(compute, Tiling::WithPositions, 3, |tiles| {
        batches.extend(tiles.to_vec());
        Ok(())
    });
    prop_assert!(in_batches.is_ok());
    prop_assert_eq!(&batches, &compute.tiles);
    Ok(())
}

/// The visible pairs by definition, without runs or bands.
pub(super) fn visible_pairs(queries: &Documents, keys: &Documents, mask: &Mask) -> HashSet<(usize, usize)> {
    let mut pairs = HashSet::new();
    for (document, (q, k)) in queries.iter().zip(keys.iter()).enumerate() {
        for i in q.spans.iter().flat_map(|span| span.clone()) {
            for j in k.spans.iter().flat_map(|span| span.clone()) {
                if mask.sees(document, i, j, q.seq_len, k.seq_len) {
                    pairs.insert((q.offset + i, k.offset + j));
                }
            }
        }
    }
    pairs
}

/// Halo must receive exactly the rows that are seen.
fn check_halo(schedule: &Schedule, plans: &[Plan]) -> std::result::Result<(), TestCaseError> {
    for (rank, plan) in plans.iter().enumerate() {
        let received = plan.iter().flat_map(|step| &step.receive).filter(|t| t.block != Block::KeyGradients(rank));
        let rows: usize = received.map(|transfer| transfer.rows.len()).sum();
        prop_assert_eq!(rows, needed_rows(schedule, rank), "halo sends what nobody needs");
    }
    Ok(())
}

/// The number of key rows of other ring ranks that the queries of a ring rank see, by definition.
fn needed_rows(schedule: &Schedule, rank: usize) -> usize {
    let (queries, keys) = (schedule.query().documents(), schedule.key().documents());
    let own: HashSet<usize> = schedule.query_groups().rows(rank).into_iter().collect();
    let local: HashSet<usize> = schedule.key_groups().rows(rank).into_iter().collect();
    let pairs = visible_pairs(queries, keys, schedule.mask()).into_iter();
    let seen: HashSet<usize> = pairs.filter(|(i, _)| own.contains(i)).map(|(_, j)| j).collect();
    seen.difference(&local).count()
}

#[test]
fn a_ring_where_all_see_all_sends_p_minus_1_blocks() {
    for (kind, mask) in [(LayoutKind::Zigzag, Mask::causal()), (LayoutKind::Contiguous, Mask::full())] {
        for ranks in [1, 2, 3, 4, 8] {
            let documents = Documents::batch(1, 16 * ranks);
            let layout = Layout::new(kind, &documents, ranks).expect("ranks");
            let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &mask, (ranks, 1)).expect("fits");
            for rank in 0..ranks {
                let rows = (ranks - 1) * 16;
                let forward = Traffic { keys: rows, ..Traffic::default() };
                assert_eq!(schedule.traffic(Pass::Forward, rank), forward);
                assert_eq!(schedule.traffic(Pass::Backward, rank), Traffic { key_gradients: rows, ..forward });
            }
        }
    }
}

#[test]
fn blocks_nobody_sees_do_not_travel() {
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 64), 4).expect("ranks");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (4, 1)).expect("fits");
    let sent: Vec<usize> = (0..4).map(|rank| schedule.traffic(Pass::Forward, rank).keys / 16).collect();
    assert_eq!(sent, [1, 2, 3, 0]);
}

#[test]
fn zigzag_balances_causal_attention_and_contiguous_does_not() {
    let pairs = |kind| -> Vec<u64> {
        let layout = Layout::new(kind, &Documents::batch(1, 4096), 4).expect("ranks");
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (4, 1)).expect("fits");
        (0..4).map(|rank| schedule.pairs(rank)).collect()
    };
    let zigzag = pairs(LayoutKind::Zigzag);
    assert!(zigzag.iter().all(|count| *count == zigzag[0]));
    assert_eq!(zigzag.iter().sum::<u64>(), 4096 * 4097 / 2);
    let contiguous = pairs(LayoutKind::Contiguous);
    assert!(contiguous[3] > 6 * contiguous[0]);
}

#[test]
fn layouts_of_other_sizes_are_refused() {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 64), 4).expect("ranks");
    let error =
        Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (3, 1)).err().map(|e| e.to_string());
    assert!(error.is_some_and(|text| text.contains("needs 3 ranks") && text.contains("there are 4")));
}

#[test]
fn drawing_names_every_rank_and_its_balance() {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 64), 4).expect("ranks");
    let drawn = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (4, 1)).expect("fits").to_string();
    assert!(drawn.contains("zigzag layout, causal mask") && drawn.contains("balance 100.0%"), "{drawn}");
    assert!(drawn.contains("kv0>1") && drawn.contains("dkv3>"), "{drawn}");
}

#[test]
fn a_window_sends_no_more_than_its_width() {
    // 8 ranks of 16 tokens, a window of 20 back: two neighbours' rows, 16 of the nearer and 4 of the farther.
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 128), 8).expect("ranks");
    let mask = Mask::causal().window(Some(20), None);
    let schedule = Schedule::new(StrategyKind::Halo, &layout, &layout, &mask, (8, 1)).expect("fits");
    let sent: Vec<usize> = (0..8).map(|rank| schedule.traffic(Pass::Forward, rank).keys).collect();
    assert_eq!(sent, [20, 20, 20, 20, 20, 20, 16, 0]);
    let ring = Schedule::new(StrategyKind::Ring, &layout, &layout, &mask, (8, 1)).expect("fits");
    assert_eq!(ring.traffic(Pass::Forward, 3).keys, 32);
}

#[test]
fn packed_documents_send_only_what_another_rank_needs() {
    // Two ranks share the middle document only: 20 tokens at 30..50 around the cut at 40.
    let documents = Documents::packed(&[30, 20, 30]);
    let layout = Layout::new(LayoutKind::Contiguous, &documents, 2).expect("ranks");
    let schedule = Schedule::new(StrategyKind::Halo, &layout, &layout, &Mask::causal(), (2, 1)).expect("fits");
    assert_eq!([0, 1].map(|rank| schedule.traffic(Pass::Forward, rank).keys), [10, 0]);
    let none = Layout::new(LayoutKind::Contiguous, &Documents::packed(&[40, 40]), 2).expect("ranks");
    for strategy in StrategyKind::ALL {
        let schedule = Schedule::new(strategy, &none, &none, &Mask::full(), (2, 1)).expect("fits");
        let traffic = [0, 1].map(|rank| schedule.traffic(Pass::Backward, rank));
        assert_eq!(traffic, [Traffic::default(); 2], "{strategy}");
    }
}

#[test]
fn a_bidirectional_ring_uses_links_between_neighbours_only() {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 96), 6).expect("ranks");
    let schedule =
        Schedule::new(StrategyKind::BidirectionalRing, &layout, &layout, &Mask::causal(), (6, 1)).expect("fits");
    for pass in [Pass::Forward, Pass::Backward] {
        for rank in 0..6 {
            for transfer in schedule.plan(pass, rank).iter().flat_map(|step| &step.send) {
                assert_eq!(transfer.peer.abs_diff(rank), 1, "{transfer:?} from {rank}");
            }
        }
    }
}

#[test]
fn few_queries_travel_rather_than_many_keys() {
    let (queries, keys) = (Documents::batch(1, 8), Documents::batch(1, 4096));
    let (query, key) =
        Layout::pair(LayoutKind::Contiguous, &queries, &keys, &Mask::causal_bottom_right(), 4).expect("ranks");
    let schedule =
        Schedule::new(StrategyKind::PassQ, &query, &key, &Mask::causal_bottom_right(), (4, 1)).expect("fits");
    let traffic = schedule.traffic(Pass::Forward, 2);
    assert_eq!((traffic.keys, traffic.queries, traffic.partials), (0, 6, 6));
}

/// A row of two documents whose tokens alternate at random, with a tenth of padding.
fn in_pieces(tokens: usize) -> Documents {
    let id = |token: usize| match (token * 7919 + token * token % 1013) % 20 {
        0 | 1 => 0,
        n => 1 + (n % 2) as i32,
    };
    Documents::from_ids(&(0..tokens).map(id).collect::<Vec<_>>(), tokens).expect("a row")
}

#[test]
fn tiles_of_documents_in_pieces_are_few() {
    let documents = in_pieces(4000);
    let masks = [
        Mask::causal(),
        Mask::full(),
        Mask::causal().window(Some(300), None),
        Mask::full().window(Some(50), Some(700)),
        Mask::causal().prefix_lm([900]),
        Mask::causal().chunked(1500).expect("not 0"),
    ];
    let kinds = ["contiguous", "zigzag", "per-document-zigzag", "striped:1", "striped:3", "balanced", "balanced:1"];
    for (kind, mask) in kinds.into_iter().flat_map(|kind| masks.iter().map(move |mask| (kind, mask))) {
        for grid in [Grid::new(1, 1), Grid::new(4, 1), Grid::new(2, 2)] {
            let kind: LayoutKind = kind.parse().expect("a layout");
            let ranks = grid.size().expect("few");
            let (layout, _) = Layout::pair(kind, &documents, &documents, mask, ranks).expect("a layout");
            let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, mask, grid).expect("fits");
            let runs = |rank: usize| schedule.query_groups().runs(rank).len();
            for compute in (0..grid.ring).flat_map(|rank| schedule.steps(Pass::Forward, rank)).filter_map(|s| s.compute)
            {
                let (tiles, runs) = (
                    schedule.with_tiles(&compute, Tiling::Joined).tiles.len(),
                    runs(compute.queries) + runs(compute.keys),
                );
                assert!(tiles <= 4 * runs, "{kind}, {mask}, {grid}: {tiles} tiles of {runs} runs");
            }
        }
    }
}

#[test]
fn single_tokens_dealt_by_work_make_few_tiles_under_a_window() {
    let (documents, mask) = (Documents::batch(1, 4000), Mask::causal().window(Some(64), Some(0)));
    let kind = LayoutKind::Balanced(Some(1));
    let (layout, _) = Layout::pair(kind, &documents, &documents, &mask, 4).expect("a layout");
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &mask, (4, 1)).expect("fits");
    for compute in (0..4).flat_map(|rank| schedule.steps(Pass::Forward, rank)).filter_map(|step| step.compute) {
        let tiles = schedule.with_tiles(&compute, Tiling::Joined).tiles.len();
        let runs = layout.runs(compute.queries).len() + layout.runs(compute.keys).len();
        assert!(tiles <= 4 * runs, "{tiles} tiles of {runs} runs");
    }
}

/// Each step looks up the next rank that sees a block; listing all of them instead made these plans take minutes.
#[test]
fn plans_of_thousands_of_ranks_take_no_list_of_ranks_at_each_step() {
    const RANKS: usize = 1500;
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 2 * RANKS), RANKS).expect("ranks");
    for (strategy, pass) in
        [StrategyKind::Ring, StrategyKind::PassQ].into_iter().flat_map(|s| [(s, Pass::Forward), (s, Pass::Backward)])
    {
        let schedule = Schedule::new(strategy, &layout, &layout, &Mask::causal(), (RANKS, 1)).expect("fits");
        let sent = |rank| schedule.steps(pass, rank).iter().map(|step| step.send.len()).sum::<usize>();
        let each = RANKS - 1;
        let blocks = if strategy == StrategyKind::PassQ && pass == Pass::Backward { 2 * each } else { each };
        assert!((0..RANKS).all(|rank| sent(rank) == blocks), "{strategy}");
    }
}

#[test]
fn layouts_whose_runs_have_other_steps_meet() {
    let (queries, keys) = (Documents::batch(1, 50), Documents::batch(1, 61));
    let layout = |kind: &str, documents| Layout::new(kind.parse().expect("a layout"), documents, 3).expect("ranks");
    let mask = Mask::causal_bottom_right().window(Some(20), None);
    for (q_kind, k_kind) in [("zigzag", "striped:1"), ("striped:2", "contiguous"), ("striped:1", "striped:4")] {
        let (query, key) = (layout(q_kind, &queries), layout(k_kind, &keys));
        let schedule = Schedule::new(StrategyKind::Ring, &query, &key, &mask, (3, 1)).expect("fits");
        let pairs: u64 = (0..3).map(|rank| schedule.pairs(rank)).sum();
        assert_eq!(pairs, visible_pairs(&queries, &keys, &mask).len() as u64, "{q_kind} before {k_kind}");
    }
}
