//! Compares two ranks of one thread that exchange nothing with one rank of two threads. Ranks divide the work of a layer statically, each has
//! its share, and they meet after the layer; the threads of one rank divide it dynamically, and take parts as they become free. Where the
//! processors of a machine are not equally fast at every moment, as those of virtual machines with neighbours, static shares take longer.
//!
//! `cargo bench --bench static_split` alternately computes some layers in both ways, and prints the time of a pass (median, and the time that a
//! tenth of the passes do not exceed) and the speed of static shares as a multiple of that of dynamic parts: for `reading` a cache of keys and values, and for `attention` of one query to them. `tokens=16384 heads=4
//! kv_heads=1 dim=256 layers=3` are the sizes, `threads=2` the number of threads, or of ranks, and `rounds=300` the passes in each way.

use half::bf16;
use ringspan::kernel::{Data, HeadMap, Inputs, Kernel, OnlineSoftmax, Score, Tile, TilePosition, View};
use ringspan::mask::Band;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Barrier;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The arguments that have an effect.
const NAMES: [&str; 7] = ["tokens", "heads", "kv_heads", "dim", "layers", "threads", "rounds"];
/// Number of dynamic parts of a layer for each thread.
const PARTS: usize = 8;

fn number(name: &str, default: usize) -> usize {
    let given = std::env::args().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned));
    let value = |text: String| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}"));
    given.map_or(default, value).max(1)
}

/// A barrier at which threads do not sleep, as ranks after a layer.
struct SpinBarrier {
    threads: usize,
    arrived: AtomicUsize,
}

impl SpinBarrier {
    /// Waits until all threads have called this as often as the calling thread, whose calls `turn` counts.
    fn wait(&self, turn: &mut usize) {
        *turn += 1;
        self.arrived.fetch_add(1, Ordering::AcqRel);
        while self.arrived.load(Ordering::Acquire) < *turn * self.threads {
            std::thread::yield_now();
        }
    }
}

/// The keys and values of some layers, and a query with all its heads.
struct Layers {
    tokens: usize,
    kv_heads: usize,
    dim: usize,
    query: Vec<f32>,
    heads: HeadMap,
    score: Score,
    /// Keys and values `[S, G, D]` of each layer.
    cache: Vec<[Vec<bf16>; 2]>,
}

impl Layers {
    fn read(&self, layer: usize, tokens: Range<usize>) {
        let width = self.kv_heads * self.dim;
        for values in &self.cache[layer] {
            let words: &[u64] = bytemuck::pod_align_to(&values[tokens.start * width..tokens.end * width]).1;
            black_box(words.iter().fold(0, |sum: u64, word| sum ^ word));
        }
    }

    fn attend(&self, kernel: &Kernel, layer: usize, tokens: Range<usize>, state: &mut OnlineSoftmax) {
        let width = self.kv_heads * self.dim;
        let elements = tokens.start * width..tokens.end * width;
        let [k, v] = [0, 1].map(|which| {
            let values = Data::Bf16(&self.cache[layer][which][elements.clone()]);
            View::stored(values, tokens.len(), self.kv_heads, self.dim).expect("made of this size")
        });
        let q = View::new(&self.query, 1, self.heads.heads(), self.dim).expect("made of this size");
        let inputs = Inputs { q, k, v, heads: &self.heads, score: &self.score, bias: None };
        let band = Band { lo: i64::MIN, hi: i64::MAX };
        let tile = Tile { q: 0..1, k: 0..tokens.len(), band, position: TilePosition::START };
        state.max.fill(f32::NEG_INFINITY);
        state.sum.fill(0.0);
        kernel.decode(&inputs, &[tile], state).expect("a CPU does not fail");
    }
}

/// The share of a rank in so many tokens or parts.
fn share(all: usize, rank: usize, ranks: usize) -> Range<usize> {
    all * rank / ranks..all * (rank + 1) / ranks
}

