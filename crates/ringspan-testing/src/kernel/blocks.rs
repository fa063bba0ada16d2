//! Checks of shapes, bands, tiles and key blocks.

use super::*;
use proptest::prelude::{ProptestConfig, prop, proptest};

pub fn head_widths_need_not_fit_the_vectors(kernels: &dyn Kernels) {
    for dims in [(8, 8), (16, 16), (33, 33), (64, 64), (80, 80), (128, 128), (24, 40), (80, 33), (192, 128), (1, 3)] {
        Problem::new(61, 139, (2, 1), dims, CAUSAL).check(kernels, &format!("widths {dims:?}"));
    }
}

pub fn lengths_need_not_fit_the_blocks(kernels: &dyn Kernels) {
    for (queries, keys) in [(1, 1), (1, 300), (300, 1), (47, 127), (48, 128), (49, 129), (97, 250), (7, 5), (145, 385)]
    {
        for band in [FULL, CAUSAL, Band { lo: queries as i64 - keys as i64, hi: i64::MAX }] {
            Problem::new(queries, keys, (1, 1), (16, 16), band)
                .check(kernels, &format!("{queries} x {keys}, {band:?}"));
        }
    }
}

pub fn nothing_to_compute_changes_nothing(kernels: &dyn Kernels) {
    for (queries, keys) in [(0, 5), (5, 0), (0, 0)] {
        Problem::new(queries, keys, (2, 1), (16, 16), FULL).check(kernels, &format!("{queries} x {keys}"));
    }
    let mut none = Problem::new(50, 50, (2, 1), (16, 16), FULL);
    none.blocks[0].1.clear();
    none.check(kernels, "no tiles");
    Problem::new(50, 50, (2, 1), (16, 16), Band { lo: 50, hi: 90 }).check(kernels, "a band beside the tile");
}

pub fn windows_and_shifts_leave_empty_rows_at_zero(kernels: &dyn Kernels) {
    for band in [
        Band { lo: 0, hi: 5 },
        Band { lo: -3, hi: 60 },
        Band { lo: 20, hi: 20 },
        Band { lo: 150, hi: 400 },
        Band { lo: -400, hi: -90 },
    ] {
        Problem::new(260, 200, (2, 2), (16, 24), band).check(kernels, &format!("{band:?}"));
    }
}

pub fn query_heads_share_keys_in_groups_of_any_size(kernels: &dyn Kernels) {
    Problem::new(100, 100, (8, 1), (16, 16), CAUSAL).check(kernels, "8 to 1");
    Problem::new(100, 100, (6, 3), (16, 16), CAUSAL).check(kernels, "2 to 1");
    let unequal = Problem::new(100, 100, (6, 3), (16, 16), CAUSAL);
    Problem { kv_of: vec![0, 1, 1, 1, 2, 2], ..unequal }.check(kernels, "1, 3, 2 to 1");
    let unread = Problem::new(100, 100, (6, 3), (16, 16), CAUSAL);
    Problem { kv_of: vec![0, 0, 0, 0, 2, 2], ..unread }.check(kernels, "a key head that nobody reads");
}

pub fn tiles_may_come_in_any_order_and_number(kernels: &dyn Kernels) {
    let documents = vec![
        tile(90..130, 80..120, CAUSAL),
        tile(0..37, 0..37, CAUSAL),
        tile(39..90, 39..80, Band { lo: -4, hi: 11 }),
        tile(90..130, 10..30, FULL),
        tile(37..38, 120..121, FULL),
        tile(5..5, 3..9, FULL),
    ];
    let mut problem = Problem::new(140, 150, (4, 2), (32, 16), FULL);
    problem.blocks = vec![(0..150, documents)];
    problem.check(kernels, "documents");
    let single = (0..60).map(|i| tile(i..i + 1, 59 - i..60 - i, FULL)).collect();
    let mut problem = Problem::new(60, 60, (2, 1), (16, 16), FULL);
    problem.blocks = vec![(0..60, single)];
    problem.check(kernels, "tiles of one pair");
}

