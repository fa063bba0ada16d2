//! The cases of TransformerEngine's PyTorch tests, with our tolerances: every way to communicate, head configurations,
//! windows, biases, softmax variants, batches and packed rows, in every type.
//!
//! Rows have 40 tokens instead of 4096, windows shrink with them, and 32, 64 and 128 heads become 16 in the same groups.

use crate::matrix::{bound, check, draws};
use ringspan::attention::Wire;
use ringspan::mesh::Grid;
use ringspan::{Documents, Layout, LayoutKind, Mask, StrategyKind};
use ringspan_testing::mesh::{Inputs, MeshSetup, Problem, random, relative_l2};

const LEN: usize = 40;
const WIRES: [Wire; 3] = [Wire::F32, Wire::Bf16, Wire::F16];

/// A ring, an all-gather, an all-to-all, and a ring of all-to-alls on either axis.
fn ways() -> [(StrategyKind, Grid); 5] {
    [
        (StrategyKind::Ring, Grid::new(2, 1)),
        (StrategyKind::AllGather, Grid::new(2, 1)),
        (StrategyKind::Ring, Grid::new(1, 2)),
        (StrategyKind::Ring, Grid::new(2, 2)),
        (StrategyKind::AllGather, Grid::new(2, 2).with_ulysses_outer()),
    ]
}

/// A batch of two rows of `len` tokens.
fn batch(len: usize) -> Documents {
    Documents::batch(2, len)
}

/// One row of sequences of random lengths, some of them empty; `between` adds padding after each, up to the next multiple
/// that zigzag on two ranks divides.
fn sequences(len: usize, between: bool, seed: u64) -> Documents {
    let mut lengths = draws(6, 0..len / 2, seed);
    lengths.push(0);
    if !between {
        return Documents::packed(&lengths);
    }
    let mut ids = Vec::new();
    for (id, &len) in lengths.iter().enumerate() {
        ids.extend(vec![id as i32 + 1; len]);
        ids.resize(ids.len().next_multiple_of(4) + 4 * (id % 2), 0);
    }
    let size = ids.len();
    Documents::from_ids(&ids, size).expect("one row")
}

/// Query heads, key-value heads, widths of keys and values.
type Heads = (usize, usize, usize, usize);

fn problem(documents: &Documents, rows: usize, (heads, kv_heads, dim, v_dim): Heads, mask: &Mask) -> Problem {
    Problem { v_dim, ..Problem::with_documents(documents.clone(), rows, heads, kv_heads, dim, mask.clone()) }
}

/// Runs a problem with every way of communication, in each of the types.
fn run(name: &str, problem: &Problem, kind: LayoutKind, wires: &[Wire]) {
    for &wire in wires {
        let inputs = problem.inputs_of(wire, 11);
        let wanted = problem.reference(&inputs);
        for (strategy, grid) in ways() {
            check(name, problem, &inputs, &wanted, MeshSetup { wire, ..MeshSetup::new(kind, strategy, grid) });
        }
    }
}

/// Runs a case as a batch, as packed sequences, and as sequences with padding between them. For the sequences, the types
/// alternate.
fn run_formats(turn: usize, name: &str, heads: Heads, mask: &Mask, change: impl Fn(Problem) -> Problem) {
    run(name, &change(problem(&batch(LEN), 2, heads, mask)), LayoutKind::Zigzag, &WIRES);
    for between in [false, true] {
        let documents = sequences(LEN, between, turn as u64);
        let wires = [Wire::F32, WIRES[1 + (turn + usize::from(between)) % 2]];
        run(name, &change(problem(&documents, 1, heads, mask)), LayoutKind::PerDocumentZigzag, &wires);
    }
}

const EQUAL: Heads = (12, 12, 128, 128);

/// A window given for 4096 tokens, scaled to our length.
fn window(back: usize, ahead: usize) -> Mask {
    Mask::full().window(Some(back * LEN / 4096), Some(ahead * LEN / 4096))
}

#[test]
fn head_configurations() {
    let rows = [
        ("equal heads, causal", EQUAL, Mask::causal()),
        ("equal heads, none", EQUAL, Mask::full()),
        ("equal heads, window 512 both sides", EQUAL, window(512, 512)),
        ("groups of 8, causal", (16, 2, 128, 128), Mask::causal()),
        ("groups of 6, none", (12, 2, 128, 128), Mask::full()),
        ("groups of 6, window 512 back", (12, 2, 128, 128), window(512, 0)),
        ("many equal heads, window 128 back", (16, 16, 128, 128), window(128, 0)),
    ];
    for (turn, (name, heads, mask)) in rows.into_iter().enumerate() {
        run_formats(turn, name, heads, &mask, |problem| problem);
    }
}

#[test]
fn values_narrower_than_keys() {
    let rows = [
        ("many heads, 192 and 128, causal", (16, 16, 192, 128), Mask::causal()),
        ("192 and 128, causal", (12, 12, 192, 128), Mask::causal()),
        ("192 and 128, none", (12, 12, 192, 128), Mask::full()),
        ("192 and 128, window 512 back", (12, 12, 192, 128), window(512, 0)),
        ("128 and 64, causal", (12, 12, 128, 64), Mask::causal()),
        ("128 and 64, none", (12, 12, 128, 64), Mask::full()),
    ];
    for (turn, (name, heads, mask)) in rows.into_iter().enumerate() {
        run_formats(turn, name, heads, &mask, |problem| problem);
    }
}

