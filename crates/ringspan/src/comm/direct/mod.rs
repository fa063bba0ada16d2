//! Blocks that go from device to device, around a communicator that carries everything else. The protocol is described in
//! `comm/direct/README.md`; NCCL is the lane of NVIDIA's GPUs (`kernel::nccl`, feature `nccl`).

mod engine;
mod lane;
mod note;
mod world;

pub use lane::{Lane, Transfer};

use super::Communicator;
use super::group::Group;
use crate::error::Result;
use engine::Engine;
use std::sync::Arc;
use std::time::Duration;
use world::World;

/// A communicator of the same ranks that carries blocks on devices by `lane`, and all else by `beneath`. All ranks must call
/// this; `deadline` is the longest wait for another rank.
///
/// All groups split from it share the lane. It looks after failures as far as it sees them: a rank that returns an error
/// tells the others through the communicator beneath. When the last of its groups and handles is dropped, the rank says
/// that nothing follows; the communicator beneath must then be there still.
///
/// # Errors
/// Failures of other ranks.
pub fn over(beneath: &dyn Communicator, lane: Box<dyn Lane>, deadline: Duration) -> Result<Arc<dyn Communicator>> {
    let (rank, size) = (beneath.rank(), beneath.size());
    // A group of its own: its tags are nobody else's.
    let engine = Engine::new(beneath.split(0, rank)?, lane);
    Ok(Arc::new(Group::world(Arc::new(World::new(engine, deadline)), (0..size).collect(), rank)))
}
