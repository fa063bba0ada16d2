//! The test cases of MaxDiffusion, USP (yunchang, xDiT) and diffusers: rings of all-to-alls for every (R, U) up to 8 ranks,
//! computed with real kernels where those mock them.

use crate::matrix::check;
use ringspan::attention::Wire;
use ringspan::mesh::Grid;
use ringspan::schedule::HeadShare;
use ringspan::{Documents, Layout, LayoutKind, Mask, Schedule, StrategyKind};
use ringspan_testing::mesh::{Answer, MeshSetup, Problem, relative_l2};

const LAYOUTS: [LayoutKind; 4] =
    [LayoutKind::Contiguous, LayoutKind::Zigzag, LayoutKind::Striped(1), LayoutKind::Balanced(None)];

/// Every (R, U) with up to 8 ranks in which each Ulysses rank has a head; both orders of the axes alternate.
fn grids(heads: usize) -> Vec<Grid> {
    let of = |ring: usize| (1..=8 / ring).map(move |ulysses| Grid::new(ring, ulysses));
    let all = (1..=8).flat_map(of).filter(|grid| grid.ulysses <= heads);
    all.enumerate().map(|(turn, grid)| if turn % 3 == 2 { grid.with_ulysses_outer() } else { grid }).collect()
}

/// Runs a problem on all grids; layouts and strategies alternate.
fn run(name: &str, problem: &Problem, turn: usize) {
    let inputs = problem.inputs(turn as u64);
    let wanted = problem.reference(&inputs);
    for (number, grid) in grids(problem.heads).into_iter().enumerate() {
        let strategy = StrategyKind::ALL[(number / 2 + turn) % StrategyKind::ALL.len()];
        let on = MeshSetup::new(LAYOUTS[(number + turn) % LAYOUTS.len()], strategy, grid);
        check(name, problem, &inputs, &wanted, on);
    }
}

#[test]
fn lengths_that_divide_and_that_do_not() {
    // The lengths divide by all grids, by none, are one token, or fewer tokens than ranks.
    for (turn, len) in [24, 7, 1, 3].into_iter().enumerate() {
        for (heads, kv_heads, dim) in [(8, 8, 4), (8, 2, 16), (4, 4, 3)] {
            for (name, mask) in [("full", Mask::full()), ("causal", Mask::causal())] {
                run(name, &Problem::new(2, len, heads, kv_heads, dim, mask), turn);
            }
        }
    }
}

#[test]
fn seven_tokens_on_two_times_two_ranks() {
    for (turn, (batch, heads)) in [(1, 4), (2, 4), (2, 8)].into_iter().enumerate() {
        let problem = Problem::new(batch, 7, heads, heads, 4, Mask::full());
        let inputs = problem.inputs(turn as u64);
        let wanted = problem.reference(&inputs);
        for (kind, strategy) in LAYOUTS.into_iter().flat_map(|kind| StrategyKind::ALL.map(|strategy| (kind, strategy)))
        {
            check("7 tokens", &problem, &inputs, &wanted, MeshSetup::new(kind, strategy, (2, 2)));
        }
    }
}

/// The round trip that others test with mocked kernels: a token that sees only itself gets its value back, bit by bit.
#[test]
fn a_token_that_sees_itself_gets_its_value_back_from_every_grid() {
    for (len, heads) in [(5, 4), (8, 4), (7, 8), (6, 8)] {
        let problem = Problem::new(2, len, heads, heads, 4, Mask::full().window(Some(0), Some(0)));
        let inputs = problem.inputs(3);
        for grid in grids(heads) {
            for chunks in 1..=3 {
                let on = MeshSetup {
                    head_chunks: chunks,
                    ..MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, grid)
                };
                let got = problem.on_mesh(&inputs, on).expect("runs");
                let what = format!("{len} tokens, {heads} heads, {on:?}");
                assert!(got.out == inputs.v, "{what}");
                // The weight is recomputed, so the gradient comes back up to rounding.
                let error = relative_l2(&got.dv, &inputs.d_out);
                assert!(error <= 2e-7, "{what}: dv differs by {error:e}");
            }
        }
    }
}

