//! The exchanges of a replica group, which run while its ranks compute.

use super::shared_gathers::{AssembledOnce, GatherId};
use crate::error::Result;
use ringspan::comm::{Buffer, Communicator, PendingAllToAll};
use std::{cell::Cell, sync::Arc};

/// Exchanges among the ranks of a group. All ranks start the same exchanges, in the same order.
pub(crate) struct Exchange {
    group: Arc<dyn Communicator>,
    /// The id of the next exchange, whose tag is that of its messages.
    next: Cell<GatherId>,
}

/// An all-gather of shards that is under way.
pub(crate) struct PendingGather {
    id: GatherId,
    shards: PendingAllToAll,
}

impl Exchange {
    /// The group must be used for nothing else: exchanges number their messages. `first_rank` is its first rank in the world.
    pub(crate) fn new(group: Arc<dyn Communicator>, first_rank: usize, replica_group: usize) -> Self {
        Self { group, next: Cell::new(GatherId { first_rank, replica_group, tag: 0 }) }
    }

    pub(crate) fn group(&self) -> &Arc<dyn Communicator> {
        &self.group
    }

    /// Starts to send `part(r)` to each rank r. Parts are handed over, not copied, where ranks share memory.
    pub(crate) fn start(&self, part: impl FnMut(usize) -> Arc<Buffer>) -> Result<PendingAllToAll> {
        let id = self.next.get();
        self.next.set(GatherId { tag: id.tag + 1, ..id });
        Ok(self.group.start_all_to_all(id.tag, (0..self.group.size()).map(part).collect())?)
    }

    /// Starts to send this rank's shard to all ranks.
    pub(crate) fn start_gather(&self, shard: &Arc<Buffer>) -> Result<PendingGather> {
        let id = self.next.get();
        Ok(PendingGather { id, shards: self.start(|_| shard.clone())? })
    }

    /// Waits for the shards of all ranks, and puts the gathered parameters together with `assemble`. Where the ranks share memory,
    /// one of them does that, and all take its result from `shared`.
    pub(crate) fn finish_gather<T: Clone>(
        &self,
        PendingGather { id, shards }: PendingGather,
        shared: Option<&AssembledOnce<T>>,
        assemble: impl FnOnce(&[Arc<Buffer>]) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let shards = shards.wait()?;
        match (shared, self.group.size()) {
            (Some(shared), ranks @ 2..) => shared.get_or_assemble(id, ranks, || assemble(&shards)),
            _ => assemble(&shards),
        }
    }
}

impl PendingGather {
    /// Waits for the shards of all ranks, and drops them.
    pub(crate) fn discard(self) -> Result<()> {
        self.shards.wait()?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use ringspan::comm::threads::{self, Options};

    /// Gathers the numbers of ranks, of which rank `failing` returns an error first.
    fn gather(ranks: usize, failing: Option<usize>) -> Result<Vec<Arc<Vec<f32>>>> {
        let shared = AssembledOnce::default();
        threads::run(ranks, Options::default(), |world| {
            let (rank, exchange) = (world.rank(), Exchange::new(world.clone(), 0, 0));
            if failing == Some(rank) {
                return Err(Error::Model("no memory is left".into()));
            }
            let under_way = exchange.start_gather(&Arc::new(Buffer::F32(vec![rank as f32])))?;
            let assemble = |shards: &[Arc<Buffer>]| {
                let values = shards.iter().map(|shard| Ok(shard.f32()?[0])).collect::<Result<Vec<_>>>()?;
                Ok(vec![Arc::new(values)])
            };
            let mut gathered = exchange.finish_gather(under_way, Some(&shared), assemble)?;
            gathered.pop().ok_or_else(|| Error::Model("nothing was gathered".into()))
        })
    }

    #[test]
    fn ranks_that_share_memory_gather_one_copy() {
        let all = gather(4, None).expect("no rank fails");
        assert!(all.iter().all(|gathered| Arc::ptr_eq(gathered, &all[0]) && **gathered == [0.0, 1.0, 2.0, 3.0]));
    }

    #[test]
    fn a_rank_that_fails_before_a_gather_ends_it_for_the_others() {
        for failing in 0..3 {
            let error = gather(3, Some(failing)).expect_err("a rank fails").to_string();
            assert!(error.contains("no memory is left"), "{error}");
        }
    }
}
