//! The cases of TransformerEngine's JAX tests, with our tolerances: ring and all-gather on 2, 4 and 8 ranks, batches and
//! packed rows, balanced, unbalanced and striped layouts, with windows.
//!
//! A rank holds 16 tokens of a row instead of 256 or 512, and stripes shrink with them, so windows span more ranks than
//! there. Stripes of 64 and 128 also occur in full size, with narrow heads.

use crate::matrix::{check, segments};
use ringspan::attention::Wire;
use ringspan::{Documents, Layout, LayoutKind, Mask, StrategyKind};
use ringspan_testing::mesh::{MeshSetup, Problem, random};

const RANKS: [usize; 3] = [2, 4, 8];
const BOTH: [StrategyKind; 2] = [StrategyKind::Ring, StrategyKind::AllGather];
const BALANCED_AND_NOT: [LayoutKind; 2] = [LayoutKind::Zigzag, LayoutKind::Contiguous];

/// Batch, tokens of a row on one rank, query heads, width.
const SHAPES: [(usize, usize, usize, usize); 2] = [(2, 16, 8, 128), (4, 16, 8, 64)];
/// Numbers of query heads per key-value head.
const GROUPS: [usize; 2] = [1, 8];

/// A sliding window with `back` keys back and none ahead.
fn windowed(back: Option<usize>) -> Mask {
    Mask::causal().window(back, None)
}

/// Runs a problem in every layout, with every strategy, in each of the types.
fn run(name: &str, problem: &Problem, kinds: &[LayoutKind], strategies: &[StrategyKind], ranks: usize, wires: &[Wire]) {
    for &wire in wires {
        let inputs = problem.inputs_of(wire, ranks as u64);
        let wanted = problem.reference(&inputs);
        for (&kind, &strategy) in kinds.iter().flat_map(|kind| strategies.iter().map(move |strategy| (kind, strategy)))
        {
            let on = MeshSetup { wire, ..MeshSetup::new(kind, strategy, (ranks, 1)) };
            check(name, problem, &inputs, &wanted, on);
        }
    }
}

#[test]
fn batches_balanced_and_not() {
    for (batch, tokens, heads, dim) in SHAPES {
        for (ranks, group) in RANKS.into_iter().flat_map(|ranks| GROUPS.map(|group| (ranks, group))) {
            for (name, mask) in [("batch, causal", Mask::causal()), ("batch, none", Mask::full())] {
                let problem = Problem::new(batch, tokens * ranks, heads, heads / group, dim, mask);
                run(name, &problem, &BALANCED_AND_NOT, &BOTH, ranks, &[Wire::F32]);
            }
        }
    }
}

#[test]
fn batches_in_half_precision() {
    for ranks in RANKS {
        for (name, mask) in [("batch, causal, half", Mask::causal()), ("batch, none, half", Mask::full())] {
            let problem = Problem::new(2, 16 * ranks, 8, 1, 64, mask);
            run(name, &problem, &BALANCED_AND_NOT, &BOTH, ranks, &[Wire::Bf16, Wire::F16]);
        }
    }
}

#[test]
fn packed_rows_with_a_tail_of_padding_in_each_segment() {
    let rows = [
        ("segments, ring, stripe 1", 2, None, LayoutKind::Striped(1), StrategyKind::Ring),
        ("segments, ring, stripe 1, window 20", 2, Some(20), LayoutKind::Striped(1), StrategyKind::Ring),
        ("segments, ring, zigzag", 2, None, LayoutKind::Zigzag, StrategyKind::Ring),
        ("segments, ring, zigzag, window 20", 2, Some(20), LayoutKind::Zigzag, StrategyKind::Ring),
        ("segments, ring, contiguous", 2, None, LayoutKind::Contiguous, StrategyKind::Ring),
        ("segments, gather, stripe 4", 5, None, LayoutKind::Striped(4), StrategyKind::AllGather),
        ("segments, gather, stripe 4, window 5", 5, Some(5), LayoutKind::Striped(4), StrategyKind::AllGather),
        ("segments, gather, stripe 8", 5, None, LayoutKind::Striped(8), StrategyKind::AllGather),
        ("segments, gather, stripe 8, window 5", 5, Some(5), LayoutKind::Striped(8), StrategyKind::AllGather),
        ("segments, gather, contiguous, window 20", 5, Some(20), LayoutKind::Contiguous, StrategyKind::AllGather),
    ];
    // Shapes and groups alternate, so that each case occurs with each of them on some number of ranks.
    for (seed, (name, count, window, kind, strategy)) in rows.into_iter().enumerate() {
        for (turn, ranks) in RANKS.into_iter().enumerate() {
            for half in 0..2 {
                let ((batch, tokens, heads, dim), group) = (SHAPES[half], GROUPS[(seed + turn + half) % 2]);
                let documents = segments(batch, tokens * ranks, count, true, 42 + seed as u64);
                let problem = Problem::with_documents(documents, batch, heads, heads / group, dim, windowed(window));
                run(name, &problem, &[kind], &[strategy], ranks, &[Wire::F32]);
            }
        }
    }
}

