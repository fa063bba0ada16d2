//! Measures the speed of the attention kernels and compares it with a matrix product in the same process.
//!
//! Clock rates drift and machines are shared, so GFLOP/s alone say little: the table times the kernels and the product
//! alternately and prints medians of the rounds and of their ratios. Operations: 4 S^2 H D forward, 2.5 times that
//! backward, half of it if causal.
//!
//! `cargo bench --bench attention -- --table` prints the table alone. Arguments like `case=a`, `mask=causal`, `type=bf16`
//! and `threads=1` choose rows; `rounds=9` sets how often each is timed; `isa=avx2,portable` times other instruction sets
//! than the fastest, with their own FMA peak; `score=softcap`, `alibi`, `buckets` or `dropout` adds this to the scores.
//! `--hook` instead times the cost of calls between tiles, with which kernels advance transfers. With `threads=1
//! clock=cpu`, processor time is measured, which is useful if other processes compute too.

use criterion::{BenchmarkId, Criterion, Throughput};
use half::{bf16, f16};
use ringspan::kernel::{
    Buckets, Data, Dropout, FloatsMut, HeadMap, Inputs, Isa, Kernel, Partial, Relative, Saved, Score, Statistics, Sums,
    Tile, TilePosition, View,
};
use ringspan::mask::Band;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Width of the square matrix product that represents the speed of the machine.
const PRODUCT: usize = 2048;
/// Number of interleaved rounds of the table.
const ROUNDS: usize = 3;
/// Minimum duration of one timing in seconds.
const LEAST: f64 = 0.15;

/// Tokens S, query heads H, key-value heads G, and head width D.
type Shape = (usize, usize, usize, usize);

const SHAPES: [(&str, Shape); 8] = [
    ("a", (4096, 16, 16, 64)),
    ("b", (8192, 16, 4, 128)),
    ("c", (16384, 8, 2, 128)),
    ("d", (1024, 16, 16, 64)),
    ("e", (1024, 16, 4, 128)),
    ("f", (4096, 16, 4, 128)),
    ("g", (256, 16, 16, 64)),
    ("h", (512, 16, 16, 64)),
];

/// Self-attention of S tokens, H query heads, G key-value heads of width D.
struct Case {
    name: String,
    s: usize,
    h: usize,
    g: usize,
    d: usize,
    causal: bool,
    kind: &'static str,
    /// q, k and v.
    values: [Vec<f32>; 3],
    bf16: [Vec<bf16>; 3],
    f16: [Vec<f16>; 3],
    d_out: Vec<f32>,
}

impl Case {
    fn new(name: &str, (s, h, g, d): Shape, causal: bool, kind: &'static str) -> Self {
        let mask = if causal { "causal" } else { "full" };
        let name = format!("{name} S={s} H={h} G={g} D={d} {mask} {kind}");
        let values = [(h, 1), (g, 2), (g, 3)].map(|(heads, seed)| random(s * heads * d, seed));
        let bf16 = values.each_ref().map(|x| x.iter().map(|x| bf16::from_f32(*x)).collect());
        let f16 = values.each_ref().map(|x| x.iter().map(|x| f16::from_f32(*x)).collect());
        Self { name, s, h, g, d, causal, kind, values, bf16, f16, d_out: random(s * h * d, 4) }
    }

    /// Number of operations in the forward pass.
    fn operations(&self) -> f64 {
        let full = 4.0 * (self.s * self.s) as f64 * (self.h * self.d) as f64;
        if self.causal { full / 2.0 } else { full }
    }

    fn tiles(&self) -> [Tile; 1] {
        let lo = if self.causal { 0 } else { i64::MIN };
        [Tile { q: 0..self.s, k: 0..self.s, band: Band { lo, hi: i64::MAX }, position: TilePosition::START }]
    }

    /// Calls `work` with the inputs of the kernels.
    fn with(&self, work: impl FnOnce(&Inputs)) {
        let view = |at: usize, heads| {
            let data = match self.kind {
                "bf16" => Data::Bf16(&self.bf16[at]),
                "f16" => Data::F16(&self.f16[at]),
                _ => Data::F32(&self.values[at]),
            };
            View::stored(data, self.s, heads, self.d).expect("made of this size")
        };
        let heads = &HeadMap::grouped(self.h, self.g).expect("G divides H");
        let score = &score(self.h, self.d);
        work(&Inputs { q: view(0, self.h), k: view(1, self.g), v: view(2, self.g), heads, score, bias: None });
    }

