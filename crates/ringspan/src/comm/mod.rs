//! Communication between ranks: one object-safe trait, a transport for ranks that are threads of one process, a transport
//! for ranks that are processes (feature `mpi`), and one that wraps either of them and moves device memory directly between
//! devices.
//!
//! A rank starts a transfer, computes, and then waits for it: this is how a schedule overlaps transfers with computation.
//! Every wait has a deadline, and if a rank fails or calls another collective than the others, all ranks return an error
//! that names it.
//!
//! ```
//! use ringspan::Error;
//! use ringspan::comm::{Buffer, threads};
//!
//! // One hop of a ring.
//! let got = threads::run(4, threads::Options::default(), |comm| {
//!     let (rank, size) = (comm.rank(), comm.size());
//!     let sent = comm.send((rank + 1) % size, 0, Buffer::U64(vec![rank as u64]).into())?;
//!     let under_way = comm.receive((rank + size - 1) % size, 0)?;
//!     // A rank computes here.
//!     sent.wait()?;
//!     Ok::<_, Error>(under_way.wait()?.map(|buffer| (*buffer).clone()))
//! })?;
//! assert_eq!(got[0], Some(Buffer::U64(vec![3])));
//! # Ok::<_, Error>(())
//! ```

pub mod agree;
mod all_to_all;
mod arrived;
mod codec;
mod device;
pub mod direct;
mod group;
mod header;
pub mod launch;
#[cfg(feature = "mpi")]
pub mod mpi;
pub mod numbers;
pub mod process_group;
pub mod threads;
pub mod timed;

pub use all_to_all::PendingAllToAll;
pub use device::OnDevice;

use crate::error::{Error, Result};
use std::sync::Arc;

/// The payload of a message. Ranks that share memory pass the block itself, without a copy.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit words: bf16 or f16 bit patterns.
    U16(Vec<u16>),
    /// Unsigned integers, such as counts or token ids.
    U64(Vec<u64>),
    /// Raw bytes.
    U8(Vec<u8>),
    /// Elements in the memory of a device, for communicators that [hand them over](Communicator::passes_device_memory).
    Device(Arc<dyn OnDevice>),
}

impl Buffer {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::U16(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::U8(values) => values.len(),
            Self::Device(values) => values.elements(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements, if they are 32-bit floats.
    ///
    /// # Errors
    /// [`Error::Shape`] for another type.
    pub fn f32(&self) -> Result<&[f32]> {
        match self {
            Self::F32(values) => Ok(values),
            other => Err(Error::Shape {
                operation: "reading a buffer",
                what: "a buffer of another type",
                expected: 0,
                actual: other.len(),
                shape: "32-bit floats".into(),
            }),
        }
    }

    /// Number of bytes of all elements.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.width()
    }

    /// Number of bytes of one element.
    fn width(&self) -> u64 {
        match self {
            Self::F32(_) => 4,
            Self::U16(_) => 2,
            Self::U64(_) => 8,
            Self::U8(_) => 1,
            Self::Device(values) => values.width(),
        }
    }
}

/// A transfer that has been started.
pub trait Pending: Send {
    /// Whether the transfer has finished; drives progress if the transport needs it. Never blocks.
    fn test(&mut self) -> Result<bool>;
    /// Waits until the transfer has finished, at most until the deadline. A receive returns its payload, a send `None`.
    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>>;
}

/// A group of ranks. All ranks of the group must call the same collectives in the same order.
pub trait Communicator: Send + Sync {
    /// This rank's number in the group, `0..size`.
    fn rank(&self) -> usize;
    /// Number of ranks in the group.
    fn size(&self) -> usize;
    /// Starts sending `data` to rank `to` under `tag`; the send ends when the data has left, not when it is received.
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>>;
    /// Starts receiving what rank `from` sends under `tag`; messages with the same ranks and tag keep their order.
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>>;
    /// Advances transfers if the transport does not do so by itself: kernels call this between parts of their work, about
    /// once a millisecond. Between threads it does nothing, because messages are passed at once. A communicator that wraps
    /// another must pass the call on, or transfers do not overlap with computation.
    fn progress(&self);
    /// Whether messages may be [`Buffer::Device`]: they reach the receiver as they are in the same process, or are moved to
    /// the receiver's device. A communicator that wraps another passes the question on.
    fn passes_device_memory(&self) -> bool {
        false
    }
    /// Sends `parts[r]` to each rank r and returns the parts that the ranks sent to this one; lengths may differ, and be 0.
    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>>;
    /// Starts an all-to-all that runs while the rank computes: `parts[r]` is sent to each rank r. All ranks of the group must start
    /// the same exchanges under the same tags, which no other messages may use meanwhile. Parts are passed without a copy between
    /// ranks that share memory.
    ///
    /// An all-gather is one whose parts are the same.
    fn start_all_to_all(&self, tag: u64, parts: Vec<Arc<Buffer>>) -> Result<PendingAllToAll> {
        PendingAllToAll::start(self, tag, parts)
    }
    /// Every rank's buffer, in rank order; lengths may differ.
    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>>;
    /// Sums `data` over the ranks, in rank order, so that all compute the same bits, and returns this rank's part of the
    /// sum. Rank r gets the r-th range of elements, of length `counts[r]`.
    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>>;
    /// Sums `data` over the ranks in place, in rank order: the same bits on every rank.
    fn all_reduce(&self, data: &mut [f32]) -> Result<()>;
    /// Returns the buffer of rank `root` on every rank. `data` is `Some` on that rank, and `None` on all others.
    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>>;
    /// Waits until every rank has called it.
    fn barrier(&self) -> Result<()>;
    /// Makes new groups of the ranks that give the same `color`, ordered by `(key, rank)`.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>>;
    /// Bytes this rank has sent to *other* ranks so far, over this group and all groups split from the same world.
    fn bytes_sent(&self) -> u64;
}
