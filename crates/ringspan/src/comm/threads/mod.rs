//! Ranks as threads of one process. The protocol is described in `comm/README.md`.

mod round;
mod shared;
mod simulated_link;
mod transport;

use super::Communicator;
use super::group::Group;
use super::group::transport::Transport;
use crate::error::Error;
use crate::sync::thread;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;
use transport::ThreadTransport;

pub use simulated_link::SimulatedLink;

/// Options for running ranks as threads.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Longest wait for another rank, even for one that computes: an hour by default. Failures and deadlocks are detected
    /// at once, regardless of it.
    pub deadline: Duration,
    /// Stack size of a rank's thread in bytes. Candle's backward recurses once per operation.
    pub stack_bytes: usize,
    /// Simulated speed of messages; `None` passes them at once.
    pub link: Option<SimulatedLink>,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(3600), stack_bytes: 64 << 20, link: None }
    }
}

/// Bytes that a thread uses before it holds a tensor: the used part of its stack, its heap in the allocator, the buffers of
/// a kernel. Measured with `ringspan attend` in pages of 4 KB, without plans: 0.4 MB each with 256 threads of five tokens,
/// 0.6 with 1,024, 1.2 with 4,096. With heaps in large pages (2 MB) it was up to 6 MB.
const BYTES_PER_THREAD: u64 = 2 << 20;

/// Approximate number of bytes that `size` ranks use as threads before they hold a tensor: threads, and in a collective a
/// part of every rank for every other.
pub fn memory(size: usize) -> u64 {
    let pairs = (size as u64).saturating_mul(size as u64);
    let collective = pairs.saturating_mul(2 * size_of::<Option<super::group::part::CollectivePart>>() as u64);
    collective.saturating_add(BYTES_PER_THREAD.saturating_mul(size as u64))
}

/// Refuses more threads than memory allows: the system would start them and later kill this process, or others.
fn check_memory(size: usize) -> Result<(), Error> {
    let needed = memory(size);
    let Some(free) = crate::memory::available().filter(|free| needed > *free) else { return Ok(()) };
    let fits = |ranks: &usize| memory(*ranks) <= free;
    let most = std::iter::successors(Some(size), |ranks| Some(ranks / 2).filter(|ranks| *ranks > 0)).find(fits);
    let gigabytes = |bytes: u64| bytes as f64 / 1e9;
    let problem = format!(
        "{size} ranks as threads take about {:.1} GB before they hold a tensor, and {:.1} GB are free: {} would fit, or give \
         each rank a process of its own",
        gigabytes(needed),
        gigabytes(free),
        most.unwrap_or(0)
    );
    Err(Error::Communicator { rank: 0, operation: "run".into(), problem })
}

/// Refuses no ranks, more than memory allows, and a link that carries nothing.
pub(crate) fn check(size: usize, options: &Options) -> Result<(), Error> {
    if size == 0 {
        return Err(Error::MeshSize { mesh: "threads".into(), needed: 1, ranks: 0 });
    }
    if let Some(SimulatedLink { bandwidth, .. }) =
        options.link.filter(|link| link.bandwidth.is_nan() || link.bandwidth <= 0.0)
    {
        let problem = format!("a link of {bandwidth} bytes a second carries nothing; it must be above 0");
        return Err(Error::Communicator { rank: 0, operation: "run".into(), problem });
    }
    check_memory(size)
}

/// The connections between ranks that work repeatedly, on threads that the caller provides.
pub(crate) struct Connections {
    transport: Arc<ThreadTransport>,
    communicators: Vec<Arc<dyn Communicator>>,
}

impl Connections {
    /// Connects `size` ranks.
    pub(crate) fn new(size: usize, options: &Options) -> Self {
        let transport = Arc::new(ThreadTransport::new(size, options.deadline, options.link));
        let ranks: Arc<[usize]> = (0..size).collect();
        let communicator =
            |rank| -> Arc<dyn Communicator> { Arc::new(Group::world(transport.clone(), ranks.clone(), rank)) };
        Self { communicators: (0..size).map(communicator).collect(), transport }
    }

    /// The communicator of each rank; it is the same in all calls.
    pub(crate) fn communicators(&self) -> &[Arc<dyn Communicator>] {
        &self.communicators
    }

