//! The adapters that one pass over the weights computes together.

use crate::error::Result;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// An adapter that this many steps with several adapters have not asked for is left out of those that are joined: each costs time in every
/// step, but so does joining them again.
const REMEMBERED_STEPS: u64 = 64;

/// A model with the adapters for which recent steps have asked, joined. All ranks see the same steps, so they join the same ones.
#[derive(Debug)]
pub(super) struct JoinedAdapters<M> {
    /// The model, with the slots of its adapters.
    joined: Option<(BTreeSet<u64>, Arc<M>)>,
    /// For each slot, the last step that asked for it.
    last_asked: BTreeMap<u64, u64>,
    steps: u64,
}

impl<M> Default for JoinedAdapters<M> {
    fn default() -> Self {
        Self { joined: None, last_asked: BTreeMap::new(), steps: 0 }
    }
}

impl<M> JoinedAdapters<M> {
    /// The model with at least the adapters in these slots, which a step asks for; `join` makes it where others must be joined.
    pub(super) fn model(
        &mut self,
        asked: &BTreeSet<u64>,
        join: impl FnOnce(&BTreeSet<u64>) -> Result<Arc<M>>,
    ) -> Result<Arc<M>> {
        self.steps += 1;
        self.last_asked.extend(asked.iter().map(|slot| (*slot, self.steps)));
        self.last_asked.retain(|_, step| *step + REMEMBERED_STEPS > self.steps);
        if let Some((slots, model)) = &self.joined
            && slots.iter().eq(self.last_asked.keys())
        {
            return Ok(model.clone());
        }
        // The former model is freed before the next is made.
        self.joined = None;
        let slots: BTreeSet<u64> = self.last_asked.keys().copied().collect();
        let model = join(&slots)?;
        self.joined = Some((slots, model.clone()));
        Ok(model)
    }

    /// Forgets an adapter.
    pub(super) fn forget(&mut self, slot: u64) {
        if self.last_asked.remove(&slot).is_some() {
            self.joined = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The slots that are joined for a step, and whether they had to be joined anew.
    fn step(joined: &mut JoinedAdapters<Vec<u64>>, asked: &[u64]) -> (Vec<u64>, bool) {
        let mut is_new = false;
        let model = joined.model(&asked.iter().copied().collect(), |slots| {
            is_new = true;
            Ok(Arc::new(slots.iter().copied().collect()))
        });
        (model.expect("joined").to_vec(), is_new)
    }

    #[test]
    fn adapters_of_recent_steps_stay_joined_and_others_leave() {
        let mut joined = JoinedAdapters::default();
        assert_eq!(step(&mut joined, &[3, 5]), (vec![3, 5], true));
        assert_eq!(step(&mut joined, &[3, 4]), (vec![3, 4, 5], true));
        // The fifth was last asked for by the first step.
        for _ in 2..REMEMBERED_STEPS {
            assert_eq!(step(&mut joined, &[3, 4]), (vec![3, 4, 5], false));
        }
        assert_eq!(step(&mut joined, &[4]), (vec![3, 4], true));
        joined.forget(9);
        assert_eq!(step(&mut joined, &[3]), (vec![3, 4], false));
        joined.forget(3);
        assert_eq!(step(&mut joined, &[4]), (vec![4], true));
    }
}