#[test]
fn key_padding_that_differs_by_row() {
    // No query is padding; keys are masked, and the last row has none, so its queries see nothing.
    let ids = |mask: &str| -> Vec<i32> { mask.bytes().map(|bit| i32::from(bit == b'1')).collect() };
    let rows = [
        ("alternating", 2, 5, Documents::from_ids(&ids("1010101010"), 5).expect("rows")),
        ("holes", 1, 8, Documents::from_ids(&ids("11001110"), 8).expect("rows")),
        ("holes, other rows", 2, 8, Documents::from_ids(&ids("1100111000000001"), 8).expect("rows")),
        ("lengths", 3, 7, Documents::padded(&[7, 3, 0], 7).expect("fits")),
        ("lengths, long", 4, 33, Documents::padded(&[33, 1, 0, 17], 33).expect("fits")),
    ];
    for (turn, (name, batch, len, keys)) in rows.into_iter().enumerate() {
        for (heads, kv_heads) in [(4, 4), (8, 2)] {
            let mut problem = Problem::new(batch, len, heads, kv_heads, 8, Mask::full());
            problem.k_documents = keys.clone();
            run(name, &problem, turn);
            run(name, &problem.with_sinks(), turn + 1);
        }
    }
}

#[test]
fn hops_and_rows_that_are_masked_out() {
    // Documents end at the borders of ranks, so whole hops see nothing; some rows are only padding.
    let ids: Vec<i32> = (0..3 * 24).map(|t| [1, 1, 0, 2, 2, 2, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 3][t / 4]).collect();
    let rows = [
        ("documents of a rank", 1, Documents::packed(&[6; 4])),
        ("documents of half a rank", 1, Documents::packed(&[3; 8])),
        ("padding inside, a row of padding, the two ends", 3, Documents::from_ids(&ids, 24).expect("rows")),
        ("rows of padding", 3, Documents::padded(&[0, 24, 0], 24).expect("fits")),
        ("nothing at all", 2, Documents::padded(&[0, 0], 24).expect("fits")),
    ];
    for (turn, (name, batch, documents)) in rows.into_iter().enumerate() {
        let masks = [Mask::full(), Mask::causal(), Mask::causal().window(Some(2), None)];
        for (side, mask) in masks.into_iter().enumerate() {
            run(name, &Problem::with_documents(documents.clone(), batch, 8, 4, 8, mask), turn + side);
        }
    }
    // The first queries are before the first key they may see.
    run("rows without a key", &Problem::cross(2, 20, 6, 4, 2, 8, Mask::causal_bottom_right()), 0);
}

#[test]
fn heads_that_do_not_divide() {
    for (turn, (heads, kv_heads)) in [(3, 3), (5, 5), (6, 2), (7, 1), (7, 7)].into_iter().enumerate() {
        run("heads by U", &Problem::new(2, 13, heads, kv_heads, 4, Mask::causal()), turn);
    }
}

#[test]
fn more_ulysses_ranks_than_key_heads() {
    for (turn, (heads, kv_heads)) in [(8, 1), (8, 2), (8, 4), (6, 3)].into_iter().enumerate() {
        run("key heads by U", &Problem::new(2, 13, heads, kv_heads, 16, Mask::causal()).with_sinks(), turn);
    }
}

#[test]
fn parts_of_heads_do_not_change_the_answer() {
    let rows = [((2, 6, 8, 8, 3), (1, 2)), ((2, 8, 8, 8, 3), (2, 2)), ((1, 29, 10, 10, 16), (2, 2))];
    let grouped = [((2, 21, 8, 2, 16), (2, 2)), ((1, 29, 10, 5, 16), (3, 2)), ((1, 29, 10, 1, 16), (2, 2))];
    for ((batch, len, heads, kv_heads, dim), grid) in rows.into_iter().chain(grouped) {
        for (strategy, mask) in StrategyKind::ALL
            .into_iter()
            .flat_map(|strategy| [Mask::full(), Mask::causal()].map(|mask| (strategy, mask)))
        {
            let problem = Problem::new(batch, len, heads, kv_heads, dim, mask);
            let inputs = problem.inputs(8);
            let wanted = problem.reference(&inputs);
            let run = |head_chunks| {
                let on = MeshSetup { head_chunks, ..MeshSetup::new(LayoutKind::Zigzag, strategy, grid) };
                check("parts", &problem, &inputs, &wanted, on)
            };
            let whole = run(1);
            for chunks in 2..=5 {
                let parts = run(chunks);
                let what = format!("{}, {strategy}, {chunks} parts", problem.name);
                let of_queries = |answer: &Answer| [answer.out.clone(), answer.lse.clone(), answer.dq.clone()];
                assert!(of_queries(&parts) == of_queries(&whole), "{what}: other bits");
                // If parts share a key-value head, its gradient is summed in another order.
                for (name, part, whole) in [("dk", &parts.dk, &whole.dk), ("dv", &parts.dv, &whole.dv)] {
                    assert!(heads != kv_heads || part == whole, "{what}: other bits of {name}");
                    let error = relative_l2(part, whole);
                    assert!(error <= 1e-6, "{what}: {name} differs by {error:e}");
                }
            }
        }
    }
}