    /// Runs the work of `rank` on the calling thread. All ranks must be run at the same time.
    pub(crate) fn run<T, E>(&self, rank: usize, work: impl FnOnce() -> Result<T, E>) -> Result<T, E>
    where
        E: From<Error> + Display,
    {
        one_rank(&self.transport, rank, work)
    }

    /// Ends a call that all ranks have finished: returns their results, or the error of the rank that failed first, and
    /// whether the ranks can be run again.
    ///
    /// If they cannot, all later calls of their communicators fail, and the error names the rank that failed.
    pub(crate) fn finish<T, E>(&self, results: Vec<Result<T, E>>) -> (Result<Vec<T>, E>, bool) {
        let failed = self.transport.failed();
        let unfinished = if failed.is_empty() { self.transport.restart().err() } else { None };
        let usable = failed.is_empty() && unfinished.is_none();
        if let Some((rank, problem)) = unfinished {
            self.transport.fail(rank, format!("the call before ended although {problem}"));
        }
        (root_cause(results, &failed), usable)
    }
}

/// Runs `rank_main` on `size` ranks, each on a thread `rank-N`, and returns their results in rank order.
///
/// # Errors
/// No ranks, or more than memory allows; else the error of the rank that failed first. A rank that fails or panics makes
/// the others fail at their next call.
pub fn run<T, E, F>(size: usize, options: Options, rank_main: F) -> Result<Vec<T>, E>
where
    F: Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
    T: Send,
    E: From<Error> + Display + Send,
{
    check(size, &options)?;
    let world = Arc::new(ThreadTransport::new(size, options.deadline, options.link));
    let ranks: Arc<[usize]> = (0..size).collect();
    let results = thread::scope(|scope| {
        let spawn = |rank: usize| {
            let (world, rank_main) = (world.clone(), &rank_main);
            let group = Arc::new(Group::world(world.clone(), ranks.clone(), rank));
            let thread = thread::Builder::new().name(format!("rank-{rank}")).stack_size(options.stack_bytes);
            thread.spawn_scoped(scope, move || one_rank(&world, rank, || rank_main(group)))
        };
        let start = |rank: usize| {
            let thread = spawn(rank);
            if let Err(error) = &thread {
                world.fail(rank, not_started(error, options));
            }
            thread
        };
        let started: Vec<_> = (0..size).map(start).collect();
        let join = |(rank, thread): (usize, std::io::Result<thread::ScopedJoinHandle<'_, _>>)| {
            let problem = match thread.map(|thread| thread.join()) {
                Ok(Ok(result)) => return result,
                Ok(Err(panic)) => panic_message(&*panic),
                Err(error) => not_started(&error, options),
            };
            Err(Error::Communicator { rank, operation: "run".into(), problem }.into())
        };
        started.into_iter().enumerate().map(join).collect::<Vec<Result<T, E>>>()
    });
    root_cause(results, &world.failed())
}

/// All results, or the error of the first of `failed` that has one: the errors of other ranks only report that failure.
fn root_cause<T, E>(results: Vec<Result<T, E>>, failed: &[usize]) -> Result<Vec<T>, E> {
    let mut oks = Vec::with_capacity(results.len());
    let mut first: Option<(usize, E)> = None;
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(value) => oks.push(value),
            Err(error) => {
                let place = failed.iter().position(|other| *other == rank).unwrap_or(usize::MAX);
                if first.as_ref().is_none_or(|(best, _)| place < *best) {
                    first = Some((place, error));
                }
            }
        }
    }
    first.map_or(Ok(oks), |(_, error)| Err(error))
}

/// Runs the work of a rank on the calling thread. It tells the world how the work ended, also after a panic.
fn one_rank<T, E>(world: &ThreadTransport, rank: usize, work: impl FnOnce() -> Result<T, E>) -> Result<T, E>
where
    E: From<Error> + Display,
{
    world.begin(rank);
    let result = catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Error::Panicked { rank, message: panic_message(&*panic) }.into()));
    match &result {
        Ok(_) => world.finish(rank),
        Err(error) => {
            let text = catch_unwind(AssertUnwindSafe(|| error.to_string()));
            world.fail(rank, text.unwrap_or_else(|_| "an error whose text cannot be shown".into()));
        }
    }
    result
}

fn not_started(error: &std::io::Error, options: Options) -> String {
    format!("its thread did not start with a stack of {} bytes: {error}", options.stack_bytes)
}

pub(super) fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".into())
}
