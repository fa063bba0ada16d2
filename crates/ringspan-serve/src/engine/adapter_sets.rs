//! The models of steps whose rows use different adapters, by the set of these adapters.

use crate::error::Result;
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Largest number of cached sets. Their models share all weights, so the cache only saves building their maps of names to weights again.
const MAX_CACHED_SETS: usize = 16;

/// Models by the slots of their adapters, the one that was used last at the end.
#[derive(Debug)]
pub(super) struct AdapterSets<M>(VecDeque<(BTreeSet<u64>, Arc<M>)>);

impl<M> Default for AdapterSets<M> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<M> AdapterSets<M> {
    /// The model with the adapters in these slots, which `make` makes if it is not at hand.
    pub(super) fn get(&mut self, slots: &BTreeSet<u64>, make: impl FnOnce() -> Result<M>) -> Result<Arc<M>> {
        let known = self.0.iter().position(|(of, _)| of == slots).and_then(|at| self.0.remove(at));
        let entry = match known {
            Some(entry) => entry,
            None => (slots.clone(), Arc::new(make()?)),
        };
        let model = entry.1.clone();
        self.0.push_back(entry);
        if self.0.len() > MAX_CACHED_SETS {
            self.0.pop_front();
        }
        Ok(model)
    }

    /// Forgets the models with an adapter.
    pub(super) fn forget(&mut self, slot: u64) {
        self.0.retain(|(slots, _)| !slots.contains(&slot));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the model of these slots had to be made.
    fn is_made(sets: &mut AdapterSets<Vec<u64>>, slots: &[u64]) -> bool {
        let mut is_made = false;
        let model = sets.get(&slots.iter().copied().collect(), || {
            is_made = true;
            Ok(slots.to_vec())
        });
        assert_eq!(*model.expect("made"), slots);
        is_made
    }

    #[test]
    fn models_of_recent_sets_are_kept_and_those_of_an_adapter_that_is_gone_are_not() {
        let mut sets = AdapterSets::default();
        assert!(is_made(&mut sets, &[3, 5]) && is_made(&mut sets, &[3]) && !is_made(&mut sets, &[3, 5]));
        for other in 10..10 + MAX_CACHED_SETS as u64 - 1 {
            assert!(is_made(&mut sets, &[other]));
        }
        assert!(!is_made(&mut sets, &[3, 5]) && is_made(&mut sets, &[3]), "the least recently used has left");
        sets.forget(5);
        assert!(is_made(&mut sets, &[3, 5]) && !is_made(&mut sets, &[3]));
    }
}
