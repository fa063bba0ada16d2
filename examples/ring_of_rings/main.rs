//! A strategy from outside the library: a ring of nodes, each of which is a ring of ranks.
//!
//! `cargo run --release -p ringspan --example ring_of_rings` computes attention of six ranks on two nodes by it, forward and backward,
//! compares results with those of one rank, and counts what crosses from node to node.
//!
//! In a plain ring, the last rank of a node sends all blocks to the next node, over its link alone. Here, each block enters a node
//! once, at the first rank that sees it, and visits the others from there; blocks of different owners enter at different ranks, so
//! that all links between nodes work at once. Backward, a node sums the gradients of a block before the sum returns to its owner.

use ringspan::attention::{self, Group, Inputs};
use ringspan::kernel::View;
use ringspan::schedule::{Block, Pass, Plan, Step};
use ringspan::{Documents, Error, Layout, LayoutKind, Mask, Result, Schedule, Score, Strategy, StrategyKind, World};

/// Shapes of the example: tokens, query heads, and width of a head.
const TOKENS: usize = 601;
const HEADS: usize = 2;
const DIM: usize = 16;

/// A ring over nodes of `node` consecutive ring ranks each; the last node may have fewer.
#[derive(Debug, Clone, Copy)]
struct RingOfRings {
    node: usize,
}

impl RingOfRings {
    /// The step in which `rank` computes the keys of `owner`: as many rounds over all ranks of a node as the owner's node is before that of
    /// `rank`, and in a round, the distance of the two inside their nodes.
    fn step(self, ring: usize, rank: usize, owner: usize) -> usize {
        let nodes = ring.div_ceil(self.node);
        let round = (rank / self.node + nodes - owner / self.node) % nodes;
        round * self.node + (rank + self.node - owner % self.node) % self.node
    }

    /// The ranks that have the keys of `owner`, node by node, both in the order in which the keys visit them.
    fn route(self, schedule: &Schedule, owner: usize) -> Vec<Vec<usize>> {
        let ring = schedule.grid().ring;
        let mut ranks: Vec<usize> = std::iter::once(owner).chain(schedule.users(owner)).collect();
        ranks.sort_by_key(|&rank| self.step(ring, rank, owner));
        ranks.chunk_by(|a, b| a / self.node == b / self.node).map(<[usize]>::to_vec).collect()
    }
}

impl Strategy for RingOfRings {
    fn name(&self) -> String {
        format!("ring-of-rings:{}", self.node)
    }

    fn plan(&self, schedule: &Schedule, pass: Pass, rank: usize) -> Plan {
        let ring = schedule.grid().ring;
        let mut plan: Plan = (0..=ring.div_ceil(self.node) * self.node).map(|_| Step::default()).collect();
        for owner in std::iter::once(rank).chain(schedule.owners(rank)) {
            let step = self.step(ring, rank, owner);
            let route = self.route(schedule, owner);
            let node = route.iter().position(|ranks| ranks.contains(&rank)).unwrap_or(0);
            let place = route[node].iter().position(|&other| other == rank).unwrap_or(0);
            let before = place.checked_sub(1).map(|place| route[node][place]);
            let after = route[node].get(place + 1).copied();

            // The first rank of a node sends keys to the first rank of the next node, each rank to the next one of its node.
            let next_node = route.get(node + 1).map(|ranks| ranks[0]).filter(|_| place == 0);
            for peer in next_node.into_iter().chain(after) {
                plan[step].send.push(schedule.transfer(Block::Keys(owner), peer));
            }
            if rank != owner {
                let peer = before.unwrap_or_else(|| route[node - 1][0]);
                plan[step - 1].receive.push(schedule.transfer(Block::Keys(owner), peer));
            }
            plan[step].compute = schedule.compute(rank, owner);

            // Gradients travel along a node's ranks, and from the last of them to the owner.
            if pass == Pass::Backward && rank != owner {
                let gradients = |peer| schedule.transfer(Block::KeyGradients(owner), peer);
                plan[step].receive.extend(before.filter(|&peer| peer != owner).map(gradients));
                plan[step].after.push(gradients(after.unwrap_or(owner)));
            }
        }
        if pass == Pass::Backward {
            for user in self.route(schedule, rank).iter().filter_map(|ranks| ranks.last()).filter(|&&user| user != rank)
            {
                let done = self.step(ring, *user, rank) + 1;
                plan[done].receive.push(schedule.transfer(Block::KeyGradients(rank), *user));
            }
        }
        plan
    }
}

/// Outputs and gradients of queries, keys and values, of all tokens in the order of the sequence.
type Results = [Vec<f32>; 4];

