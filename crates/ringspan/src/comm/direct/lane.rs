//! What carries elements between the devices of two ranks: NCCL, or what stands for it in a test.

use crate::comm::OnDevice;
use crate::error::Result;
use std::sync::Arc;

/// One end of a block's way.
#[derive(Debug, Clone)]
pub enum Transfer {
    /// To that rank.
    Send {
        /// The receiver.
        to: usize,
        /// What it gets; nobody writes to it any more.
        elements: Arc<dyn OnDevice>,
    },
    /// From that rank.
    Receive {
        /// The sender.
        from: usize,
        /// Of [`Lane::room`]: nobody reads it before the flight has ended.
        elements: Arc<dyn OnDevice>,
    },
}

impl Transfer {
    /// The rank at the other end.
    pub fn peer(&self) -> usize {
        match self {
            Self::Send { to: peer, .. } | Self::Receive { from: peer, .. } => *peer,
        }
    }
}

/// Moves elements between the devices of ranks, in *flights*: transfers that move together.
///
/// A lane keeps the order it is given: flight after flight, and between two ranks, in each direction, the transfers of a
/// flight. The n-th send of one meets the n-th receive of the other, whatever they are; a send may end no sooner than its
/// receive has begun. Ranks are those of the communicator beneath. No call blocks.
pub trait Lane: Send {
    /// What a receiver has to know of elements, besides how many there are, to make room for them.
    ///
    /// # Errors
    /// Elements that this lane cannot reach.
    fn form(&self, elements: &dyn OnDevice) -> Result<u64>;
    /// Room for `len` elements of such a form.
    ///
    /// # Errors
    /// An unknown form; no memory.
    fn room(&mut self, form: u64, len: usize) -> Result<Arc<dyn OnDevice>>;
    /// Starts a flight behind those that were started before.
    ///
    /// # Errors
    /// What the lane says; it carries nothing more then.
    fn start(&mut self, transfers: Vec<Transfer>) -> Result<()>;
    /// Moves all along, and returns how many flights have ended since the last call. What these brought can be read.
    ///
    /// # Errors
    /// As of [`start`](Self::start).
    fn landed(&mut self) -> Result<usize>;
    /// Ends all flights, whatever they carry. The lane carries nothing more.
    fn abort(&mut self);
}
