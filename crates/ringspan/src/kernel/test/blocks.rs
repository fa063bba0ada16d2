//! Tests of shapes, bands, tiles and key blocks.

use super::*;
use proptest::prelude::*;

#[test]
fn head_widths_need_not_fit_the_vectors() {
    for dims in [(8, 8), (16, 16), (33, 33), (64, 64), (80, 80), (128, 128), (24, 40), (80, 33), (192, 128), (1, 3)] {
        Problem::new(61, 139, (2, 1), dims, CAUSAL).check(&format!("widths {dims:?}"));
    }
}

#[test]
fn lengths_need_not_fit_the_blocks() {
    for (queries, keys) in [(1, 1), (1, 300), (300, 1), (47, 127), (48, 128), (49, 129), (97, 250), (7, 5), (145, 385)]
    {
        for band in [FULL, CAUSAL, Band { lo: queries as i64 - keys as i64, hi: i64::MAX }] {
            Problem::new(queries, keys, (1, 1), (16, 16), band).check(&format!("{queries} x {keys}, {band:?}"));
        }
    }
}

#[test]
fn nothing_to_compute_changes_nothing() {
    for (queries, keys) in [(0, 5), (5, 0), (0, 0)] {
        Problem::new(queries, keys, (2, 1), (16, 16), FULL).check(&format!("{queries} x {keys}"));
    }
    let mut none = Problem::new(50, 50, (2, 1), (16, 16), FULL);
    none.blocks[0].1.clear();
    none.check("no tiles");
    Problem::new(50, 50, (2, 1), (16, 16), Band { lo: 50, hi: 90 }).check("a band beside the tile");
}

#[test]
fn windows_and_shifts_leave_empty_rows_at_zero() {
    for band in [
        Band { lo: 0, hi: 5 },
        Band { lo: -3, hi: 60 },
        Band { lo: 20, hi: 20 },
        Band { lo: 150, hi: 400 },
        Band { lo: -400, hi: -90 },
    ] {
        Problem::new(260, 200, (2, 2), (16, 24), band).check(&format!("{band:?}"));
    }
}

#[test]
fn query_heads_share_keys_in_groups_of_any_size() {
    Problem::new(100, 100, (8, 1), (16, 16), CAUSAL).check("8 to 1");
    Problem::new(100, 100, (6, 3), (16, 16), CAUSAL).check("2 to 1");
    let unequal = Problem::new(100, 100, (6, 3), (16, 16), CAUSAL);
    Problem { kv_of: vec![0, 1, 1, 1, 2, 2], ..unequal }.check("1, 3, 2 to 1");
    let unread = Problem::new(100, 100, (6, 3), (16, 16), CAUSAL);
    Problem { kv_of: vec![0, 0, 0, 0, 2, 2], ..unread }.check("a key head that nobody reads");
}

#[test]
fn tiles_may_come_in_any_order_and_number() {
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
    problem.check("documents");
    let single = (0..60).map(|i| tile(i..i + 1, 59 - i..60 - i, FULL)).collect();
    let mut problem = Problem::new(60, 60, (2, 1), (16, 16), FULL);
    problem.blocks = vec![(0..60, single)];
    problem.check("tiles of one pair");
}

#[test]
fn key_blocks_accumulate_in_any_order() {
    let mut problem = Problem::new(200, 300, (4, 2), (24, 24), FULL);
    problem.blocks = vec![
        (200..300, vec![tile(0..200, 0..100, Band { lo: 10, hi: i64::MAX })]),
        (0..0, vec![]),
        (0..90, vec![tile(0..100, 0..90, CAUSAL), tile(100..150, 0..45, FULL)]),
        (90..200, vec![tile(20..200, 5..90, Band { lo: -9, hi: 70 })]),
    ];
    problem.check("blocks");
}

#[test]
fn more_queries_than_a_segment() {
    Problem::new(4300, 50, (2, 1), (8, 8), Band { lo: -20, hi: 4100 }).check("two segments");
}

