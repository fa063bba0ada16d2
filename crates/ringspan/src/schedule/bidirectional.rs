//! The bidirectional ring, for links without wrap-around: blocks only pass between neighbours r and r + 1.
//!
//! A block leaves its owner in both directions, and every rank passes it on, whether it sees the block or not, up to the
//! farthest rank that does. Ring rank r computes its own block, then alternates between the block d below and the one d
//! above. Both directions of a link work at once, so a block's longest path is as long as in a one-way ring, without a hop
//! from the last rank to the first. Gradients are sent directly to the owner: passing them through all neighbours would not
//! be faster.

use super::{Block, Plan, Schedule, Step};

/// The step in which `rank` computes the block of `owner` if it sees it: the diagonal first, then by distance, lower owners
/// first.
fn turn(rank: usize, owner: usize) -> usize {
    match rank.abs_diff(owner) {
        0 => 0,
        distance if owner < rank => 2 * distance - 1,
        distance => 2 * distance,
    }
}

pub(super) fn plan(schedule: &Schedule, rank: usize, backward: bool) -> Plan {
    let size = schedule.grid().ring;
    let mut plan: Plan = (0..2 * size).map(|_| Step::default()).collect();
    for owner in 0..size {
        let (below, above) = schedule.visible.reach(owner);
        let keys = |peer| schedule.transfer(Block::Keys(owner), peer);
        let step = turn(rank, owner);
        if (rank > owner && rank <= above) || (rank < owner && rank >= below) {
            let from = if rank > owner { rank - 1 } else { rank + 1 };
            plan[step - 1].receive.push(keys(from));
        }
        if rank >= owner && rank < above {
            plan[step].send.push(keys(rank + 1));
        }
        if rank <= owner && rank > below {
            plan[step].send.push(keys(rank - 1));
        }
        plan[step].compute = schedule.compute(rank, owner);
        if backward && owner != rank && plan[step].compute.is_some() {
            plan[step].after.push(schedule.transfer(Block::KeyGradients(owner), owner));
        }
    }
    if backward {
        for user in schedule.users(rank) {
            plan[turn(user, rank) + 1].receive.push(schedule.transfer(Block::KeyGradients(rank), user));
        }
    }
    plan
}
