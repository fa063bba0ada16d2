//! Every mesh gives the answer of the f64 reference: out, LSE, dQ, dK, dV.

use super::{MeshSetup, Problem};
use crate::Kernels;
use ringspan::{Documents, LayoutKind, Mask, StrategyKind};

const RANKS: [usize; 6] = [1, 2, 3, 4, 6, 8];
const LAYOUTS: [LayoutKind; 6] = [
    LayoutKind::Zigzag,
    LayoutKind::Contiguous,
    LayoutKind::Striped(1),
    LayoutKind::Striped(20),
    LayoutKind::PerDocumentZigzag,
    LayoutKind::Balanced(None),
];

/// All grids (ring, ulysses) of 1, 2, 3, 4, 6 and 8 ranks in which every Ulysses rank has a query head.
fn meshes(heads: usize) -> Vec<(usize, usize)> {
    let split = |ranks: usize| (1..=ranks).filter(move |u| ranks.is_multiple_of(*u)).map(move |u| (ranks / u, u));
    RANKS.into_iter().flat_map(split).filter(|(_, ulysses)| *ulysses <= heads).collect()
}

/// Runs a problem on every mesh; layouts and strategies alternate, so that over all tests each occurs with each.
fn on_all_meshes(kernels: &dyn Kernels, problem: &Problem, turn: usize) {
    if kernels.one().is_none() {
        return;
    }
    let inputs = problem.inputs(turn as u64);
    let wanted = problem.reference(&inputs);
    for (index, mesh) in meshes(problem.heads).into_iter().enumerate() {
        let kind = LAYOUTS[(index + turn) % LAYOUTS.len()];
        let strategy = StrategyKind::ALL[(index / 2 + turn) % StrategyKind::ALL.len()];
        problem.check_by(kernels, &inputs, &wanted, MeshSetup::new(kind, strategy, mesh));
    }
}

pub fn lengths_around_the_number_of_ranks(kernels: &dyn Kernels) {
    for ranks in RANKS {
        for len in [ranks - 1, ranks, ranks + 1] {
            for (turn, mask) in [Mask::causal(), Mask::full()].into_iter().enumerate() {
                let problem = Problem::new(1, len, 4, 2, 16, mask);
                let inputs = problem.inputs(len as u64);
                let wanted = problem.reference(&inputs);
                for (index, kind) in LAYOUTS.into_iter().enumerate() {
                    for ulysses in [1, 2, 4].into_iter().filter(|u| ranks.is_multiple_of(*u)) {
                        let strategy = StrategyKind::ALL[(index + turn + ranks) % StrategyKind::ALL.len()];
                        problem.check_by(
                            kernels,
                            &inputs,
                            &wanted,
                            MeshSetup::new(kind, strategy, (ranks / ulysses, ulysses)),
                        );
                    }
                }
            }
        }
    }
}

pub fn lengths_that_divide_by_nothing(kernels: &dyn Kernels) {
    for (turn, len) in [1, 7, 97, 128].into_iter().enumerate() {
        for (side, mask) in [Mask::causal(), Mask::full()].into_iter().enumerate() {
            on_all_meshes(kernels, &Problem::new(1, len, 8, 2, 16, mask), 2 * turn + side);
        }
    }
}

pub fn a_thousand_tokens(kernels: &dyn Kernels) {
    on_all_meshes(kernels, &Problem::new(1, 1000, 8, 2, 64, Mask::causal()), 3);
}

pub fn head_widths(kernels: &dyn Kernels) {
    for (turn, dim) in [16, 64, 80, 128].into_iter().enumerate() {
        on_all_meshes(kernels, &Problem::new(1, 130, 4, 2, dim, Mask::causal()), turn);
    }
}

pub fn values_of_another_width_than_keys(kernels: &dyn Kernels) {
    let mut problem = Problem::new(1, 99, 4, 2, 48, Mask::causal());
    problem.v_dim = 32;
    on_all_meshes(kernels, &problem, 1);
}

pub fn one_key_head_for_eight_query_heads_and_more_ulysses_ranks_than_key_heads(kernels: &dyn Kernels) {
    on_all_meshes(kernels, &Problem::new(2, 61, 8, 1, 32, Mask::causal()), 0);
    on_all_meshes(kernels, &Problem::new(1, 61, 16, 2, 16, Mask::full()), 2);
}