#[test]
fn a_call_holds_no_more_than_it_says() {
    for (queries, keys, kv_heads) in [(100, 300, 1), (500, 100, 4), (1, 3000, 2), (1, 3000, 4), (4300, 50, 2)] {
        for bias_heads in [0, 1, 4] {
            let mut problem = Problem::new(queries, keys, (4, kv_heads), (24, 40), FULL);
            problem.bias_heads = bias_heads;
            let values = problem.values();
            let map = HeadMap::new(problem.kv_of.clone(), kv_heads).expect("heads in order");
            let inputs = Inputs {
                q: View::new(&values.q, queries, 4, 24).expect("its size"),
                k: View::new(&values.k, keys, kv_heads, 24).expect("its size"),
                v: View::new(&values.v, keys, kv_heads, 40).expect("its size"),
                heads: &map,
                score: &problem.score,
                bias: View::new(&values.bias, queries, bias_heads, keys).filter(|_| bias_heads > 0),
            };
            let tiles = &problem.blocks[0].1;
            for isa in Isa::available() {
                for threads in 1..=3 {
                    let kernel = || Kernel::with_isa(threads, isa).expect("available");
                    let (forward, both) = (kernel(), kernel());
                    forward.forward(&inputs, tiles, &mut Partial::new(queries, 4, 40)).expect("no failure");
                    problem.computed(&both, &values);
                    let mut said = forward.forward_workspace(&inputs, tiles);
                    assert!(0 < forward.held() && forward.held() <= said, "{queries}: {} of {said}", forward.held());
                    if queries == 1 {
                        let decode = kernel();
                        decode.decode(&inputs, tiles, &mut Partial::new(1, 4, 40)).expect("no failure");
                        let of_decode = decode.decode_workspace(&inputs, tiles);
                        assert!(0 < decode.held() && decode.held() <= of_decode, "{} of {of_decode}", decode.held());
                        said += of_decode;
                    }
                    let said = said + both.backward_workspace(&inputs, tiles);
                    // A larger buffer replaces one that is too small, so with one query both passes may hold less.
                    let least = if queries == 1 { 1 } else { forward.held() + 1 };
                    assert!((least..=said).contains(&both.held()), "{queries}: {} of {said}", both.held());
                }
            }
        }
    }
}

#[test]
fn progress_is_called_by_the_caller_alone() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let caller = std::thread::current().id();
    for (queries, threads) in [(500, 1), (500, 3), (1, 1)] {
        let calls = Arc::new(AtomicUsize::new(0));
        let counter = calls.clone();
        let kernel = Kernel::new(threads).with_progress(Arc::new(move || {
            assert_eq!(std::thread::current().id(), caller);
            counter.fetch_add(1, Ordering::Relaxed);
        }));
        let problem = Problem::new(queries, 3000, (4, 2), (16, 16), FULL);
        problem.computed(&kernel.with_pause(std::time::Duration::ZERO), &problem.values());
        let calls = calls.load(Ordering::Relaxed);
        assert!(calls > 0 && (threads > 1 || calls > 20), "{calls} calls");
    }
}

#[test]
fn progress_is_called_once_where_the_pause_is_longer_than_the_computation() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    let calls = Arc::new(AtomicUsize::new(0));
    let counter = calls.clone();
    let hook = move || {
        counter.fetch_add(1, Ordering::Relaxed);
    };
    let kernel = Kernel::new(1).with_pause(std::time::Duration::MAX).with_progress(Arc::new(hook));
    let problem = Problem::new(500, 3000, (4, 2), (16, 16), FULL);
    for computations in 1..=2 {
        problem.computed(&kernel, &problem.values());
        // The forward and the backward pass each call the hook once.
        assert_eq!(calls.load(Ordering::Relaxed), 2 * computations);
    }
}

