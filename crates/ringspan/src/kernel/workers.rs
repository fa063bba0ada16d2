//! The threads of a kernel, which belong to the rank and stay between calls. There is no global pool.

use super::team::Team;
use rayon::Scope;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock};

/// The threads that a kernel call computes with, including the calling thread.
pub(super) struct Workers {
    count: usize,
    pool: OtherThreads,
}

/// The source of the other threads.
enum OtherThreads {
    /// The kernel's own threads, started at the first call that needs them; `None` if they could not be started.
    Own(OnceLock<Option<Team>>),
    /// The rayon pool that the calling thread belongs to.
    Current,
}

impl Workers {
    /// The calling thread and `count - 1` threads of the kernel's own.
    pub(super) fn new(count: usize) -> Self {
        Self { count: count.max(1), pool: OtherThreads::Own(OnceLock::new()) }
    }

    /// The calling thread and other threads of the pool it belongs to, `count` in total.
    pub(super) fn of_current_pool(count: usize) -> Self {
        Self { count: count.max(1), pool: OtherThreads::Current }
    }

    /// Maximum number of threads.
    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Calls `work(worker)` once for every worker below `count`, worker 0 on the calling thread, and waits for all. Workers
    /// may run one after the other, so none may wait for a worker that has not begun.
    pub(super) fn run(&self, count: usize, work: &(dyn Fn(usize) + Sync)) {
        if count <= 1 {
            return work(0);
        }
        match &self.pool {
            OtherThreads::Own(team) => match team.get_or_init(|| Team::new(self.count - 1)) {
                Some(team) => team.run(count, work),
                None => (0..count).for_each(work),
            },
            // Outside of any pool rayon would use its global pool. A pool thread may itself have to run the work that it
            // waits for.
            OtherThreads::Current if rayon::current_thread_index().is_some() => {
                rayon::in_place_scope(|scope| all(scope, count, work))
            }
            OtherThreads::Current => (0..count).for_each(work),
        }
    }
}

/// Calls worker 0 here, and lets the scope's threads call the others.
fn all<'s>(scope: &Scope<'s>, count: usize, work: &'s (dyn Fn(usize) + Sync)) {
    for worker in 1..count {
        scope.spawn(move |_| work(worker));
    }
    work(0);
}

/// A countdown of events: some threads count them, others wait for all.
pub(super) struct Countdown {
    left: AtomicUsize,
    lock: Mutex<()>,
    done: Condvar,
}

impl Countdown {
    pub(super) fn new(events: usize) -> Self {
        Self { left: AtomicUsize::new(events), lock: Mutex::new(()), done: Condvar::new() }
    }

    /// Counts one event. Writes of its thread before this are visible to threads that have waited.
    pub(super) fn count(&self) {
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            // A thread that is about to wait holds the lock until it sleeps, so it cannot miss the notification.
            drop(self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
            self.done.notify_all();
        }
    }

    /// Returns a guard that counts one event when it is dropped, also in a panic.
    pub(super) fn counted(&self) -> Counted<'_> {
        Counted(self)
    }

    /// Waits for all events: first by spinning, because sleeping and waking takes longer than most waits.
    pub(super) fn wait(&self) {
        for _ in 0..500 {
            if self.left.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        let mut lock = self.lock.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while self.left.load(Ordering::Acquire) > 0 {
            lock = self.done.wait(lock).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
    }
}

/// Counts one event when it is dropped.
pub(super) struct Counted<'a>(&'a Countdown);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.count();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::ThreadPoolBuilder;
    use std::collections::HashSet;
    use std::thread::{ThreadId, current};

    /// Returns the threads that many calls used; checks that each call runs every worker once.
    fn threads_of(workers: &Workers, calls: usize) -> HashSet<ThreadId> {
        let seen = Mutex::new(Vec::new());
        let mut threads = HashSet::new();
        for _ in 0..calls {
            let caller = current().id();
            workers.run(3, &|worker| {
                assert!(worker > 0 || current().id() == caller);
                seen.lock().expect("no panic").push((worker, current().id()));
            });
            let mut seen: Vec<_> = std::mem::take(&mut *seen.lock().expect("no panic"));
            seen.sort_by_key(|seen| seen.0);
            assert_eq!(seen.iter().map(|seen| seen.0).collect::<Vec<_>>(), [0, 1, 2]);
            threads.extend(seen.iter().map(|seen| seen.1));
        }
        threads
    }

    #[test]
    fn every_worker_runs_once_on_threads_that_stay() {
        assert!(threads_of(&Workers::new(3), 200).len() <= 3);
    }

    #[test]
    fn workers_of_a_pool_are_its_threads() {
        let pool = ThreadPoolBuilder::new().num_threads(3).build().expect("threads");
        let own: HashSet<ThreadId> = pool.broadcast(|_| current().id()).into_iter().collect();
        let seen = pool.install(|| threads_of(&Workers::of_current_pool(3), 200));
        assert!(seen.is_subset(&own), "{seen:?} of {own:?}");
        // Outside of a pool the calling thread runs all workers.
        assert_eq!(threads_of(&Workers::of_current_pool(3), 2), HashSet::from([current().id()]));
    }

    #[test]
    fn one_worker_is_the_calling_thread() {
        let caller = current().id();
        Workers::new(1).run(1, &|_| assert_eq!(current().id(), caller));
    }

    #[test]
    fn waiting_ends_when_all_events_are_counted() {
        let events = Countdown::new(4);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    events.wait();
                    assert_eq!(sum.load(Ordering::Relaxed), 4);
                });
            }
            for _ in 0..4 {
                sum.fetch_add(1, Ordering::Relaxed);
                events.count();
            }
        });
        Countdown::new(0).wait();
    }
}
