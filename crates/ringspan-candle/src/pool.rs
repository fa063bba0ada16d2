//! The thread pool of a rank. Each rank has one of its own, so that ranks in one process do not compete for the global one.

use candle_core::{Error, Result};
use rayon::ThreadPoolBuilder;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::Range;

/// Runs `work` on a new pool of `threads` threads, at least one. The fused layers that `work` calls compute on all of them.
///
/// Outside such a pool, a layer computes on the thread that calls it.
///
/// # Errors
/// A machine that cannot start the threads.
pub fn run<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    let name = |index| format!("ringspan-{index}");
    let pool = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(name).build();
    Ok(pool.map_err(Error::wrap)?.install(work))
}

/// Number of threads in the pool that this thread belongs to; one outside of any pool.
#[must_use]
pub fn threads() -> usize {
    // Outside of a pool, rayon would return the size of the process's global pool.
    if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 }
}

/// Applies `work` to every part on the threads of the current pool; returns the results in the order of the parts.
pub fn map<T: Send, R: Send>(parts: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    match threads() {
        1 => parts.into_iter().map(work).collect(),
        _ => parts.into_par_iter().map(work).collect(),
    }
}

/// Number of rows in a part, when `rows` of `width` elements are distributed over the threads: several parts for each thread,
/// since threads are not equally fast, but not so small that distributing them costs more than their work.
#[must_use]
pub fn part(rows: usize, width: usize) -> usize {
    const LEAST: usize = 1 << 14;
    let parts = if threads() == 1 { 1 } else { 8 * threads() };
    rows.div_ceil(parts).max(LEAST.div_ceil(width.max(1)))
}

/// Consecutive ranges of [`part`] rows that cover `rows`.
pub fn parts(rows: usize, width: usize) -> Vec<Range<usize>> {
    let part = part(rows, width);
    (0..rows.div_ceil(part)).map(|index| index * part..rows.min((index + 1) * part)).collect()
}

/// Runs `work` compiled for the widest vector instructions of this machine.
#[inline(always)]
pub fn vectorized<R>(work: impl FnOnce() -> R) -> R {
    pulp::Arch::new().dispatch(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_computes_on_its_own_threads_and_alone_without_a_pool() {
        assert_eq!(threads(), 1);
        for count in [1, 3] {
            let (seen, names) = run(count, || {
                let name = |_| std::thread::current().name().unwrap_or_default().to_owned();
                (threads(), map((0..64).collect(), name))
            })
            .expect("threads");
            assert_eq!(seen, count);
            assert!(names.iter().all(|name| name.starts_with("ringspan-")), "{names:?}");
        }
        assert_eq!(threads(), 1);
    }

    #[test]
    fn parts_cover_all_rows_once() {
        for (rows, width) in [(0, 8), (1, 8), (100_000, 3), (5, 1 << 20), (7, 0)] {
            let ranges = run(4, || parts(rows, width)).expect("threads");
            assert_eq!(ranges.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..rows).collect::<Vec<_>>());
        }
    }
}
