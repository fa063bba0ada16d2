//! Estimates the cost of a schedule on a given machine by simulating its plans, and chooses the cheapest schedule.

use super::{Block, Pass, Plan, Schedule, TensorSizes, Transfer};
use crate::error::{Error, Result};
use crate::mesh::Grid;
use std::collections::HashMap;
use std::fmt::{Display, Formatter};

/// The outgoing link of a rank.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds from sending the last byte to its arrival.
    pub latency: f64,
}

/// Speed of computation and communication of the ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    /// Floating-point operations a second of one rank in attention.
    pub flops: f64,
    /// Link between ring ranks.
    pub ring: Link,
    /// Link between the members of a Ulysses group.
    pub ulysses: Link,
    /// Whether ring ranks are connected in a line: a message passes through every rank between its two ends.
    pub line: bool,
}

/// The estimated cost of a schedule.
#[derive(Debug, Clone, PartialEq)]
pub struct Estimate {
    /// The schedule's strategy.
    pub strategy: String,
    /// The sizes of its ring and Ulysses axes.
    pub grid: Grid,
    /// Seconds from the common start of all ranks until the last has finished.
    pub seconds: f64,
    /// Seconds of computation of the rank that computes longest.
    pub compute_seconds: f64,
    /// Bytes sent by the rank that sends most.
    pub bytes_sent: u64,
}

impl Schedule {
    /// Simulates the passes: every rank takes its steps in order, sends one message after the other over its link,
    /// computes, and waits for its receives.
    ///
    /// # Errors
    /// Head counts that do not fit the grid.
    pub fn estimate(&self, sizes: &TensorSizes, machine: &Machine, passes: &[Pass]) -> Result<Estimate> {
        let ranks = self.query().ranks();
        let (mut seconds, mut compute, mut bytes) = (0.0, 0.0, vec![0; ranks]);
        for &pass in passes {
            let mut exchanged: f64 = 0.0;
            for (rank, bytes) in bytes.iter_mut().enumerate() {
                let sent = self.bytes_sent(pass, rank, sizes)?;
                *bytes += sent;
                if self.grid().ulysses > 1 {
                    let shares = super::HeadShare::all(sizes.heads, sizes.kv_heads, self.grid())?;
                    let share = &shares[self.grid().coordinates(rank).1];
                    let own = TensorSizes { heads: share.query.len(), kv_heads: share.kv.len(), ..*sizes };
                    let ring = self
                        .traffic(pass, self.grid().coordinates(rank).0)
                        .bytes(&own, self.key().documents().row_len());
                    // The time covers both exchanges. If heads are in parts, only the first and the last exchange are not
                    // overlapped.
                    let time = sent.saturating_sub(ring) as f64 / machine.ulysses.bandwidth;
                    exchanged = exchanged.max(time / self.head_chunks() as f64 + 2.0 * machine.ulysses.latency);
                }
            }
            let (finish, longest) = self.simulate(sizes, machine, pass)?;
            seconds += finish + exchanged;
            compute += longest;
        }
        let bytes_sent = bytes.into_iter().max().unwrap_or(0);
        Ok(Estimate {
            strategy: self.strategy().name(),
            grid: self.grid(),
            seconds,
            compute_seconds: compute,
            bytes_sent,
        })
    }

