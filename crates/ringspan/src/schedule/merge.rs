//! The plans of decoding: how the ranks' softmax states of the same queries become one.
//!
//! In a decoding step every rank has the same few queries, and attends to the keys that it holds. Then the ranks'
//! states of these queries are merged. Each rank does this by a [`Plan`], made of the same steps and transfers as the
//! plans of other strategies: they are checked, counted and printed alike.

use super::display::write_transfers;
use super::validate::check_messages;
use super::{Block, Plan, RowRanges, Step, TensorSizes, Traffic, Transfer};
use crate::error::{Error, Result};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::fmt::{Display, Formatter};

/// How the softmax states of the ranks are merged; every rank ends with the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Merge {
    /// Every rank sends its state to all others: one exchange, P - 1 messages a rank.
    #[default]
    AllGather,
    /// States are reduced up a binary tree and the result is sent down: 2 log2(P) exchanges, at most as many messages a
    /// rank (Shyam et al., 2024, arXiv:2408.04093).
    Tree,
}

/// The plans of all ranks for the merge of a decoding step.
///
/// `Block::Partial(r)` is the softmax state of rank r's copy of the queries. A rank that receives it for its own copy merges it
/// into its state; in a step in which it sends its state, too, the states are merged in rank order. A rank that receives the
/// state of another rank's copy takes it as the result: it holds all keys.
///
/// ```
/// use ringspan::schedule::{DecodeSchedule, Merge, TensorSizes};
///
/// let schedule = DecodeSchedule::new(Merge::Tree, 8, 1);
/// schedule.validate()?;
/// let sizes = TensorSizes { heads: 32, kv_heads: 8, dim: 128, v_dim: 128, wire: 2, bias_heads: 0 };
/// // A state is an output, a maximum and a sum in f32 for each head. Rank 0 sends the result to ranks 4, 2 and 1.
/// assert_eq!(schedule.bytes_sent(0, &sizes), 3 * 32 * (128 + 2) * 4);
/// println!("{schedule}");
/// # Ok::<_, ringspan::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecodeSchedule {
    merge: Merge,
    ranks: usize,
    queries: usize,
}

impl DecodeSchedule {
    /// The schedule for `queries` queries, which all of `ranks` ranks have.
    pub fn new(merge: Merge, ranks: usize, queries: usize) -> Self {
        Self { merge, ranks, queries }
    }

    /// The steps of a rank, which begins with the state of its own keys. Without other ranks there is none.
    pub fn plan(&self, rank: usize) -> Plan {
        match self.merge {
            _ if self.ranks == 1 => Vec::new(),
            Merge::AllGather => {
                let others = || (0..self.ranks).filter(|peer| *peer != rank);
                vec![Step {
                    send: others().map(|peer| self.state(peer, peer)).collect(),
                    receive: others().map(|peer| self.state(rank, peer)).collect(),
                    ..Step::default()
                }]
            }
            Merge::Tree => self.tree(rank),
        }
    }

    /// Rank r merges the states of ranks r + 1, r + 2, r + 4, .. until it meets a set bit of r, then sends its own to r minus
    /// that bit. The result takes the same way back, first to the rank at the root of the largest subtree.
    fn tree(&self, rank: usize) -> Plan {
        let send = |transfer| Step { send: [transfer].into_iter().collect(), ..Step::default() };
        let receive = |transfer| Step { receive: [transfer].into_iter().collect(), ..Step::default() };
        let distances = || (0..usize::BITS).map(|bit| 1 << bit).take_while(|distance| *distance < self.ranks);
        let children: Vec<usize> = distances()
            .take_while(|distance| rank & distance == 0)
            .map(|distance| rank + distance)
            .filter(|&child| child < self.ranks)
            .collect();
        let mut plan: Plan = children.iter().map(|&child| receive(self.state(rank, child))).collect();
        if let Some(distance) = distances().find(|distance| rank & distance != 0) {
            let parent = rank - distance;
            plan.extend([send(self.state(parent, parent)), receive(self.state(0, parent))]);
        }
        plan.extend(children.iter().rev().map(|&child| send(self.state(0, child))));
        plan
    }

    /// The transfer, to or from `peer`, of the state of `owner`'s copy of the queries.
    fn state(&self, owner: usize, peer: usize) -> Transfer {
        Transfer { block: Block::Partial(owner), peer, rows: RowRanges::all(self.queries) }
    }

