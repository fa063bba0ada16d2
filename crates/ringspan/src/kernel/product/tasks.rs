//! Distributes the tasks of a product over threads.

use super::super::workers::Workers;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Products with fewer multiplications are finished before other threads would have started.
const FEW: usize = 1 << 18;

/// Number of threads for a product: those of the pool that this thread belongs to, or one for small products.
pub(super) fn threads(sizes: [usize; 3]) -> usize {
    let few = sizes.into_iter().fold(1, usize::saturating_mul) < FEW;
    // Outside of a pool rayon would return the number of its global pool's threads.
    if few || rayon::current_thread_index().is_none() { 1 } else { rayon::current_num_threads() }
}

/// Calls `work` on some threads, each with an iterator that takes the next task when the thread is ready for it.
pub(super) fn share(threads: usize, tasks: usize, work: impl Fn(&mut dyn Iterator<Item = usize>) + Sync) {
    let next = AtomicUsize::new(0);
    let count = threads.min(tasks);
    Workers::of_current_pool(count).run(count, &|_| {
        let mut own = std::iter::from_fn(|| Some(next.fetch_add(1, Ordering::Relaxed)).filter(|task| *task < tasks));
        work(&mut own);
    });
}
