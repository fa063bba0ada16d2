//! A world of ranks that is started once and then runs any number of functions on them.
//!
//! A server, a notebook or a trainer starts its [`World`] once. Each rank keeps its threads, and its communicator, so groups
//! that were made of it in one call can be used in the next; what else a rank needs again, such as weights or a cache,
//! belongs to the caller, and is passed to [`World::run_with`]:
//!
//! ```
//! use ringspan::{Error, World};
//!
//! let mut world = World::threads(4)?;
//! let mut sums = vec![0.0; 4];
//! for _ in 0..3 {
//!     world.run_with(&mut sums, |rank, sum| {
//!         let mut term = [rank.index() as f32];
//!         rank.communicator().all_reduce(&mut term)?;
//!         *sum += term[0];
//!         Ok::<_, Error>(())
//!     })?;
//! }
//! assert_eq!(sums, [18.0; 4]);
//! # Ok::<_, Error>(())
//! ```
//!
//! If a rank fails or panics, the call ends on all ranks, and returns the error of the rank that failed first. A world of
//! threads can be used again afterwards: its ranks are connected anew, and communicators from before the failure fail, with
//! the name of that rank. A world of processes is closed by a failure, and says so in all later calls.

use crate::comm::{Communicator, process_group::ProcessGroup, threads};
use crate::error::{Error, Result};
use crate::kernel::Kernel;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::fmt::{self, Display};
use std::sync::{Arc, Mutex, PoisonError};
use threads::Connections;

/// Options of a world.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Threads with which each rank computes, at least 1.
    pub threads_per_rank: usize,
    /// Deadline of waits, and stack size of the ranks' threads.
    pub ranks: threads::Options,
}

impl Default for Options {
    fn default() -> Self {
        Self { threads_per_rank: 1, ranks: threads::Options::default() }
    }
}

/// Ranks that take work repeatedly: threads of this process, or processes of MPI of which this one is a rank.
pub struct World {
    ranks: Ranks,
    options: Options,
}

enum Ranks {
    Threads {
        /// One thread for each rank, which passes the rank's work to the rank's pool and waits.
        launcher: ThreadPool,
        pools: Vec<ThreadPool>,
        connections: Connections,
    },
    #[cfg(feature = "mpi")]
    Process {
        pool: ThreadPool,
        /// `None` once the world has been closed.
        process: Option<crate::comm::mpi::Process>,
        failed: bool,
    },
    /// This process, in a group of processes that outlives the world.
    Member {
        /// `None` if the rank computes with one thread, that of the caller.
        pool: Option<ThreadPool>,
        communicator: Arc<dyn Communicator>,
        failed: bool,
    },
}

/// A rank, as the function that it runs sees it.
#[derive(Clone)]
pub struct Rank {
    communicator: Arc<dyn Communicator>,
    threads: usize,
}

impl Rank {
    /// This rank's number, `0..size`.
    pub fn index(&self) -> usize {
        self.communicator.rank()
    }

    /// Number of ranks in the world.
    pub fn size(&self) -> usize {
        self.communicator.size()
    }

    /// The communicator of all ranks. It is the same in every call of [`World::run`].
    pub fn communicator(&self) -> &Arc<dyn Communicator> {
        &self.communicator
    }

    /// Number of threads with which the rank computes: those of the rayon pool in which its work runs.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// An attention kernel for the CPU that computes on the rank's threads.
    pub fn kernel(&self) -> Kernel {
        Kernel::in_current_pool(self.threads)
    }
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rank {} of {}, {} threads", self.index(), self.size(), self.threads)
    }
}

impl World {
    /// Starts `size` ranks as threads of this process; each computes with one thread.
    ///
    /// # Errors
    /// No ranks, or more than memory or the system allow.
    pub fn threads(size: usize) -> Result<Self> {
        Self::threads_with(size, Options::default())
    }

    /// Like [`threads`](Self::threads), with options.
    ///
    /// # Errors
    /// As for [`threads`](Self::threads).
    pub fn threads_with(size: usize, options: Options) -> Result<Self> {
        let options = Options { threads_per_rank: options.threads_per_rank.max(1), ..options };
        threads::check(size, &options.ranks)?;
        let launcher = ThreadPoolBuilder::new().num_threads(size).stack_size(256 << 10);
        let launcher = launcher.thread_name(|rank| format!("launch-{rank}")).build().map_err(not_started(0))?;
        let pools = (0..size).map(|rank| rank_pool(rank, &options)).collect::<Result<_>>()?;
        let connections = Connections::new(size, &options.ranks);
        Ok(Self { ranks: Ranks::Threads { launcher, pools, connections }, options })
    }

