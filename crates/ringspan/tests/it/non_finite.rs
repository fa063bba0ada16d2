//! Tests that NaN and infinities in one token reach the tokens that see it and no others, whatever the strategy and
//! mesh: neither by a zero weight, nor by a tile that is computed as a whole.

use ringspan::attention::Wire;
use ringspan::mesh::Grid;
use ringspan::{Documents, LayoutKind, Mask, StrategyKind};
use ringspan_testing::mesh::{Answer, Inputs, MeshSetup, Problem};

const LEN: usize = 60;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tensor {
    Q,
    K,
    V,
    DOut,
}

const TENSORS: [Tensor; 4] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut];

impl Tensor {
    fn of(self, inputs: &mut Inputs) -> &mut Vec<f32> {
        match self {
            Self::Q => &mut inputs.q,
            Self::K => &mut inputs.k,
            Self::V => &mut inputs.v,
            Self::DOut => &mut inputs.d_out,
        }
    }

    fn heads(self) -> usize {
        if matches!(self, Self::K | Self::V) { KV_HEADS } else { HEADS }
    }
}

fn grids() -> [Grid; 3] {
    [Grid::new(3, 1), Grid::new(2, 2), Grid::new(2, 2).with_ulysses_outer()]
}

fn problems() -> Vec<Problem> {
    let whole = |mask| Problem::new(1, LEN, HEADS, KV_HEADS, DIM, mask);
    let gaps: Vec<i32> = (0..LEN as i32).map(|t| [1, 1, 0, 2, 1, 0, 2, 2][(t / 8) as usize]).collect();
    let documents = |documents, mask| Problem::with_documents(documents, 1, HEADS, KV_HEADS, DIM, mask);
    vec![
        whole(Mask::causal()),
        whole(Mask::causal().window(Some(9), None)),
        whole(Mask::full().window(Some(3), Some(5))),
        whole(Mask::causal().chunked(13).expect("not 0")),
        documents(Documents::packed(&[21, 1, 17, 21]), Mask::full()),
        documents(Documents::from_ids(&gaps, LEN).expect("a row"), Mask::causal()),
        whole(Mask::causal().window(Some(9), None)).with_softcap().with_alibi().with_sinks(),
        documents(Documents::packed(&[21, 1, 17, 21]), Mask::causal()).with_buckets(),
    ]
}

/// Whether query i sees key j, according to the documents and the mask.
fn visible(problem: &Problem) -> Vec<Vec<bool>> {
    let len = problem.queries;
    let mut places = vec![None; len];
    for (index, document) in problem.q_documents.iter().enumerate() {
        for position in document.spans.iter().flat_map(Clone::clone) {
            places[document.offset + position] = Some((index, position, document.seq_len));
        }
    }
    let sees = |i: usize, j: usize| match (places[i], places[j]) {
        (Some((a, i, seq_len)), Some((b, j, _))) => a == b && problem.mask.sees(a, i, j, seq_len, seq_len),
        _ => false,
    };
    (0..len).map(|i| (0..len).map(|j| sees(i, j)).collect()).collect()
}

/// How close untouched rows are to those of the clean run.
#[derive(Clone, Copy, PartialEq)]
enum Tolerance {
    Bits,
    /// Blocks with a non-finite number have their products masked pair by pair, in another order: 2e-6, the kernel's own bound.
    Rounding,
    /// Masked products are not rounded to bf16: 2e-2, the kernel's own bound.
    Bf16,
}

impl Tolerance {
    fn bound(self) -> f32 {
        match self {
            Self::Bits => 0.0,
            Self::Rounding => 2e-6,
            Self::Bf16 => 2e-2,
        }
    }
}

/// Asserts that the rows of untouched tokens and heads are those of the clean run.
fn same_rows(
    what: &str,
    (heads, dim): (usize, usize),
    tolerance: Tolerance,
    [clean, got]: [&[f32]; 2],
    untouched: impl Fn(usize, usize) -> bool,
) {
    let same = |(a, b): (&f32, &f32)| {
        a.to_bits() == b.to_bits()
            || tolerance != Tolerance::Bits && (a - b).abs() <= tolerance.bound() * a.abs().max(1.0)
    };
    for (row, (clean, got)) in clean.chunks_exact(dim).zip(got.chunks_exact(dim)).enumerate() {
        let (token, head) = (row / heads, row % heads);
        let moved = !clean.iter().zip(got).all(same);
        assert!(!moved || !untouched(token, head), "{what}: token {token} head {head} moved:\n{clean:?}\n{got:?}");
    }
}

