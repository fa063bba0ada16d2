//! A team of threads for short calls. They spin for a moment before they sleep: sleeping and waking would take a good
//! part of such a call, and the system may put a woken thread on the processor of the thread that wakes it.

use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long a thread without work spins before it sleeps.
const SPIN_TIME: Duration = Duration::from_micros(100);

/// The function of a call: worker 0 runs on the calling thread, the others on the team's threads.
type Work<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed number of threads that live as long as the team.
pub(super) struct Team {
    shared: Arc<TeamState>,
    threads: Vec<JoinHandle<()>>,
    /// Allows one call at a time.
    calling: Mutex<()>,
}

struct TeamState {
    /// Number of calls so far. A thread that sees it change reads `job`.
    calls: AtomicUsize,
    job: UnsafeCell<Option<TeamCall>>,
    /// Number of the team's threads that have not finished their part of the call.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    lock: Mutex<()>,
    /// Signals that a call began, or that the team ends.
    begun: Condvar,
    /// Signals that all threads have finished their parts.
    ended: Condvar,
}

#[derive(Clone, Copy)]
struct TeamCall {
    work: Work<'static>,
    workers: usize,
}

// SAFETY: `job` is written by the thread that holds `calling`, while no thread of the team is busy, and read by threads of
// the team that have seen `calls` change after the write.
unsafe impl Sync for TeamState {}

impl Team {
    /// Starts `count` threads; `None` if any of them could not be started.
    pub(super) fn new(count: usize) -> Option<Self> {
        let shared = Arc::new(TeamState {
            calls: AtomicUsize::new(0),
            job: UnsafeCell::new(None),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            begun: Condvar::new(),
            ended: Condvar::new(),
        });
        let mut team = Self { shared, threads: Vec::new(), calling: Mutex::new(()) };
        for index in 0..count {
            let shared = team.shared.clone();
            let named = thread::Builder::new().name(format!("ringspan-kernel-{index}"));
            team.threads.push(named.spawn(move || shared.serve(index + 1)).ok()?);
        }
        Some(team)
    }

    /// Calls `work(worker)` once for every worker below `workers`, worker 0 on this thread, and waits for all. If another
    /// thread's call is running, this thread runs all workers.
    ///
    /// # Panics
    /// If a worker panics.
    pub(super) fn run(&self, workers: usize, work: Work<'_>) {
        let _one = match self.calling.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return (0..workers).for_each(work),
        };
        // SAFETY: the reference outlives its use: this function waits until every thread has finished its part, also if a
        // worker panics.
        let work = unsafe { std::mem::transmute::<Work<'_>, Work<'static>>(work) };
        let shared = &*self.shared;
        shared.busy.store(self.threads.len(), Ordering::Relaxed);
        // SAFETY: no thread of the team is busy, so none reads it.
        unsafe { *shared.job.get() = Some(TeamCall { work, workers }) };
        shared.calls.fetch_add(1, Ordering::Release);
        // A thread that is about to sleep holds the lock until it does, so it cannot miss the notification.
        drop(shared.locked());
        shared.begun.notify_all();
        let own = catch_unwind(AssertUnwindSafe(|| {
            work(0);
            // This thread also runs the workers that exceed the size of the team.
            (self.threads.len() + 1..workers).for_each(work);
        }));
        shared.wait(&shared.ended, || shared.busy.load(Ordering::Acquire) == 0);
        if let Err(panic) = own {
            resume_unwind(panic);
        }
        assert!(!shared.panicked.swap(false, Ordering::Relaxed), "a thread of a kernel panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        drop(self.shared.locked());
        self.shared.begun.notify_all();
        for thread in self.threads.drain(..) {
            // The thread cannot panic, because panics of its work are caught.
            let _ = thread.join();
        }
    }
}

impl TeamState {
    /// The main function of a team's thread: runs this worker's part of each call.
    fn serve(&self, worker: usize) {
        let mut seen = 0;
        loop {
            self.wait(&self.begun, || self.calls.load(Ordering::Acquire) != seen || self.stop.load(Ordering::Acquire));
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            // The next call begins only after this one has ended on all threads.
            seen = seen.wrapping_add(1);
            // SAFETY: it was written before `calls` changed, and is not written while this thread is busy.
            let job = unsafe { *self.job.get() };
            if let Some(TeamCall { work, .. }) = job.filter(|job| worker < job.workers)
                && catch_unwind(AssertUnwindSafe(|| work(worker))).is_err()
            {
                self.panicked.store(true, Ordering::Relaxed);
            }
            if self.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
                drop(self.locked());
                self.ended.notify_all();
            }
        }
    }

    /// Waits until `is_so` returns true: first by spinning, then by sleeping until `changed` is notified.
    fn wait(&self, changed: &Condvar, is_so: impl Fn() -> bool) {
        let begin = Instant::now();
        while begin.elapsed() < SPIN_TIME {
            if is_so() {
                return;
            }
            std::hint::spin_loop();
        }
        let mut lock = self.locked();
        while !is_so() {
            lock = changed.wait(lock).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_any_worker_reaches_the_caller_when_all_have_ended() {
        let team = Team::new(2).expect("threads");
        for bad in 0..3 {
            let ended = AtomicUsize::new(0);
            let result = catch_unwind(AssertUnwindSafe(|| {
                team.run(3, &|worker| {
                    assert!(worker != bad, "worker {worker} panics");
                    thread::sleep(Duration::from_millis(20));
                    ended.fetch_add(1, Ordering::Relaxed);
                });
            }));
            assert!(result.is_err());
            assert_eq!(ended.load(Ordering::Relaxed), 2, "the others ended");
        }
        let calls = AtomicUsize::new(0);
        team.run(3, &|_| {
            calls.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(calls.load(Ordering::Relaxed), 3, "the team goes on");
    }

    #[test]
    fn calls_of_several_threads_and_of_more_or_fewer_workers_all_run() {
        let team = Team::new(2).expect("threads");
        let calls = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for workers in (1..6).cycle().take(200) {
                        team.run(workers, &|_| {
                            calls.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(calls.load(Ordering::Relaxed), 3 * 40 * (1 + 2 + 3 + 4 + 5));
    }

    #[test]
    fn a_team_that_sleeps_is_woken() {
        let team = Team::new(1).expect("a thread");
        for _ in 0..20 {
            thread::sleep(SPIN_TIME * 3);
            let calls = AtomicUsize::new(0);
            team.run(2, &|_| {
                calls.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(calls.load(Ordering::Relaxed), 2);
        }
    }
}
