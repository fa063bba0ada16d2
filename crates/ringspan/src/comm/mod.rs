//! How ranks talk: one object-safe trait, a transport for ranks that are threads of one process, one for ranks that are
//! processes (feature `mpi`), and one around these that moves what lies on devices from one device to the other.
//!
//! A transfer is started, computed past, then waited for: this is how a schedule hides it behind a step. A wait ends at
//! a deadline, and a rank that fails, or calls another collective than the others, makes all of them return an error
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
//!     // Here a rank computes.
//!     sent.wait()?;
//!     Ok::<_, Error>(under_way.wait()?.map(|buffer| (*buffer).clone()))
//! })?;
//! assert_eq!(got[0], Some(Buffer::U64(vec![3])));
//! # Ok::<_, Error>(())
//! ```

pub mod agree;
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
pub mod ranks;
pub mod threads;
pub mod timed;

pub use device::OnDevice;

use crate::error::{Error, Result};
use std::sync::Arc;

/// The payload of a message. Blocks are handed over, not copied, where ranks share memory.
#[derive(Debug, Clone, PartialEq)]
pub enum Buffer {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 16-bit words: bf16 or f16 bit patterns.
    U16(Vec<u16>),
    /// Unsigned integers: counts, tokens.
    U64(Vec<u64>),
    /// Raw bytes.
    U8(Vec<u8>),
    /// Elements in the memory of a device, for communicators that [hand them over](Communicator::hands_over).
    Device(Arc<dyn OnDevice>),
}

impl Buffer {
    /// Elements.
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

    /// Bytes of the elements.
    pub fn bytes(&self) -> u64 {
        self.len() as u64 * self.width()
    }

    /// Bytes of one element.
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

/// A transfer under way.
pub trait Pending: Send {
    /// Whether it has finished; drives progress where the transport needs it. Never blocks.
    fn test(&mut self) -> Result<bool>;
    /// Waits until it has finished, at most to the deadline. A receive yields its payload, a send `None`.
    fn wait(self: Box<Self>) -> Result<Option<Arc<Buffer>>>;
}

/// A group of ranks. All collectives must be called by all ranks of the group in the same order.
pub trait Communicator: Send + Sync {
    /// This rank, `0..size`.
    fn rank(&self) -> usize;
    /// Ranks in the group.
    fn size(&self) -> usize;
    /// Starts sending `data` to `to` under `tag`; it ends when the data has left, not when it is received.
    fn send(&self, to: usize, tag: u64, data: Arc<Buffer>) -> Result<Box<dyn Pending>>;
    /// Starts receiving what `from` sends under `tag`; messages of the same pair and tag keep their order.
    fn receive(&self, from: usize, tag: u64) -> Result<Box<dyn Pending>>;
    /// Moves transfers along where nothing moves by itself: kernels call this between pieces of their work, about once a
    /// millisecond. Threads hand their messages over at once, so there it does nothing; a communicator around another one
    /// passes the call on, or its transfers hide behind nothing.
    fn progress(&self);
    /// Whether messages may be [`Buffer::Device`]: they reach their receiver as they are, in the sender's process, or on the
    /// receiver's own device. A communicator around another one passes the question on.
    fn hands_over(&self) -> bool {
        false
    }
    /// Sends `parts[r]` to each rank r and returns what each rank sent here; counts may differ, and be 0.
    fn all_to_all(&self, parts: Vec<Buffer>) -> Result<Vec<Arc<Buffer>>>;
    /// Every rank's buffer, in rank order; lengths may differ.
    fn all_gather(&self, data: Buffer) -> Result<Vec<Arc<Buffer>>>;
    /// Sums `data` over the ranks, in rank order (so all get the same bits), and returns this rank's part:
    /// `counts[r]` elements for rank r, in order.
    fn reduce_scatter(&self, data: Vec<f32>, counts: &[usize]) -> Result<Vec<f32>>;
    /// Sums `data` over the ranks in place, in rank order: the same bits on every rank.
    fn all_reduce(&self, data: &mut [f32]) -> Result<()>;
    /// The buffer of rank `root`, on every rank.
    fn broadcast(&self, root: usize, data: Option<Buffer>) -> Result<Arc<Buffer>>;
    /// Waits until every rank is here.
    fn barrier(&self) -> Result<()>;
    /// New groups: the ranks that give the same `color`, ordered by `(key, rank)`.
    fn split(&self, color: usize, key: usize) -> Result<Arc<dyn Communicator>>;
    /// Bytes this rank has sent to *other* ranks so far, over this group and all groups split from the same world.
    fn bytes_sent(&self) -> u64;
}
