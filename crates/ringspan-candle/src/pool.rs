//! The thread pool of a rank. Each rank has its own pool, so that ranks in one process do not compete for the global
//! one.

use candle_core::{Error, Result};
use rayon::ThreadPoolBuilder;
use rayon::iter::{IntoParallelIterator, ParallelIterator};
use ringspan::kernel::Isa;
use std::cell::Cell;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

thread_local! {
    /// The instruction set that was chosen for the pool of this thread.
    static ISA: Cell<Option<Isa>> = const { Cell::new(None) };
}

/// Runs `work` on a new pool of `threads` threads, at least one. The fused layers that `work` calls compute on all of them.
///
/// Outside such a pool, a layer computes on the thread that calls it.
///
/// # Errors
/// A machine that cannot start the threads.
pub fn run<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    run_with_isa(threads, None, work)
}

/// Like [`run`]; attention and products of matrices use this instruction set if one is given, to measure the slower ones. The
/// products that are otherwise the `gemm` crate's, which chooses its instructions itself, are then computed by `ringspan`.
///
/// # Errors
/// An instruction set that this machine lacks, and a machine that cannot start the threads.
pub fn run_with_isa<R: Send>(threads: usize, isa: Option<Isa>, work: impl FnOnce() -> R + Send) -> Result<R> {
    isa.map_or(Ok(()), Isa::check_available).map_err(Error::wrap)?;
    let name = |index| format!("ringspan-{index}");
    let builder = ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(name);
    let pool = builder.start_handler(move |_| ISA.set(isa)).build();
    Ok(pool.map_err(Error::wrap)?.install(work))
}

/// Lets attention and products of matrices on all threads of the current pool use an instruction set, as [`run_with_isa`] does.
///
/// # Errors
/// An instruction set that this machine lacks.
pub fn set_isa(isa: Isa) -> Result<()> {
    isa.check_available().map_err(Error::wrap)?;
    match rayon::current_thread_index() {
        Some(_) => drop(rayon::broadcast(|_| ISA.set(Some(isa)))),
        None => ISA.set(Some(isa)),
    }
    Ok(())
}

/// The instruction set that was chosen for the pool of this thread; `None` for the fastest.
#[must_use]
pub fn isa() -> Option<Isa> {
    ISA.get()
}

/// Number of threads in the pool that this thread belongs to; one outside of any pool.
#[must_use]
pub fn threads() -> usize {
    // Outside of a pool, rayon would return the size of the process's global pool.
    if rayon::current_thread_index().is_some() { rayon::current_num_threads() } else { 1 }
}

/// Applies `work` to every part on the threads of the current pool; returns the results in the order of the parts.
pub fn map<T: Send, R: Send>(parts: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
    if threads() == 1 {
        return parts.into_iter().map(work).collect();
    }
    let slots: Vec<Mutex<(Option<T>, Option<R>)>> =
        parts.into_iter().map(|part| Mutex::new((Some(part), None))).collect();
    for_each_index(slots.len(), &|index| {
        let mut slot = slots[index].lock().unwrap_or_else(PoisonError::into_inner);
        slot.1 = slot.0.take().map(&work);
    });
    slots.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner).1).collect()
}

/// A copy of the values that `change` changes part by part on the threads of the current pool; it gets the index of a part's first
/// value, and the part. Copying all at once would leave the other threads waiting.
pub fn map_copy<T: Copy + Send + Sync>(
    values: &[T],
    part: usize,
    change: impl Fn(usize, &mut [T]) + Sync + Send,
) -> Vec<T> {
    let part = part.max(1);
    let mut copy = Vec::with_capacity(values.len());
    let parts = values.chunks(part).zip(copy.spare_capacity_mut().chunks_mut(part)).enumerate().collect();
    map(parts, |(index, (from, to)): (usize, (&[T], &mut [MaybeUninit<T>]))| {
        change(index * part, to[..from.len()].write_copy_of_slice(from));
    });
    // SAFETY: each of these values was copied.
    unsafe { copy.set_len(values.len()) };
    copy
}

/// Zeros, written on the threads of the current pool where they are many: the logits of 16 tokens may be 16 MB.
pub(crate) fn zeros(len: usize) -> Vec<f32> {
    const LEAST: usize = 1 << 18;
    let threads = threads();
    if threads == 1 || len < LEAST {
        return vec![0.0; len];
    }
    let mut zeros = Vec::with_capacity(len);
    let parts = zeros.spare_capacity_mut()[..len].chunks_mut(len.div_ceil(threads)).collect();
    map(parts, |part: &mut [MaybeUninit<f32>]| {
        for value in part {
            value.write(0.0);
        }
    });
    // SAFETY: each of these values was written.
    unsafe { zeros.set_len(len) };
    zeros
}

