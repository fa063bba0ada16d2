//! Checks that NaN and infinities only reach the queries and keys that see them.

use super::*;

/// A row that has a non-finite element: tensor, token, head.
#[derive(Debug, Clone, Copy)]
enum Fault {
    Query(usize, usize),
    DOut(usize, usize),
    Key(usize, usize),
    Value(usize, usize),
}

impl Fault {
    fn put(self, problem: &Problem, values: &mut Values, x: f32) {
        let (heads, kv_heads) = (problem.heads(), problem.kv_heads);
        let (data, at) = match self {
            Fault::Query(i, h) => (&mut values.q, (i * heads + h) * problem.dim),
            Fault::DOut(i, h) => (&mut values.d_out, (i * heads + h) * problem.v_dim),
            Fault::Key(j, g) => (&mut values.k, (j * kv_heads + g) * problem.dim),
            Fault::Value(j, g) => (&mut values.v, (j * kv_heads + g) * problem.v_dim),
        };
        data[at + 3] = x;
    }

    /// Whether the fault reaches the output, and whether it reaches the gradient, of a query.
    fn reaches_query(self, problem: &Problem, i: usize, h: usize) -> (bool, bool) {
        match self {
            Fault::Query(row, head) => ((i, h) == (row, head), (i, h) == (row, head)),
            Fault::DOut(row, head) => (false, (i, h) == (row, head)),
            Fault::Key(j, g) | Fault::Value(j, g) => {
                let sees = problem.kv_of[h] == g && problem.sees(i, j);
                (sees, sees)
            }
        }
    }

    /// Whether the fault reaches the gradients of a key and its value: a query that it reaches sees the key.
    fn reaches_key(self, problem: &Problem, j: usize, g: usize) -> bool {
        (0..problem.heads())
            .filter(|&h| problem.kv_of[h] == g)
            .any(|h| (0..problem.queries).any(|i| problem.sees(i, j) && self.reaches_query(problem, i, h).1))
    }
}

/// Checks that elements of reached rows are finite if the reference's are, and that others equal the clean ones up to
/// rounding.
fn compare(clean: &[f32], wanted: &[f32], got: &[f32], reached: impl Fn(usize) -> bool, bound: f32, what: &str) {
    for (at, (clean, (wanted, got))) in clean.iter().zip(wanted.iter().zip(got)).enumerate() {
        if reached(at) {
            assert_eq!(wanted.is_finite(), got.is_finite(), "{what}, element {at}: {got} for {wanted}");
        } else {
            let near = clean == got || (clean - got).abs() < bound * clean.abs().max(1.0);
            assert!(near, "{what}, element {at} is out of reach: {got} for {clean}");
        }
    }
}

fn check(kernels: &dyn Kernels, problem: &Problem, fault: Fault, what: &str) {
    let clean = problem.values();
    for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut with_fault = clean.clone();
        fault.put(problem, &mut with_fault, x);
        let wanted = problem.wanted(&with_fault);
        for kernel in problem.kernels(kernels, &[2]) {
            let (clean, got) = (problem.computed(&kernel, &clean), problem.computed(&kernel, &with_fault));
            // Where products are masked pair by pair, they are not rounded to bf16.
            let bound = if problem.rounds(&kernel) { 2e-2 } else { 2e-6 };
            let what = |tensor: &str| format!("{what}, {fault:?} {x}, {kernel:?}: {tensor}");
            let (heads, kv_heads) = (problem.heads(), problem.kv_heads);
            let query = |at: usize| fault.reaches_query(problem, at / heads, at % heads);
            let key = |at: usize| fault.reaches_key(problem, at / kv_heads, at % kv_heads);
            let lse = |at: usize| fault.reaches_query(problem, at % problem.queries, at / problem.queries).0;
            compare(&clean.out, &wanted.out, &got.out, |at| query(at / problem.v_dim).0, bound, &what("out"));
            compare(&clean.lse, &wanted.lse, &got.lse, lse, bound, &what("lse"));
            if problem.queries == 1 {
                let reached = |at: usize| query(at / problem.v_dim).0;
                compare(&clean.decoded, &wanted.decoded, &got.decoded, reached, bound, &what("decoded"));
                compare(&clean.decoded_lse, &wanted.decoded_lse, &got.decoded_lse, lse, bound, &what("decoded lse"));
            }
            compare(&clean.dq, &wanted.dq, &got.dq, |at| query(at / problem.dim).1, bound, &what("dq"));
            let keys: Vec<bool> = (0..problem.keys * kv_heads).map(key).collect();
            compare(&clean.dk, &wanted.dk, &got.dk, |at| keys[at / problem.dim], bound, &what("dk"));
            compare(&clean.dv, &wanted.dv, &got.dv, |at| keys[at / problem.v_dim], bound, &what("dv"));
        }
    }
}

