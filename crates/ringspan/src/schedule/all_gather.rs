//! All-gather: every block goes at once to all ranks that see it, and their gradients come straight back.

use super::{Block, Plan, Schedule, Step, Transfer};

pub(super) fn forward(schedule: &Schedule, rank: usize) -> Plan {
    let mut plan = vec![gather(schedule, rank)];
    for owner in seen_by(schedule, rank) {
        plan.push(Step { compute: schedule.compute(rank, owner), ..Step::default() });
    }
    plan
}

pub(super) fn backward(schedule: &Schedule, rank: usize) -> Plan {
    let mut plan = vec![gather(schedule, rank)];
    for owner in seen_by(schedule, rank) {
        plan.push(Step {
            compute: schedule.compute(rank, owner),
            after: vec![Transfer { block: Block::Gradients(owner), peer: owner }],
            ..Step::default()
        });
    }
    let receive = users(schedule, rank).into_iter().map(|peer| Transfer { block: Block::Gradients(rank), peer });
    plan.push(Step { receive: receive.collect(), ..Step::default() });
    plan
}

/// Sends this rank's keys, receives all it needs, and computes the diagonal meanwhile.
fn gather(schedule: &Schedule, rank: usize) -> Step {
    Step {
        send: users(schedule, rank).into_iter().map(|peer| Transfer { block: Block::Keys(rank), peer }).collect(),
        receive: seen_by(schedule, rank).into_iter().map(|peer| Transfer { block: Block::Keys(peer), peer }).collect(),
        compute: schedule.compute(rank, rank),
        after: Vec::new(),
    }
}

/// The other ranks whose keys `rank` sees; each starts with its neighbour, so that no owner is asked by all at once.
fn seen_by(schedule: &Schedule, rank: usize) -> Vec<usize> {
    let size = schedule.ring();
    (1..size).map(|distance| (rank + size - distance) % size).filter(|&owner| schedule.sees(rank, owner)).collect()
}

fn users(schedule: &Schedule, owner: usize) -> Vec<usize> {
    let size = schedule.ring();
    schedule.users(owner, |distance| (owner + distance) % size)
}