    /// The rows that a rank sends to others.
    pub fn traffic(&self, rank: usize) -> Traffic {
        Traffic::of(&self.plan(rank))
    }

    /// Bytes that a rank sends to others: an output, a maximum and a sum in f32 for each query and head, whatever the length of
    /// the context.
    pub fn bytes_sent(&self, rank: usize, sizes: &TensorSizes) -> u64 {
        self.traffic(rank).bytes(sizes, 0)
    }

    /// Checks the plans of all ranks: every send meets a receive, no rank waits for ever, a rank has what it sends, no state is
    /// merged twice, and every rank ends with the states of all. The time grows with the square of the number of ranks.
    ///
    /// # Errors
    /// [`Error::Plan`] with the first rule that is broken.
    pub fn validate(&self) -> Result<()> {
        validate(&self.name(), &(0..self.ranks).map(|rank| self.plan(rank)).collect::<Vec<_>>())
    }

    fn name(&self) -> String {
        match self.merge {
            Merge::AllGather => "all-gather of softmax states".into(),
            Merge::Tree => "tree of softmax states".into(),
        }
    }
}

/// Prints each rank's steps: `o2>2` sends a state to rank 2, which merges it; `o0>1` sends rank 1 the result of rank 0.
impl Display for DecodeSchedule {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} over {} ranks, {} queries (rank: step | states sent >rank)",
            self.name(),
            self.ranks,
            self.queries
        )?;
        (0..self.ranks).try_for_each(|rank| {
            write!(f, "\n  {rank:>3}:")?;
            self.plan(rank).iter().try_for_each(|step| {
                f.write_str(if step.send.is_empty() { " | --" } else { " |" })?;
                write_transfers(f, &step.send)
            })
        })
    }
}

/// Stands for a softmax state that the plans merge: the ranks whose keys it includes.
type SeenRanks = BTreeSet<usize>;

