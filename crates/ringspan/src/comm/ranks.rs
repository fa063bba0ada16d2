//! The ranks of a mesh, as threads of this process or as one rank in each of several processes.

use super::agree::{Setting, agree, smallest};
use super::{Buffer, Communicator, threads};
use crate::error::{Error, Result};
use std::fmt::{self, Display};
use std::sync::Arc;

/// How ranks run. The same program serves both: it runs a closure on every rank, and only rank 0 prints and writes files.
#[derive(Clone, Default)]
pub struct Ranks {
    /// The rank that this process is, or `None` if ranks are threads.
    process: Option<Process>,
}

#[derive(Clone)]
struct Process {
    comm: Arc<dyn Communicator>,
    /// Number of ranks on this machine, and this rank's index among them.
    local: (usize, usize),
    set_deadline: Arc<dyn Fn(std::time::Duration) + Send + Sync>,
}

impl Ranks {
    /// Ranks that are threads of this process.
    pub const fn threads() -> Self {
        Self { process: None }
    }

    /// Ranks that are processes: this process is a rank of `world`, and communicates through `comm`.
    #[cfg(feature = "mpi")]
    pub fn process(world: &super::mpi::World, comm: Arc<dyn Communicator>) -> Self {
        let (local, set_deadline) = ((world.local_size(), world.local_rank()), world.deadline_setter());
        Self { process: Some(Process { comm, local, set_deadline }) }
    }

    /// Whether rank 0 is in this process. Only that process prints results and writes files.
    pub fn lead(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.comm.rank() == 0)
    }

    /// Number of ranks on this machine if each is a process; `None` if ranks are threads.
    pub fn local(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.0)
    }

    /// This process's index among the ranks on its machine; `None` if ranks are threads.
    pub fn local_rank(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.1)
    }

    /// The communicator of this process; `None` if ranks are threads, which receive theirs in [`run`](Self::run).
    pub fn comm(&self) -> Option<&Arc<dyn Communicator>> {
        self.process.as_ref().map(|process| &process.comm)
    }

    /// The same processes with another communicator, which has the same ranks and wraps the one they had. Has no effect on
    /// threads.
    #[must_use]
    pub fn with_communicator(&self, comm: Arc<dyn Communicator>) -> Self {
        Self { process: self.process.as_ref().map(|process| Process { comm, ..process.clone() }) }
    }

    /// Runs `rank_main` on every rank of a mesh of `size`, and returns the results of the ranks of *this process*, in rank
    /// order: the results of all ranks if they are threads, of one if they are processes.
    ///
    /// # Errors
    /// [`Error::MeshSize`] for another number of processes; else like those of [`threads::run`], where a process returns
    /// the error of its own rank.
    pub fn run<T, E, F>(&self, size: usize, options: threads::Options, rank_main: F) -> std::result::Result<Vec<T>, E>
    where
        F: Fn(Arc<dyn Communicator>) -> std::result::Result<T, E> + Sync,
        T: Send,
        E: From<Error> + Display + Send,
    {
        let Some(Process { comm, set_deadline, .. }) = &self.process else {
            return threads::run(size, options, rank_main);
        };
        self.check(size)?;
        set_deadline(options.deadline);
        Ok(vec![rank_main(comm.clone())?])
    }

    /// Checks that a mesh of `size` can run here.
    ///
    /// # Errors
    /// [`Error::MeshSize`] for another number of processes.
    pub fn check(&self, size: usize) -> Result<()> {
        match &self.process {
            Some(Process { comm, .. }) if comm.size() != size => {
                Err(Error::MeshSize { mesh: format!("of {size}"), needed: size, ranks: comm.size() })
            }
            _ => Ok(()),
        }
    }

    /// Gathers the buffers of all ranks, in rank order, on rank 0; other processes get `None`. `own` has the buffers of
    /// this process's ranks: as many as [`run`](Self::run) returns results.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn gather(&self, own: Vec<Buffer>) -> Result<Option<Vec<Arc<Buffer>>>> {
        let Some(Process { comm, .. }) = &self.process else {
            return Ok(Some(own.into_iter().map(Arc::new).collect()));
        };
        let mut parts = vec![Buffer::U8(Vec::new()); comm.size()];
        if let (Some(first), Some(own)) = (parts.first_mut(), own.into_iter().next()) {
            *first = own;
        }
        let all = comm.all_to_all(parts)?;
        Ok(self.lead().then_some(all))
    }

    /// The smallest number that a process gives, such as what its machine has room for; threads get their own.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn smallest(&self, number: u64) -> Result<u64> {
        self.process.as_ref().map_or(Ok(number), |process| smallest(&*process.comm, number))
    }

    /// Compares settings over all processes with [`agree`]; threads always agree.
    ///
    /// # Errors
    /// [`Error::Disagreement`], or failures of other ranks.
    pub fn agree(&self, settings: &[Setting]) -> Result<()> {
        self.process.as_ref().map_or(Ok(()), |process| agree(&*process.comm, settings))
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            None => f.write_str("Ranks::threads"),
            Some(Process { comm, .. }) => write!(f, "Ranks::process {} of {}", comm.rank(), comm.size()),
        }
    }
}
