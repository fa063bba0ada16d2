//! The cases of PyTorch's context-parallel and varlen tests, with our tolerances: documents, the parts of them that ranks
//! hold, even work, bytes and sends of a ring, and an error that does not grow with the number of ranks.

use crate::matrix::{check, draws};
use ringspan::attention::Wire;
use ringspan::schedule::{Block, Pass, TensorSizes};
use ringspan::{Documents, Layout, LayoutKind, Mask, Run, Schedule, StrategyKind};
use ringspan_testing::mesh::{Answer, Inputs, MeshSetup, Problem, relative_l2};

const BALANCERS: [LayoutKind; 4] =
    [LayoutKind::Contiguous, LayoutKind::Zigzag, LayoutKind::PerDocumentZigzag, LayoutKind::Balanced(None)];

fn run(name: &str, problem: &Problem, kinds: &[LayoutKind], strategies: &[StrategyKind], ranks: &[usize]) {
    let inputs = problem.inputs(3);
    let wanted = problem.reference(&inputs);
    for (&kind, &strategy) in kinds.iter().flat_map(|kind| strategies.iter().map(move |strategy| (kind, strategy))) {
        for &ranks in ranks {
            check(name, problem, &inputs, &wanted, MeshSetup::new(kind, strategy, (ranks, 1)));
        }
    }
}

#[test]
fn two_documents_of_40_and_88() {
    for batch in [1, 2] {
        let documents = Documents::from_rows(&vec![vec![40, 88]; batch], 128).expect("fits");
        let problem = Problem::with_documents(documents, batch, 4, 4, 32, Mask::causal());
        run("40 and 88", &problem, &BALANCERS, &StrategyKind::ALL, &[2]);
    }
}

#[test]
fn batches_over_both_ways_to_rotate() {
    // There are 64 tokens per rank instead of 1024, and 2 rows instead of 8.
    for ranks in [2, 4] {
        for (name, mask) in [("batch, causal", Mask::causal()), ("batch, none", Mask::full())] {
            let problem = Problem::new(2, 64 * ranks, 8, 8, 32, mask);
            run(name, &problem, &BALANCERS[..2], &[StrategyKind::Ring, StrategyKind::AllGather], &[ranks]);
        }
    }
}

/// Lengths of `count` documents that fill a row of `len`.
fn lengths(count: usize, len: usize, seed: u64) -> Vec<usize> {
    let mut ends = draws(count - 1, 1..len, seed);
    ends.extend([0, len]);
    ends.sort_unstable();
    ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

#[test]
fn twenty_eight_documents() {
    for batch in 2..=4 {
        let rows: Vec<Vec<usize>> = (0..batch).map(|row| lengths(28, 512, row as u64)).collect();
        let documents = Documents::from_rows(&rows, 512).expect("fits");
        let problem = Problem::with_documents(documents, batch, 2, 1, 32, Mask::causal());
        run("28 documents", &problem, &BALANCERS, &[StrategyKind::Ring, StrategyKind::Halo], &[2]);
    }
    // This row is so short that other implementations refuse it.
    let documents = Documents::from_rows(&[lengths(28, 128, 9)], 128).expect("fits");
    let problem = Problem::with_documents(documents, 1, 4, 4, 32, Mask::causal());
    run("28 documents, short", &problem, &BALANCERS, &StrategyKind::ALL, &[2]);
}

/// A part of a document on a rank: document, first position, number of tokens, and number of keys that its last token sees.
type Segment = (usize, usize, usize, usize);

fn segments(layout: &Layout, rank: usize) -> Vec<Segment> {
    let of = |run: &Run| {
        assert!(run.step == 1 || run.len == 1, "{run:?}");
        (run.document, run.start, run.len, run.start + run.len)
    };
    layout.runs(rank).iter().map(of).collect()
}

/// Documents of 10, 40 and 14 tokens on two ranks, with parts computed by hand.
#[test]
fn each_rank_holds_the_known_parts_of_documents() {
    let documents = Documents::from_boundaries(&[0, 10, 50, 64], 64).expect("rises");
    let layout = |kind| Layout::new(kind, &documents, 2).expect("ranks");

    // The ranks hold 0..32 and 32..64.
    let contiguous = layout(LayoutKind::Contiguous);
    assert_eq!(segments(&contiguous, 0), [(0, 0, 10, 10), (1, 0, 22, 22)]);
    assert_eq!(segments(&contiguous, 1), [(1, 22, 18, 40), (2, 0, 14, 14)]);

    // The ranks hold 0..16 and 48..64, and 16..48: queries of rank 0 in parts of 10, 6, 2, 14 see 10, 6, 40, 14 keys.
    let zigzag = layout(LayoutKind::Zigzag);
    assert_eq!(segments(&zigzag, 0), [(0, 0, 10, 10), (1, 0, 6, 6), (1, 38, 2, 40), (2, 0, 14, 14)]);
    assert_eq!(segments(&zigzag, 1), [(1, 6, 32, 38)]);

    // Each document is cut into four parts; 10 and 14 do not divide by 4.
    let each = layout(LayoutKind::PerDocumentZigzag);
    let rank_0 = [(0, 0, 2, 2), (0, 7, 3, 10), (1, 0, 10, 10), (1, 30, 10, 40), (2, 0, 3, 3), (2, 10, 4, 14)];
    assert_eq!(segments(&each, 0), rank_0);
    assert_eq!(segments(&each, 1), [(0, 2, 5, 7), (1, 10, 20, 30), (2, 3, 7, 10)]);

    // There are 10 * 11 / 2 = 55 pairs in the first document, 40 * 41 / 2 = 820 and 14 * 15 / 2 = 105 in the others, 980 in
    // total.
    let pairs = |layout: &Layout| {
        let schedule = Schedule::new(StrategyKind::Ring, layout, layout, &Mask::causal(), (2, 1)).expect("plans");
        [schedule.pairs(0), schedule.pairs(1)]
    };
    assert_eq!(pairs(&contiguous), [55 + 253, 567 + 105]);
    assert_eq!(pairs(&zigzag), [55 + 21 + 39 + 40 + 105, 720]);
    assert_eq!(pairs(&each), [3 + 27 + 55 + 355 + 6 + 50, 25 + 410 + 49]);
}

fn work(kind: LayoutKind, documents: &Documents, ranks: usize) -> Vec<u64> {
    let layout = Layout::new(kind, documents, ranks).expect("ranks");
    let schedule =
        Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (ranks, 1)).expect("one layout, one mask");
    (0..ranks).map(|rank| schedule.pairs(rank)).collect()
}

