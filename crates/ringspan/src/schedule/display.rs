//! Prints a schedule as a table: what each rank computes and sends in each step.

use super::{Block, Pass, Schedule, Transfer};
use std::fmt::{Display, Formatter, Result};

/// Maximum number of ring ranks that are printed one by one.
const DRAWN: usize = 16;

impl Display for Schedule {
    fn fmt(&self, f: &mut Formatter<'_>) -> Result {
        writeln!(f, "{} over {}, {} layout, {} mask", self.strategy.name(), self.grid, self.query.kind(), self.mask)?;
        let drawn = self.grid.ring.min(DRAWN);
        for (name, pass) in [("forward", Pass::Forward), ("backward", Pass::Backward)] {
            writeln!(
                f,
                "{name} (rank: step | keys of @rank or queries of q, share of this rank's pairs, blocks sent >rank)"
            )?;
            for rank in 0..drawn {
                let total = self.pairs(self.grid.rank(rank, 0)).max(1);
                write!(f, "  {rank:>3}:")?;
                for step in self.steps(pass, rank) {
                    f.write_str(" |")?;
                    match &step.compute {
                        Some(compute) => {
                            let share = 100.0 * self.pairs_of(compute) as f64 / total as f64;
                            match compute.queries == rank {
                                true => write!(f, " @{} {share:>3.0}%", compute.keys)?,
                                false => write!(f, " q{} {share:>3.0}%", compute.queries)?,
                            }
                        }
                        None => write!(f, " -- ")?,
                    }
                    write_transfers(f, step.send.iter().chain(&step.after))?;
                }
                writeln!(f)?;
            }
            if drawn < self.grid.ring {
                writeln!(f, "  ... and {} more", self.grid.ring - drawn)?;
            }
        }
        let pairs: Vec<u64> = (0..drawn).map(|rank| self.pairs(self.grid.rank(rank, 0))).collect();
        let (sum, most) = (pairs.iter().sum::<u64>(), pairs.iter().max().copied().unwrap_or(0));
        let balance = if most == 0 { 1.0 } else { sum as f64 / drawn as f64 / most as f64 };
        write!(f, "pairs per rank and head: {pairs:?}, balance {:.1}%", 100.0 * balance)
    }
}

/// Prints what is sent: the block with its owner, and the rank that receives it.
pub(super) fn write_transfers<'a>(f: &mut Formatter<'_>, transfers: impl IntoIterator<Item = &'a Transfer>) -> Result {
    transfers.into_iter().try_for_each(|Transfer { block, peer, .. }| match block {
        Block::Keys(owner) => write!(f, " kv{owner}>{peer}"),
        Block::KeyGradients(owner) => write!(f, " dkv{owner}>{peer}"),
        Block::Queries(owner) => write!(f, " q{owner}>{peer}"),
        Block::Saved(owner) => write!(f, " do{owner}>{peer}"),
        Block::Partial(owner) => write!(f, " o{owner}>{peer}"),
        Block::QueryGradients(owner) => write!(f, " dq{owner}>{peer}"),
    })
}