pub fn heads_that_do_not_divide_by_ulysses(kernels: &dyn Kernels) {
    on_all_meshes(kernels, &Problem::new(1, 50, 6, 3, 16, Mask::causal()), 1);
    on_all_meshes(kernels, &Problem::new(1, 50, 7, 1, 16, Mask::causal()), 2);
}

pub fn windows(kernels: &dyn Kernels) {
    for (turn, (left, right)) in
        [(Some(9), None), (Some(40), Some(0)), (Some(3), Some(5)), (None, Some(7))].into_iter().enumerate()
    {
        on_all_meshes(kernels, &Problem::new(1, 150, 4, 2, 16, Mask::full().window(left, right)), turn);
        on_all_meshes(kernels, &Problem::new(1, 150, 4, 2, 16, Mask::causal().window(left, None)), turn + 1);
    }
}

pub fn ragged_batches_with_padding(kernels: &dyn Kernels) {
    let documents = Documents::padded(&[40, 1, 0, 33], 40).expect("fits");
    for (turn, mask) in [Mask::causal(), Mask::full(), Mask::full().window(Some(5), Some(2))].into_iter().enumerate() {
        on_all_meshes(kernels, &Problem::with_documents(documents.clone(), 4, 4, 2, 16, mask), turn);
    }
}

/// 96 tokens on 4 ranks have borders at 24, 48, 72 (with zigzag at multiples of 12); documents end at them and next to
/// them.
pub fn packed_documents_whose_borders_fall_on_and_beside_rank_borders(kernels: &dyn Kernels) {
    for (turn, lengths) in
        [[24, 24, 24, 24], [23, 25, 25, 23], [12, 13, 47, 24], [1, 94, 0, 1], [11, 1, 1, 83]].iter().enumerate()
    {
        for (side, mask) in [Mask::causal(), Mask::full()].into_iter().enumerate() {
            on_all_meshes(
                kernels,
                &Problem::with_documents(Documents::packed(lengths), 1, 4, 2, 16, mask),
                turn + side,
            );
        }
    }
}

pub fn documents_with_padding_between_and_after_them(kernels: &dyn Kernels) {
    let ids: Vec<i32> = (0..96)
        .map(|t| match t {
            0..=4 => 0,
            5..=30 => 7,
            31 => 0,
            32..=60 => 2,
            61..=64 => 0,
            65..=70 => 7,
            _ => 5,
        })
        .collect();
    let documents = Documents::from_ids(&ids, 96).expect("full row");
    for (turn, mask) in [Mask::causal(), Mask::full().window(Some(8), Some(40))].into_iter().enumerate() {
        on_all_meshes(kernels, &Problem::with_documents(documents.clone(), 1, 4, 4, 16, mask), turn);
    }
    let tail = Documents::from_boundaries(&[0, 20, 50], 64).expect("rises");
    on_all_meshes(kernels, &Problem::with_documents(tail, 1, 4, 1, 16, Mask::causal()), 2);
}

/// Two documents whose tokens alternate at random, with padding between them.
pub fn documents_in_pieces(kernels: &dyn Kernels) {
    let id = |token: i32| match (token * 37 + token * token % 23) % 19 {
        0 | 1 => 0,
        n => 1 + n % 2,
    };
    let documents = Documents::from_ids(&(0..2 * 170).map(id).collect::<Vec<_>>(), 170).expect("two rows");
    let problem = |mask| Problem::with_documents(documents.clone(), 2, 4, 2, 16, mask);
    let masks = [
        Mask::causal(),
        Mask::full(),
        Mask::causal().window(Some(30), None),
        Mask::full().window(Some(12), Some(50)),
        Mask::causal().chunked(40).expect("not 0"),
        Mask::causal().prefix_lm([33]),
    ];
    for (turn, mask) in masks.into_iter().enumerate() {
        on_all_meshes(kernels, &problem(mask), turn);
    }
    let window = Mask::causal().window(Some(60), None);
    let terms =
        [problem(Mask::causal()).with_softcap(), problem(window).with_alibi(), problem(Mask::full()).with_buckets()];
    for (turn, problem) in terms.iter().enumerate() {
        on_all_meshes(kernels, problem, turn);
    }
}

