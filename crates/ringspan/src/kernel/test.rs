//! The blocked kernels against the f64 reference, on every instruction set of this machine.

use super::reference::{self, Shape};
use super::*;
use proptest::prelude::*;

/// One row of queries against keys that arrive in blocks, with the tiles of each block.
struct Problem {
    queries: usize,
    keys: usize,
    kv_of: Vec<usize>,
    kv_heads: usize,
    dim: usize,
    v_dim: usize,
    /// Key rows of a block, and its tiles in rows of that block.
    blocks: Vec<(Range<usize>, Vec<Tile>)>,
}

#[derive(Debug, PartialEq)]
struct Answer {
    out: Vec<f32>,
    lse: Vec<f32>,
    dq: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
}

struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
}

const FULL: Band = Band { lo: i64::MIN, hi: i64::MAX };
const CAUSAL: Band = Band { lo: 0, hi: i64::MAX };

impl Problem {
    /// One block and one tile, heads in equal groups.
    fn new(
        queries: usize,
        keys: usize,
        (heads, kv_heads): (usize, usize),
        (dim, v_dim): (usize, usize),
        band: Band,
    ) -> Self {
        Self {
            queries,
            keys,
            kv_of: (0..heads).map(|h| h * kv_heads / heads).collect(),
            kv_heads,
            dim,
            v_dim,
            blocks: vec![(0..keys, vec![Tile { q: 0..queries, k: 0..keys, band }])],
        }
    }

    fn sees(&self, i: usize, j: usize) -> bool {
        self.blocks.iter().any(|(rows, tiles)| {
            rows.contains(&j)
                && tiles.iter().any(|Tile { q, k, band }| {
                    let j = j - rows.start;
                    q.contains(&i) && k.contains(&j) && band.sees(i - q.start, j - k.start)
                })
        })
    }

    fn inputs(&self) -> Inputs {
        let heads = self.kv_of.len();
        Inputs {
            q: random(self.queries * heads * self.dim, 1),
            k: random(self.keys * self.kv_heads * self.dim, 2),
            v: random(self.keys * self.kv_heads * self.v_dim, 3),
            d_out: random(self.queries * heads * self.v_dim, 4),
        }
    }

    fn scale(&self) -> f32 {
        1.5 / (self.dim as f32).sqrt()
    }

    /// By the reference, which knows only groups of equal size: keys and values are repeated for every query head.
    fn wanted(&self, inputs: &Inputs) -> Answer {
        let heads = self.kv_of.len();
        let expand = |x: &[f32], dim: usize| -> Vec<f32> {
            let row = |at: usize| (at / heads) * self.kv_heads + self.kv_of[at % heads];
            (0..self.keys * heads).flat_map(|at| x[row(at) * dim..][..dim].to_vec()).collect()
        };
        let fold = |x: Vec<f64>, dim: usize| -> Vec<f32> {
            let mut sums = vec![0.0; self.keys * self.kv_heads * dim];
            for (at, x) in x.chunks_exact(dim).enumerate() {
                let row = (at / heads) * self.kv_heads + self.kv_of[at % heads];
                sums[row * dim..][..dim].iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
            }
            round(sums)
        };
        let Self { queries, keys, dim, v_dim, .. } = *self;
        let shape = Shape { batch: 1, queries, keys, heads, kv_heads: heads, dim, v_dim };
        let (k, v) = (expand(&inputs.k, dim), expand(&inputs.v, v_dim));
        let (scale, sees) = (f64::from(self.scale()), |_, i, j| self.sees(i, j));
        let (out, lse) = reference::attention(shape, &inputs.q, &k, &v, scale, &sees);
        let (dq, dk, dv) = reference::backward(shape, &inputs.q, &k, &v, scale, &sees, &inputs.d_out);
        Answer { out: round(out), lse: round(lse), dq: round(dq), dk: fold(dk, dim), dv: fold(dv, v_dim) }
    }

