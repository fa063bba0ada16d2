//! The plans of decoding: how the ranks' softmax states of the same queries become one.

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

/// One step of a rank in a merge. A rank begins with the state of its own keys; states and results have the same size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MergeStep {
    /// Sends this rank's state to all others, and merges the states of all in rank order into the result.
    Exchange,
    /// Receives the state of a rank and merges it into this rank's.
    Receive {
        /// The rank that sends its state.
        from: usize,
    },
    /// Sends this rank's state.
    Send {
        /// The rank that merges it.
        to: usize,
    },
    /// Takes this rank's state as the result: it holds those of all ranks.
    TakeResult,
    /// Receives the result.
    ReceiveResult {
        /// The rank that has it.
        from: usize,
    },
    /// Sends the result on.
    SendResult {
        /// The rank that waits for it.
        to: usize,
    },
}

impl Merge {
    /// The steps of `rank` of `size` ranks, in order.
    pub fn plan(self, size: usize, rank: usize) -> Vec<MergeStep> {
        match self {
            _ if size == 1 => vec![MergeStep::TakeResult],
            Self::AllGather => vec![MergeStep::Exchange],
            Self::Tree => tree(size, rank),
        }
    }

    /// Bytes that `rank` of `size` ranks sends for `tokens` queries of `heads` heads and values of width `v_dim`: an output, a
    /// maximum and a sum in f32 for each query and head, whatever the length of the context.
    pub fn bytes_sent(self, size: usize, rank: usize, tokens: usize, heads: usize, v_dim: usize) -> u64 {
        let messages = |step: &MergeStep| match step {
            MergeStep::Exchange => size - 1,
            MergeStep::Send { .. } | MergeStep::SendResult { .. } => 1,
            MergeStep::Receive { .. } | MergeStep::TakeResult | MergeStep::ReceiveResult { .. } => 0,
        };
        let messages: usize = self.plan(size, rank).iter().map(messages).sum();
        (messages * tokens * heads * (v_dim + 2) * 4) as u64
    }
}

/// Rank r merges the states of ranks r + 1, r + 2, r + 4, .. until it meets a set bit of r, then sends its own to r minus
/// that bit. The result takes the same way back, first to the rank with the most ranks behind it.
fn tree(size: usize, rank: usize) -> Vec<MergeStep> {
    let distances = || (0..usize::BITS).map(|bit| 1 << bit).take_while(|distance| *distance < size);
    let below: Vec<usize> = distances()
        .take_while(|distance| rank & distance == 0)
        .map(|distance| rank + distance)
        .filter(|&peer| peer < size)
        .collect();
    let mut plan: Vec<MergeStep> = below.iter().map(|&from| MergeStep::Receive { from }).collect();
    match distances().find(|distance| rank & distance != 0) {
        Some(distance) => {
            plan.extend([MergeStep::Send { to: rank - distance }, MergeStep::ReceiveResult { from: rank - distance }]);
        }
        None => plan.push(MergeStep::TakeResult),
    }
    plan.extend(below.iter().rev().map(|&to| MergeStep::SendResult { to }));
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet, VecDeque};

    /// Plays the plans of all ranks with sets of ranks as states.
    fn play(merge: Merge, size: usize) -> Vec<BTreeSet<usize>> {
        let mut plans: Vec<VecDeque<MergeStep>> = (0..size).map(|rank| merge.plan(size, rank).into()).collect();
        let mut states: Vec<BTreeSet<usize>> = (0..size).map(|rank| [rank].into()).collect();
        let mut results = vec![BTreeSet::new(); size];
        let mut under_way: BTreeMap<(usize, usize), VecDeque<BTreeSet<usize>>> = BTreeMap::new();
        while plans.iter().any(|plan| !plan.is_empty()) {
            let mut moved = false;
            for rank in 0..size {
                let Some(&step) = plans[rank].front() else { continue };
                match step {
                    MergeStep::Exchange => results[rank] = (0..size).collect(),
                    MergeStep::TakeResult => results[rank] = states[rank].clone(),
                    MergeStep::Send { to } => under_way.entry((rank, to)).or_default().push_back(states[rank].clone()),
                    MergeStep::SendResult { to } => {
                        under_way.entry((rank, to)).or_default().push_back(results[rank].clone());
                    }
                    MergeStep::Receive { from } | MergeStep::ReceiveResult { from } => {
                        let arrived = under_way.get_mut(&(from, rank)).and_then(VecDeque::pop_front);
                        let Some(arrived) = arrived else { continue };
                        if step == (MergeStep::ReceiveResult { from }) {
                            results[rank] = arrived;
                        } else {
                            assert!(states[rank].is_disjoint(&arrived), "a state is merged twice");
                            states[rank].extend(arrived);
                        }
                    }
                }
                plans[rank].pop_front();
                moved = true;
            }
            assert!(moved, "{merge:?} of {size} ranks waits for ever");
        }
        assert!(under_way.values().all(VecDeque::is_empty), "a message nobody receives");
        results
    }

    #[test]
    fn every_rank_ends_with_the_states_of_all_merged_once() {
        for (merge, size) in (1..40).flat_map(|size| [(Merge::AllGather, size), (Merge::Tree, size)]) {
            assert!(play(merge, size).iter().all(|result| *result == (0..size).collect()), "{merge:?} of {size}");
        }
    }

    #[test]
    fn a_tree_sends_at_most_as_many_messages_as_it_has_levels() {
        for size in 2usize..70 {
            let most = (0..size).map(|rank| Merge::Tree.bytes_sent(size, rank, 1, 1, 2) / 16).max();
            assert_eq!(most, Some(u64::from(size.next_power_of_two().ilog2())), "{size}");
        }
    }
}
