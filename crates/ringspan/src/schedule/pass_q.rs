//! Pass-Q: queries visit the keys, and what they find comes straight back (Yang et al., 2024, arXiv:2411.01783).
//!
//! For few queries and many keys, as behind a cache. A block of queries passes, in ring order, just the ranks whose keys
//! it sees: ring rank r holds the queries of r - s in step s. Results are merged by their owner in the order of the
//! visits, a step after they were made. Backward, queries travel with the gradients of their outputs; the gradients of
//! keys stay where the keys are.

use super::{Block, Pass, Plan, Schedule, Step};

pub(super) fn plan(schedule: &Schedule, rank: usize, pass: Pass) -> Plan {
    let size = schedule.grid().ring;
    let path = |owner: usize| -> Vec<usize> {
        (1..size).map(|distance| (owner + distance) % size).filter(|&host| schedule.sees(owner, host)).collect()
    };
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
        let path = path(owner);
        let at = path.iter().position(|&host| host == rank);
        if let Some(at) = at {
            let peer = if at == 0 { owner } else { path[at - 1] };
            plan[step - 1].receive.extend(travels(owner).into_iter().map(|block| schedule.whole(block, peer)));
            plan[step].after.push(schedule.whole(result(owner), owner));
        }
        let next = if rank == owner { path.first() } else { at.and_then(|at| path.get(at + 1)) };
        if let Some(&peer) = next {
            plan[step].send.extend(travels(owner).into_iter().map(|block| schedule.whole(block, peer)));
        }
        plan[step].compute = schedule.compute(owner, rank);
    }
    for host in path(rank) {
        let visited = (host + size - rank) % size;
        plan[visited + 1].receive.push(schedule.whole(result(rank), host));
    }
    plan
}
