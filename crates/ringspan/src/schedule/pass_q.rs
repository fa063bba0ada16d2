//! Pass-Q: queries visit the keys, and partial results return to the owner (Yang et al., 2024, arXiv:2411.01783).
//!
//! It suits few queries and many keys, as with a KV cache. A block of queries visits, in ring order, only the ranks whose
//! keys it sees: ring rank r holds the queries of r - s in step s. The owner merges the results in the order of the visits,
//! one step after they were computed. Backward, queries travel with the gradients of their outputs; the gradients of keys
//! stay with the keys.

use super::{Block, Pass, Plan, Schedule, Step};

pub(super) fn plan(schedule: &Schedule, rank: usize, pass: Pass) -> Plan {
    let (size, visible) = (schedule.grid().ring, &schedule.visible);
    let travels = |owner: usize| match pass {
        Pass::Forward => vec![Block::Queries(owner)],
        Pass::Backward => vec![Block::Queries(owner), Block::Saved(owner)],
    };
    let result = |owner: usize| match pass {
        Pass::Forward => Block::Partial(owner),
        Pass::Backward => Block::QueryGradients(owner),
    };
    let mut plan: Plan = (0..=size).map(|_| Step::default()).collect();
    for step in 0..size {
        let owner = (rank + size - step) % size;
        if step > 0 && !schedule.sees(owner, rank) {
            continue;
        }
        if step > 0 {
            let peer = visible.owner_before(owner, rank).unwrap_or(owner);
            plan[step - 1].receive.extend(travels(owner).into_iter().map(|block| schedule.transfer(block, peer)));
            plan[step].after.push(schedule.transfer(result(owner), owner));
        }
        if let Some(peer) = visible.owner_after(owner, rank) {
            plan[step].send.extend(travels(owner).into_iter().map(|block| schedule.transfer(block, peer)));
        }
        plan[step].compute = schedule.compute(owner, rank);
    }
    for host in schedule.owners(rank) {
        let visited = (host + size - rank) % size;
        plan[visited + 1].receive.push(schedule.transfer(result(rank), host));
    }
    plan
}