#[test]
fn softmax_variants() {
    let off_by_one = |problem: Problem| {
        let heads = problem.heads;
        problem.with_score("off by one", |_, score| *score = score.clone().off_by_one(heads))
    };
    let few = (16, 2, 64, 64);
    run_formats(0, "vanilla", few, &Mask::causal(), |problem| problem);
    run_formats(1, "off by one", few, &Mask::causal(), off_by_one);
    run_formats(2, "learnable", few, &Mask::causal(), Problem::with_sinks);
    run_formats(3, "learnable, window 128 back", (16, 16, 64, 64), &window(128, 0), Problem::with_sinks);
}

#[test]
fn width_256() {
    for (turn, mask) in [Mask::causal(), Mask::causal().window(Some(16), None)].into_iter().enumerate() {
        run_formats(turn, "D 256", (4, 4, 256, 256), &mask, |problem| problem);
    }
}

/// The axes along which a bias has different values; along the others its values are shared.
#[derive(Clone, Copy)]
struct Shape {
    batch: bool,
    heads: bool,
    queries: bool,
}

impl Shape {
    /// The index of the shared value for an element of the problem's bias `[B, Sq, Hb, Sk]`.
    fn own(self, problem: &Problem, index: usize) -> usize {
        let (keys, heads, queries) = (problem.keys, problem.bias_heads, problem.queries);
        let (j, h) = (index % keys, index / keys % heads);
        let (i, b) = (index / keys / heads % queries, index / keys / heads / queries);
        let (b, i) = (if self.batch { b } else { 0 }, if self.queries { i } else { 0 });
        ((b * queries + i) * heads + h) * keys + j
    }

    /// Inputs whose bias has this shape.
    fn inputs(self, problem: &Problem, wire: Wire) -> Inputs {
        let inputs = problem.inputs_of(wire, 5);
        let bias = (0..inputs.bias.len()).map(|index| inputs.bias[self.own(problem, index)]).collect();
        Inputs { bias, ..inputs }
    }

    /// The gradient of the shared values: sums over the elements that share them.
    fn gradient(self, problem: &Problem, d_bias: &[f32]) -> Vec<f32> {
        let mut sums = vec![0.0f64; d_bias.len()];
        for (index, x) in d_bias.iter().enumerate() {
            sums[self.own(problem, index)] += f64::from(*x);
        }
        sums.into_iter().map(|x| x as f32).collect()
    }
}

#[test]
fn biases_of_every_shape() {
    let shape = |batch, heads, queries| Shape { batch, heads, queries };
    let rows = [
        ("1hss", shape(false, true, true)),
        ("11ss", shape(false, false, true)),
        ("bhss", shape(true, true, true)),
        ("b1ss", shape(true, false, true)),
        ("111s", shape(false, false, false)),
    ];
    for (row, (name, shape)) in rows.into_iter().enumerate() {
        for (turn, (heads, mask)) in [
            (EQUAL, Mask::causal()),
            ((12, 2, 128, 128), Mask::full()),
            ((12, 12, 192, 128), Mask::causal()),
            ((16, 2, 64, 64), window(512, 512)),
        ]
        .into_iter()
        .enumerate()
        {
            let problem = problem(&batch(LEN), 2, heads, &mask).with_bias(if shape.heads { heads.0 } else { 1 });
            // The 16-bit types alternate.
            for wire in [Wire::F32, WIRES[1 + (row + turn) % 2]] {
                let inputs = shape.inputs(&problem, wire);
                let wanted = problem.reference(&inputs);
                let d_bias = shape.gradient(&problem, &wanted.d_bias);
                for (strategy, grid) in ways() {
                    let on = MeshSetup { wire, ..MeshSetup::new(LayoutKind::Zigzag, strategy, grid) };
                    let got = check(name, &problem, &inputs, &wanted, on);
                    let error = relative_l2(&shape.gradient(&problem, &got.d_bias), &d_bias);
                    assert!(error <= bound(wire), "{name}, {on:?}: the gradient of the bias differs by {error:e}");
                }
            }
        }
    }
}

/// Two sequences of 8 tokens on two ranks: each rank holds an early and a late quarter of each.
#[test]
fn packed_sequences_are_split_as_known() {
    let documents = Documents::from_boundaries(&[0, 8, 16], 16).expect("rises");
    let layout = Layout::new(LayoutKind::PerDocumentZigzag, &documents, 2).expect("ranks");
    assert_eq!(layout.rows(0), [0, 1, 6, 7, 8, 9, 14, 15]);
    assert_eq!(layout.rows(1), [2, 3, 4, 5, 10, 11, 12, 13]);
    let values = random(16, 3);
    let local = layout.shard(0, &values, 1).expect("size");
    assert_eq!(local, [0, 1, 6, 7, 8, 9, 14, 15].map(|row: usize| values[row]));
}