const FAULTS: [Fault; 8] = [
    Fault::Query(70, 1),
    Fault::Query(3, 0),
    Fault::DOut(52, 2),
    Fault::DOut(99, 1),
    Fault::Key(61, 1),
    Fault::Key(99, 0),
    Fault::Value(40, 0),
    Fault::Value(0, 1),
];

pub fn faults_stay_in_bands(kernels: &dyn Kernels) {
    for band in [CAUSAL, Band { lo: 0, hi: 20 }, Band { lo: -9, hi: 4 }, FULL] {
        for fault in FAULTS {
            let mut problem = Problem::new(100, 100, (4, 2), (16, 24), band);
            check(kernels, &problem, fault, &format!("{band:?}"));
            problem.storage = Storage::Bf16;
            check(kernels, &problem, fault, &format!("{band:?}, bf16"));
        }
    }
}

pub fn faults_stay_in_their_tile(kernels: &dyn Kernels) {
    let mut problem = Problem::new(100, 100, (4, 2), (16, 24), FULL);
    problem.blocks = vec![
        (50..100, vec![tile(20..60, 0..30, FULL), tile(60..100, 30..50, CAUSAL)]),
        (0..50, vec![tile(0..100, 3..50, Band { lo: 9, hi: 60 })]),
    ];
    for fault in FAULTS {
        check(kernels, &problem, fault, "tiles");
    }
}

pub fn faults_stay_in_bands_over_many_blocks(kernels: &dyn Kernels) {
    let mut problem = Problem::new(150, 420, (2, 1), (24, 72), Band { lo: -300, hi: 20 });
    problem.storage = Storage::Bf16;
    for fault in [Fault::Value(200, 0), Fault::Value(419, 0), Fault::Key(400, 0), Fault::Query(140, 1)] {
        check(kernels, &problem, fault, "many blocks");
    }
}

pub fn faults_stay_in_bands_with_terms(kernels: &dyn Kernels) {
    let mut problem = Problem::new(100, 100, (4, 2), (16, 24), Band { lo: -9, hi: 30 });
    problem.score.softcap = Some(2.0);
    problem.score.relative = Some(RelativeBias::Alibi { slopes: vec![0.1; 4] });
    problem.bias_heads = 1;
    for fault in FAULTS {
        check(kernels, &problem, fault, "terms");
    }
}

pub fn one_query_does_not_read_what_it_does_not_see(kernels: &dyn Kernels) {
    let mut problem = Problem::new(1, 100, (4, 2), (16, 24), FULL);
    problem.blocks = vec![(0..100, vec![tile(0..1, 10..30, FULL), tile(0..1, 62..99, Band { lo: -20, hi: -5 })])];
    for fault in [Fault::Query(0, 1), Fault::DOut(0, 2), Fault::Key(9, 0), Fault::Key(70, 1), Fault::Value(65, 0)] {
        check(kernels, &problem, fault, "one query");
    }
}