    /// Starts MPI in a process that `mpirun` or `srun` started: this process is one rank, which computes with one thread.
    ///
    /// # Errors
    /// MPI that was started before or does not support calls from several threads, or ranks that do not connect.
    #[cfg(feature = "mpi")]
    pub fn mpi() -> Result<Self> {
        Self::mpi_with(Options::default())
    }

    /// Like [`mpi`](Self::mpi), with options. A simulated link has no effect between processes, and is refused.
    ///
    /// # Errors
    /// As for [`mpi`](Self::mpi).
    #[cfg(feature = "mpi")]
    pub fn mpi_with(options: Options) -> Result<Self> {
        let options = Options { threads_per_rank: options.threads_per_rank.max(1), ..options };
        let threads::Options { deadline, stack_bytes, link } = options.ranks;
        if link.is_some() {
            let problem = "a link can be simulated only between ranks that are threads".into();
            return Err(Error::Communicator { rank: 0, operation: "start".into(), problem });
        }
        let mpi = crate::comm::mpi::Options { deadline, stack_bytes, ..Default::default() };
        let process = crate::comm::mpi::Process::start(mpi)?;
        let pool = rank_pool(process.rank(), &options)?;
        Ok(Self { ranks: Ranks::Process { pool, process: Some(process), failed: false }, options })
    }

    /// Starts `size` ranks where a group of processes runs: as threads if this is the only process, else as the processes, whose
    /// connections stay when the world ends.
    ///
    /// # Errors
    /// Another number of processes than `size`; else as for [`threads_with`](Self::threads_with).
    pub fn start(processes: &ProcessGroup, size: usize, options: Options) -> Result<Self> {
        let Some(communicator) = processes.comm() else { return Self::threads_with(size, options) };
        let options = Options { threads_per_rank: options.threads_per_rank.max(1), ..options };
        processes.check(size)?;
        processes.set_deadline(options.ranks.deadline);
        let pool = (options.threads_per_rank > 1).then(|| rank_pool(communicator.rank(), &options)).transpose()?;
        Ok(Self { ranks: Ranks::Member { pool, communicator: communicator.clone(), failed: false }, options })
    }

    /// Number of ranks in the world.
    pub fn size(&self) -> usize {
        match &self.ranks {
            Ranks::Member { communicator, .. } => communicator.size(),
            Ranks::Threads { pools, .. } => pools.len(),
            #[cfg(feature = "mpi")]
            Ranks::Process { process, .. } => process.as_ref().map_or(0, crate::comm::mpi::Process::size),
        }
    }

    /// Number of ranks in this process: all of them if they are threads, 1 if they are processes.
    pub fn local_size(&self) -> usize {
        match &self.ranks {
            Ranks::Threads { pools, .. } => pools.len(),
            #[cfg(feature = "mpi")]
            Ranks::Process { .. } => 1,
            Ranks::Member { .. } => 1,
        }
    }

    /// Whether rank 0 is in this process, which then prints results and writes files.
    pub fn is_lead(&self) -> bool {
        match &self.ranks {
            Ranks::Threads { .. } => true,
            #[cfg(feature = "mpi")]
            Ranks::Process { process, .. } => process.as_ref().is_some_and(|process| process.rank() == 0),
            Ranks::Member { communicator, .. } => communicator.rank() == 0,
        }
    }