/// The difference in work between the busiest and the idlest rank, as a share of the mean.
fn spread(work: &[u64]) -> f64 {
    let (most, least) = (work.iter().max().expect("ranks"), work.iter().min().expect("ranks"));
    (most - least) as f64 * work.len() as f64 / work.iter().sum::<u64>() as f64
}

/// 128 tokens in blocks of 32 have 528, 1552, 2576 and 3600 pairs: the first and the last together equal the other two.
#[test]
fn a_row_in_four_blocks_is_balanced_to_the_pair() {
    let documents = Documents::batch(1, 128);
    for kind in [LayoutKind::Balanced(Some(32)), LayoutKind::Zigzag] {
        assert_eq!(work(kind, &documents, 2), [4128, 4128], "{kind}");
    }
}

#[test]
fn balanced_work_is_even_where_zigzag_is_not() {
    // A long document comes first, last or in the middle, or lengths decrease.
    let skewed = [
        vec![700, 40, 40, 40, 40, 40, 40, 84],
        vec![30, 30, 30, 30, 30, 874],
        vec![100, 600, 20, 20, 20, 20, 244],
        vec![512, 256, 128, 64, 32, 16, 8, 8],
        vec![10, 40, 14, 700, 200, 60],
    ];
    for lengths in skewed {
        let documents = Documents::packed(&lengths);
        for ranks in [2, 4, 8] {
            let (balanced, zigzag) = (
                spread(&work(LayoutKind::Balanced(None), &documents, ranks)),
                spread(&work(LayoutKind::Zigzag, &documents, ranks)),
            );
            let what = format!("{lengths:?} on {ranks} ranks: balanced {balanced:.4}, zigzag {zigzag:.4}");
            assert!(balanced <= 0.05 && balanced < 0.5 * zigzag, "{what}");
        }
    }
}

