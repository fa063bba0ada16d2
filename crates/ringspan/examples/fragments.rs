//! Measures the cost of fragmented documents: attention if the tokens of a document are not neighbours in the sequence.
//!
//! `cargo run --release -p ringspan --example fragments -- CASE [TOKENS] [LAYOUT] [RANKS] [WINDOW]` prints the seconds for
//! the schedule, the forward and the backward pass, and the peak memory of the process. CASE is `whole` (one document),
//! `halves` (two documents, one after the other), `interleaved` (two documents whose tokens alternate at random) or
//! `padding` (one document, and a tenth of the tokens is padding).

use ringspan::attention::{self, Group, Inputs};
use ringspan::kernel::View;
use ringspan::{Documents, Error, Kernel, Layout, LayoutKind, Mask, Schedule, Score, StrategyKind, comm::threads};
use std::time::Instant;

const DIM: usize = 64;

/// Document ids of the tokens in a case; 0 is padding.
fn ids(case: &str, tokens: usize) -> Result<Vec<i32>, Error> {
    let mut state = 1u64;
    let mut random = move || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    let id = |token: usize| match case {
        "whole" => Some(1),
        "halves" => Some(if token < tokens / 2 { 1 } else { 2 }),
        "interleaved" => Some(1 + (random() % 2) as i32),
        "padding" => Some(i32::from(random() % 10 > 0)),
        _ => None,
    };
    let possible = "whole, halves, interleaved, padding";
    let unknown = || Error::Unknown { what: "case", given: case.to_owned(), possible };
    (0..tokens).map(id).collect::<Option<Vec<_>>>().ok_or_else(unknown)
}

/// Peak memory of the process in MB, if the system tells it.
fn peak() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<f64>().ok());
    kilobytes.map_or("unknown".into(), |kilobytes| format!("{:.0} MB", kilobytes / 1e3))
}

fn main() -> Result<(), Error> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let argument = |at: usize, default: &str| arguments.get(at).cloned().unwrap_or_else(|| default.to_owned());
    let number = |at: usize, default: &str| {
        let given = argument(at, default);
        given.parse::<usize>().map_err(|_| Error::Layout(format!("{given} is no number")))
    };
    let (case, tokens, ranks) = (argument(0, "interleaved"), number(1, "16000")?, number(3, "1")?);
    let kind: LayoutKind = argument(2, "zigzag").parse()?;
    let mask = match arguments.get(4) {
        None => Mask::causal(),
        Some(_) => Mask::causal().window(Some(number(4, "64")?), None),
    };
    let documents = Documents::from_ids(&ids(&case, tokens)?, tokens)?;
    let begin = Instant::now();
    let (layout, _) = Layout::pair(kind, &documents, &documents, &mask, ranks)?;
    let schedule = Schedule::new(StrategyKind::Ring, &layout, &layout, &mask, (ranks, 1))?;
    println!("{case}, {tokens} tokens, {kind} on {ranks} ranks, {mask}: scheduled in {:.2?}", begin.elapsed());
    let score = Score::new(1.0 / (DIM as f32).sqrt());
    let held = threads::run(ranks, threads::Options::default(), |comm| {
        let tokens = layout.tokens(comm.rank());
        let tensor = |seed: usize| -> Vec<f32> {
            (0..tokens * DIM).map(|i| (((i + seed) * 7919 % 1009) as f32 / 1009.0) - 0.5).collect()
        };
        let [q, k, v, d_out] = [1, 2, 3, 4].map(tensor);
        let view = |data| View::new(data, tokens, 1, DIM).expect("made of this size");
        let inputs = Inputs::new(view(&q), view(&k), view(&v), &score);
        let group = Group::new(comm.clone(), (ranks, 1), Kernel::new((2 / ranks).max(1)))?;
        comm.barrier()?;
        let begin = Instant::now();
        let forward = attention::forward(&group, &schedule, &inputs)?;
        comm.barrier()?;
        let middle = Instant::now();
        let gradients = attention::backward(&group, &schedule, &inputs, &forward, view(&d_out))?;
        comm.barrier()?;
        if comm.rank() == 0 {
            println!("forward in {:.2?}, backward in {:.2?}", middle - begin, middle.elapsed());
        }
        drop(gradients);
        let forward = attention::forward_bytes(&group, &schedule, &inputs)?;
        Ok::<_, Error>(forward.max(attention::backward_bytes(&group, &schedule, &inputs, view(&d_out))?))
    })?;
    let most = held.into_iter().max().unwrap_or(0) as f64 / 1e6;
    println!("a rank holds {most:.1} MB by its plan, the process held {} at most", peak());
    Ok(())
}