/// Carries out the plans with sets of ranks as states.
fn validate(name: &str, plans: &[Plan]) -> Result<()> {
    let broken = |ring_rank, problem: String| Err(Error::Plan { strategy: name.into(), ring_rank, problem });
    check_messages(name, plans)?;
    let mut states: Vec<Option<SeenRanks>> = (0..plans.len()).map(|rank| Some([rank].into())).collect();
    let mut on_the_way: HashMap<(usize, usize, Block), VecDeque<SeenRanks>> = HashMap::new();
    let (mut next, mut has_sent) = (vec![0; plans.len()], vec![false; plans.len()]);
    while next.iter().zip(plans).any(|(next, plan)| *next < plan.len()) {
        let mut moved = false;
        for (rank, plan) in plans.iter().enumerate() {
            let Some(step) = plan.get(next[rank]) else { continue };
            if !has_sent[rank] {
                for Transfer { block, peer, .. } in &step.send {
                    let Some(state) = states[rank].clone() else {
                        return broken(rank, format!("sends {block:?} to {peer} after it gave its state away"));
                    };
                    on_the_way.entry((rank, *peer, *block)).or_default().push_back(state);
                }
                (has_sent[rank], moved) = (true, true);
            }
            let here = |transfer: &Transfer| {
                on_the_way.get(&(transfer.peer, rank, transfer.block)).is_some_and(|states| !states.is_empty())
            };
            if !step.receive.iter().all(here) {
                continue;
            }
            // A state that another rank merges is that rank's from then on, unless they are exchanged.
            if step.receive.is_empty() && step.send.iter().any(|transfer| transfer.block.owner() == transfer.peer) {
                states[rank] = None;
            }
            for Transfer { block, peer, .. } in &step.receive {
                let arrived = on_the_way.get_mut(&(*peer, rank, *block)).and_then(VecDeque::pop_front);
                let arrived = arrived.unwrap_or_default();
                if block.owner() != rank {
                    states[rank] = Some(arrived);
                    continue;
                }
                match &mut states[rank] {
                    Some(state) if state.is_disjoint(&arrived) => state.extend(arrived),
                    Some(_) => return broken(rank, format!("merges the state of {peer}, parts of which it has")),
                    None => return broken(rank, format!("merges the state of {peer} after it gave its own away")),
                }
            }
            (next[rank], has_sent[rank], moved) = (next[rank] + 1, false, true);
        }
        if !moved {
            let rank = (0..plans.len()).find(|rank| next[*rank] < plans[*rank].len()).unwrap_or(0);
            return broken(rank, format!("waits for ever in step {}", next[rank]));
        }
    }
    for (rank, state) in states.iter().enumerate() {
        let missing = (0..plans.len()).find(|other| state.as_ref().is_none_or(|state| !state.contains(other)));
        if let Some(missing) = missing {
            return broken(rank, format!("ends without the state of {missing}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: TensorSizes = TensorSizes { heads: 1, kv_heads: 1, dim: 4, v_dim: 2, wire: 2, bias_heads: 0 };

    #[test]
    fn every_rank_ends_with_the_states_of_all_merged_once() {
        for (merge, ranks) in (1..40).flat_map(|ranks| [(Merge::AllGather, ranks), (Merge::Tree, ranks)]) {
            for queries in [0, 3] {
                DecodeSchedule::new(merge, ranks, queries).validate().expect("a valid plan");
            }
        }
    }

    #[test]
    fn a_tree_sends_at_most_as_many_messages_as_it_has_levels() {
        for ranks in 2usize..70 {
            let schedule = DecodeSchedule::new(Merge::Tree, ranks, 1);
            let most = (0..ranks).map(|rank| schedule.bytes_sent(rank, &SIZES) / 16).max();
            assert_eq!(most, Some(u64::from(ranks.next_power_of_two().ilog2())), "{ranks}");
        }
    }

    #[test]
    fn each_broken_rule_is_named_with_its_rank() {
        type Change = fn(&mut [Plan]);
        let changes: [(Change, &str); 7] = [
            (|_| (), ""),
            (|plans| plans[3].truncate(1), "rank 2 sends Partial(0), 1 rows, to 3, which does not receive it"),
            (|plans| drop(plans[1].remove(0)), "rank 0 receives Partial(0), 1 rows, from 1, which does not send it"),
            (|plans| plans[2].swap(1, 2), "rank 0 waits for ever in step 1"),
            (|plans| plans[2].swap(0, 1), "rank 2 merges the state of 3 after it gave its own away"),
            (|plans| plans[1].swap(0, 1), "waits for ever in step 0"),
            (
                |plans| {
                    for (rank, plan) in plans.iter_mut().enumerate() {
                        plan.retain(|step| step.receive.iter().chain(&step.send).all(|it| it.peer.min(rank) != 0));
                    }
                },
                "ends without the state of",
            ),
        ];
        for (change, problem) in changes {
            let mut plans: Vec<Plan> = (0..4).map(|rank| DecodeSchedule::new(Merge::Tree, 4, 1).plan(rank)).collect();
            change(&mut plans);
            match validate("changed", &plans) {
                Ok(()) => assert_eq!(problem, ""),
                Err(error) => {
                    assert!(!problem.is_empty() && error.to_string().contains(problem), "{error} for {problem}");
                }
            }
        }
    }

    #[test]
    fn a_state_that_arrives_by_two_ways_is_refused() {
        // Rank 0 merges the state of rank 1, and in the exchange that follows each gets it again.
        let exchange = |rank| DecodeSchedule::new(Merge::AllGather, 2, 1).plan(rank);
        let plans: Vec<Plan> = (0..2).map(|rank| [exchange(rank), exchange(rank)].concat()).collect();
        let error = validate("twice", &plans).expect_err("merged twice").to_string();
        assert!(error.contains("parts of which it has"), "{error}");
    }

    #[test]
    fn plans_are_printed_like_those_of_other_strategies() {
        let tree = DecodeSchedule::new(Merge::Tree, 3, 2).to_string();
        let expected = "tree of softmax states over 3 ranks, 2 queries (rank: step | states sent >rank)\n    \
                        0: | -- | -- | o0>2 | o0>1\n    1: | o0>0 | --\n    2: | o0>0 | --";
        assert_eq!(tree, expected);
        let all = DecodeSchedule::new(Merge::AllGather, 3, 2).to_string();
        assert!(all.ends_with("\n    0: | o1>1 o2>2\n    1: | o0>0 o2>2\n    2: | o0>0 o1>1"), "{all}");
    }
}
