//! Gathered parameters that the ranks of one process share, so that the process holds them once and not once for each rank.

use crate::error::Result;
use candle_core::Tensor;
use ringspan_candle::quantized::QuantizedMatrix;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The gathered parameters of ranks that are threads of this process and compute on the CPU.
#[derive(Default)]
pub(crate) struct SharedGathers {
    /// Parameters that were gathered as numbers.
    pub(super) numbers: AssembledOnce<Tensor>,
    /// Matrices that were gathered as the bytes of their stored format.
    pub(super) stored: AssembledOnce<QuantizedMatrix>,
}

/// Identifies an all-gather among those of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct GatherId {
    /// The first rank, in the world, of the ranks that take part.
    pub(super) first_rank: usize,
    /// The replica group whose partitions are gathered.
    pub(super) replica_group: usize,
    /// The tag of the exchange, which counts the exchanges of these ranks.
    pub(super) tag: u64,
}

/// The results of all-gathers, each from the moment when the first rank has put it together until the last rank has taken it.
///
/// Every rank takes part in the all-gather itself, so each learns of the failure of another rank, or reaches the deadline, in its own
/// wait for the shards. Only a rank that has all shards comes here. It waits for another rank at most while that one copies them.
pub(super) struct AssembledOnce<T> {
    entries: Mutex<HashMap<GatherId, Arc<Mutex<Entry<T>>>>>,
}

struct Entry<T> {
    /// None until a rank has put the parameters together.
    assembled: Option<Vec<T>>,
    /// Number of ranks that have taken them.
    taken: usize,
}

impl<T> Default for AssembledOnce<T> {
    fn default() -> Self {
        Self { entries: Mutex::default() }
    }
}

impl<T> Default for Entry<T> {
    fn default() -> Self {
        Self { assembled: None, taken: 0 }
    }
}

impl<T: Clone> AssembledOnce<T> {
    /// Returns the parameters of an all-gather among `ranks` ranks of this process, each of which must call this once. The first
    /// caller puts them together with `assemble`, and all get clones that share memory.
    ///
    /// # Errors
    /// Errors of `assemble`; the next caller then assembles.
    pub(super) fn get_or_assemble(
        &self,
        id: GatherId,
        ranks: usize,
        assemble: impl FnOnce() -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let entry = lock(&self.entries).entry(id).or_default().clone();
        let mut entry = lock(&entry);
        let parameters = match &entry.assembled {
            Some(assembled) => assembled.clone(),
            None => assemble()?,
        };
        entry.taken += 1;
        if entry.taken == ranks {
            lock(&self.entries).remove(&id);
            entry.assembled = None;
        } else if entry.assembled.is_none() {
            entry.assembled = Some(parameters.clone());
        }
        Ok(parameters)
    }
}

/// Locks, also after a panic of another rank: an entry is changed only once its parameters are complete.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use std::sync::Barrier;
    use std::sync::atomic::{AtomicUsize, Ordering};

    const RANKS: usize = 4;

    fn id(tag: u64) -> GatherId {
        GatherId { first_rank: 0, replica_group: 0, tag }
    }

    #[test]
    fn parameters_are_assembled_once_and_released_by_the_last_rank() {
        let (shared, assembled) = (AssembledOnce::default(), AtomicUsize::new(0));
        let barrier = Barrier::new(RANKS);
        std::thread::scope(|scope| {
            for _ in 0..RANKS {
                scope.spawn(|| {
                    for tag in 0..20 {
                        barrier.wait();
                        let assemble = || Ok(vec![Arc::new((tag, assembled.fetch_add(1, Ordering::SeqCst)))]);
                        let got = shared.get_or_assemble(id(tag), RANKS, assemble).unwrap();
                        assert_eq!(*got[0], (tag, tag as usize));
                        barrier.wait();
                        assert_eq!(Arc::strong_count(&got[0]), RANKS, "only the ranks hold the parameters");
                        barrier.wait();
                    }
                });
            }
        });
        assert!(lock(&shared.entries).is_empty());
    }

    #[test]
    fn groups_of_ranks_do_not_share() {
        let shared = AssembledOnce::default();
        for (at, other) in [(1, 0), (0, 1)].into_iter().enumerate() {
            let id = GatherId { first_rank: other.0, replica_group: other.1, tag: 0 };
            assert_eq!(shared.get_or_assemble(id, 2, || Ok(vec![at])).unwrap(), [at]);
        }
    }

    #[test]
    fn a_rank_that_fails_or_panics_while_it_assembles_blocks_no_other() {
        let shared = AssembledOnce::default();
        let failed = shared.get_or_assemble(id(0), RANKS, || Err::<Vec<u8>, _>(Error::Model("no shard".into())));
        assert!(failed.is_err());
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| drop(shared.get_or_assemble(id(0), RANKS, || panic!("a rank panics"))));
            assert!(panics.join().is_err());
        });
        assert_eq!(shared.get_or_assemble(id(0), RANKS, || Ok(vec![1])).unwrap(), [1]);
        assert_eq!(shared.get_or_assemble(id(0), RANKS, || Ok(vec![2])).unwrap(), [1]);
    }
}
