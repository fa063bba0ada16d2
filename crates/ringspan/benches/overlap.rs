//! Measures how much of the transfer time overlaps with computation, over a simulated slow link: blocks of a ring, and the
//! exchange of heads of Ulysses in parts.
//!
//! Transfers take a given share of the computation time. Time that the pass takes longer than without a link was not
//! overlapped. `cargo bench -p ringspan --bench overlap [-- S]`

use ringspan::attention::{self, Group, Inputs};
use ringspan::comm::threads::{self, SimulatedLink};
use ringspan::kernel::View;
use ringspan::schedule::{Pass, TensorSizes};
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use std::time::{Duration, Instant};

/// Number of interleaved rounds.
const ROUNDS: usize = 5;
const DIM: usize = 128;
const LATENCY: Duration = Duration::from_micros(20);
/// Time of a ring's hop, divided by the computation time between two hops.
const RING_SHARES: [f64; 4] = [0.25, 0.5, 0.8, 1.5];
/// Time of all exchanges of heads, divided by the computation time of the pass.
const ULYSSES_SHARES: [f64; 3] = [0.1, 0.25, 0.5];
/// Heads as in WAN 1.3B, and the numbers of parts in which each of two ranks exchanges its six.
const ULYSSES_HEADS: usize = 12;
const PARTS: [usize; 4] = [1, 2, 3, 6];

/// Attention of `ranks` ranks of one thread, all queries to all keys.
struct Pattern {
    layout: Layout,
    schedule: Schedule,
    grid: (usize, usize),
    heads: usize,
}

/// What a pass takes, in seconds and bytes a second.
struct Measured {
    bandwidth: f64,
    without: f64,
    with: f64,
    /// Share of the transfer time in percent.
    overlapped: f64,
}

impl Pattern {
    fn new(len: usize, grid: (usize, usize), heads: usize, parts: usize) -> Result<Self, Error> {
        let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, len), grid.0 * grid.1)?;
        let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), grid)?;
        Ok(Self { layout, schedule: schedule.with_head_chunks(parts), grid, heads })
    }

    /// Bytes that a rank sends in a forward pass.
    fn bytes(&self) -> Result<f64, Error> {
        let sizes =
            TensorSizes { heads: self.heads, kv_heads: self.heads, dim: DIM, v_dim: DIM, wire: 4, bias_heads: 0 };
        Ok(self.schedule.bytes_sent(Pass::Forward, 0, &sizes)? as f64)
    }

    /// Seconds of a forward pass, from the common start until all ranks have finished.
    fn seconds(&self, link: Option<SimulatedLink>) -> Result<f64, Error> {
        let score = Score::new(1.0 / (DIM as f32).sqrt());
        let times = threads::run(self.layout.ranks(), threads::Options { link, ..Default::default() }, |comm| {
            let tokens = self.layout.tokens(comm.rank());
            let group = Group::new(comm.clone(), self.grid, Kernel::new(1))?;
            let values: Vec<f32> = (0..tokens * self.heads * DIM).map(|n| ((n as f32) * 0.37).sin()).collect();
            let view = View::new(&values, tokens, self.heads, DIM).expect("made of this size");
            let inputs = Inputs::new(view, view, view, &score);
            comm.barrier()?;
            let start = Instant::now();
            attention::forward(&group, &self.schedule, &inputs)?;
            comm.barrier()?;
            Ok::<_, Error>(start.elapsed().as_secs_f64())
        })?;
        Ok(times[0])
    }

    /// Medians of rounds in which the transfers of a pass take `share` of its computation time.
    fn measure(&self, share: f64, rounds: usize) -> Result<Measured, Error> {
        let bytes = self.bytes()?;
        let mut columns: [Vec<f64>; 4] = Default::default();
        for _ in 0..rounds {
            // The bandwidth is set according to the current speed of the machine.
            let without = self.seconds(None)?;
            let bandwidth = bytes / (share * without);
            let with = self.seconds(Some(SimulatedLink { bandwidth, latency: LATENCY }))?;
            let overlapped = 100.0 * (1.0 - (with - without) / (bytes / bandwidth)).clamp(0.0, 1.0);
            for (column, value) in columns.iter_mut().zip([bandwidth, without, with, overlapped]) {
                column.push(value);
            }
        }
        let [bandwidth, without, with, overlapped] = columns.map(median);
        Ok(Measured { bandwidth, without, with, overlapped })
    }
}

impl Measured {
    fn columns(&self) -> String {
        let Self { bandwidth, without, with, overlapped } = self;
        format!("{:>14.1} {without:>12.4} {with:>12.4} {overlapped:>11.1}%", bandwidth / 1e6)
    }
}

const HEADER: &str = "bandwidth MB/s    without s       with s   overlapped";

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    // As a test (`cargo test --benches`, without `--bench`) a few tokens show that it runs.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let len = arguments.next().and_then(|given| given.parse().ok()).unwrap_or(if quick { 512 } else { 8192 });
    let rounds = if quick { 1 } else { ROUNDS };

    let ranks = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8);
    let ring = Pattern::new(len, (ranks, 1), 8, 1)?;
    ring.seconds(None)?;
    let hop = ring.bytes()? / (ranks - 1) as f64;
    println!("S={len} H=8 D={DIM}, ring of {ranks} ranks of one thread, {:.1} MB a hop", hop / 1e6);
    println!("{:>14} {HEADER}", "hop / compute");
    for share in RING_SHARES {
        let of_pass = share * (ranks - 1) as f64 / ranks as f64;
        println!("{share:>14.2} {}", ring.measure(of_pass, rounds)?.columns());
    }

    let sent = Pattern::new(len, (1, 2), ULYSSES_HEADS, 1)?.bytes()?;
    println!("S={len} H={ULYSSES_HEADS} D={DIM}, two Ulysses ranks of one thread, {:.1} MB a rank", sent / 1e6);
    println!("{:>14} {:>6} {HEADER}", "sent / compute", "parts");
    for share in ULYSSES_SHARES {
        for parts in PARTS {
            let measured = Pattern::new(len, (1, 2), ULYSSES_HEADS, parts)?.measure(share, rounds)?;
            println!("{share:>14.2} {parts:>6} {}", measured.columns());
        }
    }
    Ok(())
}
