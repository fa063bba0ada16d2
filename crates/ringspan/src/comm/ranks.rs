//! The ranks of a mesh, wherever they run: threads of this process, or one rank in each of several processes.

use super::agree::{Setting, agree};
use super::{Buffer, Communicator, threads};
use crate::error::{Error, Result};
use std::fmt::{self, Display};
use std::sync::Arc;

/// Where ranks run. One program serves both: it runs a closure on every rank, and only the lead shows and writes.
#[derive(Clone, Default)]
pub struct Ranks {
    /// This process as a rank; none: threads.
    process: Option<Process>,
}

#[derive(Clone)]
struct Process {
    comm: Arc<dyn Communicator>,
    /// Ranks on this machine, and this one's place among them.
    local: (usize, usize),
    set_deadline: Arc<dyn Fn(std::time::Duration) + Send + Sync>,
}

impl Ranks {
    /// Ranks are threads of this process.
    pub const fn threads() -> Self {
        Self { process: None }
    }

    /// This process is one rank of `world`, as `comm`.
    #[cfg(feature = "mpi")]
    pub fn process(world: &super::mpi::World, comm: Arc<dyn Communicator>) -> Self {
        let (local, set_deadline) = ((world.local_size(), world.local_rank()), world.deadline_setter());
        Self { process: Some(Process { comm, local, set_deadline }) }
    }

    /// Whether rank 0 is in this process: it alone shows results and writes files.
    pub fn lead(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.comm.rank() == 0)
    }

    /// Ranks on this machine where each is a process of its own; `None` where they are threads.
    pub fn local(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.0)
    }

    /// This process's place among them.
    pub fn local_rank(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.1)
    }

    /// The communicator of this process; `None` where ranks are threads, which get theirs when they run.
    pub fn comm(&self) -> Option<&Arc<dyn Communicator>> {
        self.process.as_ref().map(|process| &process.comm)
    }

    /// The same processes, which talk by `comm`: of the same ranks, and around the communicator they had. Threads stay as they
    /// are.
    #[must_use]
    pub fn talking_by(&self, comm: Arc<dyn Communicator>) -> Self {
        Self { process: self.process.as_ref().map(|process| Process { comm, ..process.clone() }) }
    }

    /// Runs `rank_main` on every rank of a mesh of `size`, and returns the results of the ranks of *this process*, in
    /// rank order: of all ranks where they are threads, of one where they are processes.
    ///
    /// # Errors
    /// [`Error::MeshSize`] where there is another number of processes; else as [`threads::run`], and in a process the
    /// error of its own rank.
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

    /// Whether a mesh of `size` can run here.
    ///
    /// # Errors
    /// [`Error::MeshSize`] where there is another number of processes.
    pub fn check(&self, size: usize) -> Result<()> {
        match &self.process {
            Some(Process { comm, .. }) if comm.size() != size => {
                Err(Error::MeshSize { mesh: format!("of {size}"), needed: size, ranks: comm.size() })
            }
            _ => Ok(()),
        }
    }

    /// What every rank has, in rank order, in the process of rank 0; `None` in the others. `own` is what the ranks of this
    /// process have: as many as [`run`](Self::run) returns results.
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

    /// Compares settings over all processes; threads share theirs. See [`agree`].
    ///
    /// # Errors
    /// [`Error::Disagreement`]; failures of other ranks.
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
