//! The trait that context-parallel strategies implement: those of this library, and those of other crates.

use super::{Pass, Plan, Schedule};
use std::fmt::Debug;
use std::sync::Arc;

/// A context-parallel strategy: which blocks move between ring ranks so that queries meet the keys they see.
///
/// It generates plans, and one executor runs the plans of any strategy, forward and backward, on CPUs and GPUs. The library's own
/// are [`StrategyKind`](super::StrategyKind)'s; `examples/ring_of_rings` is one from outside, in one file.
///
/// A plan is correct if every visible pair is computed once, every send meets a receive, and every block is used by the rank that
/// receives it: [`Schedule::validate`] checks this. The rules for the order of a plan are those of [`Step`](super::Step).
pub trait Strategy: Debug + Send + Sync {
    /// The name in tables and messages.
    fn name(&self) -> String;

    /// The steps of ring rank `rank`, whose computations have no tiles yet; empty steps are removed from it.
    ///
    /// All ranks must generate plans that fit each other, from the schedule alone: its layouts, its mask and which ranks see each
    /// other ([`Schedule::sees`], [`Schedule::users`], [`Schedule::owners`]). [`Schedule::transfer`] and [`Schedule::compute`] make
    /// the elements of a step.
    fn plan(&self, schedule: &Schedule, pass: Pass, rank: usize) -> Plan;
}

impl Strategy for Arc<dyn Strategy> {
    fn name(&self) -> String {
        (**self).name()
    }

    fn plan(&self, schedule: &Schedule, pass: Pass, rank: usize) -> Plan {
        (**self).plan(schedule, pass, rank)
    }
}
