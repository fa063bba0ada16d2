//! Measures the cost of starting and joining a kernel's threads in short calls.
//!
//! `cargo bench --bench short_calls` alternately times a kernel with two threads, and two kernels with one thread that have
//! half of the heads each and never wait for each other: these show the most that two threads of this machine can do. The
//! last column is the share of it that the kernel with two threads reaches, and its range. `isa=avx2` chooses the
//! instruction set, `rounds=9` how often each is timed.

use ringspan::kernel::{HeadMap, Inputs, Isa, Kernel, OnlineSoftmax, Score, Tile, TilePosition, View};
use ringspan::mask::Band;
use std::sync::Barrier;
use std::time::Instant;

/// Number of heads H, the same for queries, keys and values; `DIM` is their width D.
const HEADS: usize = 16;
const DIM: usize = 64;
/// Duration of one timing in seconds.
const LAST: f64 = 0.3;

/// Causal attention of some heads of S tokens, whose tensors have the strides of all heads.
struct Work {
    tokens: usize,
    heads: usize,
    values: Vec<f32>,
    score: Score,
    partial: OnlineSoftmax,
}

impl Work {
    fn new(tokens: usize, heads: usize) -> Self {
        let values = (0..tokens * HEADS * DIM).map(|i| (i as f32 * 0.37).sin()).collect();
        let score = Score::new(1.0 / (DIM as f32).sqrt());
        Self { tokens, heads, values, score, partial: OnlineSoftmax::new(tokens, heads, DIM) }
    }

    fn run(&mut self, kernel: &Kernel) {
        let Self { tokens, heads, values, score, partial } = self;
        let all = View::new(values, *tokens, HEADS, DIM).expect("made of this size");
        let view = View { heads: *heads, ..all };
        let map = HeadMap::grouped(*heads, *heads).expect("as many of both");
        let inputs = Inputs { q: view, k: view, v: view, heads: &map, score, bias: None };
        let tile =
            Tile { q: 0..*tokens, k: 0..*tokens, band: Band { lo: 0, hi: i64::MAX }, position: TilePosition::START };
        partial.max.fill(f32::NEG_INFINITY);
        partial.sum.fill(0.0);
        kernel.forward(&inputs, &[tile], partial).expect("a CPU does not fail");
    }
}

/// Number of calls per second.
fn rate(kernel: &Kernel, work: &mut Work) -> f64 {
    let (start, mut calls) = (Instant::now(), 0.0);
    while start.elapsed().as_secs_f64() < LAST {
        work.run(kernel);
        calls += 1.0;
    }
    calls / start.elapsed().as_secs_f64()
}

/// Number of calls per second of two concurrent kernels that have half of the heads each.
fn rate_apart(kernels: &[Kernel; 2], halves: &mut [Work; 2]) -> f64 {
    let begin = Barrier::new(2);
    std::thread::scope(|scope| {
        let started = kernels.iter().zip(halves).map(|(kernel, half)| {
            let begin = &begin;
            scope.spawn(move || {
                begin.wait();
                rate(kernel, half)
            })
        });
        let running: Vec<_> = started.collect();
        running.into_iter().map(|thread| thread.join().expect("a CPU does not fail")).sum::<f64>() / 2.0
    })
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let given =
        |name: &str| std::env::args().find_map(|word| Some(word.strip_prefix(name)?.strip_prefix('=')?.to_owned()));
    let rounds = given("rounds").map_or(9, |rounds| rounds.parse().expect("rounds=N is a number"));
    let isas: Vec<Isa> = match given("isa") {
        Some(names) => names.split(',').map(|name| name.parse().expect("isa=NAME is an instruction set")).collect(),
        None => Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect(),
    };
    println!("calls a second of attention, H={HEADS} D={DIM}, causal, f32: medians of {rounds} interleaved rounds");
    println!("{:24} {:>10} {:>12} {:>10} {:>8}", "", "one thread", "two threads", "two apart", "share");
    for isa in &isas {
        let kernel = |threads| Kernel::with_isa(threads, *isa).unwrap_or_else(|error| panic!("{error}"));
        let [one, two] = [1, 2].map(|threads| 1e6 / rate(&kernel(threads), &mut Work::new(2, HEADS)));
        println!("{isa}: a call of two tokens takes {one:.1} us on one thread, {two:.1} us on two");
    }
    for (isa, tokens) in isas.iter().flat_map(|isa| [256, 512, 1024].map(|tokens| (*isa, tokens))) {
        let kernel = |threads| Kernel::with_isa(threads, isa).unwrap_or_else(|error| panic!("{error}"));
        let (one, two, apart) = (kernel(1), kernel(2), [kernel(1), kernel(1)]);
        let (mut whole, mut halves) = (Work::new(tokens, HEADS), [(); 2].map(|()| Work::new(tokens, HEADS / 2)));
        let mut timed = [Vec::new(), Vec::new(), Vec::new(), Vec::new()];
        for _ in 0..rounds {
            let alone = rate(&one, &mut whole);
            // The kernel is timed between two timings of the other two, so that a drift of the clock affects both.
            let before = rate_apart(&apart, &mut halves);
            let together = rate(&two, &mut whole);
            let bound = (before + rate_apart(&apart, &mut halves)) / 2.0;
            for (all, value) in timed.iter_mut().zip([alone, together, bound, together / bound]) {
                all.push(value);
            }
        }
        let range = |values: &[f64]| {
            (values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(0.0, f64::max))
        };
        let (least, most) = range(&timed[3]);
        let [alone, together, bound, share] = timed.map(median);
        let name = format!("{isa} S={tokens}");
        println!("{name:24} {alone:10.0} {together:12.0} {bound:10.0} {share:8.3} ({least:.3} to {most:.3})");
    }
}