/// Calls `work` with each index on the threads of the current pool. It is compiled once for all callers: what rayon needs to distribute
/// work is long, and was a quarter of this crate's code when each caller had its own.
fn for_each_index(count: usize, work: &(dyn Fn(usize) + Sync)) {
    if count > 1 && !IN_WORK.get() {
        keep_threads_awake();
    }
    (0..count).into_par_iter().for_each(|index| {
        let outer = IN_WORK.replace(true);
        work(index);
        IN_WORK.set(outer);
    });
}

/// How long a thread without work stays awake.
const SPIN_TIME: Duration = Duration::from_micros(200);

thread_local! {
    /// Whether this thread does a part of some work. Then it keeps no others awake: the one that distributes that work does.
    static IN_WORK: Cell<bool> = const { Cell::new(false) };
    /// How many threads of its pool this thread keeps awake.
    static AWAKE: Arc<AtomicUsize> = Arc::default();
}

/// Keeps the other threads of this pool awake for [`SPIN_TIME`] after each work. A thread that sleeps takes longer to wake up than many of
/// a layer's operations take, and rayon lets threads sleep sooner than a model computes the next operation.
fn keep_threads_awake() {
    let (Some(caller), threads) = (rayon::current_thread_index(), rayon::current_num_threads()) else { return };
    AWAKE.with(|awake| {
        while awake.load(Ordering::Relaxed) + 1 < threads {
            awake.fetch_add(1, Ordering::Relaxed);
            let awake = awake.clone();
            rayon::spawn(move || {
                // The caller itself may take this job while it waits for others.
                if rayon::current_thread_index() != Some(caller) {
                    work_until_idle();
                }
                awake.fetch_sub(1, Ordering::Relaxed);
            });
        }
    });
}

/// Does the work of this thread's pool until there was none for [`SPIN_TIME`].
fn work_until_idle() {
    let mut idle_since = Instant::now();
    while idle_since.elapsed() < SPIN_TIME {
        match rayon::yield_now() {
            Some(rayon::Yield::Executed) => idle_since = Instant::now(),
            _ => std::thread::yield_now(),
        }
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

/// Runs `work` compiled for the widest vector instructions of this machine. A closure must be `#[inline(always)]`, as must what it
/// calls: what the compiler does not inline is compiled for the oldest processors.
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
    fn all_threads_of_a_pool_know_its_instruction_set() {
        let isas = || map((0..64).collect(), |_: usize| isa());
        for chosen in Isa::available().into_iter().map(Some).chain([None]) {
            let seen = run_with_isa(3, chosen, isas).expect("threads");
            assert!(seen.iter().all(|isa| *isa == chosen), "{seen:?}");
        }
        assert_eq!(isa(), None);
    }

    #[test]
    fn each_part_of_a_copy_is_changed_once() {
        for (len, part, threads) in [(0, 4, 2), (1, 4, 2), (103, 10, 3), (103, 0, 1), (8, 100, 3)] {
            let values: Vec<usize> = (0..len).collect();
            let change = |first: usize, part: &mut [usize]| {
                part.iter_mut().enumerate().for_each(|(i, x)| *x = 10 * *x + first + i);
            };
            let got = run(threads, || map_copy(&values, part, change)).expect("threads");
            assert_eq!(got, values.iter().map(|x| 11 * x).collect::<Vec<_>>());
        }
    }

    #[test]
    fn zeros_are_as_many_as_asked_for() {
        for len in [0, 5, (1 << 18) + 7] {
            let zeros = run(3, || zeros(len)).expect("threads");
            assert!(zeros.len() == len && zeros.iter().all(|zero| *zero == 0.0));
        }
    }

    #[test]
    fn the_other_threads_are_kept_awake_and_sleep_in_the_end() {
        let begin = Instant::now();
        let awake = run(3, || {
            map((0..64).collect(), |i: usize| map((0..4).collect(), |j: usize| i + j));
            // A thread may already sleep again, so this may take several turns.
            loop {
                keep_threads_awake();
                let count = AWAKE.with(|awake| awake.load(Ordering::Relaxed));
                assert!(count <= 2, "{count} other threads of two");
                if count > 0 {
                    return AWAKE.with(Arc::clone);
                }
                assert!(begin.elapsed() < Duration::from_secs(10), "no thread is kept awake");
            }
        });
        let awake = awake.expect("threads");
        while awake.load(Ordering::Relaxed) > 0 {
            assert!(begin.elapsed() < Duration::from_secs(20), "threads stay awake");
            std::thread::yield_now();
        }
    }

    #[test]
    fn parts_cover_all_rows_once() {
        for (rows, width) in [(0, 8), (1, 8), (100_000, 3), (5, 1 << 20), (7, 0)] {
            let ranges = run(4, || parts(rows, width)).expect("threads");
            assert_eq!(ranges.iter().flat_map(Clone::clone).collect::<Vec<_>>(), (0..rows).collect::<Vec<_>>());
        }
    }
}
