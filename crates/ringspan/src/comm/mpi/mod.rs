//! Ranks as processes of MPI, started by `mpirun` or `srun`. The protocol is described in `comm/mpi/README.md`.
//!
//! A process is one rank. It connects to the others, runs its rank's work once or repeatedly, and ends:
//!
//! ```no_run
//! use ringspan::Error;
//! use ringspan::comm::mpi::{Options, Process};
//!
//! let process = Process::start(Options::default())?;
//! let result = process.run(|comm| comm.barrier());
//! if let Err(error) = &result {
//!     eprintln!("error: {error}"); // Before the end, which may come with the end of all processes.
//! }
//! process.end(result.is_ok())?;
//! # Ok::<_, Error>(())
//! ```
//!
//! When a process dies, `mpirun` ends the others, first by SIGTERM: a program that handles this signal has a second left,
//! in which it learns which rank died and can report it.

mod engine;
mod transport;
mod watch;
mod wire;

use super::Communicator;
use super::group::Group;
use super::group::transport::Transport;
use super::threads::panic_message;
use crate::error::{Error, Result};
use ::mpi::Threading;
use ::mpi::environment::Universe;
use engine::Engine;
use std::fmt::Display;
use std::mem::ManuallyDrop;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;
use transport::MpiTransport;
use watch::{RankAddress, Watch};
use wire::Wire;

/// Longest time that starting or ending MPI may take; it does not say why it hangs.
const MPI_TIMEOUT: Duration = Duration::from_secs(90);

/// Options for running ranks as processes.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Longest wait for another rank, even for one that computes: an hour by default. Processes that die or are stopped are
    /// detected regardless of it.
    pub deadline: Duration,
    /// A process without a heartbeat for this time counts as stopped. All others end within twice this time.
    pub silence: Duration,
    /// Stack size of the rank's thread in bytes. Candle's backward recurses once per operation.
    pub stack_bytes: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self { deadline: Duration::from_secs(3600), silence: Duration::from_secs(4), stack_bytes: 64 << 20 }
    }
}

/// This process's connection to all ranks. A process has at most one in its lifetime.
pub struct Process {
    universe: ManuallyDrop<Universe>,
    transport: Arc<MpiTransport>,
    /// The group of all ranks: one for all calls of [`run`](Self::run), since it numbers collectives.
    group: Arc<Group<MpiTransport>>,
    /// Number of ranks on this machine, and this rank's index among them.
    local: (usize, usize),
    options: Options,
}