pub fn key_blocks_accumulate_in_any_order(kernels: &dyn Kernels) {
    let mut problem = Problem::new(200, 300, (4, 2), (24, 24), FULL);
    problem.blocks = vec![
        (200..300, vec![tile(0..200, 0..100, Band { lo: 10, hi: i64::MAX })]),
        (0..0, vec![]),
        (0..90, vec![tile(0..100, 0..90, CAUSAL), tile(100..150, 0..45, FULL)]),
        (90..200, vec![tile(20..200, 5..90, Band { lo: -9, hi: 70 })]),
    ];
    problem.check(kernels, "blocks");
}

pub fn more_queries_than_a_segment(kernels: &dyn Kernels) {
    Problem::new(4300, 50, (2, 1), (8, 8), Band { lo: -20, hi: 4100 }).check(kernels, "two segments");
}

/// The CPU packs a segment of wide keys at a time, and the last heads into the memory of the first ones.
pub fn more_keys_than_a_segment(kernels: &dyn Kernels) {
    let band = Band { lo: 20 - 4700, hi: i64::MAX };
    let problem = Problem::new(20, 4700, (5, 5), (352, 352), band);
    problem.check(kernels, "three segments");
    let mut problem = Problem { storage: Storage::Bf16, ..problem };
    problem.blocks[0].1 = vec![
        tile(0..9, 2000..2100, FULL),
        tile(3..20, 4500..4600, Band { lo: -70, hi: 9 }),
        tile(12..15, 0..50, CAUSAL),
    ];
    problem.check(kernels, "queries that see nothing of some segments");
}

pub fn scores_far_apart_stay_finite(kernels: &dyn Kernels) {
    let problem = Problem::new(70, 150, (2, 1), (16, 16), CAUSAL);
    let mut values = problem.values();
    values.q.iter_mut().for_each(|x| *x *= 300.0);
    let wanted = problem.wanted(&values);
    for kernel in kernels.all(&[1]) {
        let got = problem.computed(&kernel, &values);
        // Scores of several hundred have an absolute error of 1e-5, and so have their exponentials.
        wanted.compare(&got, 2e-4, &format!("{kernel:?}"));
    }
}

/// Every key occurs twice. Its two weights are half of a single key's weight if both passes compute the same score.
pub fn keys_that_tie_at_any_score_share_the_weight(kernels: &dyn Kernels) {
    for (storage, power, bias) in [Storage::F32, Storage::Bf16, Storage::F16]
        .into_iter()
        .flat_map(|storage| [(storage, 10, 0.0), (storage, 31, 0.0), (storage, 31, -1e4), (storage, 0, f32::MIN)])
        .filter(|(storage, power, bias)| *storage != Storage::F16 || (*power <= 10 && *bias == 0.0))
    {
        let mut problem = Problem::new(70, 150, (4, 2), (16, 16), FULL);
        (problem.storage, problem.bias_heads) = (storage, usize::from(bias != 0.0));
        let mut values = problem.values();
        values.q.iter_mut().for_each(|x| *x *= (1u64 << power) as f32);
        values.k.copy_within(..75 * 32, 75 * 32);
        values.bias.fill(if storage == Storage::Bf16 {
            bf16::from_f32(bias.max(bf16::MIN.to_f32())).to_f32()
        } else {
            bias
        });
        let wanted = problem.wanted(&values);
        for kernel in problem.kernels(kernels, &[1]) {
            let got = problem.computed(&kernel, &values);
            let bound = if problem.rounds(&kernel) { 8e-3 } else { 5e-5 };
            let mut relative = got.clone();
            // Gradients of keys and log-sum-exps are compared relative to the size of the queries.
            let size = (1u64 << power) as f32;
            let mut wanted = wanted.clone();
            for x in wanted.dk.iter_mut().chain(&mut relative.dk).chain(&mut wanted.lse).chain(&mut relative.lse) {
                *x /= size;
            }
            wanted.compare(&relative, bound, &format!("{kernel:?}, {storage:?}, 2^{power}, a bias of {bias:e}"));
        }
    }
}

