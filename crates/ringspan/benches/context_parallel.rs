//! Measures the overhead of context parallelism: P ranks of one thread are compared with one rank that has a thread for
//! each core, alternately in one process, on the same problem.
//!
//! The efficiency is the ratio of their speeds. The balance that the schedule counts is printed next to it, as the limit
//! for a layout if each rank has its own core. `cargo bench -p ringspan --bench context_parallel [-- S [ROW..]]`; a row is
//! named as it is printed: `8192 "8 ring zigzag"`.

use ringspan::attention::{self, Group, Inputs};
use ringspan::comm::threads;
use ringspan::kernel::View;
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind};
use std::time::Instant;

/// Number of interleaved rounds.
const ROUNDS: usize = 3;
const HEADS: usize = 16;
const KV_HEADS: usize = 4;
const DIM: usize = 128;

/// A case: ranks, threads of each, layout and strategy.
#[derive(Clone, Copy)]
struct Case {
    ranks: usize,
    threads: usize,
    kind: LayoutKind,
    strategy: StrategyKind,
}

/// Seconds of the forward and of the backward pass, from the common start until all ranks have finished.
fn run(case: Case, len: usize) -> Result<[f64; 2], Error> {
    let Case { ranks, threads, kind, strategy } = case;
    let layout = Layout::new(kind, &Documents::batch(1, len), ranks)?;
    let schedule = Schedule::new(strategy, &layout, &layout, &Mask::causal(), (ranks, 1))?;
    let score = Score::new(1.0 / (DIM as f32).sqrt());
    let times = threads::run(ranks, threads::Options::default(), |comm| {
        let tokens = layout.tokens(comm.rank());
        let group = Group::new(comm.clone(), (ranks, 1), Kernel::new(threads))?;
        let values = |heads: usize| (0..tokens * heads * DIM).map(|n| ((n as f32) * 0.37).sin()).collect::<Vec<_>>();
        let (q, kv) = (values(HEADS), values(KV_HEADS));
        let view = |data, heads| View::new(data, tokens, heads, DIM).expect("made of this size");
        let inputs = Inputs::new(view(&q, HEADS), view(&kv, KV_HEADS), view(&kv, KV_HEADS), &score);
        // A first run without timing allocates buffers and touches their pages.
        attention::forward(&group, &schedule, &inputs)?;
        comm.barrier()?;
        let start = Instant::now();
        let saved = attention::forward(&group, &schedule, &inputs)?;
        comm.barrier()?;
        let middle = Instant::now();
        attention::backward(&group, &schedule, &inputs, &saved, inputs.q)?;
        comm.barrier()?;
        Ok::<_, Error>([(middle - start).as_secs_f64(), middle.elapsed().as_secs_f64()])
    })?;
    Ok(times[0])
}

/// The mean number of pairs per rank, divided by the number on the rank with the most.
fn balance(case: Case, len: usize) -> Result<f64, Error> {
    let layout = Layout::new(case.kind, &Documents::batch(1, len), case.ranks)?;
    let schedule = Schedule::new(case.strategy, &layout, &layout, &Mask::causal(), (case.ranks, 1))?;
    let pairs: Vec<u64> = (0..case.ranks).map(|rank| schedule.pairs(rank)).collect();
    Ok(pairs.iter().sum::<u64>() as f64 / (pairs.len() as u64 * pairs.iter().max().copied().unwrap_or(1)) as f64)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with("--"));
    // As a test (`cargo test --benches`, without `--bench`) a few tokens show that it runs.
    let quick = !std::env::args().any(|argument| argument == "--bench");
    let len = arguments.next().and_then(|given| given.parse().ok()).unwrap_or(if quick { 256 } else { 8192 });
    let wanted: Vec<String> = arguments.collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!("S={len} H={HEADS} G={KV_HEADS} D={DIM} causal, f32; efficiency against 1 rank of {cores} threads");
    println!("{:>5} {:>20} {:>20} {:>8} {:>8} {:>8}", "ranks", "strategy", "layout", "forward", "backward", "balance");
    let one = Case { ranks: 1, threads: cores, kind: LayoutKind::Contiguous, strategy: StrategyKind::Ring };
    let zigzag = |ranks, strategy| Case { ranks, threads: 1, kind: LayoutKind::Zigzag, strategy };
    let of = |kind| Case { ranks: cores, threads: 1, kind, strategy: StrategyKind::Ring };
    let cases = [
        zigzag(cores, StrategyKind::Ring),
        zigzag(4 * cores, StrategyKind::Ring),
        zigzag(cores, StrategyKind::AllGather),
        zigzag(4 * cores, StrategyKind::BidirectionalRing),
        zigzag(4 * cores, StrategyKind::PassQ),
        of(LayoutKind::Contiguous),
        of(LayoutKind::Striped(1)),
        of(LayoutKind::Striped(64)),
        of(LayoutKind::Balanced(None)),
    ];
    for case in cases {
        let Case { ranks, kind, strategy, .. } = case;
        let row = format!("{ranks} {strategy} {kind}");
        if !wanted.is_empty() && !wanted.contains(&row) {
            continue;
        }
        let mut rounds: [Vec<f64>; 2] = Default::default();
        for _ in 0..if quick { 1 } else { ROUNDS } {
            let (alone, many) = (run(one, len)?, run(case, len)?);
            for (pass, ratios) in rounds.iter_mut().enumerate() {
                ratios.push(alone[pass] / many[pass]);
            }
        }
        let [forward, backward] = rounds.map(median);
        let (kind, strategy, balance) = (kind.to_string(), strategy.to_string(), balance(case, len)?);
        println!("{ranks:>5} {strategy:>20} {kind:>20} {forward:>8.3} {backward:>8.3} {balance:>8.3}");
    }
    Ok(())
}
