//! The strategies of this library and their names.

use super::all_gather::{self, Extent};
use super::{Pass, Plan, Schedule, Strategy, bidirectional, pass_q, ring};
use crate::error::Error;
use std::fmt::{Display, Formatter};
use std::str::FromStr;

/// A [`Strategy`] of this library, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StrategyKind {
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

impl StrategyKind {
    /// All strategies.
    pub const ALL: [Self; 5] = [Self::Ring, Self::BidirectionalRing, Self::AllGather, Self::Halo, Self::PassQ];

    /// The name in options and tables.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::BidirectionalRing => "bidirectional-ring",
            Self::AllGather => "all-gather",
            Self::Halo => "halo",
            Self::PassQ => "pass-q",
        }
    }
}

impl Display for StrategyKind {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for StrategyKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL.into_iter().find(|strategy| strategy.name() == text).ok_or_else(|| Error::Unknown {
            what: "strategy",
            given: text.to_owned(),
            possible: "ring, bidirectional-ring, all-gather, halo, pass-q",
        })
    }
}

impl Strategy for StrategyKind {
    fn name(&self) -> String {
        self.to_string()
    }

    fn plan(&self, schedule: &Schedule, pass: Pass, rank: usize) -> Plan {
        let backward = pass == Pass::Backward;
        match (self, pass) {
            (Self::Ring, Pass::Forward) => ring::forward(schedule, rank),
            (Self::Ring, Pass::Backward) => ring::backward(schedule, rank),
            (Self::BidirectionalRing, _) => bidirectional::plan(schedule, rank, backward),
            (Self::AllGather, Pass::Forward) => all_gather::forward(schedule, rank, Extent::Whole),
            (Self::AllGather, Pass::Backward) => all_gather::backward(schedule, rank, Extent::Whole),
            (Self::Halo, Pass::Forward) => all_gather::forward(schedule, rank, Extent::Needed),
            (Self::Halo, Pass::Backward) => all_gather::backward(schedule, rank, Extent::Needed),
            (Self::PassQ, _) => pass_q::plan(schedule, rank, pass),
        }
    }
}
