//! The processes that run a program together: one, whose ranks are threads, or several, each of which is a rank.

use super::agree::{Setting, agree, smallest};
use super::{Buffer, Communicator};
use crate::error::{Error, Result};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// The processes that run a program together. One program serves both kinds: it starts a `World` for its mesh, whose ranks are
/// threads of a single process or all processes of the group, and only the process with rank 0 prints and writes files.
#[derive(Clone, Default)]
pub struct ProcessGroup {
    /// The rank that this process is, or `None` if it is the only one.
    process: Option<Process>,
}

#[derive(Clone)]
struct Process {
    comm: Arc<dyn Communicator>,
    /// Number of ranks on this machine, and this rank's index among them.
    local: (usize, usize),
    set_deadline: Arc<dyn Fn(Duration) + Send + Sync>,
}

impl ProcessGroup {
    /// A single process, whose ranks are threads.
    pub const fn single() -> Self {
        Self { process: None }
    }

    /// The processes of MPI, of which this one is `process`, and communicates through `comm`.
    #[cfg(feature = "mpi")]
    pub fn mpi(process: &super::mpi::Process, comm: Arc<dyn Communicator>) -> Self {
        let (local, set_deadline) = ((process.local_size(), process.local_rank()), process.deadline_setter());
        Self { process: Some(Process { comm, local, set_deadline }) }
    }

    /// Whether rank 0 is in this process. Only that process prints results and writes files.
    pub fn lead(&self) -> bool {
        self.process.as_ref().is_none_or(|process| process.comm.rank() == 0)
    }

    /// Number of processes on this machine if each is a rank; `None` if ranks are threads.
    pub fn local(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.0)
    }

    /// This process's index among those on its machine; `None` if ranks are threads.
    pub fn local_rank(&self) -> Option<usize> {
        self.process.as_ref().map(|process| process.local.1)
    }

    /// The communicator of this process; `None` if ranks are threads, which have their own in a `World`.
    pub fn comm(&self) -> Option<&Arc<dyn Communicator>> {
        self.process.as_ref().map(|process| &process.comm)
    }

    /// The same processes with another communicator, which has the same ranks and wraps the one they had. Has no effect on
    /// threads.
    #[must_use]
    pub fn with_communicator(&self, comm: Arc<dyn Communicator>) -> Self {
        Self { process: self.process.as_ref().map(|process| Process { comm, ..process.clone() }) }
    }

    /// Sets the longest wait of this process for another; has no effect on threads.
    pub(crate) fn set_deadline(&self, deadline: Duration) {
        if let Some(Process { set_deadline, .. }) = &self.process {
            set_deadline(deadline);
        }
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
    /// this process's ranks: as many as `World::run` returns results.
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

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.process {
            None => f.write_str("ProcessGroup::single"),
            Some(Process { comm, .. }) => write!(f, "ProcessGroup: process {} of {}", comm.rank(), comm.size()),
        }
    }
}