    fn d_out(&self) -> View<'_> {
        View::new(&self.d_out, self.s, self.h, self.d).expect("made of this size")
    }

    fn forward(&self, kernel: &Kernel, partial: &mut Partial) {
        partial.max.fill(f32::NEG_INFINITY);
        partial.sum.fill(0.0);
        self.with(|inputs| kernel.forward(inputs, &self.tiles(), partial).expect("a CPU does not fail"));
    }

    /// Softmax statistics and delta, which the backward pass needs.
    fn saved(&self, kernel: &Kernel) -> (Statistics, Vec<f32>) {
        let mut partial = Partial::new(self.s, self.h, self.d);
        self.forward(kernel, &mut partial);
        let (out, statistics) = partial.finish(self.s, self.h, self.d, None);
        (
            statistics,
            kernel
                .delta(View::new(&out, self.s, self.h, self.d).expect("its size"), self.d_out())
                .expect("a CPU does not fail"),
        )
    }

    fn backward(&self, kernel: &Kernel, (statistics, delta): &(Statistics, Vec<f32>), sums: &mut [Vec<f32>; 3]) {
        let [dq, dk, dv] = sums;
        let mut d_table = vec![0.0; score(self.h, self.d).table_len()];
        let (dq, dk, dv, d_table) = (dq.into(), dk.into(), dv.into(), (&mut d_table).into());
        let mut sums = Sums { dq, dk, dv, d_table, d_bias: FloatsMut::Host(&mut []) };
        let saved = Saved { statistics: statistics.data(), delta: Data::F32(delta), d_out: self.d_out() };
        self.with(|inputs| kernel.backward(inputs, &self.tiles(), &saved, &mut sums).expect("a CPU does not fail"));
    }

    fn sums(&self) -> [Vec<f32>; 3] {
        // The sums are not zero, so that their pages exist before they are timed.
        self.values.each_ref().map(|x| vec![1.0; x.len()])
    }
}

/// Scaled products, with the terms that `score=` adds.
fn score(heads: usize, dim: usize) -> Score {
    let plain = Score::new(1.0 / (dim as f32).sqrt());
    match given("score").as_deref() {
        Some("softcap") => Score { softcap: Some(20.0), ..plain },
        Some("alibi") => Score { relative: Some(Relative::Alibi { slopes: vec![0.01; heads] }), ..plain },
        Some("dropout") => {
            Score { dropout: Some(Dropout { rate: 0.1, seed: 1, first_head: 0, first_query: 0 }), ..plain }
        }
        Some("buckets") => {
            let (count, max_distance) = (32, 128);
            let table = random(heads * count, 6);
            let buckets = Buckets { table, count, max_distance, bidirectional: false };
            Score { relative: Some(Relative::Buckets(buckets)), ..plain }
        }
        _ => plain,
    }
}

/// The square matrix product for comparison.
struct Product([Vec<f32>; 3]);

