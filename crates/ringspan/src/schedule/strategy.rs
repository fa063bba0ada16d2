//! The strategies by name.

use crate::error::Error;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// What moves between ring ranks so that queries meet the keys they see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Keys pass from rank to rank, one step behind the computation (Liu et al., 2023). Two blocks in memory.
    Ring,
    /// The ring both ways, over links between neighbours only. Four blocks in memory.
    BidirectionalRing,
    /// Keys go at once to all ranks that see any of them (Llama 3, 2024). All of them in memory.
    AllGather,
    /// Each rank gets just the keys that it sees, straight from their owner. For windows and documents.
    Halo,
    /// Queries pass from rank to rank, results come back. For few queries and many keys.
    PassQ,
}

impl Strategy {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Ring, Self::BidirectionalRing, Self::AllGather, Self::Halo, Self::PassQ];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::BidirectionalRing => "bidirectional-ring",
            Self::AllGather => "all-gather",
            Self::Halo => "halo",
            Self::PassQ => "pass-q",
        }
    }
}

impl Display for Strategy {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Strategy {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == text).ok_or_else(|| Error::Unknown {
            what: "strategy",
            given: text.to_owned(),
            possible: "ring, bidirectional-ring, all-gather, halo, pass-q",
        })
    }
}
