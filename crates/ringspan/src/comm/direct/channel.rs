//! Channels, which move elements directly between the devices of two ranks: a vendor's library, or a substitute in tests.

use crate::comm::OnDevice;
use crate::error::Result;
use std::sync::Arc;

/// A send or a receive of one block.
#[derive(Debug, Clone)]
pub enum Transfer {
    /// A send to another rank.
    Send {
        /// The receiver.
        to: usize,
        /// The elements to send; they are not written to any more.
        elements: Arc<dyn OnDevice>,
    },
    /// A receive from another rank.
    Receive {
        /// The sender.
        from: usize,
        /// Memory allocated by [`Channel::allocate`], which is not read before the flight has ended.
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

/// Moves elements between the devices of ranks, in *flights*: groups of transfers that move together.
///
/// A channel keeps the given order: flight after flight, and in a flight the order of transfers between two ranks in each
/// direction. The n-th send of one rank is matched with the n-th receive of the other; a send may not end before its
/// receive has begun. Ranks are those of the underlying communicator. No call blocks.
pub trait Channel: Send {
    /// A code for the type of elements: all that a receiver needs to know, except their number, to allocate memory for them.
    ///
    /// # Errors
    /// Elements that this channel cannot reach.
    fn type_code(&self, elements: &dyn OnDevice) -> Result<u64>;
    /// Allocates memory for `len` elements of the type with code `type_code`.
    ///
    /// # Errors
    /// An unknown code, or no memory.
    fn allocate(&mut self, type_code: u64, len: usize) -> Result<Arc<dyn OnDevice>>;
    /// Starts a flight after those that were started before.
    ///
    /// # Errors
    /// A failure of the channel, which then moves nothing more.
    fn start(&mut self, transfers: Vec<Transfer>) -> Result<()>;
    /// Advances all flights, and returns how many have ended since the last call; the elements they received can then be
    /// read.
    ///
    /// # Errors
    /// Like those of [`start`](Self::start).
    fn take_ended(&mut self) -> Result<usize>;
    /// Ends all flights, whatever they carry. The channel moves nothing more.
    fn abort(&mut self);
}
