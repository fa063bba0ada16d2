//! A schedule as a table: who computes what when, and what moves meanwhile.

use super::{Block, Plan, Schedule, Transfer};
use std::fmt::{Display, Formatter, Result};

/// More ring ranks than this are not drawn one by one.
const DRAWN: usize = 16;

impl Display for Schedule {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(
            f,
            "{} over ring {} x ulysses {}, {} layout, {} mask",
            self.strategy,
            self.ring,
            self.ulysses,
            self.query.kind(),
            self.mask
        )?;
        let drawn = self.ring.min(DRAWN);
        for (name, plan) in [("forward", Self::forward as fn(&Self, usize) -> Plan), ("backward", Self::backward)] {
            writeln!(f, "{name} (rank: step | keys of @rank, share of this rank's pairs | blocks sent >rank)")?;
            for rank in 0..drawn {
                let total = self.pairs(rank * self.ulysses).max(1);
                write!(f, "  {rank:>3}:")?;
                for step in plan(self, rank) {
                    f.write_str(" |")?;
                    match &step.compute {
                        Some(compute) => {
                            let share = 100.0 * compute.pairs() as f64 / total as f64;
                            write!(f, " @{} {share:>3.0}%", compute.owner)?;
                        }
                        None => write!(f, " -- ")?,
                    }
                    for Transfer { block, peer } in step.send.iter().chain(&step.after) {
                        match block {
                            Block::Keys(owner) => write!(f, " kv{owner}>{peer}")?,
                            Block::Gradients(owner) => write!(f, " d{owner}>{peer}")?,
                        }
                    }
                }
                writeln!(f)?;
            }
            if drawn < self.ring {
                writeln!(f, "  ... and {} more", self.ring - drawn)?;
            }
        }
        let pairs: Vec<u64> = (0..drawn).map(|rank| self.pairs(rank * self.ulysses)).collect();
        let (sum, most) = (pairs.iter().sum::<u64>(), pairs.iter().max().copied().unwrap_or(0));
        let balance = if most == 0 { 1.0 } else { sum as f64 / drawn as f64 / most as f64 };
        write!(f, "pairs per rank and head: {pairs:?}, balance {:.1}%", 100.0 * balance)
    }
}
