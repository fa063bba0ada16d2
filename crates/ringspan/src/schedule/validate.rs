//! Checks what the plans of a strategy compute and send.

use super::{Block, Compute, Pass, Plan, RowRanges, Schedule, Step, Transfer};
use crate::error::{Error, Result};
use std::collections::{HashMap, HashSet};

/// A message: sender, receiver, block and rows.
type Message = (usize, usize, Block, RowRanges);

impl Schedule {
    /// Checks the plans of all ring ranks, forward and backward: every two ring ranks that see each other are computed once, with
    /// all rows that are visible; every send meets a receive; a rank has every block that it sends or computes with, and uses
    /// every block that it receives; results return to their owner. Strategies of this library pass it; a new one should in its
    /// tests, on meshes of several sizes. The time grows with the square of the ring's size.
    ///
    /// # Errors
    /// [`Error::Plan`] with the first rule that is broken.
    pub fn validate(&self) -> Result<()> {
        [Pass::Forward, Pass::Backward].into_iter().try_for_each(|pass| {
            let plans: Vec<Plan> = (0..self.grid().ring).map(|rank| self.steps(pass, rank)).collect();
            self.check_computations(&plans)?;
            check_messages(&self.strategy().name(), &plans)?;
            plans.iter().enumerate().try_for_each(|(rank, plan)| self.check_blocks(pass, rank, plan))
        })
    }

    fn broken(&self, ring_rank: usize, problem: String) -> Error {
        Error::Plan { strategy: self.strategy().name(), ring_rank, problem }
    }

    /// Every two ring ranks that see each other must be computed once.
    fn check_computations(&self, plans: &[Plan]) -> Result<()> {
        let mut computed = HashSet::new();
        for (rank, step) in plans.iter().enumerate().flat_map(|(rank, plan)| plan.iter().map(move |step| (rank, step)))
        {
            let Some(Compute { queries, keys, rows, .. }) = &step.compute else { continue };
            if *queries != rank && *keys != rank {
                return Err(
                    self.broken(rank, format!("computes queries of {queries} and keys of {keys}, both of others"))
                );
            }
            if !computed.insert((*queries, *keys)) {
                return Err(
                    self.broken(rank, format!("computes queries of {queries} and keys of {keys} a second time"))
                );
            }
            let needed = self.needed_rows(*queries, *keys);
            let held = |row: usize| rows.ranges().iter().any(|range| range.contains(&row));
            if let Some(missing) = needed.ranges().iter().flat_map(Clone::clone).find(|row| !held(*row)) {
                let problem = format!("computes queries of {queries} without row {missing} of {keys}, which they see");
                return Err(self.broken(rank, problem));
            }
        }
        let pairs = |queries| (0..plans.len()).map(move |keys| (queries, keys));
        let missing = (0..plans.len()).flat_map(pairs).find(|&(q, k)| self.sees(q, k) && !computed.contains(&(q, k)));
        match missing {
            Some((queries, keys)) => {
                Err(self
                    .broken(queries, format!("no rank computes its queries with the keys of {keys}, which they see")))
            }
            None => Ok(()),
        }
    }

    /// A rank must have what it sends and computes with, and use what it receives.
    fn check_blocks(&self, pass: Pass, rank: usize, plan: &Plan) -> Result<()> {
        let is_result =
            |block: Block| matches!(block, Block::KeyGradients(_) | Block::Partial(_) | Block::QueryGradients(_));
        let (mut held, mut used, mut made) = (HashSet::new(), HashSet::new(), HashSet::new());
        let broken = |problem| Err(self.broken(rank, problem));
        for Step { send, receive, compute, after } in plan {
            for Transfer { block, peer, rows } in send {
                if *peer == rank || rows.is_empty() {
                    return broken(format!("sends {block:?}, {} rows, to {peer}: to itself, or nothing", rows.len()));
                }
                if is_result(*block) || (block.owner() != rank && !held.contains(block)) {
                    return broken(format!("sends {block:?} to {peer} before it has it"));
                }
                used.insert(*block);
            }
            if let Some(Compute { queries, keys, .. }) = compute {
                let saved = Some(Block::Saved(*queries)).filter(|_| pass == Pass::Backward);
                for block in [Block::Keys(*keys), Block::Queries(*queries)].into_iter().chain(saved) {
                    if block.owner() != rank && !held.contains(&block) {
                        return broken(format!("computes with {block:?} before it has it"));
                    }
                    used.insert(block);
                }
                match pass {
                    Pass::Forward => made.extend([Block::Partial(*queries)]),
                    Pass::Backward => made.extend([Block::KeyGradients(*keys), Block::QueryGradients(*queries)]),
                }
            }
            for Transfer { block, peer, .. } in receive {
                if is_result(*block) {
                    if block.owner() != rank && !made.contains(block) {
                        return broken(format!("receives {block:?} from {peer}, to which it has nothing to add"));
                    }
                } else if !held.insert(*block) {
                    return broken(format!("receives {block:?} from {peer}, which it has"));
                }
            }
            for Transfer { block, peer, .. } in after {
                if !is_result(*block) || !made.remove(block) {
                    return broken(format!("sends {block:?} to {peer} after a step that did not make it"));
                }
            }
        }
        if let Some(block) = held.iter().find(|block| !used.contains(block)) {
            return broken(format!("receives {block:?} and does not use it"));
        }
        match made.iter().find(|block| block.owner() != rank) {
            Some(block) => broken(format!("makes {block:?} and does not send it")),
            None => Ok(()),
        }
    }
}