pub fn cross_attention_and_queries_after_a_cache(kernels: &dyn Kernels) {
    for (turn, (queries, keys)) in [(5, 77), (77, 5), (30, 31), (1, 64), (0, 9), (9, 0)].into_iter().enumerate() {
        for (side, mask) in [
            Mask::full(),
            Mask::causal(),
            Mask::causal_bottom_right(),
            Mask::causal_bottom_right().window(Some(6), None),
            Mask::full_bottom_right().window(Some(6), Some(3)),
        ]
        .into_iter()
        .enumerate()
        {
            on_all_meshes(kernels, &Problem::cross(2, queries, keys, 4, 2, 16, mask), turn + side);
        }
    }
}

pub fn keys_hidden_beyond_their_length(kernels: &dyn Kernels) {
    let mut problem = Problem::new(3, 40, 4, 2, 16, Mask::full());
    problem.k_documents = Documents::padded(&[40, 13, 0], 40).expect("fits");
    on_all_meshes(kernels, &problem, 0);
    problem.mask = Mask::causal_bottom_right();
    on_all_meshes(kernels, &problem, 1);
}

/// With more queries than keys, a mask aligned to the end leaves the first queries without keys.
pub fn rows_that_see_nothing_are_zero_with_lse_minus_infinity(kernels: &dyn Kernels) {
    if kernels.one().is_none() {
        return;
    }
    let problem = Problem::cross(1, 20, 6, 2, 1, 16, Mask::causal_bottom_right());
    let inputs = problem.inputs(5);
    let got = problem
        .on_mesh_of(kernels, &inputs, MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, (3, 1)))
        .expect("runs");
    for row in 0..14 {
        assert!(got.out[row * 32..(row + 1) * 32].iter().all(|x| *x == 0.0));
        assert!(got.dq[row * 32..(row + 1) * 32].iter().all(|x| *x == 0.0));
        assert!((0..2).all(|head| got.lse[head * 20 + row] == f32::NEG_INFINITY));
    }
    assert!(got.dk.iter().chain(&got.dv).chain(&got.lse[14..20]).all(|x| x.is_finite()));
}

pub fn the_same_mesh_gives_the_same_bits(kernels: &dyn Kernels) {
    if kernels.one().is_none() {
        return;
    }
    let problem = Problem::new(1, 300, 4, 2, 32, Mask::causal());
    let inputs = problem.inputs(9);
    for strategy in StrategyKind::ALL {
        let run = || {
            problem.on_mesh_of(kernels, &inputs, MeshSetup::new(LayoutKind::Zigzag, strategy, (2, 2))).expect("runs")
        };
        let first = run();
        assert!((0..3).all(|_| run() == first));
    }
}

/// If a token of one document changes, no bit of any other document may change, on any mesh.
pub fn a_changed_token_is_seen_by_later_tokens_of_its_document_only(kernels: &dyn Kernels) {
    if kernels.one().is_none() {
        return;
    }
    let lengths = [25, 40, 31];
    let problem = Problem::with_documents(Documents::packed(&lengths), 1, 4, 2, 16, Mask::causal());
    let inputs = problem.inputs(3);
    let mut changed = problem.inputs(3);
    let token = 25 + 11;
    changed.k[token * 32..(token + 1) * 32].fill(0.5);
    changed.v[token * 32..(token + 1) * 32].fill(3.0);
    for mesh in meshes(4) {
        let before = problem
            .on_mesh_of(kernels, &inputs, MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, (mesh.0, mesh.1)))
            .expect("runs");
        let after = problem
            .on_mesh_of(kernels, &changed, MeshSetup::new(LayoutKind::Zigzag, StrategyKind::Ring, (mesh.0, mesh.1)))
            .expect("runs");
        for row in 0..96 {
            let moved = before.out[row * 64..(row + 1) * 64] != after.out[row * 64..(row + 1) * 64];
            assert_eq!(moved, (token..65).contains(&row), "row {row} on {mesh:?}");
        }
    }
}
