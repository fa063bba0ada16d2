use super::Strategy;
use super::*;
use crate::layout::{Documents, LayoutKind};
use proptest::prelude::{Strategy as Generator, *};
use std::collections::{HashMap, HashSet};

type Edge = (usize, usize, Block);

fn kinds() -> impl Generator<Value = LayoutKind> {
    prop_oneof![
        Just(LayoutKind::Contiguous),
        Just(LayoutKind::Zigzag),
        Just(LayoutKind::PerDocumentZigzag),
        (1usize..20).prop_map(LayoutKind::Striped),
    ]
}

fn masks() -> impl Generator<Value = Mask> {
    let base = prop_oneof![Just(Mask::full()), Just(Mask::causal()), Just(Mask::causal_bottom_right())];
    let side = || proptest::option::of(0usize..20);
    (base, side(), side()).prop_map(|(mask, left, right)| mask.window(left, right))
}

/// Documents of queries and of keys: equal for packed and padded batches, of other lengths for cross attention.
fn documents() -> impl Generator<Value = (Documents, Documents)> {
    prop_oneof![
        proptest::collection::vec(0usize..24, 1..5).prop_map(|l| (Documents::packed(&l), Documents::packed(&l))),
        (1usize..3, 0usize..30, 0usize..30).prop_map(|(b, q, k)| (Documents::batch(b, q), Documents::batch(b, k))),
        proptest::collection::vec(0i32..4, 40).prop_map(|ids| {
            let documents = Documents::from_ids(&ids, 20).expect("full rows");
            (documents.clone(), documents)
        }),
    ]
}