impl Product {
    const OPERATIONS: f64 = 2.0 * (PRODUCT * PRODUCT * PRODUCT) as f64;

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

/// Does fused multiply-adds in registers, the fastest that a core can do with an instruction set: `rounds` of a dozen
/// vectors or more. Returns the number of operations in a round.
#[cfg(target_arch = "x86_64")]
fn peak(isa: Isa, rounds: usize) -> f64 {
    use std::arch::x86_64::*;
    macro_rules! chains {
        ($name:ident, $feature:literal, $vector:ty, $count:literal, $set:ident, $fma:expr) => {
            #[target_feature(enable = $feature)]
            fn $name(rounds: usize) -> f64 {
                let (x, y) = ($set(black_box(0.999)), $set(black_box(1e-3)));
                let mut sums: [$vector; $count] = [x; $count];
                for _ in 0..rounds {
                    for sum in &mut sums {
                        *sum = $fma(*sum, x, y);
                    }
                }
                black_box(sums);
                (2 * $count * size_of::<$vector>() / size_of::<f32>()) as f64
            }
        };
    }
    chains!(wide, "avx512f", __m512, 24, _mm512_set1_ps, |a, b, c| _mm512_fmadd_ps(a, b, c));
    chains!(narrow, "avx2,fma", __m256, 12, _mm256_set1_ps, |a, b, c| _mm256_fmadd_ps(a, b, c));
    chains!(portable, "avx", __m256, 12, _mm256_set1_ps, |a, b, c| _mm256_add_ps(_mm256_mul_ps(a, b), c));
    chains!(least, "sse2", __m128, 12, _mm_set1_ps, |a, b, c| _mm_add_ps(_mm_mul_ps(a, b), c));
    match isa {
        // SAFETY: the machine has the instructions of every set that is timed.
        Isa::Avx512 => unsafe { wide(rounds) },
        // SAFETY: as above.
        Isa::Avx2 => unsafe { narrow(rounds) },
        // SAFETY: as above.
        Isa::Portable if is_x86_feature_detected!("avx") => unsafe { portable(rounds) },
        // SAFETY: SSE2 is part of the architecture.
        Isa::Portable => unsafe { least(rounds) },
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn peak(_: Isa, _: usize) -> f64 {
    f64::NAN
}

fn peak_of(isa: Isa, threads: usize) -> f64 {
    const STEPS: usize = 2_000_000;
    let operations = peak(isa, 1) * (STEPS * threads) as f64;
    speed(operations, || {
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(|| peak(isa, STEPS))));
            peak(isa, STEPS);
        });
    })
}

/// The instruction sets to be timed: those given by `isa=`, or the fastest one.
fn isas() -> Vec<Isa> {
    let Some(wanted) = given("isa") else { return vec![Isa::best()] };
    let isa = |name: &str| name.parse().unwrap_or_else(|error| panic!("isa={name}: {error}"));
    wanted.split(',').map(isa).collect()
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

/// Names of the `name=value` arguments.
const NAMES: [&str; 8] = ["case", "mask", "type", "threads", "rounds", "isa", "score", "clock"];

/// Exits if an argument would have no effect.
fn check_arguments() {
    for argument in std::env::args().skip(1).filter(|argument| !argument.starts_with('-')) {
        if let Some((name, _)) = argument.split_once('=').filter(|(name, _)| !NAMES.contains(name)) {
            eprintln!("{argument}: '{name}' is unknown: possible are {}", NAMES.join(", "));
            std::process::exit(2);
        }
    }
}

/// The value of the argument `name=value`.
fn given(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

fn chosen(name: &str, value: &str) -> bool {
    given(name).is_none_or(|wanted| wanted.split(',').any(|wanted| wanted == value))
}

fn cases() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().filter(|(name, _)| chosen("case", name)).flat_map(|(name, shape)| {
        let masks = ["full", "causal"].into_iter().filter(|mask| chosen("mask", mask));
        masks.flat_map(move |mask| {
            let kinds = ["f32", "bf16", "f16"].into_iter().filter(|kind| chosen("type", kind));
            kinds.map(move |kind| Case::new(name, shape, mask == "causal", kind))
        })
    })
}

fn threads() -> impl Iterator<Item = usize> {
    [1, 2].into_iter().filter(|threads| chosen("threads", &threads.to_string()))
}

/// Speed in 10^9 operations per second of `work`, repeated as often as the timing needs.
fn speed(operations: f64, mut work: impl FnMut()) -> f64 {
    let (start, processor, mut times) = (Instant::now(), processor_seconds(), 0.0);
    while start.elapsed().as_secs_f64() < LEAST {
        work();
        times += 1.0;
    }
    let seconds = match (processor, processor_seconds()) {
        (Some(start), Some(end)) if given("clock").as_deref() == Some("cpu") => end - start,
        _ => start.elapsed().as_secs_f64(),
    };
    times * operations / seconds / 1e9
}

/// Processor time of this thread in seconds, which excludes other threads and processes.
fn processor_seconds() -> Option<f64> {
    let spent = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(spent.split(' ').next()?.parse::<f64>().ok()? / 1e9)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn table() {
    let rounds = given("rounds").and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS);
    println!("GFLOP/s and ratios to gemm and to the FMA peak, medians of {rounds} interleaved rounds");
    println!("{}", machine());
    println!(
        "{:46} threads {:>8} {:>6} {:>6} {:>9} {:>6} {:>6} {:>8} {:>8}",
        "", "forward", "/gemm", "/peak", "backward", "/gemm", "/peak", "gemm", "peak"
    );
    let mut product = Product::new();
    for case in cases() {
        for (threads, isa) in threads().flat_map(|threads| isas().into_iter().map(move |isa| (threads, isa))) {
            let kernel = Kernel::with_isa(threads, isa).unwrap_or_else(|error| panic!("isa={isa}: {error}"));
            let mut partial = Partial::new(case.s, case.h, case.d);
            let (saved, mut sums) = (case.saved(&kernel), case.sums());
            let mut timed = Vec::new();
            for _ in 0..rounds {
                let peak = peak_of(isa, threads);
                let mut gemm = || speed(Product::OPERATIONS, || product.run(threads));
                // Each pass is timed between two products, so that a drift of the clock affects both.
                let first = gemm();
                let forward = speed(case.operations(), || case.forward(&kernel, &mut partial));
                let second = gemm();
                let backward = speed(2.5 * case.operations(), || case.backward(&kernel, &saved, &mut sums));
                let third = gemm();
                let around = [(first + second) / 2.0, (second + third) / 2.0];
                timed.push([
                    forward,
                    forward / around[0],
                    forward / peak,
                    backward,
                    backward / around[1],
                    backward / peak,
                    second,
                    peak,
                ]);
            }
            let [forward, f, fp, backward, b, bp, gemm, peak] =
                std::array::from_fn(|i| median(timed.iter().map(|r| r[i]).collect()));
            println!(
                "{:37} {:8} {threads:7} {forward:8.1} {f:6.2} {fp:6.2} {backward:9.1} {b:6.2} {bp:6.2} {gemm:8.1} {peak:8.1}",
                case.name,
                isa.to_string()
            );
        }
    }
}

/// The processor and its instruction sets, for the heading of the table.
fn machine() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = info.lines().find(|line| line.split(':').next().is_some_and(|key| key.trim() == name));
        line.and_then(|line| line.split(':').nth(1)).map_or("unknown", str::trim)
    };
    let isas = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ");
    let bf16 = if Isa::best().multiplies_bf16() { "products of bf16" } else { "no products of bf16" };
    format!("{}, family {} model {}: {isas}; {bf16}", field("model name"), field("cpu family"), field("model"))
}

