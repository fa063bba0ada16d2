//! The strategies and their names.

use crate::error::Error;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// A context-parallel strategy: which blocks move between ring ranks so that queries meet the keys they see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strategy {
    /// Keys pass from rank to rank, one step behind the computation (Liu et al., 2023). A rank holds two blocks.
    Ring,
    /// Keys travel round in both directions, over links between neighbours only. A rank holds four blocks.
    BidirectionalRing,
    /// Each rank sends its keys directly to all ranks that see any of them (Llama 3, 2024). A rank holds all blocks that it
    /// sees.
    AllGather,
    /// Each rank receives only the key rows that it sees, directly from their owner. Suits windows and documents.
    Halo,
    /// Queries pass from rank to rank, and partial results return to the owner. Suits few queries and many keys.
    PassQ,
}

impl Strategy {
    /// All strategies.
    pub const ALL: [Self; 5] = [Self::Ring, Self::BidirectionalRing, Self::AllGather, Self::Halo, Self::PassQ];

    /// The name in options and tables.
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