    fn computed(&self, kernel: &Kernel, inputs: &Inputs) -> Answer {
        let heads = self.kv_of.len();
        let map = HeadMap::new(self.kv_of.clone(), self.kv_heads).expect("heads in order");
        let score = Score { scale: self.scale() };
        let q = View::new(&inputs.q, self.queries, heads, self.dim).expect("its size");
        let d_out = View::new(&inputs.d_out, self.queries, heads, self.v_dim).expect("its size");
        let (k_width, v_width) = (self.kv_heads * self.dim, self.kv_heads * self.v_dim);
        let views = |rows: &Range<usize>| {
            let k = &inputs.k[rows.start * k_width..rows.end * k_width];
            let v = &inputs.v[rows.start * v_width..rows.end * v_width];
            let k = View::new(k, rows.len(), self.kv_heads, self.dim).expect("its size");
            (k, View::new(v, rows.len(), self.kv_heads, self.v_dim).expect("its size"))
        };
        let mut partial = Partial::new(self.queries, heads, self.v_dim);
        for (rows, tiles) in &self.blocks {
            let (k, v) = views(rows);
            kernel.forward(q, k, v, &map, tiles, &score, &mut partial);
        }
        let (out, lse) = partial.finish(self.queries, heads, self.v_dim);
        let delta = delta(&out, d_out);
        let (mut dq, mut dk) = (vec![0.0; inputs.q.len()], vec![0.0; inputs.k.len()]);
        let mut dv = vec![0.0; inputs.v.len()];
        for (rows, tiles) in &self.blocks {
            let (k, v) = views(rows);
            let (dk, dv) =
                (&mut dk[rows.start * k_width..][..k.data.len()], &mut dv[rows.start * v_width..][..v.data.len()]);
            kernel.backward(q, k, v, &map, tiles, &score, &lse, &delta, d_out, &mut dq, dk, dv);
        }
        Answer { out, lse, dq, dk, dv }
    }

    /// Every instruction set, one to three threads, against the reference.
    fn check(&self, what: &str) {
        let inputs = self.inputs();
        let wanted = self.wanted(&inputs);
        for isa in Isa::available() {
            for threads in 1..=3 {
                let kernel = Kernel::with_isa(threads, isa).expect("available");
                let got = self.computed(&kernel, &inputs);
                wanted.compare(&got, 5e-6, &format!("{what}, {isa:?}, {threads} threads"));
                // The second call meets used buffers and other timing, and has to give the same bits.
                assert_eq!(self.computed(&kernel, &inputs), got, "{what}, {isa:?}, {threads} threads, again");
            }
        }
    }
}

impl Answer {
    fn compare(&self, got: &Answer, bound: f64, what: &str) {
        let pairs = [
            ("out", &self.out, &got.out),
            ("lse", &self.lse, &got.lse),
            ("dq", &self.dq, &got.dq),
            ("dk", &self.dk, &got.dk),
            ("dv", &self.dv, &got.dv),
        ];
        for (name, wanted, got) in pairs {
            let (mut difference, mut norm) = (0.0, 0.0);
            for (wanted, got) in wanted.iter().zip(got) {
                if wanted.is_infinite() || *wanted == 0.0 && name != "dq" && name != "dk" {
                    assert_eq!(wanted, got, "{what}: {name}");
                    continue;
                }
                difference += f64::from(wanted - got).powi(2);
                norm += f64::from(*wanted).powi(2);
            }
            // Gradients that cancel to zero (one visible key: dS = P (dP - delta) = 0) are compared absolutely.
            let error = difference.sqrt() / norm.sqrt().max(0.1 * (wanted.len() as f64).sqrt()).max(1e-9);
            assert!(error <= bound, "{what}: {name} differs by {error:e}");
        }
    }
}

fn round(values: Vec<f64>) -> Vec<f32> {
    values.into_iter().map(|x| x as f32).collect()
}

/// Reproducible values in [-1, 1), by SplitMix64.
fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    };
    (0..n).map(|_| (next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0).collect()
}

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
    let tile = |q: Range<usize>, k: Range<usize>, band| Tile { q, k, band };
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
    let tile = |q: Range<usize>, k: Range<usize>, band| Tile { q, k, band };
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
        let problem = Problem::new(queries, keys, (4, kv_heads), (24, 40), FULL);
        let inputs = problem.inputs();
        let map = HeadMap::new(problem.kv_of.clone(), kv_heads).expect("heads in order");
        let q = View::new(&inputs.q, queries, 4, 24).expect("its size");
        let k = View::new(&inputs.k, keys, kv_heads, 24).expect("its size");
        let v = View::new(&inputs.v, keys, kv_heads, 40).expect("its size");
        let tiles = &problem.blocks[0].1;
        for isa in Isa::available() {
            for threads in 1..=3 {
                let kernel = || Kernel::with_isa(threads, isa).expect("available");
                let (forward, both) = (kernel(), kernel());
                let mut partial = Partial::new(queries, 4, 40);
                forward.forward(q, k, v, &map, tiles, &Score { scale: 0.2 }, &mut partial);
                problem.computed(&both, &inputs);
                let said = forward.forward_workspace(q, k, v, &map, tiles);
                assert!(0 < forward.held() && forward.held() <= said, "{queries}: {} of {said}", forward.held());
                let said = said + both.backward_workspace(q, k, v, &map, tiles);
                assert!(forward.held() < both.held() && both.held() <= said, "{queries}: {} of {said}", both.held());
            }
        }
    }
}

