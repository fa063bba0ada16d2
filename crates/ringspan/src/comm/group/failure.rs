//! The failure that ended a world, and the error that each rank returns for it.

use crate::error::Error;
use std::fmt::Display;

/// The first failure of a world. It is permanent: every later call of any rank fails with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum Failure {
    /// A rank failed.
    Rank { peer: usize, message: String },
    /// Two ranks are in different collectives.
    Mismatch { ranks: [usize; 2], operations: [String; 2] },
    /// Ranks wait for each other in a cycle.
    Deadlock { problem: String },
}

impl Failure {
    /// The error of `rank`, which is in `operation`. A mismatch has the views of both ranks that differ.
    pub(in crate::comm) fn seen_by(&self, rank: usize, operation: &impl Display) -> Error {
        match self {
            Self::Rank { peer, message } => {
                Error::PeerFailed { rank, operation: operation.to_string(), peer: *peer, message: message.clone() }
            }
            Self::Mismatch { ranks, operations } => {
                // Any other rank reports the two ranks that differ.
                let (own, other) = if rank == ranks[1] { (1, 0) } else { (0, 1) };
                Error::Mismatch {
                    rank: ranks[own],
                    operation: operations[own].clone(),
                    peer: ranks[other],
                    peer_operation: operations[other].clone(),
                }
            }
            Self::Deadlock { problem } => {
                Error::Communicator { rank, operation: operation.to_string(), problem: problem.clone() }
            }
        }
    }
}
