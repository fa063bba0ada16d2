//! Operations of a communicator, in words, with everything that the ranks of a collective must agree on.

use std::fmt;
use std::sync::Arc;

/// A call to a communicator. Ranks are world ranks, even in a group split from the world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) struct Operation {
    pub(in crate::comm) call: Call,
    /// Members of the group, unless it is the world.
    pub(in crate::comm) group: Option<Arc<[usize]>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum Call {
    Send { elements: usize, to: usize, tag: u64 },
    Receive { from: usize, tag: u64 },
    Collective { number: u64, collective: Collective },
}

/// A collective with everything that its ranks must agree on: ranks whose values differ get a mismatch error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::comm) enum Collective {
    AllToAll,
    AllGather,
    ReduceScatter {
        counts: Vec<usize>,
    },
    AllReduce {
        elements: usize,
    },
    /// `complete` is false only on a root that gives no data, so that it differs from all other ranks.
    Broadcast {
        root: usize,
        complete: bool,
    },
    Barrier,
    Split,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.call {
            Call::Send { elements, to, tag } => write!(f, "send of {elements} elements to rank {to} (tag {tag})")?,
            Call::Receive { from, tag } => write!(f, "receive from rank {from} (tag {tag})")?,
            Call::Collective { number, collective } => collective.write(f, *number)?,
        }
        match &self.group {
            Some(ranks) => write!(f, " in the group of ranks {}", listing(ranks)),
            None => Ok(()),
        }
    }
}

impl Collective {
    fn write(&self, f: &mut fmt::Formatter<'_>, number: u64) -> fmt::Result {
        match self {
            Self::AllToAll => write!(f, "all_to_all #{number}"),
            Self::AllGather => write!(f, "all_gather #{number}"),
            Self::ReduceScatter { counts } => write!(f, "reduce_scatter #{number} of {} elements", listing(counts)),
            Self::AllReduce { elements } => write!(f, "all_reduce #{number} of {elements} elements"),
            Self::Broadcast { root, complete } => {
                write!(f, "broadcast #{number} from rank {root}{}", if *complete { "" } else { ", which gave no data" })
            }
            Self::Barrier => write!(f, "barrier #{number}"),
            Self::Split => write!(f, "split #{number}"),
        }
    }
}

/// Numbers in brackets; of a long list, the first ones and the count.
pub(in crate::comm) fn listing(numbers: &[usize]) -> String {
    const SHOWN: usize = 16;
    match numbers.get(..SHOWN) {
        Some(first) if numbers.len() > SHOWN => {
            let first: Vec<String> = first.iter().map(ToString::to_string).collect();
            format!("[{}, .. {} in all]", first.join(", "), numbers.len())
        }
        _ => format!("{numbers:?}"),
    }
}