fn strategies() -> impl Generator<Value = Strategy> {
    prop_oneof![Just(Strategy::Ring), Just(Strategy::AllGather)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_visible_pair_is_computed_exactly_once_and_every_block_sent_is_used(
        kind in kinds(), strategy in strategies(), mask in masks(), (q_docs, k_docs) in documents(),
        ring in 1usize..6, ulysses in 1usize..4,
    ) {
        let query = Layout::new(kind, &q_docs, ring * ulysses).expect("ranks");
        let key = Layout::new(kind, &k_docs, ring * ulysses).expect("ranks");
        let schedule = Schedule::new(strategy, &query, &key, &mask, ring, ulysses).expect("fits");
        for backward in [false, true] {
            let plans: Vec<Plan> = (0..ring)
                .map(|rank| if backward { schedule.backward(rank) } else { schedule.forward(rank) })
                .collect();
            let mut seen = HashSet::new();
            for (rank, plan) in plans.iter().enumerate() {
                let rows = schedule.query_groups().rows(rank);
                for compute in plan.iter().filter_map(|step| step.compute.as_ref()) {
                    let keys = schedule.key_groups().rows(compute.owner);
                    for tile in &compute.tiles {
                        for i in tile.q.clone() {
                            for j in tile.k.clone() {
                                if tile.band.sees(i - tile.q.start, j - tile.k.start) {
                                    prop_assert!(seen.insert((rows[i], keys[j])), "pair computed twice");
                                }
                            }
                        }
                    }
                }
            }
            prop_assert_eq!(seen, visible_pairs(&q_docs, &k_docs, &mask));
            check_transfers(&plans, backward)?;
        }
    }
}

/// By definition, without runs or bands.
fn visible_pairs(queries: &Documents, keys: &Documents, mask: &Mask) -> HashSet<(usize, usize)> {
    let mut pairs = HashSet::new();
    for (q, k) in queries.iter().zip(keys.iter()) {
        for i in q.spans.iter().flat_map(|span| span.clone()) {
            for j in k.spans.iter().flat_map(|span| span.clone()) {
                if mask.sees(i, j, q.extent, k.extent) {
                    pairs.insert((q.offset + i, k.offset + j));
                }
            }
        }
    }
    pairs
}

/// Runs the plans' transfers: each send meets its receive, is of a block at hand, and is of use to the receiver.
fn check_transfers(plans: &[Plan], backward: bool) -> std::result::Result<(), TestCaseError> {
    let mut sent: HashMap<Edge, i32> = HashMap::new();
    for (rank, plan) in plans.iter().enumerate() {
        let mut held = HashSet::from([rank]);
        let mut touched: HashSet<usize> = HashSet::new();
        let mut used: HashSet<usize> = HashSet::new();
        for step in plan {
            for Transfer { block, peer } in &step.send {
                prop_assert_ne!(*peer, rank, "sends to itself");
                let Block::Keys(owner) = block else { return Err(TestCaseError::fail("gradients sent too early")) };
                prop_assert!(held.contains(owner), "sends a block it does not hold");
                *sent.entry((rank, *peer, *block)).or_default() += 1;
            }
            if let Some(compute) = &step.compute {
                prop_assert!(held.contains(&compute.owner), "computes a block it does not hold");
                prop_assert!(used.insert(compute.owner), "computes a block twice");
                touched.insert(compute.owner);
            }
            for Transfer { block, peer } in &step.receive {
                *sent.entry((*peer, rank, *block)).or_default() -= 1;
                match block {
                    Block::Keys(owner) => prop_assert!(held.insert(*owner), "receives a block twice"),
                    Block::Gradients(owner) => prop_assert!(*owner == rank || touched.contains(owner)),
                }
            }
            for Transfer { block, peer } in &step.after {
                let Block::Gradients(owner) = block else { return Err(TestCaseError::fail("keys sent too late")) };
                prop_assert!(touched.contains(owner), "sends gradients it did not compute");
                *sent.entry((rank, *peer, *block)).or_default() += 1;
            }
        }
        prop_assert!(held.iter().all(|owner| *owner == rank || used.contains(owner)), "receives a block for nothing");
        if backward {
            let foreign = used.iter().filter(|owner| **owner != rank).count();
            let passed_on = plan.iter().flat_map(|step| &step.after).count();
            prop_assert_eq!(foreign, passed_on, "gradients of a foreign block stay behind");
        }
    }
    prop_assert!(sent.values().all(|balance| *balance == 0), "a send without its receive: {:?}", sent);
    Ok(())
}

#[test]
fn a_ring_where_all_see_all_sends_p_minus_1_blocks() {
    for (kind, mask) in [(LayoutKind::Zigzag, Mask::causal()), (LayoutKind::Contiguous, Mask::full())] {
        for ranks in [1, 2, 3, 4, 8] {
            let documents = Documents::batch(1, 16 * ranks);
            let layout = Layout::new(kind, &documents, ranks).expect("ranks");
            let schedule = Schedule::new(Strategy::Ring, &layout, &layout, &mask, ranks, 1).expect("fits");
            for rank in 0..ranks {
                let rows = (ranks - 1) * 16;
                let wanted = RowsSent { forward_keys: rows, backward_keys: rows, backward_gradients: rows };
                assert_eq!(schedule.rows_sent(rank), wanted);
            }
        }
    }
}

#[test]
fn blocks_nobody_sees_do_not_travel() {
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, 64), 4).expect("ranks");
    let schedule = Schedule::new(Strategy::Ring, &layout, &layout, &Mask::causal(), 4, 1).expect("fits");
    let sent: Vec<usize> = (0..4).map(|rank| schedule.rows_sent(rank).forward_keys / 16).collect();
    assert_eq!(sent, [1, 2, 3, 0]);
}

#[test]
fn zigzag_balances_causal_attention_and_contiguous_does_not() {
    let pairs = |kind| -> Vec<u64> {
        let layout = Layout::new(kind, &Documents::batch(1, 4096), 4).expect("ranks");
        let schedule = Schedule::new(Strategy::Ring, &layout, &layout, &Mask::causal(), 4, 1).expect("fits");
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
    let error = Schedule::new(Strategy::Ring, &layout, &layout, &Mask::causal(), 3, 1).err().map(|e| e.to_string());
    assert!(error.is_some_and(|text| text.contains("needs 3 ranks") && text.contains("there are 4")));
}

#[test]
fn drawing_names_every_rank_and_its_balance() {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 64), 4).expect("ranks");
    let drawn = Schedule::new(Strategy::Ring, &layout, &layout, &Mask::causal(), 4, 1).expect("fits").to_string();
    assert!(drawn.contains("zigzag layout, causal mask") && drawn.contains("balance 100.0%"), "{drawn}");
    assert!(drawn.contains("kv0>1") && drawn.contains("d3>"), "{drawn}");
}