/// Seconds of each pass, with static shares and with dynamic parts, of reading and of attention.
fn passes(layers: &Layers, threads: usize, rounds: usize) -> [[Vec<f64>; 2]; 2] {
    let (spinning, sleeping) = (SpinBarrier { threads, arrived: AtomicUsize::new(0) }, Barrier::new(threads));
    let all = Kernel::new(threads);
    let taken: Vec<AtomicUsize> = layers.cache.iter().map(|_| AtomicUsize::new(0)).collect();
    let of_rank = |rank: usize| {
        let own = Kernel::new(1);
        let mut state = OnlineSoftmax::new(1, layers.heads.heads(), layers.dim);
        let (mut turn, mut seconds) = (0, <[[Vec<f64>; 2]; 2]>::default());
        let tokens = share(layers.tokens, rank, threads);
        for _ in 0..rounds {
            for (kind, seconds) in seconds.iter_mut().enumerate() {
                sleeping.wait();
                spinning.wait(&mut turn);
                let began = Instant::now();
                for layer in 0..layers.cache.len() {
                    match kind {
                        0 => layers.read(layer, tokens.clone()),
                        _ => layers.attend(&own, layer, tokens.clone(), &mut state),
                    }
                    spinning.wait(&mut turn);
                }
                seconds[0].push(began.elapsed().as_secs_f64());
                taken.iter().for_each(|taken| taken.store(0, Ordering::Relaxed));
                sleeping.wait();
                let began = Instant::now();
                match (kind, rank) {
                    (0, _) => {
                        spinning.wait(&mut turn);
                        for (layer, taken) in taken.iter().enumerate() {
                            let parts = threads * PARTS;
                            let next = || Some(taken.fetch_add(1, Ordering::Relaxed)).filter(|part| *part < parts);
                            std::iter::from_fn(next)
                                .for_each(|part| layers.read(layer, share(layers.tokens, part, parts)));
                            spinning.wait(&mut turn);
                        }
                    }
                    // The others sleep meanwhile: the kernel has threads of its own.
                    (_, 0) => {
                        (0..taken.len()).for_each(|layer| layers.attend(&all, layer, 0..layers.tokens, &mut state))
                    }
                    _ => (),
                }
                seconds[1].push(began.elapsed().as_secs_f64());
                sleeping.wait();
            }
        }
        seconds
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|rank| scope.spawn(move || of_rank(rank))).collect();
        let first = of_rank(0);
        others.into_iter().for_each(|other| drop(other.join().expect("no panic")));
        first
    })
}

/// The median, and the time that a tenth of the passes do not exceed.
fn median_and_fastest(mut seconds: Vec<f64>) -> [f64; 2] {
    seconds.sort_by(f64::total_cmp);
    [seconds[seconds.len() / 2], seconds[seconds.len() / 10]]
}

fn main() {
    for argument in std::env::args().skip(1).filter(|argument| argument != "--bench") {
        let name = argument.split('=').next().unwrap_or_default();
        assert!(NAMES.contains(&name), "'{argument}' is unknown: possible are {}", NAMES.join(", "));
    }
    let (tokens, dim, threads) = (number("tokens", 16384), number("dim", 256), number("threads", 2));
    let (heads, kv_heads) = (number("heads", 4), number("kv_heads", 1));
    let values = |count: usize| (0..count).map(|i| (i as f32 * 0.37).sin());
    let of_layer = || [(); 2].map(|()| values(tokens * kv_heads * dim).map(bf16::from_f32).collect());
    let layers = Layers {
        tokens,
        kv_heads,
        dim,
        query: values(heads * dim).collect(),
        heads: HeadMap::grouped(heads, kv_heads).expect("query heads are a multiple of the others"),
        score: Score::new(1.0 / (dim as f32).sqrt()),
        cache: (0..number("layers", 3)).map(|_| of_layer()).collect(),
    };
    println!("S={tokens} H={heads} G={kv_heads} D={dim}, {} layers, bf16, {threads} threads", layers.cache.len());
    println!("{:10} {:>21} {:>21} {:>17}", "ms", "dynamic parts", "static shares", "ratio");
    for (name, [of_shares, of_parts]) in
        ["reading", "attention"].into_iter().zip(passes(&layers, threads, number("rounds", 300)))
    {
        let ([of_shares, fastest_of_shares], [of_parts, fastest_of_parts]) =
            (median_and_fastest(of_shares), median_and_fastest(of_parts));
        println!(
            "{name:10} {:9.3} ({:9.3}) {:9.3} ({:9.3}) {:8.2} ({:6.2})",
            of_parts * 1e3,
            fastest_of_parts * 1e3,
            of_shares * 1e3,
            fastest_of_shares * 1e3,
            of_parts / of_shares,
            fastest_of_parts / fastest_of_shares
        );
    }
}