#[test]
fn wide_stripes_in_their_full_size() {
    let rows = [
        ("stripe 64", 64, None),
        ("stripe 64, window 5", 64, Some(5)),
        ("stripe 128", 128, None),
        ("stripe 128, window 5", 128, Some(5)),
    ];
    for (name, stripe, window) in rows {
        for (ranks, group) in [(2, 1), (2, 4), (4, 4)] {
            let documents = segments(1, 256 * ranks, 5, true, stripe as u64);
            let problem = Problem::with_documents(documents, 1, 4, 4 / group, 16, windowed(window));
            run(name, &problem, &[LayoutKind::Striped(stripe)], &BOTH, ranks, &[Wire::F32, Wire::Bf16]);
        }
    }
}

#[test]
fn heads_of_width_256() {
    for ranks in RANKS {
        for (name, mask) in [("D 256, batch", Mask::causal()), ("D 256, batch, window 20", windowed(Some(20)))] {
            let problem = Problem::new(2, 8 * ranks, 4, 4, 256, mask);
            run(name, &problem, &[LayoutKind::Zigzag], &BOTH, ranks, &[Wire::F32, Wire::F16, Wire::Bf16]);
        }
        for (name, window) in [("D 256, segments", None), ("D 256, segments, window 20", Some(20))] {
            let documents = segments(2, 8 * ranks, 2, true, ranks as u64);
            let problem = Problem::with_documents(documents, 2, 4, 4, 256, windowed(window));
            let wires = [Wire::F32, Wire::F16, Wire::Bf16];
            run(name, &problem, &[LayoutKind::Striped(1)], &BOTH[..1], ranks, &wires);
            run(name, &problem, &[LayoutKind::Striped(8)], &BOTH[1..], ranks, &wires);
        }
    }
}

/// Sharding and unsharding keep every bit, including NaN and denormal numbers, and ranks hold the right tokens.
#[test]
fn reordering_there_and_back_is_exact() {
    for (batch, base, heads, dim) in [(3, 32, 8, 64), (4, 32, 12, 32), (1, 16, 1, 1)] {
        for ranks in RANKS {
            let (len, width) = (base * ranks * 2, heads * dim);
            let bits: Vec<u32> =
                random(batch * len * width, 0).into_iter().map(|x| x.to_bits() ^ 0x7F80_0000).collect();
            for kind in [LayoutKind::Zigzag, LayoutKind::Striped(1), LayoutKind::Striped(4)] {
                let layout = Layout::new(kind, &Documents::batch(batch, len), ranks).expect("ranks");
                let mut back = vec![0; bits.len()];
                for rank in 0..ranks {
                    let part = |t: usize| t / base;
                    let on = |t: usize| match kind {
                        LayoutKind::Striped(width) => t / width % ranks == rank,
                        _ => part(t) == rank || part(t) == 2 * ranks - 1 - rank,
                    };
                    let mut rows = layout.rows(rank);
                    rows.sort_unstable();
                    let expected: Vec<usize> = (0..batch * len).filter(|row| on(row % len)).collect();
                    assert_eq!(rows, expected, "{kind} on {ranks}");
                    let local = layout.shard(rank, &bits, width).expect("size");
                    layout.unshard(rank, &local, width, &mut back).expect("size");
                }
                assert!(back == bits, "{kind} on {ranks} ranks changes bits");
            }
            // In packed rows, segments come back and padding is not written.
            let documents = segments(batch, len, 3, true, ranks as u64);
            for kind in [LayoutKind::Zigzag, LayoutKind::Striped(1), LayoutKind::Striped(4)] {
                let layout = Layout::new(kind, &documents, ranks).expect("ranks");
                let mut back = vec![0; bits.len()];
                let mut expected = vec![0; bits.len()];
                for rank in 0..ranks {
                    let local = layout.shard(rank, &bits, width).expect("size");
                    layout.unshard(rank, &local, width, &mut back).expect("size");
                }
                for (document, span) in documents.iter().flat_map(|d| d.spans.iter().map(move |span| (d, span))) {
                    let rows = (document.offset + span.start) * width..(document.offset + span.end) * width;
                    expected[rows.clone()].copy_from_slice(&bits[rows]);
                }
                assert!(back == expected, "{kind} on {ranks} ranks changes bits of segments");
            }
        }
    }
}
