//! Threads for the time of one call: a rank owns its threads, there is no global pool.

use std::thread::{Builder, scope};

/// Calls `work(worker)` once for every worker below `count`, worker 0 on the calling thread, and waits for all.
pub(super) fn run(count: usize, work: &(dyn Fn(usize) + Sync)) {
    if count <= 1 {
        return work(0);
    }
    scope(|scope| {
        let spawned = |&worker: &usize| Builder::new().spawn_scoped(scope, move || work(worker)).is_err();
        // A machine that gives no thread gets the work done by this one.
        let refused: Vec<usize> = (1..count).filter(spawned).collect();
        work(0);
        refused.into_iter().for_each(work);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::thread::current;

    #[test]
    fn every_worker_runs_once_and_one_alone_on_the_calling_thread() {
        let seen = Mutex::new(Vec::new());
        run(3, &|worker| seen.lock().expect("no panic").push(worker));
        let mut seen = seen.into_inner().expect("no panic");
        seen.sort();
        assert_eq!(seen, [0, 1, 2]);
        let caller = current().id();
        run(1, &|_| assert_eq!(current().id(), caller));
    }
}
