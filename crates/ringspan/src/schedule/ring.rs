//! The ring: a block visits, in ring order, only the ranks that see it.
//!
//! Forward, ring rank r computes block r - s in step s, and passes it on to the next rank that sees it. Backward runs the
//! other way: r computes block r + 1 + t in step t and ends on its own. Every rank that a block visits adds to its
//! gradients, so the last hop brings their sum to the block's owner. If all ranks see each other, each sends R - 1 blocks
//! forward, and R - 1 of keys and R - 1 of gradients backward.

use super::{Block, Plan, Schedule, Step};

pub(super) fn forward(schedule: &Schedule, rank: usize) -> Plan {
    let (size, visible) = (schedule.grid().ring, &schedule.visible);
    let mut plan: Plan = (0..size).map(|_| Step::default()).collect();
    for step in 0..size {
        let owner = (rank + size - step) % size;
        // Only the owner and the ranks that see the block ever hold it.
        if step > 0 && !schedule.sees(rank, owner) {
            continue;
        }
        if step > 0 {
            let peer = visible.user_before(owner, rank).unwrap_or(owner);
            plan[step - 1].receive.push(schedule.transfer(Block::Keys(owner), peer));
        }
        if let Some(peer) = visible.user_after(owner, rank) {
            plan[step].send.push(schedule.transfer(Block::Keys(owner), peer));
        }
        plan[step].compute = schedule.compute(rank, owner);
    }
    plan
}

pub(super) fn backward(schedule: &Schedule, rank: usize) -> Plan {
    let (size, visible) = (schedule.grid().ring, &schedule.visible);
    // Step 0 only fetches; step t + 1 computes block rank + 1 + t; the last step computes the diagonal. Blocks move to
    // lower ranks.
    let mut plan: Plan = (0..=size).map(|_| Step::default()).collect();
    if let Some(peer) = visible.user_before(rank, rank) {
        plan[0].send.push(schedule.transfer(Block::Keys(rank), peer));
    }
    for step in 1..size {
        let owner = (rank + step) % size;
        if !schedule.sees(rank, owner) {
            continue;
        }
        let (before, after) = (visible.user_after(owner, rank), visible.user_before(owner, rank));
        let from = before.unwrap_or(owner);
        plan[step - 1].receive.push(schedule.transfer(Block::Keys(owner), from));
        if let Some(peer) = after {
            plan[step].send.push(schedule.transfer(Block::Keys(owner), peer));
        }
        if before.is_some() {
            plan[step].receive.push(schedule.transfer(Block::KeyGradients(owner), from));
        }
        plan[step].compute = schedule.compute(rank, owner);
        plan[step].after.push(schedule.transfer(Block::KeyGradients(owner), after.unwrap_or(owner)));
    }
    if let Some(peer) = visible.user_after(rank, rank) {
        plan[size].receive.push(schedule.transfer(Block::KeyGradients(rank), peer));
    }
    plan[size].compute = schedule.compute(rank, rank);
    plan
}