    /// The time at which the last ring rank has finished a pass, and the computation time of the busiest.
    fn simulate(&self, sizes: &TensorSizes, machine: &Machine, pass: Pass) -> Result<(f64, f64)> {
        let shares = super::HeadShare::all(sizes.heads, sizes.kv_heads, self.grid())?;
        let most = shares.iter().max_by_key(|share| share.query.len());
        let (heads, kv_heads) = most.map_or((1, 1), |share| (share.query.len(), share.kv.len()));
        let sizes = TensorSizes { heads, kv_heads, ..*sizes };
        let products = match pass {
            Pass::Forward => sizes.dim + sizes.v_dim,
            Pass::Backward => 3 * sizes.dim + 2 * sizes.v_dim,
        };
        let pair = (2 * heads * products) as f64 / machine.flops;
        let mut ranks: Vec<SimulatedRank> =
            (0..self.grid().ring).map(|rank| SimulatedRank::new(self, self.steps(pass, rank), pair)).collect();
        let mut arrivals: HashMap<(usize, usize, Block), f64> = HashMap::new();
        loop {
            let mut moved = false;
            for (rank, player) in ranks.iter_mut().enumerate() {
                while player.take_action(rank, &sizes, machine, &mut arrivals) {
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        if let Some(stuck) = ranks.iter().position(|player| player.next < player.acts.len()) {
            return Err(Error::Layout(format!("the schedule leaves ring rank {stuck} waiting for ever")));
        }
        let most = |of: fn(&SimulatedRank) -> f64| ranks.iter().map(of).fold(0.0, f64::max);
        Ok((most(|player| player.now), most(|player| player.busy)))
    }
}

/// The state of a simulated ring rank in its plan.
struct SimulatedRank {
    acts: Vec<Action>,
    next: usize,
    now: f64,
    busy: f64,
    /// Time at which the outgoing link is free again.
    link: f64,
    /// Number of keys of a batch row.
    keys: usize,
}

enum Action {
    Send(Transfer),
    Compute(f64),
    Receive(Transfer),
}

impl SimulatedRank {
    fn new(schedule: &Schedule, plan: Plan, pair: f64) -> Self {
        let mut acts = Vec::new();
        for step in plan {
            acts.extend(step.send.into_iter().map(Action::Send));
            acts.extend(step.compute.map(|compute| Action::Compute(schedule.pairs_of(&compute) as f64 * pair)));
            acts.extend(step.receive.into_iter().map(Action::Receive));
            acts.extend(step.after.into_iter().map(Action::Send));
        }
        let keys = schedule.key().documents().row_len();
        Self { acts, next: 0, now: 0.0, busy: 0.0, link: 0.0, keys }
    }

    /// Takes the next action; false if there is none left, or if it waits for a message that is not sent yet.
    fn take_action(
        &mut self,
        rank: usize,
        sizes: &TensorSizes,
        machine: &Machine,
        arrivals: &mut HashMap<(usize, usize, Block), f64>,
    ) -> bool {
        match self.acts.get(self.next) {
            None => return false,
            Some(Action::Send(Transfer { block, peer, rows })) => {
                let hops = if machine.line { peer.abs_diff(rank) as f64 } else { 1.0 };
                let time = (rows.len() as u64 * sizes.row(*block, self.keys)) as f64 / machine.ring.bandwidth;
                self.link = self.link.max(self.now) + time * hops;
                arrivals.insert((rank, *peer, *block), self.link + machine.ring.latency * hops);
            }
            Some(Action::Compute(seconds)) => {
                self.now += seconds;
                self.busy += seconds;
            }
            Some(Action::Receive(Transfer { block, peer, .. })) => match arrivals.remove(&(*peer, rank, *block)) {
                Some(arrival) => self.now = self.now.max(arrival),
                None => return false,
            },
        }
        self.next += 1;
        true
    }
}

/// The cheapest of several schedules, with the estimated cost of each.
#[derive(Debug, Clone)]
pub struct Choice {
    /// The cheapest schedule; among equals the one that sends least, then the first.
    pub schedule: Schedule,
    /// The estimates of all candidates, in the given order.
    pub estimates: Vec<Estimate>,
}

impl Choice {
    /// Estimates all `candidates` and keeps the cheapest.
    ///
    /// # Errors
    /// An empty list of candidates, or one whose heads do not fit its grid.
    pub fn cheapest(
        candidates: Vec<Schedule>,
        sizes: &TensorSizes,
        machine: &Machine,
        passes: &[Pass],
    ) -> Result<Self> {
        let estimates =
            candidates.iter().map(|schedule| schedule.estimate(sizes, machine, passes)).collect::<Result<Vec<_>>>()?;
        let least = (0..estimates.len()).min_by(|&a, &b| {
            let (a, b) = (&estimates[a], &estimates[b]);
            a.seconds.total_cmp(&b.seconds).then(a.bytes_sent.cmp(&b.bytes_sent))
        });
        let chosen = least.and_then(|least| candidates.into_iter().nth(least));
        match chosen {
            Some(schedule) => Ok(Self { schedule, estimates }),
            None => Err(Error::Layout("no schedule to choose from".into())),
        }
    }
}

impl Display for Choice {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{:>18} {:>22} {:>12} {:>12} {:>12}", "strategy", "grid", "estimate ms", "compute ms", "MB sent")?;
        for estimate in &self.estimates {
            let Estimate { strategy, grid, seconds, compute_seconds, bytes_sent } = estimate;
            let (grid, megabytes) = (grid.to_string(), *bytes_sent as f64 / 1e6);
            let (seconds, compute) = (seconds * 1e3, compute_seconds * 1e3);
            writeln!(f, "{:>18} {grid:>22} {seconds:>12.3} {compute:>12.3} {megabytes:>12.3}", strategy)?;
        }
        let of = |e: &&Estimate| e.strategy == self.schedule.strategy().name() && e.grid == self.schedule.grid();
        match self.estimates.iter().find(of) {
            Some(chosen) => {
                let exposed = 1e3 * (chosen.seconds - chosen.compute_seconds);
                write!(f, "{} is the cheapest: {exposed:.3} ms of its transfers are not hidden", chosen.strategy)
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::documents::Documents;
    use crate::layout::{Layout, LayoutKind};
    use crate::mask::Mask;
    use crate::schedule::StrategyKind;

    const SIZES: TensorSizes = TensorSizes { heads: 8, kv_heads: 2, dim: 64, v_dim: 64, wire: 4, bias_heads: 0 };

    fn machine(bandwidth: f64) -> Machine {
        let link = Link { bandwidth, latency: 0.0 };
        Machine { flops: 1e11, ring: link, ulysses: link, line: false }
    }

    fn candidates(queries: usize, keys: usize, mask: &Mask, ranks: usize) -> Vec<Schedule> {
        let (queries, keys) = (Documents::batch(1, queries), Documents::batch(1, keys));
        let (query, key) = Layout::pair(LayoutKind::Contiguous, &queries, &keys, mask, ranks).expect("a layout");
        let schedule = |strategy| Schedule::new(strategy, &query, &key, mask, (ranks, 1)).expect("fits");
        StrategyKind::ALL.into_iter().map(schedule).collect()
    }

    fn chosen(candidates: Vec<Schedule>, bandwidth: f64) -> String {
        let choice = Choice::cheapest(candidates, &SIZES, &machine(bandwidth), &[Pass::Forward]).expect("fits");
        assert!(choice.to_string().contains("is the cheapest"));
        choice.schedule.strategy().name()
    }

    #[test]
    fn few_queries_over_a_long_cache_travel_themselves() {
        assert_eq!(chosen(candidates(4, 100_000, &Mask::causal_bottom_right(), 4), 1e9), "pass-q");
    }

    #[test]
    fn a_window_on_a_slow_link_is_fetched_by_halo() {
        assert_eq!(chosen(candidates(8192, 8192, &Mask::causal().window(Some(64), None), 4), 1e8), "halo");
    }

    #[test]
    fn a_full_mask_on_a_fast_link_costs_its_computation_alone() {
        let all = candidates(4096, 4096, &Mask::full(), 4);
        let estimate = all[0].estimate(&SIZES, &machine(1e15), &[Pass::Forward]).expect("fits");
        let flops = 4.0 * 64.0 * 8.0 * 4096.0 * 1024.0;
        assert!((estimate.seconds / (flops / 1e11) - 1.0).abs() < 1e-4, "{estimate:?}");
        // A block takes twice as long to send as to compute with, so the ring waits for each of them.
        let block = (1024 * 2 * 128 * 4) as f64;
        let slow =
            all[0].estimate(&SIZES, &machine(block / (2.0 * flops / 4.0 / 1e11)), &[Pass::Forward]).expect("fits");
        assert!((slow.seconds / (flops / 1e11) - 7.0 / 4.0).abs() < 1e-3, "{slow:?}");
        assert_eq!(slow.bytes_sent, 3 * block as u64);
    }

    #[test]
    fn without_a_way_around_a_line_is_walked_both_ways() {
        let all = candidates(512, 512, &Mask::full(), 8);
        let machine = Machine { line: true, ..machine(1e8) };
        let choice = Choice::cheapest(all, &SIZES, &machine, &[Pass::Forward]).expect("fits");
        assert_eq!(choice.schedule.strategy().name(), "bidirectional-ring", "{choice}");
    }

    #[test]
    fn backward_is_played_through_for_every_strategy() {
        for schedule in candidates(100, 100, &Mask::causal(), 5) {
            let both = schedule.estimate(&SIZES, &machine(1e9), &[Pass::Forward, Pass::Backward]).expect("fits");
            assert!(both.seconds >= both.compute_seconds && both.compute_seconds > 0.0, "{both:?}");
        }
    }
}
