//! Checks of score terms besides the mask.

use super::*;

/// A named change of a problem that adds a score term.
pub(super) type Change = (&'static str, fn(&mut Problem));

pub(super) const CHANGES: [Change; 9] = [
    ("softcap", |problem| problem.score.softcap = Some(0.7)),
    ("alibi", |problem| {
        let slopes = (0..problem.heads()).map(|head| 0.5f32.powi(head as i32 + 2)).collect();
        problem.score.relative = Some(RelativeBias::Alibi { slopes });
    }),
    ("buckets", |problem| problem.score.relative = Some(buckets(problem, 12, 40, false))),
    ("buckets of both sides", |problem| problem.score.relative = Some(buckets(problem, 16, 50, true))),
    ("sinks", |problem| problem.score.sinks = Some(random(problem.heads(), 8))),
    ("dropout", |problem| {
        problem.score.dropout = Some(Dropout { rate: 0.25, seed: 9, first_head: 3, first_query: 11 })
    }),
    ("bias", |problem| problem.bias_heads = problem.heads()),
    ("bias of all heads", |problem| problem.bias_heads = 1),
    ("negative scale", |problem| problem.score.scale *= -1.0),
];

fn buckets(problem: &Problem, count: usize, max_distance: usize, bidirectional: bool) -> RelativeBias {
    RelativeBias::Buckets(Buckets { table: random(problem.heads() * count, 7), count, max_distance, bidirectional })
}

pub fn each_term_alone(kernels: &dyn Kernels) {
    for (what, change) in CHANGES {
        for (queries, keys) in [(61, 139), (200, 90), (1, 77)] {
            let mut problem = Problem::new(queries, keys, (4, 2), (16, 24), Band { lo: -40, hi: 55 });
            change(&mut problem);
            problem.check(kernels, &format!("{what}, {queries} x {keys}"));
        }
    }
}

pub fn terms_in_pairs_over_tiles_and_key_blocks(kernels: &dyn Kernels) {
    for (at, (first, change)) in CHANGES.into_iter().enumerate() {
        for (second, further) in &CHANGES[at + 1..] {
            let mut problem = Problem::new(130, 300, (6, 2), (20, 12), FULL);
            problem.blocks = vec![
                (110..300, vec![tile(5..100, 3..60, FULL), tile(5..130, 60..190, Band { lo: -90, hi: 70 })]),
                (0..110, vec![tile(0..77, 1..110, Band { lo: -20, hi: 60 }), tile(80..130, 40..95, CAUSAL)]),
            ];
            change(&mut problem);
            further(&mut problem);
            problem.check(kernels, &format!("{first} and {second}"));
        }
    }
}

pub fn terms_count_in_tokens_of_the_row(kernels: &dyn Kernels) {
    for (what, change) in CHANGES {
        // Every third token of a row, starting at different tokens, as on a rank of a striped layout.
        let mut problem = Problem::new(75, 140, (4, 4), (16, 16), Band { lo: -60, hi: 30 });
        (problem.first, problem.step) = ((1, 2), 3);
        change(&mut problem);
        problem.check(kernels, &format!("{what}, striped"));
        let mut query = Problem::new(1, 140, (4, 2), (16, 16), Band { lo: -60, hi: 30 });
        (query.first, query.step) = ((200, 2), 3);
        change(&mut query);
        query.check(kernels, &format!("{what}, striped, one query"));
    }
}

pub fn all_terms_at_once_with_wide_heads(kernels: &dyn Kernels) {
    for dims in [(576, 512), (40, 576), (256, 256)] {
        let mut problem = Problem::new(70, 200, (4, 1), dims, CAUSAL);
        problem.check(kernels, &format!("{dims:?}, plain"));
        for (what, change) in CHANGES {
            if !matches!(what, "alibi" | "bias" | "negative scale") {
                change(&mut problem);
            }
        }
        problem.check(kernels, &format!("{dims:?}, all"));
    }
}

pub fn a_bias_may_hide_keys_and_whole_queries(kernels: &dyn Kernels) {
    let mut problem = Problem::new(60, 150, (2, 1), (16, 16), FULL);
    problem.bias_heads = 2;
    let mut values = problem.values();
    for (row, bias) in values.bias.chunks_exact_mut(150).enumerate() {
        let hidden = if row % 7 == 3 { 0..150 } else { row..row + 30 };
        bias[hidden].fill(f32::NEG_INFINITY);
    }
    let wanted = problem.wanted(&values);
    assert!(wanted.lse.contains(&f32::NEG_INFINITY) && wanted.dq.iter().all(|x| x.is_finite()));
    // The least f32, which many masks use, hides a pair as well, except from a query that sees nothing else.
    for hidden in [f32::NEG_INFINITY, f32::MIN] {
        values.bias.iter_mut().filter(|x| **x < -1e38).for_each(|x| *x = hidden);
        let wanted = problem.wanted(&values);
        for kernel in kernels.all(&[2]) {
            wanted.compare(&problem.computed(&kernel, &values), 5e-6, &format!("{kernel:?}, {hidden}"));
        }
    }
}

pub fn softcap_bounds_scores_of_any_size(kernels: &dyn Kernels) {
    for factor in [1e-4, 1.0, 300.0, 1e30] {
        let mut problem = Problem::new(70, 150, (2, 1), (16, 16), CAUSAL);
        problem.score.softcap = Some(20.0);
        let mut values = problem.values();
        values.q.iter_mut().for_each(|x| *x *= factor);
        let wanted = problem.wanted(&values);
        for kernel in kernels.all(&[1]) {
            let got = problem.computed(&kernel, &values);
            // Scores of 20 have an absolute error of 1e-6; where tanh is near 1, its slope has the same error.
            wanted.compare(&got, if factor > 1.0 { 5e-5 } else { 5e-6 }, &format!("{kernel:?}, {factor}"));
        }
    }
}
