//! Blocks that move directly from device to device, in a communicator that wraps another for everything else. The protocol
//! is described in `comm/direct/README.md`; the channel between devices comes with their [`Backend`](crate::kernel::Backend).

mod channel;
mod engine;
mod note;
mod transport;

pub use channel::{Channel, Transfer};

use super::Communicator;
use super::group::Group;
use crate::error::Result;
use engine::Engine;
use std::sync::Arc;
use std::time::Duration;
use transport::DirectTransport;

/// Makes a communicator of the same ranks that moves blocks on devices through `channel`, and everything else through
/// `underlying`. All ranks must call this; `deadline` is the longest wait for another rank.
///
/// All groups split from it share the channel. Failures are detected as by the underlying communicator: a rank that returns an
/// error tells the others through it. When the last of its groups and handles is dropped, the rank says that no message
/// follows; the underlying communicator must still exist then.
///
/// # Errors
/// Failures of other ranks.
pub fn over(
    underlying: &dyn Communicator,
    channel: Box<dyn Channel>,
    deadline: Duration,
) -> Result<Arc<dyn Communicator>> {
    let (rank, size) = (underlying.rank(), underlying.size());
    // It gets its own group, so that its tags are used by nobody else.
    let engine = Engine::new(underlying.split(0, rank)?, channel);
    Ok(Arc::new(Group::world(Arc::new(DirectTransport::new(engine, deadline)), (0..size).collect(), rank)))
}