#[test]
fn scores_far_apart_stay_finite() {
    let problem = Problem::new(70, 150, (2, 1), (16, 16), CAUSAL);
    let mut values = problem.values();
    values.q.iter_mut().for_each(|x| *x *= 300.0);
    let wanted = problem.wanted(&values);
    for kernel in kernels(&[1]) {
        let got = problem.computed(&kernel, &values);
        // Scores of several hundred have an absolute error of 1e-5, and so have their exponentials.
        wanted.compare(&got, 2e-4, &format!("{kernel:?}"));
    }
}

/// Every key occurs twice. Its two weights are half of a single key's weight if both passes compute the same score.
#[test]
fn keys_that_tie_at_any_score_share_the_weight() {
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
        for kernel in problem.kernels(&[1]) {
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

#[test]
fn rows_that_nobody_sees_may_hold_anything() {
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
    for kernel in kernels(&[2]) {
        wanted.compare(&problem.computed(&kernel, &values), 2e-6, &format!("{kernel:?}"));
    }
}

#[test]
fn one_query_over_a_cache_has_the_same_bits_with_any_threads() {
    for (heads, kv_heads, dims) in [(8, 1, (64, 64)), (6, 2, (80, 33)), (4, 4, (128, 16))] {
        let mut problem = Problem::new(1, 5000, (heads, kv_heads), dims, FULL);
        let visible = [7..8, 4000..4999, 20..3333, 9..9];
        problem.blocks = vec![(0..5000, visible.iter().map(|k| tile(0..1, k.clone(), FULL)).collect())];
        let values = problem.values();
        let wanted = problem.wanted(&values);
        for isa in Isa::available() {
            let answers: Vec<Answer> = (1..=3)
                .map(|threads| problem.computed(&Kernel::with_isa(threads, isa).expect("available"), &values))
                .collect();
            for answer in &answers {
                let results =
                    |answer: &Answer| [&answer.out, &answer.lse, &answer.decoded, &answer.decoded_lse].map(Vec::clone);
                assert_eq!(results(&answers[0]), results(answer), "{isa:?}");
                wanted.compare(answer, 5e-6, &format!("{isa:?}"));
            }
        }
        if let Some(gpu) = gpu() {
            wanted.compare(&problem.computed(&gpu, &values), 5e-6, &format!("{gpu:?}"));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn any_bands_and_tiles_give_the_reference(
        (queries, keys) in (1usize..150, 1usize..200),
        cuts in (0.0f64..1.0, 0.0f64..1.0, 0.0f64..1.0),
        bands in prop::array::uniform4((-160i64..160, 0i64..260)),
        (kv_heads, group) in (1usize..3, 1usize..4),
        dims in (1usize..40, 1usize..40),
    ) {
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
        problem.check("tiles");
    }
}

#[test]
fn where_one_key_has_all_the_weight_its_gradients_are_exactly_zero() {
    for dims in [(16, 16), (64, 64), (33, 20), (128, 128)] {
        // Every query sees only the key at its own position.
        let problem = Problem::new(70, 70, (4, 2), dims, Band { lo: 0, hi: 0 });
        let values = problem.values();
        for kernel in kernels(&[2]) {
            let got = problem.computed(&kernel, &values);
            assert!(got.dq.iter().chain(&got.dk).all(|x| *x == 0.0), "{kernel:?}, widths {dims:?}");
        }
    }
}

#[test]
fn delta_is_by_head_then_token() {
    let out: Vec<f32> = (0..2 * 2 * 11).map(|x| x as f32).collect();
    let ones = vec![1.0; out.len()];
    let view = |data| View::new(data, 2, 2, 11).expect("its size");
    let sum = |row: usize| (row * 11..row * 11 + 11).sum::<usize>() as f32;
    for kernel in kernels(&[1]) {
        assert_eq!(kernel.delta(view(&out), view(&ones)), Ok(vec![sum(0), sum(2), sum(1), sum(3)]));
    }
}
