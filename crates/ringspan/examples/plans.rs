//! Measures the time to plan a large ring: `cargo run --release -p ringspan --example plans -- [RANKS] [LAYOUT]`.
//!
//! It makes the schedule of RANKS ranks (10,000 by default) with two tokens each, and then the plans of all ranks in turn.

use ringspan::schedule::Pass;
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Schedule, StrategyKind};
use std::time::Instant;

fn main() -> Result<(), Error> {
    let given = std::env::args().nth(1).unwrap_or_else(|| "10000".into());
    let ranks = given.parse::<usize>().map_err(|_| Error::Layout(format!("{given} is no number of ranks")))?;
    let kind: LayoutKind = std::env::args().nth(2).unwrap_or_else(|| "zigzag".into()).parse()?;
    let layout = Layout::new(kind, &Documents::batch(1, 2 * ranks), ranks)?;
    let begin = Instant::now();
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &Mask::causal(), (ranks, 1))?;
    println!("a schedule of {ranks} ranks, {kind}: {:.2?}", begin.elapsed());
    for pass in [Pass::Forward, Pass::Backward] {
        let begin = Instant::now();
        let rows: usize = (0..ranks).map(|rank| schedule.traffic(pass, rank).keys).sum();
        println!("plans of the {pass:?} pass, which send {rows} rows of keys: {:.2?}", begin.elapsed());
    }
    Ok(())
}
