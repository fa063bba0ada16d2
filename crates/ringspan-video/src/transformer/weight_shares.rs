//! Which rank holds which weights, where ranks share them.

use ringspan_candle::model::Unit;
use std::collections::BTreeMap;

/// The distribution of a transformer's weights over ranks. Each weight belongs to one rank; a unit's weights belong to several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightShares {
    /// For each unit and each rank the names of weights.
    names: BTreeMap<Unit, Vec<Vec<String>>>,
    /// Bytes of each rank.
    bytes: Vec<u64>,
    /// Bytes of the largest unit.
    largest_unit: u64,
}

impl WeightShares {
    /// Distributes the weights of units, given with their bytes, so that ranks hold about as many bytes each.
    pub(crate) fn new(units: BTreeMap<Unit, Vec<(String, u64)>>, ranks: usize) -> Self {
        let (mut all, mut bytes, mut largest_unit) = (BTreeMap::new(), vec![0; ranks.max(1)], 0);
        for (unit, mut weights) in units {
            largest_unit = largest_unit.max(weights.iter().map(|(_, size)| size).sum());
            // The largest first: the smaller ones then even out what these leave.
            weights.sort_by(|(name, size), (other, of_other)| of_other.cmp(size).then_with(|| name.cmp(other)));
            let mut of_ranks = vec![Vec::new(); bytes.len()];
            for (name, size) in weights {
                let least = (0..bytes.len()).min_by_key(|rank| bytes[*rank]).unwrap_or(0);
                bytes[least] += size;
                of_ranks[least].push(name);
            }
            all.insert(unit, of_ranks);
        }
        Self { names: all, bytes, largest_unit }
    }

    /// For each unit and each rank the names of its weights.
    pub(crate) fn names(&self) -> &BTreeMap<Unit, Vec<Vec<String>>> {
        &self.names
    }

    /// Bytes of the rank that holds most.
    pub(crate) fn most(&self) -> u64 {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    /// Bytes of the largest unit, which a rank holds for the time in which it computes with it.
    pub(crate) fn largest_unit(&self) -> u64 {
        self.largest_unit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Units like those of the transformer: two wide matrices, eight square ones, and vectors.
    fn units() -> BTreeMap<Unit, Vec<(String, u64)>> {
        let block = |index: usize| {
            let sizes = [2700u64; 2].into_iter().chain([1000; 8]).chain([5; 9]);
            let named = sizes.enumerate().map(|(i, size)| (format!("blocks.{index}.{i}"), size));
            (Unit::Layer(index), named.collect())
        };
        (0..30).map(block).chain([(Unit::Head, vec![("head".into(), 60)])]).collect()
    }

    #[test]
    fn each_weight_belongs_to_one_rank_and_ranks_hold_about_as_many_bytes_each() {
        let all: u64 = units().values().flatten().map(|(_, size)| size).sum();
        for ranks in [1, 2, 3, 4, 7, 8] {
            let shares = WeightShares::new(units(), ranks);
            for (unit, weights) in units() {
                let mut names: Vec<_> = shares.names()[&unit].concat();
                let mut wanted: Vec<_> = weights.into_iter().map(|(name, _)| name).collect();
                names.sort();
                wanted.sort();
                assert_eq!(names, wanted, "{unit:?} on {ranks} ranks");
            }
            let share = all.div_ceil(ranks as u64);
            assert!((share..share + 2700).contains(&shares.most()), "{ranks} ranks: {} of {all}", shares.most());
            assert_eq!(shares.largest_unit(), 2 * 2700 + 8000 + 45);
        }
    }

    #[test]
    fn ranks_may_hold_nothing() {
        let shares = WeightShares::new([(Unit::Head, vec![("a".into(), 4)])].into(), 3);
        assert_eq!(shares.names()[&Unit::Head], [vec!["a".to_owned()], vec![], vec![]]);
    }
}
