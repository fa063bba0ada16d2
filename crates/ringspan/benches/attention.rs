//! Speed of the attention kernels beside that of a matrix product in the same process.
//!
//! Clocks drift and machines are shared, so GFLOP/s alone say little: the table times the kernels and the product in
//! turn and prints medians and their ratio. Operations: 4 S^2 H D forward, 2.5 times that backward, half if causal.
//! `cargo bench --bench attention -- --table` prints the table alone.

use criterion::{BenchmarkId, Criterion, Throughput};
use ringspan::kernel::{HeadMap, Kernel, Partial, Score, Tile, View, delta};
use ringspan::mask::Band;
use std::hint::black_box;
use std::time::Instant;

/// Width of the square product that stands for the speed of the machine.
const PRODUCT: usize = 2048;
/// Interleaved rounds of the table.
const ROUNDS: usize = 3;

/// Self-attention of S tokens, H query heads, G key-value heads of width D.
struct Case {
    s: usize,
    h: usize,
    g: usize,
    d: usize,
    causal: bool,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_out: Vec<f32>,
}

impl Case {
    fn new((s, h, g, d): (usize, usize, usize, usize), causal: bool) -> Self {
        let values = |heads, seed| random(s * heads * d, seed);
        Self { s, h, g, d, causal, q: values(h, 1), k: values(g, 2), v: values(g, 3), d_out: values(h, 4) }
    }

    fn name(&self) -> String {
        let Self { s, h, g, d, .. } = self;
        format!("S={s} H={h} G={g} D={d} {}", if self.causal { "causal" } else { "full" })
    }

    /// Operations of the forward pass.
    fn operations(&self) -> f64 {
        let full = 4.0 * (self.s * self.s) as f64 * (self.h * self.d) as f64;
        if self.causal { full / 2.0 } else { full }
    }

    fn tiles(&self) -> [Tile; 1] {
        let lo = if self.causal { 0 } else { i64::MIN };
        [Tile { q: 0..self.s, k: 0..self.s, band: Band { lo, hi: i64::MAX } }]
    }

    fn views(&self) -> (View<'_>, View<'_>, View<'_>, View<'_>, HeadMap, Score) {
        let view = |data, heads| View::new(data, self.s, heads, self.d).expect("made of this size");
        let map = HeadMap::grouped(self.h, self.g).expect("G divides H");
        let score = Score { scale: 1.0 / (self.d as f32).sqrt() };
        (view(&self.q, self.h), view(&self.k, self.g), view(&self.v, self.g), view(&self.d_out, self.h), map, score)
    }

    fn forward(&self, kernel: &Kernel, partial: &mut Partial) {
        let (q, k, v, _, map, score) = self.views();
        partial.max.fill(f32::NEG_INFINITY);
        kernel.forward(q, k, v, &map, &self.tiles(), &score, partial);
    }

    /// Log-sum-exp and delta, which the backward pass starts from.
    fn saved(&self, kernel: &Kernel) -> (Vec<f32>, Vec<f32>) {
        let mut partial = Partial::new(self.s, self.h, self.d);
        self.forward(kernel, &mut partial);
        let (out, lse) = partial.finish(self.s, self.h, self.d);
        (lse, delta(&out, self.views().3))
    }

    fn backward(&self, kernel: &Kernel, (lse, delta): &(Vec<f32>, Vec<f32>), sums: &mut [Vec<f32>; 3]) {
        let (q, k, v, d_out, map, score) = self.views();
        let [dq, dk, dv] = sums;
        kernel.backward(q, k, v, &map, &self.tiles(), &score, lse, delta, d_out, dq, dk, dv);
    }

    fn sums(&self) -> [Vec<f32>; 3] {
        // Not zero, so that the pages exist before they are timed.
        [vec![1.0; self.q.len()], vec![1.0; self.k.len()], vec![1.0; self.v.len()]]
    }
}

/// The square matrix product.
struct Product([Vec<f32>; 3]);

impl Product {
    fn new() -> Self {
        let n = PRODUCT * PRODUCT;
        Self([random(n, 5), random(n, 6), vec![0.0; n]])
    }

    fn run(&mut self, threads: usize) {
        let [a, b, c] = &mut self.0;
        let (n, row) = (PRODUCT, PRODUCT as isize);
        let threads = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        // SAFETY: three matrices of n x n elements, rows n apart.
        unsafe {
            gemm::gemm(n, n, n, c, 1, row, false, a, 1, row, b, 1, row, 0.0, 1.0, false, false, false, threads);
        }
    }
}

fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

fn cases() -> impl Iterator<Item = Case> {
    let shapes = [(4096, 16, 16, 64), (8192, 16, 4, 128)];
    shapes.into_iter().flat_map(|shape| [false, true].map(|causal| Case::new(shape, causal)))
}

/// 10^9 operations a second, of something timed now.
fn speed(operations: f64, work: impl FnOnce()) -> f64 {
    let start = Instant::now();
    work();
    operations / start.elapsed().as_secs_f64() / 1e9
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn table() {
    println!(
        "{:?}; GFLOP/s, medians of {ROUNDS} interleaved rounds; ratios to gemm, round by round",
        Kernel::new(1).isa()
    );
    println!("{:34} threads {:>8} {:>6} {:>9} {:>6} {:>8}", "", "forward", "ratio", "backward", "ratio", "gemm");
    let mut product = Product::new();
    for case in cases() {
        for threads in [1, 2] {
            let kernel = Kernel::new(threads);
            let mut partial = Partial::new(case.s, case.h, case.d);
            let (saved, mut sums) = (case.saved(&kernel), case.sums());
            let mut rounds = Vec::new();
            for _ in 0..ROUNDS {
                let gemm = speed(2.0 * (PRODUCT as f64).powi(3), || product.run(threads));
                let forward = speed(case.operations(), || case.forward(&kernel, &mut partial));
                let backward = speed(2.5 * case.operations(), || case.backward(&kernel, &saved, &mut sums));
                rounds.push([forward, forward / gemm, backward, backward / gemm, gemm]);
            }
            let [forward, f, backward, b, gemm] =
                std::array::from_fn(|i| median(rounds.iter().map(|r| r[i]).collect()));
            println!("{:34} {threads:7} {forward:8.1} {f:6.2} {backward:9.1} {b:6.2} {gemm:8.1}", case.name());
        }
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(10);
    for case in cases() {
        for threads in [1, 2] {
            let kernel = Kernel::new(threads);
            let id = |pass| BenchmarkId::new(format!("{pass}, {threads} threads"), case.name());
            // Criterion's elements per second are operations per second.
            group.throughput(Throughput::Elements(case.operations() as u64));
            let mut partial = Partial::new(case.s, case.h, case.d);
            group.bench_function(id("forward"), |b| b.iter(|| case.forward(black_box(&kernel), &mut partial)));
            group.throughput(Throughput::Elements((2.5 * case.operations()) as u64));
            let (saved, mut sums) = (case.saved(&kernel), case.sums());
            group.bench_function(id("backward"), |b| b.iter(|| case.backward(black_box(&kernel), &saved, &mut sums)));
        }
    }
    group.finish();
}

fn main() {
    let given = |name: &str| std::env::args().any(|argument| argument == name);
    // As a test (`cargo test --benches`) everything runs once, and the table would take minutes.
    if !given("--test") {
        table();
    }
    if !given("--table") {
        let mut criterion = Criterion::default().configure_from_args();
        bench(&mut criterion);
        criterion.final_summary();
    }
}