#[test]
fn scores_far_apart_stay_finite() {
    let problem = Problem::new(70, 150, (2, 1), (16, 16), CAUSAL);
    let mut inputs = problem.inputs();
    inputs.q.iter_mut().for_each(|x| *x *= 300.0);
    let wanted = problem.wanted(&inputs);
    for isa in Isa::available() {
        let got = problem.computed(&Kernel::with_isa(1, isa).expect("available"), &inputs);
        // Scores of hundreds have an absolute error of 1e-5, and so have their exponentials.
        wanted.compare(&got, 2e-4, &format!("{isa:?}"));
    }
}

#[test]
fn rows_that_nobody_sees_may_hold_anything() {
    let mut problem = Problem::new(60, 90, (2, 1), (16, 16), FULL);
    problem.blocks = vec![(0..90, vec![Tile { q: 3..50, k: 5..71, band: FULL }])];
    let mut inputs = problem.inputs();
    let spoil = |x: &mut [f32], width: usize, seen: Range<usize>| {
        for (row, x) in x.chunks_exact_mut(width).enumerate() {
            if !seen.contains(&row) {
                x.fill(f32::NAN);
            }
        }
    };
    spoil(&mut inputs.q, 32, 3..50);
    spoil(&mut inputs.k, 16, 5..71);
    spoil(&mut inputs.v, 16, 5..71);
    let clean = problem.inputs();
    let wanted = problem.wanted(&clean);
    for isa in Isa::available() {
        let kernel = Kernel::with_isa(2, isa).expect("available");
        wanted.compare(&problem.computed(&kernel, &inputs), 2e-6, &format!("{isa:?}"));
    }
}

#[test]
fn one_query_over_a_cache_has_the_same_bits_with_any_threads() {
    let tile = |k: Range<usize>| Tile { q: 0..1, k, band: FULL };
    for (heads, kv_heads, dims) in [(8, 1, (64, 64)), (6, 2, (80, 33)), (4, 4, (128, 16))] {
        let mut problem = Problem::new(1, 5000, (heads, kv_heads), dims, FULL);
        let visible = [7..8, 4000..4999, 20..3333, 9..9];
        problem.blocks = vec![(0..5000, visible.iter().cloned().map(tile).collect())];
        let inputs = problem.inputs();
        let wanted = problem.wanted(&inputs);
        for isa in Isa::available() {
            let answers: Vec<Partial> = (1..=3)
                .map(|threads| {
                    let kernel = Kernel::with_isa(threads, isa).expect("available");
                    let q = View::new(&inputs.q, 1, heads, dims.0).expect("its size");
                    let k = View::new(&inputs.k, 5000, kv_heads, dims.0).expect("its size");
                    let v = View::new(&inputs.v, 5000, kv_heads, dims.1).expect("its size");
                    let map = HeadMap::grouped(heads, kv_heads).expect("they divide");
                    kernel.decode(q, k, v, &map, &visible, &Score { scale: problem.scale() })
                })
                .collect();
            assert!(answers[0] == answers[1] && answers[0] == answers[2], "{isa:?}");
            let (out, lse) = answers[0].clone().finish(1, heads, dims.1);
            let got = Answer { out, lse, dq: wanted.dq.clone(), dk: wanted.dk.clone(), dv: wanted.dv.clone() };
            wanted.compare(&got, 5e-6, &format!("{isa:?}"));
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
        // Four tiles around a cross in rows and columns, in two key blocks.
        let at = |part: f64, of: usize| (part * of as f64) as usize;
        let (row, column, split) = (at(cuts.0, queries), at(cuts.1, keys), at(cuts.2, keys));
        let mut problem = Problem::new(queries, keys, (kv_heads * group, kv_heads), dims, FULL);
        let band = |i: usize| Band { lo: bands[i].0, hi: bands[i].0 + bands[i].1 };
        let tiles = |rows: &Range<usize>, first: usize| {
            let middle = column.clamp(rows.start, rows.end) - rows.start;
            vec![
                Tile { q: 0..row, k: 0..middle, band: band(first) },
                Tile { q: row..queries, k: middle..rows.len(), band: band(first + 1) },
            ]
        };
        let parts = [0..split, split..keys];
        problem.blocks = vec![(parts[1].clone(), tiles(&parts[1], 0)), (parts[0].clone(), tiles(&parts[0], 2))];
        problem.check("tiles");
    }
}