/// For 40 heads on 8 ranks, the number of heads that all ranks together compute in each part.
#[test]
fn parts_of_forty_heads_are_as_known() {
    for (chunks, wanted) in [(1, vec![40]), (2, vec![16, 24]), (3, vec![8, 16, 16]), (5, vec![8; 5])] {
        let parts = HeadShare::parts(40, 40, Grid::new(1, 8), chunks).expect("fits");
        let heads = |part: &Vec<HeadShare>| part.iter().map(|share| share.query.len()).sum::<usize>();
        assert_eq!(parts.iter().map(heads).collect::<Vec<_>>(), wanted, "{chunks} parts");
    }
}

/// Ranks hold no more tokens than with lengths padded to a multiple.
#[test]
fn shares_are_no_longer_than_padding_would_make_them() {
    for (len, grid, most) in [(10, (4, 1), 3), (10, (2, 2), 6), (6144, (4, 2), 1536)] {
        let (documents, grid) = (Documents::batch(1, len), Grid::from(grid));
        for kind in [LayoutKind::Contiguous, LayoutKind::Zigzag, LayoutKind::Striped(1)] {
            let layout = Layout::new(kind, &documents, grid.size().expect("few")).expect("ranks");
            let groups = layout.grouped(&grid.members());
            let longest = (0..grid.ring).map(|rank| groups.tokens(rank)).max();
            // Zigzag assigns two chunks, of which either may be the longer one.
            let slack = usize::from(kind == LayoutKind::Zigzag);
            assert!(longest <= Some(most + slack), "{len} tokens, {grid}, {kind}: {longest:?}");
        }
    }
}

#[test]
fn impossible_axes_are_refused_with_the_numbers() {
    let error = |heads, kv_heads, grid: (usize, usize)| {
        let problem = Problem::new(2, 8, heads, kv_heads, 4, Mask::full());
        let on = MeshSetup::new(LayoutKind::Contiguous, StrategyKind::Ring, grid);
        problem.on_mesh(&problem.inputs(0), on).expect_err("must not fit").to_string()
    };
    for (heads, (ring, ulysses)) in [(3, (1, 4)), (4, (1, 8)), (1, (2, 2)), (2, (2, 4))] {
        let message = error(heads, heads, (ring, ulysses));
        for part in [
            format!("ulysses {ulysses} needs at least {ulysses} query heads, but there are {heads}"),
            format!("use ulysses <= {heads} and a larger ring (ring x ulysses = {})", ring * ulysses),
        ] {
            assert!(message.contains(&part), "{message}");
        }
    }
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(2, 8), 4).expect("ranks");
    for grid in [(1, 3), (3, 1), (4, 2)] {
        let error = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid).expect_err("4 ranks");
        let (message, product) = (error.to_string(), grid.0 * grid.1);
        let numbers = format!("needs {product} ranks, but there are 4");
        assert!(message.contains(&numbers) && message.contains(&Grid::from(grid).to_string()), "{message}");
    }
}

/// The cases that other libraries run on GPUs, with an eighth of the tokens or heads if these are many.
#[test]
fn hybrid_attention_of_images_and_text() {
    let rows = [
        ("batch of two", Problem::new(2, 64, 4, 4, 64, Mask::full()), Wire::F32),
        ("128 tokens, 4 heads of 64", Problem::new(1, 128, 4, 4, 64, Mask::full()), Wire::Bf16),
        ("128 tokens, 4 heads of 64", Problem::new(1, 128, 4, 4, 64, Mask::full()), Wire::F32),
        ("128 tokens, 8 heads of 64, causal", Problem::new(1, 128, 8, 8, 64, Mask::causal()), Wire::Bf16),
        ("119 tokens, 8 heads of 128, causal", Problem::new(2, 119, 8, 8, 128, Mask::causal()), Wire::Bf16),
        ("128 tokens, 4 heads of 32, causal", Problem::new(1, 128, 4, 4, 32, Mask::causal()), Wire::F16),
        ("text in front", Problem::cross(1, 128, 144, 4, 4, 32, Mask::full()), Wire::F16),
        ("text alone", Problem::cross(2, 96, 18, 4, 4, 32, Mask::full()), Wire::F32),
        ("text first for all", Problem::new(1, 128, 4, 4, 32, Mask::causal().prefix_lm([16])), Wire::F16),
    ];
    for (name, problem, wire) in rows {
        let inputs = problem.inputs_of(wire, 777);
        let wanted = problem.reference(&inputs);
        for grid in [(2, 1), (1, 2), (2, 2), (4, 2)] {
            for kind in [LayoutKind::Contiguous, LayoutKind::Zigzag] {
                check(
                    name,
                    &problem,
                    &inputs,
                    &wanted,
                    MeshSetup { wire, ..MeshSetup::new(kind, StrategyKind::Ring, grid) },
                );
            }
        }
    }
}