/// Times kernels alternately with and without a hook between tiles that takes a microsecond.
fn hook() {
    const TAKES: Duration = Duration::from_micros(1);
    println!("{:37} threads   calls a second   time with the hook / without", "case");
    for case in cases() {
        for threads in threads() {
            let calls = Arc::new(AtomicU64::new(0));
            let counted = calls.clone();
            let hook = move || {
                counted.fetch_add(1, Ordering::Relaxed);
                let began = Instant::now();
                while began.elapsed() < TAKES {}
            };
            let (plain, hooked) = (Kernel::new(threads), Kernel::new(threads).with_progress(Arc::new(hook)));
            let mut partial = Partial::new(case.s, case.h, case.d);
            let (mut ratios, mut rates) = (Vec::new(), Vec::new());
            for _ in 0..given("rounds").and_then(|rounds| rounds.parse().ok()).unwrap_or(ROUNDS) {
                let without = speed(1.0, || case.forward(&plain, &mut partial));
                let (before, began) = (calls.load(Ordering::Relaxed), Instant::now());
                let with = speed(1.0, || case.forward(&hooked, &mut partial));
                rates.push((calls.load(Ordering::Relaxed) - before) as f64 / began.elapsed().as_secs_f64());
                ratios.push(without / with);
            }
            println!("{:37} {threads:7} {:16.0} {:30.4}", case.name, median(rates), median(ratios));
        }
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attention");
    group.sample_size(10);
    for case in cases() {
        for threads in threads() {
            let kernel = Kernel::new(threads);
            let id = |pass| BenchmarkId::new(format!("{pass}, {threads} threads"), &case.name);
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
    check_arguments();
    let given = |name: &str| std::env::args().any(|argument| argument == name);
    if given("--hook") {
        return hook();
    }
    // As a test (`cargo test --benches`) everything runs only once, and the table would take minutes.
    if !given("--test") {
        table();
    }
    if !given("--table") {
        let mut criterion = Criterion::default().configure_from_args();
        bench(&mut criterion);
        criterion.final_summary();
    }
}