    /// Runs `work` on every rank at the same time, and returns the results of the ranks of *this process*, in rank order.
    ///
    /// # Errors
    /// The error of the rank that failed first; for a rank that panicked, [`Error::Panicked`] with its number. Where ranks
    /// are processes, the error of this process's rank, also if another rank failed in an earlier call.
    pub fn run<T, E, F>(&mut self, work: F) -> std::result::Result<Vec<T>, E>
    where
        F: Fn(&Rank) -> std::result::Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let mut nothing = vec![(); self.local_size()];
        self.run_with(&mut nothing, |rank, ()| work(rank))
    }

    /// Like [`run`](Self::run), where each rank of this process also has one of `states`, in rank order: what it keeps from
    /// one call to the next.
    ///
    /// # Errors
    /// As for [`run`](Self::run), and [`Error::MeshSize`] for another number of states than this process has ranks.
    pub fn run_with<S, T, E, F>(&mut self, states: &mut [S], work: F) -> std::result::Result<Vec<T>, E>
    where
        F: Fn(&Rank, &mut S) -> std::result::Result<T, E> + Sync,
        S: Send,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let (needed, threads) = (self.local_size(), self.options.threads_per_rank);
        if states.len() != needed {
            let mesh = format!("a world with {needed} ranks in this process (states were given for {})", states.len());
            return Err(Error::MeshSize { mesh, needed, ranks: states.len() }.into());
        }
        match &mut self.ranks {
            Ranks::Threads { launcher, pools, connections } => {
                let states: Vec<_> = states.iter_mut().map(Mutex::new).collect();
                let results = launcher.broadcast(|launch| {
                    let index = launch.index();
                    let rank = Rank { communicator: connections.communicators()[index].clone(), threads };
                    // Only this rank takes this lock, so it is never poisoned by another.
                    let mut state = states[index].lock().unwrap_or_else(PoisonError::into_inner);
                    let state: &mut S = &mut state;
                    pools[index].install(|| connections.run(index, || work(&rank, state)))
                });
                let (results, usable) = connections.finish(results);
                if !usable {
                    *connections = Connections::new(pools.len(), &self.options.ranks);
                }
                results
            }
            #[cfg(feature = "mpi")]
            Ranks::Process { pool, process, failed } => {
                let (Some(process), Some(state)) = (process, states.first_mut()) else { return Ok(Vec::new()) };
                let result = process.run(|communicator| {
                    let rank = Rank { communicator, threads };
                    pool.install(|| work(&rank, state))
                });
                *failed |= result.is_err();
                result.map(|result| vec![result])
            }
            Ranks::Member { pool, communicator, failed } => {
                let Some(state) = states.first_mut() else { return Ok(Vec::new()) };
                let rank = Rank { communicator: communicator.clone(), threads };
                if std::mem::replace(failed, true) {
                    let problem = "the world is closed, since this rank failed in an earlier call".into();
                    return Err(Error::Communicator { rank: rank.index(), operation: "run".into(), problem }.into());
                }
                // A panic is not caught here: it unwinds to the code that runs this process, which reports it to the other ranks.
                let result = match pool {
                    Some(pool) => pool.install(|| work(&rank, state)),
                    None => work(&rank, state),
                };
                *failed = result.is_err();
                result.map(|result| vec![result])
            }
        }
    }

    /// Ends the world. Processes wait for each other, and MPI is ended; a process that drops its world without this call
    /// ends it, too, but learns nothing of other ranks' failures.
    ///
    /// # Errors
    /// A failure of another process after this one finished well.
    pub fn close(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        match &mut self.ranks {
            Ranks::Threads { .. } | Ranks::Member { .. } => Ok(()),
            #[cfg(feature = "mpi")]
            Ranks::Process { process, failed, .. } => {
                let good = !*failed && !std::thread::panicking();
                process.take().map_or(Ok(()), |process| process.end(good))
            }
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // `close` returns this error; here nobody could handle it.
        let _ = self.end();
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.local_size() == self.size() { "threads" } else { "processes" };
        write!(f, "World of {} ranks as {kind}", self.size())
    }
}

/// The threads of a rank, which its kernels and layers share. The rank's work may run on any of them, so each has the stack
/// that it needs; the system takes memory for the pages of a stack that are used.
fn rank_pool(rank: usize, options: &Options) -> Result<ThreadPool> {
    let pool = ThreadPoolBuilder::new().num_threads(options.threads_per_rank).stack_size(options.ranks.stack_bytes);
    let name = move |thread| if thread == 0 { format!("rank-{rank}") } else { format!("rank-{rank}-{thread}") };
    pool.thread_name(name).build().map_err(not_started(rank))
}

fn not_started(rank: usize) -> impl Fn(rayon::ThreadPoolBuildError) -> Error {
    move |error| Error::Communicator { rank, operation: "start".into(), problem: format!("no threads: {error}") }
}
