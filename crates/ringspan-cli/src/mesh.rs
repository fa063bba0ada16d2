//! The flags for the number of ranks, and the number of threads of each.

use anyhow::{Context, Result, ensure};
use ringspan::comm::process_group::ProcessGroup;
use std::sync::Once;
use std::time::Duration;

/// How long a rank waits for another. Ranks of one process learn of each other's failure at once, so this only ends
/// waits that a bug would make endless; a step over a very long sequence must fit in it.
pub(crate) const DEADLINE: Duration = Duration::from_secs(3600);

/// Upper limit on ranks in one process; a larger number is surely a mistake.
const MOST_RANKS: usize = 4096;

/// The mesh: ring x ulysses ranks, which are threads of this process, or processes of MPI.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct MeshArgs {
    /// Ring size R: ranks between which keys and values move
    #[arg(long, default_value_t = 1, value_name = "R")]
    pub(crate) ring: usize,
    /// Ulysses size U: neighbouring ranks that exchange tokens for heads
    #[arg(long, default_value_t = 1, value_name = "U")]
    pub(crate) ulysses: usize,
    /// Threads of each rank [default: cores / ranks, at least 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=4096))]
    threads: Option<u32>,
}

impl MeshArgs {
    /// Whether the user gave the number of threads.
    pub(crate) fn gives_threads(&self) -> bool {
        self.threads.is_some()
    }

    /// Returns the number of ranks of the mesh, and of threads of each.
    ///
    /// Call it before anything computes: it tells the libraries below how many threads they may start.
    pub(crate) fn start(&self, processes: &ProcessGroup) -> Result<(usize, usize)> {
        self.start_with(processes, &[])
    }

    /// Like [`start`](Self::start), with more axes, each with its size and its name in an error.
    pub(crate) fn start_with(&self, processes: &ProcessGroup, axes: &[(usize, &str)]) -> Result<(usize, usize)> {
        let Self { ring, ulysses, .. } = *self;
        let ranks = ranks(ring, ulysses, axes)?;
        processes.check(ranks)?;
        let here = processes.local().unwrap_or(ranks);
        let threads = self.threads.map_or_else(|| (cores() / here).max(1), |threads| threads as usize);
        limit_threads(ranks, threads);
        Ok((ranks, threads))
    }
}

/// The number of ranks, if it is at least 1 and at most [`MOST_RANKS`]; `axes` are further sizes with their names.
pub(crate) fn ranks(ring: usize, ulysses: usize, axes: &[(usize, &str)]) -> Result<usize> {
    let mut given = format!("--ring {ring} x --ulysses {ulysses}");
    for (size, name) in axes.iter().filter(|(size, _)| *size != 1) {
        given += &format!(" x {name} {size}");
    }
    let sizes = [ulysses].into_iter().chain(axes.iter().map(|(size, _)| *size));
    let ranks = sizes.into_iter().try_fold(ring, usize::checked_mul).filter(|ranks| *ranks <= MOST_RANKS);
    let ranks = ranks.with_context(|| format!("{given} is more than {MOST_RANKS} ranks"))?;
    ensure!(ranks > 0, "{given} is no rank; each must be at least 1");
    Ok(ranks)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Keeps the process-wide thread pools of the tensor library from fighting with ranks that are threads themselves.
///
/// Call it before the first tensor operation; where ranks are processes, it is called before there are other threads. Only
/// the first call counts.
pub(crate) fn limit_threads(ranks: usize, threads: usize) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let threads = if ranks > 1 { 1 } else { threads }.to_string();
        for name in ["RAYON_NUM_THREADS", "CANDLE_NUM_THREADS"] {
            // SAFETY: no other thread reads or writes the environment now; only that of the signal handler may exist, and
            // it sleeps in a read until Ctrl-C.
            unsafe { std::env::set_var(name, &threads) };
        }
    });
}