/// Computes attention of all tokens on `ranks` ranks by `strategy`.
fn compute(strategy: impl Strategy + Clone + 'static, ranks: usize, mask: &Mask) -> Result<Results> {
    let numbers = |factor: f32| -> Vec<f32> { (0..TOKENS * HEADS * DIM).map(|i| (i as f32 * factor).sin()).collect() };
    let [q, k, v, d_out] = [0.37, 0.73, 1.1, 1.9].map(numbers);
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, TOKENS), ranks)?;
    let schedule = Schedule::new(strategy, &layout, &layout, mask, (ranks, 1))?;
    let score = Score::new(0.25);
    let of_ranks = World::threads(ranks)?.run(|rank| {
        let group = Group::new(rank.communicator().clone(), (ranks, 1), rank.kernel())?;
        let local = [&q, &k, &v, &d_out].map(|all| layout.shard(rank.index(), all, HEADS * DIM));
        let [q, k, v, d_out] = local.map(Result::unwrap_or_default);
        let view = |local| View::new(local, layout.tokens(rank.index()), HEADS, DIM);
        let (Some(q), Some(k), Some(v), Some(d_out)) = (view(&q), view(&k), view(&v), view(&d_out)) else {
            return Err(Error::Layout("a tensor of another size".into()));
        };
        let inputs = Inputs::new(q, k, v, &score);
        let saved = attention::forward(&group, &schedule, &inputs)?;
        let gradients = attention::backward(&group, &schedule, &inputs, &saved, d_out)?;
        Ok::<_, Error>([saved.out, gradients.dq, gradients.dk, gradients.dv])
    })?;
    let mut results = [(); 4].map(|()| vec![0.0; TOKENS * HEADS * DIM]);
    for (rank, of_rank) in of_ranks.iter().enumerate() {
        for (local, global) in of_rank.iter().zip(&mut results) {
            layout.unshard(rank, local, HEADS * DIM, global)?;
        }
    }
    Ok(results)
}

/// Relative L2 error of `got`.
fn error(got: &[f32], expected: &[f32]) -> f64 {
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let distance = squares(&mut got.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    (distance / squares(&mut expected.iter().map(|&x| f64::from(x)))).sqrt()
}

/// Rows that the busiest rank sends to other nodes, forward and backward.
fn rows_between_nodes(schedule: &Schedule, node: usize) -> [usize; 2] {
    [Pass::Forward, Pass::Backward].map(|pass| {
        let sent = |rank: usize| -> usize {
            let plan = schedule.plan(pass, rank);
            let transfers = plan.iter().flat_map(|step| step.send.iter().chain(&step.after));
            transfers.filter(|transfer| transfer.peer / node != rank / node).map(|transfer| transfer.rows.len()).sum()
        };
        (0..schedule.grid().ring).map(sent).max().unwrap_or(0)
    })
}

fn main() -> Result<()> {
    let (strategy, ranks, mask) = (RingOfRings { node: 3 }, 6, Mask::causal());
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, TOKENS), ranks)?;
    let schedule = Schedule::new(strategy, &layout, &layout, &mask, (ranks, 1))?;
    schedule.validate()?;
    println!("{schedule}\n");

    let (expected, got) = (compute(StrategyKind::Ring, 1, &mask)?, compute(strategy, ranks, &mask)?);
    for ((name, expected), got) in ["out", "dq", "dk", "dv"].into_iter().zip(&expected).zip(&got) {
        let error = error(got, expected);
        println!("{name:>4} differs from one rank's by {error:.1e}");
        assert!(error < 1e-5, "{name} is wrong");
    }

    let (ranks, node) = (64, 8);
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 64 * ranks), ranks)?;
    println!("\nrows of keys and of their gradients that the busiest of {ranks} ranks sends to other nodes of {node}:");
    for schedule in [
        Schedule::new(StrategyKind::Ring, &layout, &layout, &mask, (ranks, 1))?,
        Schedule::new(RingOfRings { node }, &layout, &layout, &mask, (ranks, 1))?,
    ] {
        let [forward, backward] = rows_between_nodes(&schedule, node);
        println!("{:>16} {forward:>6} forward {backward:>6} backward", schedule.strategy().name());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masks() -> [Mask; 3] {
        [Mask::full(), Mask::causal(), Mask::causal().window(Some(70), None)]
    }

    #[test]
    fn plans_are_valid_for_every_number_of_ranks_and_size_of_nodes() {
        for (ranks, node) in (1..=9).flat_map(|ranks| (1..=ranks + 1).map(move |node| (ranks, node))) {
            for (kind, mask) in [LayoutKind::Contiguous, LayoutKind::Zigzag]
                .into_iter()
                .flat_map(|kind| masks().map(|mask| (kind, mask)))
            {
                for documents in [Documents::batch(1, 200), Documents::packed(&[30, 1, 80, 7, 82])] {
                    let layout = Layout::new(kind, &documents, ranks).unwrap();
                    let strategy = RingOfRings { node };
                    let schedule = Schedule::new(strategy, &layout, &layout, &mask, (ranks, 1)).unwrap();
                    assert_eq!(schedule.validate(), Ok(()), "{ranks} ranks in nodes of {node}, {kind}, {mask}");
                }
            }
        }
    }

    #[test]
    fn results_are_those_of_one_rank() {
        for mask in masks() {
            let expected = compute(StrategyKind::Ring, 1, &mask).unwrap();
            for (ranks, node) in [(4, 2), (5, 2), (6, 3), (7, 3)] {
                let got = compute(RingOfRings { node }, ranks, &mask).unwrap();
                for (got, expected) in got.iter().zip(&expected) {
                    assert!(error(got, expected) < 1e-5, "{ranks} ranks in nodes of {node}, {mask}");
                }
            }
        }
    }
}