#[test]
fn a_ring_sends_w_minus_1_times_forward_and_twice_that_backward() {
    for (ranks, wire) in [2, 4, 8].into_iter().flat_map(|ranks| [Wire::F32, Wire::Bf16].map(|wire| (ranks, wire))) {
        let problem = Problem::new(1, 16 * ranks, 4, 2, 32, Mask::causal());
        let on = MeshSetup { wire, ..MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, (ranks, 1)) };
        let got = problem.on_mesh(&problem.inputs(0), on).expect("runs");

        let (hops, width) = (ranks as u64 - 1, if wire == Wire::F32 { 4 } else { 2 });
        let elements = (16 * problem.kv_heads * (problem.dim + problem.v_dim)) as u64;
        assert_eq!(got.bytes_forward, vec![hops * elements * width; ranks], "{on:?}");
        // Keys and values travel in the wire type, their gradients in f32.
        assert_eq!(got.bytes_backward, vec![hops * elements * (width + 4); ranks], "{on:?}");

        let layout = Layout::new(LayoutKind::Zigzag, &problem.q_documents, ranks).expect("ranks");
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &problem.mask, (ranks, 1)).expect("plans");
        let sizes = TensorSizes { heads: 4, kv_heads: 2, dim: 32, v_dim: 32, wire: width as usize, bias_heads: 0 };
        for rank in 0..ranks {
            let sends = |pass| {
                let plan = schedule.plan(pass, rank);
                let sent: Vec<Block> =
                    plan.iter().flat_map(|step| step.send.iter().chain(&step.after)).map(|sent| sent.block).collect();
                let keys = sent.iter().filter(|block| matches!(block, Block::Keys(_))).count();
                (keys, sent.len() - keys)
            };
            assert_eq!((sends(Pass::Forward), sends(Pass::Backward)), ((ranks - 1, 0), (ranks - 1, ranks - 1)));
            for (pass, sent) in [(Pass::Forward, &got.bytes_forward), (Pass::Backward, &got.bytes_backward)] {
                assert_eq!(schedule.bytes_sent(pass, rank, &sizes).expect("heads fit"), sent[rank]);
            }
        }
    }
}

const AROUND: [StrategyKind; 3] = [StrategyKind::Ring, StrategyKind::PassQ, StrategyKind::BidirectionalRing];

/// Errors of the output and the gradients.
fn errors(got: &Answer, wanted: &Answer) -> [(&'static str, f64); 4] {
    [
        ("out", &got.out, &wanted.out),
        ("dq", &got.dq, &wanted.dq),
        ("dk", &got.dk, &wanted.dk),
        ("dv", &got.dv, &wanted.dv),
    ]
    .map(|(name, got, wanted)| (name, relative_l2(got, wanted)))
}

#[test]
fn the_error_does_not_grow_with_the_ranks() {
    let problem = Problem::new(1, 512, 2, 1, 32, Mask::causal());
    for wire in [Wire::F32, Wire::Bf16] {
        let inputs = problem.inputs_of(wire, 1);
        let wanted = problem.reference(&inputs);
        for strategy in AROUND {
            let on_ranks = |ranks: usize| {
                let on = MeshSetup { wire, ..MeshSetup::new(LayoutKind::Zigzag, strategy, (ranks, 1)) };
                errors(&check("error growth", &problem, &inputs, &wanted, on), &wanted)
            };
            let two = on_ranks(2);
            for ranks in [4, 8, 16] {
                for ((tensor, error), (_, least)) in on_ranks(ranks).into_iter().zip(two) {
                    let what = format!("{tensor} by {strategy} on {ranks} ranks, {wire:?}");
                    assert!(error <= 1.5 * f64::max(least, 1e-7), "{what}: {error:e} against {least:e}");
                }
            }
        }
    }
}

/// A narrower wire type keeps a rank's own tokens exact, so with more ranks more tokens are rounded: the error is at most
/// that of rounding all once, for any number of hops. (Compared with two ranks, which round half of the tokens and no early
/// row, that is up to 1.9 times as much.)
#[test]
fn a_wire_that_rounds_does_it_once() {
    let problem = Problem::new(1, 512, 2, 1, 32, Mask::causal());
    let inputs = problem.inputs(1);
    let wanted = problem.reference(&inputs);
    let rounded = Inputs { d_out: problem.inputs(1).d_out, ..problem.inputs_of(Wire::Bf16, 1) };
    let limits = errors(&problem.reference(&rounded), &wanted);
    for strategy in AROUND {
        for ranks in [2, 4, 8, 16] {
            let on = MeshSetup { wire: Wire::Bf16, ..MeshSetup::new(LayoutKind::Zigzag, strategy, (ranks, 1)) };
            let got = check("a rounding wire", &problem, &inputs, &wanted, on);
            for ((tensor, error), (_, limit)) in errors(&got, &wanted).into_iter().zip(limits) {
                assert!(error <= limit, "{tensor} by {strategy} on {ranks} ranks: {error:e} against {limit:e}");
            }
        }
    }
}