impl Process {
    /// Starts MPI and connects the ranks. All processes must call this, on the thread that calls [`end`](Self::end).
    ///
    /// # Errors
    /// MPI that was started before or does not support calls from several threads, or ranks that do not connect.
    pub fn start(options: Options) -> Result<Self> {
        let refused = |rank: usize, problem: String| Error::Communicator { rank, operation: "start".into(), problem };
        let started = Guard::new("start")?;
        let Some((universe, threading)) = ::mpi::initialize_with_threading(Threading::Serialized) else {
            return Err(refused(0, "MPI was started before in this process".into()));
        };
        // After an error here MPI is not finalised, because that would wait for the other processes.
        let universe = ManuallyDrop::new(universe);
        let wire = Wire::new().map_err(|problem| refused(0, problem))?;
        let (rank, size) = (wire.rank, wire.size);
        if threading < Threading::Serialized {
            return Err(refused(rank, format!("MPI allows calls from {threading:?} threads, but needs Serialized")));
        }
        let address = RankAddress::agree(&wire).map_err(|problem| refused(rank, problem))?;
        let watch = Watch::start(&address, &options).map_err(|error| refused(rank, error.to_string()))?;
        drop(started);
        let transport = Arc::new(MpiTransport::new(Engine::new(wire), watch, options.deadline));
        Ok(Self {
            universe,
            group: Arc::new(Group::world(transport.clone(), (0..size).collect(), rank)),
            transport,
            local: address.local,
            options,
        })
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.transport.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> usize {
        self.group.size()
    }

    /// Number of ranks on this machine.
    pub fn local_size(&self) -> usize {
        self.local.0
    }

    /// This rank's index among the ranks on its machine.
    pub fn local_rank(&self) -> usize {
        self.local.1
    }

    /// A function that sets the longest wait for another rank, from any thread.
    pub(super) fn deadline_setter(&self) -> Arc<dyn Fn(Duration) + Send + Sync> {
        let transport = self.transport.clone();
        Arc::new(move |deadline| transport.set_deadline(deadline))
    }

    /// Runs this process's rank on a thread `rank-N`. All other ranks are told of an error or a panic, and their next call
    /// fails. It may be called again as long as no rank has failed.
    ///
    /// # Errors
    /// The error of `rank_main`, or a failure of any rank in an earlier call.
    pub fn run<T, E, F>(&self, rank_main: F) -> std::result::Result<T, E>
    where
        F: FnOnce(Arc<dyn Communicator>) -> std::result::Result<T, E> + Send,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let rank = self.rank();
        self.transport.check_call("run")?;
        let group = self.group.clone();
        let result = thread::scope(|scope| {
            let thread = thread::Builder::new().name(format!("rank-{rank}")).stack_size(self.options.stack_bytes);
            let main = || catch_unwind(AssertUnwindSafe(|| rank_main(group)));
            let panicked = |panic: Box<dyn std::any::Any + Send>| {
                Err(Error::Panicked { rank, message: panic_message(&*panic) }.into())
            };
            match thread.spawn_scoped(scope, main).map(|thread| thread.join()) {
                Ok(Ok(Ok(result))) => result,
                Ok(Ok(Err(panic)) | Err(panic)) => panicked(panic),
                Err(error) => {
                    let problem =
                        format!("its thread did not start with a stack of {} bytes: {error}", self.options.stack_bytes);
                    Err(Error::Communicator { rank, operation: "run".into(), problem }.into())
                }
            }
        });
        if let Err(error) = &result {
            let text = catch_unwind(AssertUnwindSafe(|| error.to_string()));
            self.transport.fail(rank, text.unwrap_or_else(|_| "an error whose text cannot be shown".into()));
        }
        result
    }

    /// Waits for the other ranks, and ends MPI. If `good` is false or another rank has failed, it waits only until all have
    /// reported their errors; the caller must have reported its own before, since then all processes may end.
    ///
    /// # Errors
    /// A failure of another rank after this rank finished well.
    pub fn end(self, good: bool) -> Result<()> {
        let finished = if good { self.transport.finish() } else { Ok(()) };
        if good && finished.is_ok() {
            self.transport.watch.bye();
            self.transport.close();
            let _guard = Guard::new("end")?;
            drop(ManuallyDrop::into_inner(self.universe));
            return Ok(());
        }
        if !good {
            // This has no effect if `run` has already reported the error.
            self.transport.fail(self.rank(), "it ended with an error".into());
        }
        if let Err(error) = &finished {
            // The error is printed here, because the process may be killed during the wait below.
            watch::say(error);
        }
        self.transport.watch.leave();
        self.transport.close();
        if self.rank() == 0 {
            // MPI also ends a process that is stopped.
            self.transport.abort();
        }
        finished
    }
}

/// Ends the process if a call of MPI takes too long.
struct Guard(Arc<AtomicBool>);

impl Guard {
    fn new(what: &'static str) -> Result<Self> {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        let guard = move || {
            thread::sleep(MPI_TIMEOUT);
            if !seen.load(Ordering::SeqCst) {
                watch::say(&format!("MPI did not {what} in {MPI_TIMEOUT:?}: another process is missing or stuck"));
                std::process::exit(1);
            }
        };
        let thread = thread::Builder::new().name("guard".into()).stack_size(64 << 10).spawn(guard);
        thread.map(|_| Self(over)).map_err(|error| Error::Communicator {
            rank: 0,
            operation: what.into(),
            problem: format!("no thread to watch over MPI: {error}"),
        })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
