//! Exact causal attention of one head of width 64 over 1,048,576 tokens, on eight ranks of one process.
//!
//! `cargo run --release -p ringspan --example million [TOKENS]` prints time, memory and bytes of each rank, and compares 64
//! random rows with f64. With fewer tokens it takes less time: the work grows with their square.

use ringspan::attention::{self, Group, Inputs};
use ringspan::kernel::View;
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, comm::threads};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

const RANKS: usize = 8;
const DIM: usize = 64;
const CHECKED: usize = 64;
/// Seconds between two lines of progress.
const EVERY: u64 = 15;

/// Element `d` of the q (0), k (1) or v (2) of a token, in [-1, 1), which any rank can compute by itself.
fn element(which: u64, token: usize, d: usize) -> f32 {
    let mut z = ((token * DIM + d) as u64 * 3 + which).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

fn rows(which: u64, positions: &[usize]) -> Vec<f32> {
    positions.iter().flat_map(|&token| (0..DIM).map(move |d| element(which, token, d))).collect()
}

/// The output of one query, computed by plain loops in f64.
fn exactly(query: usize, scale: f32) -> Vec<f64> {
    let q: Vec<f64> = (0..DIM).map(|d| f64::from(element(0, query, d))).collect();
    let score = |key: usize| -> f64 {
        let product: f64 = q.iter().enumerate().map(|(d, q)| q * f64::from(element(1, key, d))).sum();
        f64::from(scale) * product
    };
    let scores: Vec<f64> = (0..=query).map(score).collect();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let (mut out, mut sum) = (vec![0.0; DIM], 0.0);
    for (key, score) in scores.into_iter().enumerate() {
        let p = (score - max).exp();
        sum += p;
        out.iter_mut().enumerate().for_each(|(d, out)| *out += p * f64::from(element(2, key, d)));
    }
    out.into_iter().map(|x| x / sum).collect()
}

/// The report of a rank: a line of text, and the squared error and norm of its checked rows.
struct RankReport {
    line: String,
    error: f64,
    size: f64,
}

fn main() -> Result<(), Error> {
    let tokens = match std::env::args().nth(1).map(|given| given.replace(['_', ','], "").parse::<usize>()) {
        None => 1 << 20,
        Some(Ok(tokens)) if tokens > 0 => tokens,
        Some(_) => return Err(Error::Layout("TOKENS must be a number of at least 1".into())),
    };
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, tokens), RANKS)?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (RANKS, 1))?;
    let pairs: u64 = (0..RANKS).map(|rank| schedule.pairs(rank)).sum();
    let operations = pairs as f64 * (4 * DIM) as f64;
    println!("{tokens} tokens, causal, one head of {DIM}: {:.1} TFLOP on {RANKS} ranks", operations / 1e12);

    let score = Score::new(1.0 / (DIM as f32).sqrt());
    let start = Instant::now();
    let told =
        threads::run(RANKS, threads::Options { deadline: Duration::from_secs(7200), ..Default::default() }, |comm| {
            let rank = comm.rank();
            let positions = layout.positions(rank);
            let [q, k, v] = [0, 1, 2].map(|which| rows(which, &positions));
            let mut kernel = Kernel::new(1);
            if rank == 0 {
                // The kernel calls back while it computes; the number of sent blocks tells how far the ring has come.
                let (comm, last) = (comm.clone(), AtomicU64::new(0));
                let block = (2 * positions.len() * DIM * 4).max(1) as u64;
                kernel = kernel.with_progress(Arc::new(move || {
                    let now = start.elapsed().as_secs();
                    if now >= last.load(Ordering::Relaxed) + EVERY {
                        last.store(now, Ordering::Relaxed);
                        println!(
                            "{now:>5} s: rank 0 has passed on {} of {} blocks",
                            comm.bytes_sent() / block,
                            RANKS - 1
                        );
                    }
                }));
            }
            let group = Group::new(comm.clone(), (RANKS, 1), kernel)?;
            let view = |data| View::new(data, positions.len(), 1, DIM).expect("made of this size");
            let inputs = Inputs::new(view(&q), view(&k), view(&v), &score);
            comm.barrier()?;
            let begin = Instant::now();
            let forward = attention::forward(&group, &schedule, &inputs)?;
            let seconds = begin.elapsed().as_secs_f64();

            // Rows are chosen with a stride that shares no factor with the number of tokens; each rank checks its own.
            let (mut error, mut size) = (0.0, 0.0);
            for n in 0..CHECKED {
                let query = (n * 7_368_787 + 1_234_567) % tokens;
                let Some(row) = positions.iter().position(|&position| position == query) else { continue };
                let got = &forward.out[row * DIM..(row + 1) * DIM];
                for (got, wanted) in got.iter().zip(exactly(query, score.scale)) {
                    error += (f64::from(*got) - wanted).powi(2);
                    size += wanted * wanted;
                }
            }
            let line = format!(
                "rank {rank}: {:>9} tokens, {seconds:>8.1} s, {:>7.1} MiB at most, {:>8.1} MiB sent",
                positions.len(),
                attention::forward_bytes(&group, &schedule, &inputs)? as f64 / f64::from(1 << 20),
                comm.bytes_sent() as f64 / f64::from(1 << 20),
            );
            Ok::<_, Error>((seconds, RankReport { line, error, size }))
        })?;
    let longest = told.iter().map(|(seconds, _)| *seconds).fold(0.0, f64::max);
    told.iter().for_each(|(_, told)| println!("{}", told.line));
    println!("{:.1} s, {:.1} GFLOP/s", longest, operations / longest / 1e9);
    let (error, size) = told.iter().fold((0.0, 0.0), |sum, (_, told)| (sum.0 + told.error, sum.1 + told.size));
    let relative = (error / size).sqrt();
    println!("{CHECKED} random rows against f64: relative error (L2) {relative:.1e}");
    if relative <= 1e-5 { Ok(()) } else { Err(Error::Layout(format!("an error of {relative:e} is above 1e-5"))) }
}
