//! Shared by the test matrices: our tolerances, checks for exact zeros, random documents.
#![allow(dead_code)] // Each test binary uses its part.

use ringspan::Documents;
use ringspan::attention::Wire;
use ringspan_testing::mesh::{Answer, Inputs, MeshSetup, Problem, random};
use std::ops::Range;

/// Allowed relative L2 distance to the f64 reference for each type.
pub(crate) const fn bound(wire: Wire) -> f64 {
    match wire {
        Wire::F32 => 1e-5,
        Wire::F16 => 1e-3,
        Wire::Bf16 => 8e-3,
    }
}

/// Asserts that a mesh gives the reference's answer within the tolerance of the wire type, with exact zeros where nothing
/// is seen.
pub(crate) fn check(name: &str, problem: &Problem, inputs: &Inputs, wanted: &Answer, on: MeshSetup) -> Answer {
    let what = format!("{name}: {}, {on:?}", problem.name);
    let got = problem.on_mesh(inputs, on).unwrap_or_else(|error| panic!("{what}: {error}"));
    if let Some((name, error)) = wanted.difference(&got, bound(on.wire)) {
        panic!("{what}: {name} differs by {error:e}");
    }
    assert_zeros(&what, problem, wanted, &got);
    got
}

/// Asserts that padding, queries that see nothing and keys that no query sees have exact zeros.
fn assert_zeros(what: &str, problem: &Problem, wanted: &Answer, got: &Answer) {
    let Problem { heads, kv_heads, dim, v_dim, .. } = *problem;
    let zero = |values: &[f32], row: usize, width: usize| values[row * width..][..width].iter().all(|x| *x == 0.0);
    for row in 0..problem.batch * problem.queries {
        if zero(&wanted.out, row, heads * v_dim) {
            let zeros = zero(&got.out, row, heads * v_dim) && zero(&got.dq, row, heads * dim);
            assert!(zeros, "{what}: query {row} sees nothing and is not 0");
        }
    }
    for row in 0..problem.batch * problem.keys {
        if zero(&wanted.dv, row, kv_heads * v_dim) {
            let zeros = zero(&got.dv, row, kv_heads * v_dim) && zero(&got.dk, row, kv_heads * dim);
            assert!(zeros, "{what}: key {row} is seen by nobody and has gradients");
        }
    }
}

/// Random numbers in a range.
pub(crate) fn draws(n: usize, range: Range<usize>, seed: u64) -> Vec<usize> {
    let span = (range.end - range.start) as f64;
    random(n, seed).into_iter().map(|x| range.start + ((f64::from(x) + 1.0) / 2.0 * span) as usize).collect()
}

/// `rows` of `len` tokens, cut into `count` segments at random places; with `tails`, some tokens at the end of each segment
/// are padding.
pub(crate) fn segments(rows: usize, len: usize, count: usize, tails: bool, seed: u64) -> Documents {
    let mut ids = vec![0; rows * len];
    for (row, ids) in ids.chunks_exact_mut(len).enumerate() {
        let seed = seed * 1000 + 10 * row as u64;
        let mut ends = draws(count - 1, 1..len, seed);
        ends.push(len);
        ends.sort_unstable();
        let mut start = 0;
        for (segment, end) in ends.into_iter().enumerate() {
            let tail = if tails { draws(1, 0..(end - start) / 2 + 1, seed + 1 + segment as u64)[0] } else { 0 };
            ids[start..end - tail].fill(segment as i32 + 1);
            start = end;
        }
    }
    Documents::from_ids(&ids, len).expect("full rows")
}
