//! Connects GPUs of ranks that are processes.

use crate::gpu::Gpu;
use ringspan::Result;
use ringspan::comm::Communicator;
use ringspan::comm::process_group::ProcessGroup;
use std::sync::Arc;
use std::time::Duration;

impl Gpu {
    /// Connects the GPUs of ranks that are processes, of which this one computes on this GPU: blocks go from GPU to GPU by
    /// NCCL if all ranks can use it, else through the memory of the CPU. Also returns a text that says which, and why;
    /// `None` for threads, which need no connection. All ranks must call this and get the same result; `deadline` is the
    /// longest wait for another rank.
    ///
    /// The returned group must be dropped before the communicator of the given one.
    ///
    /// # Errors
    /// Failures of NCCL, or of other ranks.
    pub fn connect(&self, processes: &ProcessGroup, deadline: Duration) -> Result<(ProcessGroup, Option<String>)> {
        let Some(comm) = processes.comm() else { return Ok((processes.clone(), None)) };
        let (comm, way) = by_nccl(comm, self, deadline)?;
        Ok((processes.with_communicator(comm), Some(way)))
    }
}

#[cfg(feature = "nccl")]
fn by_nccl(comm: &Arc<dyn Communicator>, gpu: &Gpu, deadline: Duration) -> Result<(Arc<dyn Communicator>, String)> {
    use crate::nccl::{Options, obstacle, over, version};
    let options = Options { deadline, shared_gpus: false };
    Ok(match obstacle(&**comm, gpu, &options)? {
        None => (over(&**comm, gpu, options)?, format!("blocks by NCCL {}", version()?)),
        Some(obstacle) => (comm.clone(), format!("blocks through the memory of the CPU (no NCCL: {obstacle})")),
    })
}

#[cfg(not(feature = "nccl"))]
fn by_nccl(comm: &Arc<dyn Communicator>, _: &Gpu, _: Duration) -> Result<(Arc<dyn Communicator>, String)> {
    Ok((comm.clone(), "blocks through the memory of the CPU (built without --features nccl)".into()))
}
