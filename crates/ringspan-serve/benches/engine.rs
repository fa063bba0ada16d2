//! Benchmark of the engine as its clients see it, with random weights: the throughput of many streams compared with one, and the
//! time between tokens of running requests while the prompts of others are prefilled.
//!
//! Run `cargo bench -p ringspan-serve --bench engine` on an idle machine. Arguments change the settings: `ranks=2`,
//! `threads=1` (a rank), `streams=16`, `prompt=4000` (tokens of the long prompt), `clients=16` and `each=512` (prompts that come at
//! once, and their tokens), `chunk=512`, `mixed=64` (a fixed number of prompt tokens in a step that also decodes; without it, the
//! engine chooses the number).

#[path = "../tests/support/mod.rs"]
mod support;

use ringspan_serve::engine::request::{EngineClient, Event, Request, SamplingParams};
use ringspan_serve::engine::{Client, Engine, EngineOptions, KvCacheSize};
use ringspan_serve::{Mesh, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use support::{large, tokens};

fn number(key: &str) -> Option<usize> {
    std::env::args().find_map(|word| word.strip_prefix(&format!("{key}="))?.parse().ok())
}

fn greedy(prompt: Vec<u32>, max_tokens: usize) -> Request {
    Request { sampling: SamplingParams::greedy(), ..Request::new(prompt, max_tokens) }
}

/// A client that records the arrival time of each token, in seconds since the request.
struct Listener {
    leaves: Arc<AtomicBool>,
    thread: JoinHandle<Vec<f64>>,
}

impl Listener {
    /// Submits a request now.
    fn new(client: &Client, request: Request) -> Self {
        let began = Instant::now();
        let mut events = client.submit(request).expect("taken");
        let leaves = Arc::new(AtomicBool::new(false));
        let should_leave = leaves.clone();
        let listen = move || {
            let mut moments = Vec::new();
            while let Some(event) = events.blocking_recv() {
                match event {
                    Event::Token(..) => moments.push(began.elapsed().as_secs_f64()),
                    Event::Failed(problem) => panic!("{problem}"),
                    _ => {}
                }
                if should_leave.load(Ordering::Relaxed) {
                    break;
                }
            }
            moments
        };
        Self { leaves, thread: std::thread::spawn(listen) }
    }

    /// Waits for the end.
    fn finish(self) -> Vec<f64> {
        self.thread.join().expect("a client")
    }

    /// Disconnects at the next token.
    fn leave(self) -> Vec<f64> {
        self.leaves.store(true, Ordering::Relaxed);
        self.finish()
    }
}

/// A percentile: the value below which this share of the values is.
fn at_share(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[((sorted.len() - 1) as f64 * share) as usize]
}

/// Milliseconds: median, 99th of a hundred, and longest.
fn spread(seconds: &[f64]) -> String {
    let [median, late, longest] = [0.5, 0.99, 1.0].map(|share| at_share(seconds, share) * 1e3);
    format!(
        "median {median:.1} ms, p99 {late:.1} ms, longest {longest:.1} ms ({:.1} times the median)",
        longest / median
    )
}

fn gaps(moments: &[f64]) -> Vec<f64> {
    moments.windows(2).map(|pair| pair[1] - pair[0]).collect()
}

/// Weights are read once for all sequences of a step.
fn streams_together(client: &Client, streams: usize) {
    let speed = |streams: usize| {
        let began = Instant::now();
        let all: Vec<_> = (0..streams).map(|seed| Listener::new(client, greedy(tokens(2, seed as u64), 60))).collect();
        let generated: usize = all.into_iter().map(|one| one.finish().len()).sum();
        generated as f64 / began.elapsed().as_secs_f64()
    };
    speed(1);
    let (one, all) = (speed(1), speed(streams));
    println!("one stream {one:.1} tokens/s, {streams} streams {all:.1}: {:.1} times as many", all / one);
}

/// The time between the tokens of a request while the long prompt of another is read.
fn during_a_long_prompt(client: &Client, prompt: usize) {
    let began = Instant::now();
    let generates = Listener::new(client, greedy(tokens(2, 1), 100_000));
    std::thread::sleep(Duration::from_secs(2));
    let from = began.elapsed().as_secs_f64();
    let first = Listener::new(client, greedy(tokens(prompt, 2), 1)).finish()[0];
    let moments = generates.leave();
    let alone: Vec<f64> = moments.iter().copied().filter(|at| *at < from).skip(5).collect();
    let during: Vec<f64> = moments.iter().copied().filter(|at| *at >= from && *at < from + first).collect();
    println!("a prompt of {prompt} tokens is read in {first:.2} s ({:.0} tokens/s)", prompt as f64 / first);
    println!("  between others' tokens, alone: {}", spread(&gaps(&alone)));
    println!("  between others' tokens, meanwhile: {}", spread(&gaps(&during)));
}

/// Many prompts at once: when their first tokens come, and the time between tokens.
fn many_prompts(client: &Client, clients: usize, each: usize) {
    let began = Instant::now();
    let all: Vec<_> =
        (0..clients).map(|seed| Listener::new(client, greedy(tokens(each, 100 + seed as u64), 64))).collect();
    let all: Vec<Vec<f64>> = all.into_iter().map(Listener::finish).collect();
    let seconds = began.elapsed().as_secs_f64();
    let firsts: Vec<f64> = all.iter().map(|moments| moments[0]).collect();
    let between: Vec<f64> = all.iter().flat_map(|moments| gaps(moments)).collect();
    println!("{clients} clients with prompts of {each} tokens: {seconds:.2} s in all");
    println!("  first tokens: {}", spread(&firsts));
    println!("  between tokens: {}", spread(&between));
}

fn main() -> Result<()> {
    let number = |key, default| number(key).unwrap_or(default);
    let ranks = number("ranks", 1).max(1);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = number("threads", (cores / ranks).max(1));
    let (prompt, clients, each) = (number("prompt", 4000), number("clients", 16), number("each", 512));
    let longest = prompt.max(each) + 2000;
    let options = EngineOptions {
        page_size: 16,
        kv_cache: KvCacheSize::Pages((longest + clients.max(16) * (each + 64)).div_ceil(16 * ranks) + 64),
        max_model_len: Some(longest),
        prefill_chunk: number("chunk", 512),
        mixed_chunk: std::env::args().any(|word| word.starts_with("mixed=")).then(|| number("mixed", 64)),
        prefix_cache: false,
        ..EngineOptions::default()
    };
    println!("{ranks} ranks of {threads} threads, {options:?}");
    let engine = Engine::start(large(), Mesh { ring: ranks, threads, ..Mesh::single() }, &options)?;
    let client = engine.client();
    streams_together(&client, number("streams", 16).max(1));
    during_a_long_prompt(&client, prompt.max(1));
    many_prompts(&client, clients.max(1), each.max(1));
    engine.shutdown(true)
}
