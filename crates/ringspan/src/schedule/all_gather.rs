//! All-gather and halo: keys are sent directly to all ranks that see them, and their gradients return directly to the
//! owner.
//!
//! All-gather sends whole blocks. Halo sends each rank only the rows that it sees: those within a window of the border
//! between two ranks, or in a document that both share.

use super::{Block, Compute, Plan, RowRanges, Schedule, Step, Transfer};
use smallvec::smallvec;

/// The rows of a block that a rank receives: all of them, or only those it sees.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Extent {
    Whole,
    Needed,
}

pub(super) fn forward(schedule: &Schedule, rank: usize, extent: Extent) -> Plan {
    let mut plan = vec![gather(schedule, rank, extent)];
    for owner in schedule.owners(rank) {
        plan.push(Step { compute: compute(schedule, rank, owner, extent), ..Step::default() });
    }
    plan
}

pub(super) fn backward(schedule: &Schedule, rank: usize, extent: Extent) -> Plan {
    let mut plan = vec![gather(schedule, rank, extent)];
    for owner in schedule.owners(rank) {
        let rows = rows(schedule, rank, owner, extent);
        plan.push(Step {
            compute: compute(schedule, rank, owner, extent),
            after: smallvec![Transfer { block: Block::KeyGradients(owner), peer: owner, rows }],
            ..Step::default()
        });
    }
    let gradients = |user| {
        let rows = rows(schedule, user, rank, extent);
        Transfer { block: Block::KeyGradients(rank), peer: user, rows }
    };
    let receive = schedule.users(rank).map(gradients).collect();
    plan.push(Step { receive, ..Step::default() });
    plan
}

/// Sends this rank's keys, receives all keys it needs, and computes the diagonal meanwhile. Each rank starts with its
/// neighbour, so that not all ranks request from the same owner at once.
fn gather(schedule: &Schedule, rank: usize, extent: Extent) -> Step {
    let keys = |user, owner, peer| {
        let rows = rows(schedule, user, owner, extent);
        Transfer { block: Block::Keys(owner), peer, rows }
    };
    Step {
        send: schedule.users(rank).map(|user| keys(user, rank, user)).collect(),
        receive: schedule.owners(rank).map(|owner| keys(rank, owner, owner)).collect(),
        compute: schedule.compute(rank, rank),
        ..Step::default()
    }
}

fn rows(schedule: &Schedule, user: usize, owner: usize, extent: Extent) -> RowRanges {
    match extent {
        Extent::Whole => schedule.key_rows[owner].clone(),
        Extent::Needed => schedule.needed_rows(user, owner),
    }
}

fn compute(schedule: &Schedule, rank: usize, owner: usize, extent: Extent) -> Option<Compute> {
    Some(Compute { rows: rows(schedule, rank, owner, extent), ..schedule.compute(rank, owner)? })
}