/// Asserts that one non-finite number in a token's head reached only queries that see the token, and keys that these see.
fn contained(
    what: &str,
    problem: &Problem,
    [clean, got]: [&Answer; 2],
    (tensor, token, head): (Tensor, usize, usize),
    [outputs, gradients]: [Tolerance; 2],
) {
    let (sees, len) = (visible(problem), problem.queries);
    let group = HEADS / KV_HEADS;
    let is_key = tensor.heads() == KV_HEADS;
    // Queries whose scores, outputs or gradients depend on the number.
    let touched =
        |i: usize, h: usize| if is_key { sees[i][token] && h / group == head } else { i == token && h == head };
    let key_touched =
        |j: usize, g: usize| (0..len).any(|i| (g * group..(g + 1) * group).any(|h| touched(i, h) && sees[i][j]));
    let by_token =
        |lse: &[f32]| -> Vec<f32> { (0..len * HEADS).map(|row| lse[row % HEADS * len + row / HEADS]).collect() };
    let forward = tensor != Tensor::DOut;
    let (queries, keys) = ((HEADS, DIM), (KV_HEADS, DIM));
    let out = |i, h| !(forward && touched(i, h));
    same_rows(&format!("{what}, out"), queries, outputs, [&clean.out, &got.out], out);
    let score = matches!(tensor, Tensor::Q | Tensor::K);
    let lse = |i, h| !(score && touched(i, h));
    let values = [&by_token(&clean.lse)[..], &by_token(&got.lse)];
    same_rows(&format!("{what}, lse"), (HEADS, 1), outputs, values, lse);
    same_rows(&format!("{what}, dq"), queries, gradients, [&clean.dq, &got.dq], |i, h| !touched(i, h));
    same_rows(&format!("{what}, dk"), keys, gradients, [&clean.dk, &got.dk], |j, g| !key_touched(j, g));
    // The gradient of a value does not depend on values.
    let value = |j, g| tensor == Tensor::V || !key_touched(j, g);
    same_rows(&format!("{what}, dv"), keys, gradients, [&clean.dv, &got.dv], value);
}

/// Asserts that NaN reaches all queries that see it.
fn reached(what: &str, problem: &Problem, got: &Answer, tensor: Tensor, token: usize, head: usize) {
    let sees = visible(problem);
    let group = HEADS / KV_HEADS;
    let any_nan = |values: &[f32], row: usize| values[row * DIM..(row + 1) * DIM].iter().any(|x| x.is_nan());
    let is_key = tensor.heads() == KV_HEADS;
    for (i, h) in (0..problem.queries).flat_map(|i| (0..HEADS).map(move |h| (i, h))) {
        let touched = if is_key { sees[i][token] && h / group == head } else { i == token && h == head };
        // The dq of a query that sees only itself is 0 for any gradient, but 0 x NaN is NaN as well.
        if touched && sees[i].iter().any(|sees| *sees) {
            let forward = tensor == Tensor::DOut || any_nan(&got.out, i * HEADS + h);
            assert!(forward && any_nan(&got.dq, i * HEADS + h), "{what}: query {i} head {h} hides NaN");
        }
    }
}

fn spread(strategy: StrategyKind) {
    for (number, problem) in problems().into_iter().enumerate() {
        let clean_inputs = problem.inputs(1);
        for (turn, grid) in grids().into_iter().enumerate() {
            let kind = [LayoutKind::Zigzag, LayoutKind::Contiguous, LayoutKind::Striped(2)][(number + turn) % 3];
            let on = MeshSetup::new(kind, strategy, grid);
            let clean = problem.on_mesh(&clean_inputs, on).expect("runs");
            for (tensor, bad) in TENSORS
                .into_iter()
                .flat_map(|tensor| [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|bad| (tensor, bad)))
            {
                // The bad token alternates between borders of ranks, borders of documents, and places inside.
                for token in [[0, 33], [20, 59]][(number + turn) % 2] {
                    let head = token % tensor.heads();
                    let mut inputs = problem.inputs(1);
                    tensor.of(&mut inputs)[(token * tensor.heads() + head) * DIM + token % DIM] = bad;
                    let got = problem.on_mesh(&inputs, on).expect("runs");
                    let what = format!("{bad} in {tensor:?} of token {token} head {head}: {}, {on:?}", problem.name);
                    let tolerance = [Tolerance::Bits, Tolerance::Rounding];
                    contained(&what, &problem, [&clean, &got], (tensor, token, head), tolerance);
                    if bad.is_nan() {
                        reached(&what, &problem, &got, tensor, token, head);
                    }
                }
            }
        }
    }
}

#[test]
fn a_ring_carries_bad_numbers_only_to_those_who_see_them() {
    spread(StrategyKind::Ring);
}

#[test]
fn a_ring_both_ways_carries_bad_numbers_only_to_those_who_see_them() {
    spread(StrategyKind::BidirectionalRing);
}

#[test]
fn a_gather_carries_bad_numbers_only_to_those_who_see_them() {
    spread(StrategyKind::AllGather);
}

#[test]
fn a_halo_carries_bad_numbers_only_to_those_who_see_them() {
    spread(StrategyKind::Halo);
}

#[test]
fn passed_queries_carry_bad_numbers_only_to_those_who_see_them() {
    spread(StrategyKind::PassQ);
}