pub fn rows_that_nobody_sees_may_hold_anything(kernels: &dyn Kernels) {
    let mut problem = Problem::new(60, 90, (2, 1), (16, 16), FULL);
    problem.blocks = vec![(0..90, vec![tile(3..50, 5..71, FULL)])];
    let mut values = problem.values();
    let spoil = |x: &mut [f32], width: usize, seen: Range<usize>| {
        for (row, x) in x.chunks_exact_mut(width).enumerate() {
            if !seen.contains(&row) {
                x.fill(f32::NAN);
            }
        }
    };
    spoil(&mut values.q, 32, 3..50);
    spoil(&mut values.k, 16, 5..71);
    spoil(&mut values.v, 16, 5..71);
    let clean = problem.values();
    let wanted = problem.wanted(&clean);
    for kernel in kernels.all(&[2]) {
        wanted.compare(&problem.computed(&kernel, &values), 2e-6, &format!("{kernel:?}"));
    }
}

pub fn one_query_over_a_cache(kernels: &dyn Kernels) {
    for problem in queries_over_a_cache() {
        let values = problem.values();
        let wanted = problem.wanted(&values);
        for kernel in kernels.all(&[1, 2, 3]) {
            wanted.compare(&problem.computed(&kernel, &values), 5e-6, &format!("{kernel:?}"));
        }
    }
}

/// One query over several ranges of many keys, as in a step of decoding.
pub fn queries_over_a_cache() -> [Problem; 4] {
    [(8, 1, (64, 64)), (6, 2, (80, 33)), (4, 4, (128, 16)), (4, 1, (256, 250))].map(|(heads, kv_heads, dims)| {
        let mut problem = Problem::new(1, 5000, (heads, kv_heads), dims, FULL);
        let visible = [7..8, 4000..4999, 20..3333, 9..9];
        problem.blocks = vec![(0..5000, visible.map(|keys| tile(0..1, keys, FULL)).to_vec())];
        problem
    })
}

pub fn any_bands_and_tiles_give_the_reference(kernels: &dyn Kernels) {
    let strategy = (
        (1usize..150, 1usize..200),
        (0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0),
        prop::array::uniform4((-160i64..160, 0i64..260)),
        (1usize..3, 1usize..4),
        (1usize..40, 1usize..40),
    );
    proptest!(ProptestConfig::with_cases(40), |(((queries, keys), cuts, bands, (kv_heads, group), dims) in strategy)| {
        // Four tiles around a cross of rows and columns, in two key blocks.
        let at = |part: f64, of: usize| (part * of as f64) as usize;
        let (row, column, split) = (at(cuts.0, queries), at(cuts.1, keys), at(cuts.2, keys));
        let mut problem = Problem::new(queries, keys, (kv_heads * group, kv_heads), dims, FULL);
        let band = |i: usize| Band { lo: bands[i].0, hi: bands[i].0 + bands[i].1 };
        let tiles = |rows: &Range<usize>, first: usize| {
            let middle = column.clamp(rows.start, rows.end) - rows.start;
            vec![
                tile(0..row, 0..middle, band(first)),
                tile(row..queries, middle..rows.len(), band(first + 1)),
            ]
        };
        let parts = [0..split, split..keys];
        problem.blocks = vec![(parts[1].clone(), tiles(&parts[1], 0)), (parts[0].clone(), tiles(&parts[0], 2))];
        problem.check(kernels, "tiles");
    });
}

pub fn where_one_key_has_all_the_weight_its_gradients_are_exactly_zero(kernels: &dyn Kernels) {
    for dims in [(16, 16), (64, 64), (33, 20), (128, 128)] {
        // Every query sees only the key at its own position.
        let problem = Problem::new(70, 70, (4, 2), dims, Band { lo: 0, hi: 0 });
        let values = problem.values();
        for kernel in kernels.all(&[2]) {
            let got = problem.computed(&kernel, &values);
            assert!(got.dq.iter().chain(&got.dk).all(|x| *x == 0.0), "{kernel:?}, widths {dims:?}");
        }
    }
}

pub fn delta_is_by_head_then_token(kernels: &dyn Kernels) {
    let out: Vec<f32> = (0..2 * 2 * 11).map(|x| x as f32).collect();
    let ones = vec![1.0; out.len()];
    let view = |data| View::new(data, 2, 2, 11).expect("its size");
    let sum = |row: usize| (row * 11..row * 11 + 11).sum::<usize>() as f32;
    for kernel in kernels.all(&[1]) {
        assert_eq!(kernel.delta(view(&out), view(&ones)), Ok(vec![sum(0), sum(2), sum(1), sum(3)]));
    }
}