/// Checks that every send of a strategy's plans meets a receive of the same rows.
pub(super) fn check_messages(strategy: &str, plans: &[Plan]) -> Result<()> {
    let mut open: HashMap<Message, i64> = HashMap::new();
    for (rank, plan) in plans.iter().enumerate() {
        for Step { send, receive, after, .. } in plan {
            for Transfer { block, peer, rows } in send.iter().chain(after) {
                *open.entry((rank, *peer, *block, rows.clone())).or_default() += 1;
            }
            for Transfer { block, peer, rows } in receive {
                *open.entry((*peer, rank, *block, rows.clone())).or_default() -= 1;
            }
        }
    }
    let Some(((from, to, block, rows), count)) = open.into_iter().find(|(_, count)| *count != 0) else { return Ok(()) };
    let (ring_rank, problem) = match count > 0 {
        true => (from, format!("sends {block:?}, {} rows, to {to}, which does not receive it", rows.len())),
        false => (to, format!("receives {block:?}, {} rows, from {from}, which does not send it", rows.len())),
    };
    Err(Error::Plan { strategy: strategy.into(), ring_rank, problem })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::Documents;
    use crate::layout::{Layout, LayoutKind};
    use crate::mask::Mask;
    use crate::schedule::{Strategy, StrategyKind};

    /// The ring, with one rank's plan changed.
    #[derive(Debug)]
    struct Changed(Change);

    type Change = fn(&mut Plan, Pass);

    impl Strategy for Changed {
        fn name(&self) -> String {
            "changed".into()
        }

        fn plan(&self, schedule: &Schedule, pass: Pass, rank: usize) -> Plan {
            let mut plan = StrategyKind::Ring.plan(schedule, pass, rank);
            if rank == 1 {
                self.0(&mut plan, pass);
            }
            plan
        }
    }

    #[test]
    fn each_broken_rule_is_named_with_its_rank() {
        let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 48), 3).expect("ranks");
        let changes: [(Change, &str); 9] = [
            (|_, _| (), ""),
            (|plan, _| plan[1].compute = None, "no rank computes its queries with the keys of 0"),
            (|plan, _| plan[2].compute = plan[1].compute.clone(), "computes queries of 1 and keys of 0 a second time"),
            (|plan, _| plan[1].compute.iter_mut().for_each(|it| it.rows = RowRanges::all(9)), "without row 9 of 0"),
            (|plan, _| plan[1].compute.iter_mut().for_each(|it| it.queries = 2), "both of others"),
            (|plan, _| plan[0].receive.clear(), "which does not receive it"),
            (|plan, _| plan[0].send.clear(), "which does not send it"),
            (
                |plan, _| {
                    let late = std::mem::take(&mut plan[0].receive);
                    plan[1].receive.extend(late);
                },
                "before it has it",
            ),
            (|plan, pass| plan[1].after.retain(|_| pass == Pass::Forward), "which does not send it"),
        ];
        for (change, problem) in changes {
            let schedule = Schedule::new(Changed(change), &layout, &layout, &Mask::full(), (3, 1)).expect("fits");
            match schedule.validate() {
                Ok(()) => assert_eq!(problem, ""),
                Err(error) => {
                    let text = error.to_string();
                    assert!(
                        !problem.is_empty() && text.contains(problem) && text.contains("strategy changed"),
                        "{text}"
                    );
                }
            }
        }
    }
}
