//! The threads of a rank: a pool of its own, never the process's, so that ranks of one process do not fight for one.

use candle_core::{Error, Result};
use rayon::ThreadPoolBuilder;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use std::ops::Range;

/// Runs `work` on a new pool of `threads` threads, at least one. The fused layers that `work` calls compute on all of them.
///
/// Without this, a layer computes on the thread that calls it.
///
/// # Errors
/// A machine that gives no threads.
pub fn run<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    let name = |index| format!("ringspan-{index}");
    let pool = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(name).build();
    Ok(pool.map_err(Error::wrap)?.install(work))
}

/// Threads of the pool that this thread belongs to; one outside of any.
#[must_use]
pub fn threads() -> usize {
    // Outside of a pool rayon would answer for the process's.
    if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 }
}

/// What `work` makes of every part, in order of the parts, computed by the threads of this pool.
pub fn map<T: Send, R: Send>(parts: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    match threads() {
        1 => parts.into_iter().map(work).collect(),
        _ => parts.into_par_iter().map(work).collect(),
    }
}

/// Rows of a part, when `rows` of `width` elements are shared out: several parts a thread, since no two threads are
/// equally fast, but not so small that handing them out costs more than their work.
#[must_use]
pub fn part(rows: usize, width: usize) -> usize {
    const LEAST: usize = 1 << 14;
    let parts = if threads() == 1 { 1 } else { 8 * threads() };
    rows.div_ceil(parts).max(LEAST.div_ceil(width.max(1)))
}

/// Ranges of [`part`] rows that make up `rows`.
pub fn parts(rows: usize, width: usize) -> Vec<Range<usize>> {
    let part = part(rows, width);
    (0..rows.div_ceil(part)).map(|index| index * part..rows.min((index + 1) * part)).collect()
}

/// Runs loops compiled for the widest vectors that this machine has.
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
