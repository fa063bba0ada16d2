//! Model checks of the transport between threads, under a scheduler that chooses every interleaving: `cargo test -p
//! ringspan --test comm_model`.
//!
//! The transport's source files are compiled here again, with locks, condition variables and threads that ask the scheduler
//! before each step (`sync.rs`). Each test runs thousands of interleavings, half of them random, half with few preemptions
//! at the worst places (PCT). An interleaving in which all threads wait fails the test, and is printed in a form that
//! `shuttle::replay` repeats. Time stands still: `wait_timeout` never times out, so no deadline can hide a lost wake-up.

#[allow(dead_code, unreachable_pub, unused_imports)]
#[path = "../../src/comm/mod.rs"]
mod comm;
#[allow(dead_code, unreachable_pub)]
#[path = "../../src/error.rs"]
mod error;
mod failures;
#[allow(dead_code, unreachable_pub)]
#[path = "../../src/memory.rs"]
mod memory;
mod messages;
mod sync;

use comm::threads::{Options, run};
use comm::{Buffer, Communicator};
use error::Error;
use shuttle::Runner;
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use std::sync::{Arc, Mutex};
use std::time::Duration;

type Comm = Arc<dyn Communicator>;

/// Options whose deadline is never reached: otherwise a test would see `Error::Deadline`, which all tests refuse.
const NEVER: Options = Options { deadline: Duration::from_secs(1 << 40), stack_bytes: 0, link: None };

/// Runs `test` with `schedules` random interleavings, and as many with at most 3 preemptions.
fn explore(schedules: usize, test: impl Fn() + Send + Sync + 'static) {
    let test = Arc::new(test);
    let (random, few) = (test.clone(), test);
    // Seeds are fixed, so that a test fails either each time or never.
    Runner::new(RandomScheduler::new_from_seed(1, schedules), shuttle::Config::new()).run(move || random());
    Runner::new(PctScheduler::new_from_seed(2, 3, schedules), shuttle::Config::new()).run(move || few());
}

/// The result of `run`, and the results of all ranks.
struct Outcome<T> {
    whole: Result<Vec<T>, Error>,
    ranks: Vec<Option<Result<T, Error>>>,
}

/// Runs one program on all ranks and collects every rank's own result; `None` for a rank that panicked.
fn outcome<T: Clone + Send>(size: usize, main: impl Fn(&Comm) -> Result<T, Error> + Sync) -> Outcome<T> {
    let seen = Mutex::new(vec![None; size]);
    let whole = run(size, NEVER, |comm| {
        let result = main(&comm);
        seen.lock().expect("no panics here")[comm.rank()] = Some(result.clone());
        result
    });
    Outcome { whole, ranks: seen.into_inner().expect("no panics here") }
}

fn number(value: u64) -> Arc<Buffer> {
    Arc::new(Buffer::U64(vec![value]))
}

/// The number in a buffer that has one.
fn value(buffer: &Buffer) -> u64 {
    match buffer {
        Buffer::U64(values) if values.len() == 1 => values[0],
        other => panic!("expected one number, got {other:?}"),
    }
}
