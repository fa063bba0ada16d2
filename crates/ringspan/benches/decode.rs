//! Measures decoding, attention of one query to many cached keys, beside reading the same cache on the same threads.
//!
//! `cargo bench --bench decode` alternately times both for each storage type, over caches of several layers, so that they come from memory.
//! The last column is the share of the reading's bandwidth that decoding reaches: the median of the rounds, and its range. `tokens=16384
//! heads=4 kv_heads=1 dim=256 layers=3` are the sizes, and `sequences=1` have that many tokens each; these lie in pages of `page=64`, in
//! random order, as those of a paged cache may. `type=f32,bf16` chooses storage types, `threads=2`, `isa=avx2` and `rounds=9` the rest.

use half::bf16;
use ringspan::kernel::{Data, HeadMap, Inputs, Isa, Kernel, OnlineSoftmax, Score, Tile, TilePosition, View};
use ringspan::mask::Band;
use std::hint::black_box;
use std::time::Instant;

/// The arguments that have an effect.
const NAMES: [&str; 11] =
    ["tokens", "sequences", "heads", "kv_heads", "dim", "layers", "page", "type", "threads", "isa", "rounds"];
/// Least duration of one timing in seconds.
const LEAST: f64 = 0.2;

/// Keys or values of all tokens of a layer, `[S, G, D]`.
enum Cached {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

impl Cached {
    fn new(name: &str, elements: usize) -> Self {
        let values = (0..elements).map(|i| (i as f32 * 0.37).sin());
        match name {
            "f32" => Self::F32(values.collect()),
            "bf16" => Self::Bf16(values.map(bf16::from_f32).collect()),
            _ => panic!("type={name}: possible are f32, bf16"),
        }
    }

    fn data(&self) -> Data<'_> {
        match self {
            Self::F32(values) => Data::F32(values),
            Self::Bf16(values) => Data::Bf16(values),
        }
    }

    /// The elements as whole words of memory.
    fn words(&self) -> &[u64] {
        match self {
            Self::F32(values) => bytemuck::pod_align_to(values).1,
            Self::Bf16(values) => bytemuck::pod_align_to(values).1,
        }
    }
}

/// Seconds of one call of `work`.
fn seconds(mut work: impl FnMut()) -> f64 {
    let (start, mut calls) = (Instant::now(), 0.0);
    while start.elapsed().as_secs_f64() < LEAST {
        work();
        calls += 1.0;
    }
    start.elapsed().as_secs_f64() / calls
}

/// Reads all words, on some threads.
fn read(layers: &[[Cached; 2]], threads: usize) {
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for words in layers.iter().flatten().map(Cached::words) {
                    let part = words.len().div_ceil(threads);
                    let own = words.chunks(part).nth(thread).unwrap_or_default();
                    black_box(own.iter().fold(0, |sum: u64, word| sum ^ word));
                }
            });
        }
    });
}

/// The row of each token: pages of `page` tokens in random order.
fn paged(tokens: usize, page: usize) -> Vec<u32> {
    let mut pages: Vec<usize> = (0..tokens.div_ceil(page)).collect();
    let mut random: u64 = 1;
    for last in (1..pages.len()).rev() {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pages.swap(last, (random >> 33) as usize % (last + 1));
    }
    (0..tokens).map(|token| (pages[token / page] * page + token % page) as u32).collect()
}

fn given(name: &str) -> Option<String> {
    std::env::args().find_map(|argument| argument.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
}

fn number(name: &str, default: usize) -> usize {
    let value = |text: String| text.parse().unwrap_or_else(|error| panic!("{name}={text}: {error}"));
    given(name).map_or(default, value).max(1)
}

fn main() {
    for argument in std::env::args().skip(1) {
        if let Some((name, _)) = argument.split_once('=').filter(|(name, _)| !NAMES.contains(name)) {
            panic!("{argument}: '{name}' is unknown: possible are {}", NAMES.join(", "));
        }
    }
    let (tokens, sequences, page) = (number("tokens", 16384), number("sequences", 1), number("page", 64));
    let (heads, kv_heads, dim) = (number("heads", 4), number("kv_heads", 1), number("dim", 256));
    let (layers, threads, rounds) = (number("layers", 3), number("threads", 2), number("rounds", 9));
    let isa =
        given("isa").map_or(Isa::best(), |name| name.parse().unwrap_or_else(|error| panic!("isa={name}: {error}")));
    let kernel = Kernel::with_isa(threads, isa).unwrap_or_else(|error| panic!("isa={isa}: {error}"));
    println!(
        "{sequences} sequences of S={tokens} H={heads} G={kv_heads} D={dim}, {layers} layers, pages of {page}, {threads} threads, {isa}"
    );
    println!("{:8} {:>10} {:>10} {:>22}", "", "ms", "GB/s", "share of reading");
    let rows = paged(sequences * tokens, page);
    let elements = (sequences * tokens).next_multiple_of(page) * kv_heads * dim;
    let q: Vec<f32> = (0..sequences * heads * dim).map(|i| (i as f32 * 0.71).cos()).collect();
    let map = HeadMap::grouped(heads, kv_heads).expect("query heads are a multiple of the others");
    let score = Score::new(1.0 / (dim as f32).sqrt());
    let band = Band { lo: i64::MIN, hi: i64::MAX };
    let tile = |index: usize| {
        let k = index * tokens..(index + 1) * tokens;
        Tile { q: index..index + 1, k, band, position: TilePosition::START }
    };
    let tiles: Vec<Tile> = (0..sequences).map(tile).collect();
    for name in given("type").unwrap_or("f32,bf16".into()).split(',') {
        let cache: Vec<[Cached; 2]> = (0..layers).map(|_| [(); 2].map(|()| Cached::new(name, elements))).collect();
        let bytes: usize = cache.iter().flatten().map(|cached| size_of_val(cached.words())).sum();
        let mut partial = OnlineSoftmax::new(sequences, heads, dim);
        let mut decode = || {
            for [k, v] in &cache {
                let view = |cached| {
                    let all = View::stored(Cached::data(cached), elements / kv_heads / dim, kv_heads, dim);
                    all.expect("made of this size").with_rows(&rows)
                };
                let q = View::new(&q, sequences, heads, dim).expect("made of this size");
                let inputs = Inputs { q, k: view(k), v: view(v), heads: &map, score: &score, bias: None };
                partial.max.fill(f32::NEG_INFINITY);
                partial.sum.fill(0.0);
                kernel.decode(&inputs, &tiles, &mut partial).expect("a CPU does not fail");
            }
        };
        let mut timed: Vec<[f64; 2]> = (0..rounds)
            .map(|_| {
                let before = seconds(|| read(&cache, threads));
                let own = seconds(&mut decode);
                [own, (before + seconds(|| read(&cache, threads))) / 2.0 / own]
            })
            .collect();
        timed.sort_by(|a, b| a[1].total_cmp(&b[1]));
        let [own, share] = timed[rounds / 2];
        let (least, most) = (timed[0][1], timed[rounds - 1][1]);
        println!("{name:8} {:10.3} {:10.2} {share:8.2} ({least:.2} to {most:.2})", own * 1e3, bytes as f64 / own / 1e9);
    }
}