/// A rank has more queries than the lanes of a kernel's block, 48 at most, and more keys than a block of keys, 128: so
/// blocks that see a bad key completely, partly and not at all are next to each other, also with whole vectors of each
/// kind.
#[test]
fn bad_numbers_stay_where_they_are_seen_in_long_blocks() {
    let len = 302;
    let whole = |mask| Problem::new(1, len, HEADS, KV_HEADS, DIM, mask);
    let documents = Documents::packed(&[97, 3, 140, 62]);
    let problems = [
        whole(Mask::causal()),
        whole(Mask::causal().window(Some(70), None)),
        whole(Mask::full().window(Some(9), Some(100))),
        Problem::with_documents(documents.clone(), 1, HEADS, KV_HEADS, DIM, Mask::full()),
        Problem::with_documents(documents, 1, HEADS, KV_HEADS, DIM, Mask::causal().window(Some(50), None)).with_alibi(),
    ];
    let kinds = [LayoutKind::Contiguous, LayoutKind::Striped(1), LayoutKind::Zigzag, LayoutKind::Striped(7)];
    // The ring has two ranks, so that each holds 151 tokens.
    let grid = Grid::new(2, 1);
    for (number, problem) in problems.iter().enumerate() {
        for (turn, kind) in kinds.into_iter().enumerate() {
            // Strategies, types and numbers alternate, so that every tensor and place occurs with each of them.
            let strategy = StrategyKind::ALL[(number + turn) % StrategyKind::ALL.len()];
            for stored in [Wire::F32, Wire::Bf16] {
                let on = MeshSetup { stored, wire: stored, ..MeshSetup::new(kind, strategy, grid) };
                let tolerance = match stored {
                    Wire::F32 => [Tolerance::Bits, Tolerance::Rounding],
                    _ => [Tolerance::Bf16; 2],
                };
                let clean = problem.on_mesh(&problem.inputs_of(stored, 1), on).expect("runs");
                for (at, tensor) in TENSORS.into_iter().enumerate() {
                    for (place, token) in [0, 49, 120, 151, 301].into_iter().enumerate() {
                        let bad = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][(number + turn + at + place) % 3];
                        let head = (token + at) % tensor.heads();
                        let mut inputs = problem.inputs_of(stored, 1);
                        tensor.of(&mut inputs)[(token * tensor.heads() + head) * DIM + token % DIM] = bad;
                        let got = problem.on_mesh(&inputs, on).expect("runs");
                        let what =
                            format!("{bad} in {tensor:?} of token {token} head {head}: {}, {on:?}", problem.name);
                        contained(&what, problem, [&clean, &got], (tensor, token, head), tolerance);
                        if bad.is_nan() {
                            reached(&what, problem, &got, tensor, token, head);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn bad_numbers_in_padding_reach_nobody() {
    let ids: Vec<i32> = (0..2 * LEN as i32).map(|t| [0, 1, 0, 2, 2, 1, 0, 3][(t / 5) as usize % 8]).collect();
    let batches = [
        (2, Documents::from_ids(&ids, LEN).expect("rows")),
        (2, Documents::padded(&[LEN - 7, 11], LEN).expect("fits")),
        (3, Documents::padded(&[0, LEN, 1], LEN).expect("fits")),
    ];
    for (batch, documents) in batches {
        for mask in [Mask::causal(), Mask::full(), Mask::full().window(Some(9), Some(4))] {
            let problem = Problem::with_documents(documents.clone(), batch, HEADS, KV_HEADS, DIM, mask);
            let mut padding = vec![true; batch * LEN];
            for (document, span) in documents.iter().flat_map(|d| d.spans.iter().map(move |span| (d, span.clone()))) {
                padding[document.offset + span.start..document.offset + span.end].fill(false);
            }
            assert!(padding.contains(&true));
            for (strategy, grid) in
                StrategyKind::ALL.into_iter().flat_map(|strategy| grids().map(|grid| (strategy, grid)))
            {
                for kind in [LayoutKind::Zigzag, LayoutKind::Contiguous, LayoutKind::Balanced(None)] {
                    let on = MeshSetup::new(kind, strategy, grid);
                    let clean = problem.on_mesh(&problem.inputs(1), on).expect("runs");
                    for bad in [f32::NAN, f32::INFINITY] {
                        let mut inputs = problem.inputs(1);
                        for tensor in TENSORS {
                            let width = tensor.heads() * DIM;
                            let rows = tensor.of(&mut inputs).chunks_exact_mut(width).zip(&padding);
                            rows.filter(|(_, padding)| **padding).for_each(|(row, _)| row.fill(bad));
                        }
                        let got = problem.on_mesh(&inputs, on).expect("runs");
                        assert!(got == clean, "{bad} in the padding is seen: {}, {on:?}", problem.name);
                        for (values, width) in
                            [(&got.out, HEADS), (&got.dq, HEADS), (&got.dk, KV_HEADS), (&got.dv, KV_HEADS)]
                        {
                            let rows = values.chunks_exact(width * DIM).zip(&padding);
                            let zero = |(row, padding): (&[f32], &bool)| !padding || row.iter().all(|x| *x == 0.0);
                            assert!(rows.into_iter().all(zero), "padding is not 0: {}, {on:?}", problem.name);
                        }
                    }
                }
            }
        }
    }
}
