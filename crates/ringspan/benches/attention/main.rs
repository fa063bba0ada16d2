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

mod arguments;
mod case;
mod machine;

use arguments::{check_arguments, given, isas, threads};
use case::cases;
use criterion::{BenchmarkId, Criterion, Throughput};
use machine::{Product, machine, peak_of, speed};
use ringspan::kernel::{Kernel, OnlineSoftmax};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of interleaved rounds of the table.
const ROUNDS: usize = 3;

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
            let mut partial = OnlineSoftmax::new(case.s, case.h, case.d);
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
            let mut partial = OnlineSoftmax::new(case.s, case.h, case.d);
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
            let mut partial = OnlineSoftmax::new(case.s, case.h, case.d);
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
