//! The ring: a block visits, in ring order, just the ranks that see it.
//!
//! Forward, ring rank r computes block r - s in step s, and passes it on to the next rank that sees it. Backward runs
//! the other way: r computes block r + 1 + t in step t and ends on its own, so the gradients of a block, added to by
//! every rank it visits, arrive where they belong with the last hop. Where all ranks see each other, each sends R - 1
//! blocks forward, and R - 1 of keys and R - 1 of gradients backward.

use super::{Block, Plan, Schedule, Step};

pub(super) fn forward(schedule: &Schedule, rank: usize) -> Plan {
    let size = schedule.grid().ring;
    let mut plan: Plan = (0..size).map(|_| Step::default()).collect();
    for step in 0..size {
        let owner = (rank + size - step) % size;
        let path = schedule.users(owner, |distance| (owner + distance) % size);
        let at = path.iter().position(|&user| user == rank);
        if let Some(at) = at {
            let peer = if at == 0 { owner } else { path[at - 1] };
            plan[step - 1].receive.push(schedule.whole(Block::Keys(owner), peer));
        }
        // The owner sends to the first on the path, a rank on the path to the one after it.
        let next = if rank == owner { path.first() } else { at.and_then(|at| path.get(at + 1)) };
        if let Some(&peer) = next {
            plan[step].send.push(schedule.whole(Block::Keys(owner), peer));
        }
        plan[step].compute = schedule.compute(rank, owner);
    }
    plan
}

pub(super) fn backward(schedule: &Schedule, rank: usize) -> Plan {
    let size = schedule.grid().ring;
    let path = |owner: usize| schedule.users(owner, |distance| (owner + size - distance) % size);
    // Step 0 fetches; step t + 1 computes block rank + 1 + t; the last is the diagonal.
    let mut plan: Plan = (0..=size).map(|_| Step::default()).collect();
    let own_path = path(rank);
    if let Some(&peer) = own_path.first() {
        plan[0].send.push(schedule.whole(Block::Keys(rank), peer));
    }
    for step in 1..size {
        let owner = (rank + step) % size;
        let path = path(owner);
        let Some(at) = path.iter().position(|&user| user == rank) else { continue };
        let from = if at == 0 { owner } else { path[at - 1] };
        plan[step - 1].receive.push(schedule.whole(Block::Keys(owner), from));
        if let Some(&peer) = path.get(at + 1) {
            plan[step].send.push(schedule.whole(Block::Keys(owner), peer));
        }
        if at > 0 {
            plan[step].receive.push(schedule.whole(Block::KeyGradients(owner), from));
        }
        plan[step].compute = schedule.compute(rank, owner);
        let peer = path.get(at + 1).copied().unwrap_or(owner);
        plan[step].after.push(schedule.whole(Block::KeyGradients(owner), peer));
    }
    if let Some(&peer) = own_path.last() {
        plan[size].receive.push(schedule.whole(Block::KeyGradients(rank), peer));
    }
    plan[size].compute = schedule.compute(rank, rank);
    plan
}
