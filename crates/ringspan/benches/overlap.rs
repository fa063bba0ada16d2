//! Measures how much of the transfer time overlaps with computation: ring attention over a simulated slow link.
//!
//! The transfer of a block takes a given share of the computation time between two hops. Time that the pass takes longer
//! than without a link was not overlapped. `cargo bench -p ringspan --bench overlap [-- S]`

use ringspan::attention::{self, Group, Inputs};
use ringspan::comm::threads::{self, SimulatedLink};
use ringspan::kernel::View;
use ringspan::schedule::{Pass, Sizes};
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use std::time::{Duration, Instant};

/// Number of interleaved rounds.
const ROUNDS: usize = 5;
const HEADS: usize = 8;
const DIM: usize = 128;
/// Time of a hop, divided by the computation time between two hops.
const SHARES: [f64; 4] = [0.25, 0.5, 0.8, 1.5];

/// Seconds of a forward pass, from the common start until all ranks have finished.
fn run(schedule: &Schedule, layout: &Layout, link: Option<SimulatedLink>) -> Result<f64, Error> {
    let ranks = layout.ranks();
    let score = Score::new(1.0 / (DIM as f32).sqrt());
    let times = threads::run(ranks, threads::Options { link, ..Default::default() }, |comm| {
        let tokens = layout.tokens(comm.rank());
        let group = Group::new(comm.clone(), (ranks, 1), Kernel::new(1))?;
        let values: Vec<f32> = (0..tokens * HEADS * DIM).map(|n| ((n as f32) * 0.37).sin()).collect();
        let view = View::new(&values, tokens, HEADS, DIM).expect("made of this size");
        let inputs = Inputs::new(view, view, view, &score);
        comm.barrier()?;
        let start = Instant::now();
        attention::forward(&group, schedule, &inputs)?;
        comm.barrier()?;
        Ok::<_, Error>(start.elapsed().as_secs_f64())
    })?;
    Ok(times[0])
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    // As a test (`cargo test --benches`, without `--bench`) a few tokens show that it runs.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let len = arguments.next().and_then(|given| given.parse().ok()).unwrap_or(if quick { 512 } else { 8192 });
    let ranks = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8);
    let layout = Layout::new(LayoutKind::Contiguous, &Documents::batch(1, len), ranks)?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::full(), (ranks, 1))?;
    let sizes = Sizes { heads: HEADS, kv_heads: HEADS, dim: DIM, v_dim: DIM, wire: 4, bias_heads: 0 };
    let hops = ranks - 1;
    let block = schedule.bytes_sent(Pass::Forward, 0, &sizes)? as f64 / hops as f64;
    let rounds = if quick { 1 } else { ROUNDS };
    run(&schedule, &layout, None)?;
    println!("S={len} H={HEADS} D={DIM}, ring of {ranks} ranks of one thread, {:.1} MB a hop", block / 1e6);
    println!("{:>14} {:>14} {:>12} {:>12} {:>8}", "hop / compute", "bandwidth MB/s", "without s", "with s", "hidden");
    for share in SHARES {
        let mut columns: [Vec<f64>; 4] = Default::default();
        for _ in 0..rounds {
            // The bandwidth is set according to the current speed of the machine.
            let free = run(&schedule, &layout, None)?;
            let bandwidth = block * ranks as f64 / (share * free);
            let linked =
                run(&schedule, &layout, Some(SimulatedLink { bandwidth, latency: Duration::from_micros(20) }))?;
            let transfer = hops as f64 * (block / bandwidth + 20e-6);
            let hidden = 100.0 * (1.0 - (linked - free) / transfer).clamp(0.0, 1.0);
            for (column, value) in columns.iter_mut().zip([bandwidth / 1e6, free, linked, hidden]) {
                column.push(value);
            }
        }
        let [bandwidth, free, linked, hidden] = columns.map(median);
        println!("{share:>14.2} {bandwidth:>14.1} {free:>12.4} {linked:>12.4} {hidden:>7.1}%");
    }
    Ok(())
}
