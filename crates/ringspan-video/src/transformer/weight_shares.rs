//! Which rank holds which weights, where ranks share them.

use ringspan_candle::model::Unit;
use std::collections::BTreeMap;

/// The distribution of a transformer's weights over ranks. Each weight belongs to one rank; a unit's weights belong to several.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct WeightShares {
    /// What each rank has of each unit.
    units: BTreeMap<Unit, Vec<UnitShare>>,
    /// Bytes of each rank.
    bytes: Vec<u64>,
    /// Bytes of the largest unit.
    largest_unit: u64,
    /// Most bytes of a unit that a rank receives from others.
    most_received: u64,
}

/// The weights of a unit that belong to a rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UnitShare {
    /// Their names.
    pub(crate) names: Vec<String>,
    /// Their bytes.
    pub(crate) bytes: u64,
}

impl WeightShares {
    /// Distributes the weights of units, given with their bytes, so that ranks hold about as many bytes each.
    pub(crate) fn new(units: BTreeMap<Unit, Vec<(String, u64)>>, ranks: usize) -> Self {
        let (mut all, mut bytes) = (BTreeMap::new(), vec![0; ranks.max(1)]);
        let (mut largest_unit, mut most_received) = (0, 0);
        for (unit, mut weights) in units {
            let of_unit = weights.iter().map(|(_, size)| size).sum();
            largest_unit = largest_unit.max(of_unit);
            // The largest first: the smaller ones then even out what these leave.
            weights.sort_by(|(name, size), (other, of_other)| of_other.cmp(size).then_with(|| name.cmp(other)));
            let mut of_ranks = vec![UnitShare::default(); bytes.len()];
            for (name, size) in weights {
                let least = (0..bytes.len()).min_by_key(|rank| bytes[*rank]).unwrap_or(0);
                bytes[least] += size;
                of_ranks[least].bytes += size;
                of_ranks[least].names.push(name);
            }
            let least = of_ranks.iter().map(|share| share.bytes).min().unwrap_or(0);
            most_received = most_received.max(of_unit - least);
            all.insert(unit, of_ranks);
        }
        Self { units: all, bytes, largest_unit, most_received }
    }

    /// What each rank has of each unit.
    pub(crate) fn units(&self) -> &BTreeMap<Unit, Vec<UnitShare>> {
        &self.units
    }

    /// Bytes of the rank that holds most.
    pub(crate) fn most(&self) -> u64 {
        self.bytes.iter().copied().max().unwrap_or(0)
    }

    /// Most bytes that a rank holds beside its share: a unit with which it computes, and what it receives of the next meanwhile.
    pub(crate) fn gathered(&self) -> u64 {
        self.largest_unit + self.most_received
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
                let mut names: Vec<_> = shares.units()[&unit].iter().flat_map(|share| share.names.clone()).collect();
                let mut wanted: Vec<_> = weights.into_iter().map(|(name, _)| name).collect();
                names.sort();
                wanted.sort();
                assert_eq!(names, wanted, "{unit:?} on {ranks} ranks");
            }
            let share = all.div_ceil(ranks as u64);
            assert!((share..share + 2700).contains(&shares.most()), "{ranks} ranks: {} of {all}", shares.most());
            let of_block = 2 * 2700 + 8000 + 45;
            let received = |share: &UnitShare| of_block - share.bytes;
            let of_blocks = shares.units().iter().filter(|(unit, _)| **unit != Unit::Head);
            let most = of_blocks.flat_map(|(_, of_ranks)| of_ranks.iter().map(received)).max();
            assert_eq!(shares.gathered(), of_block + most.unwrap_or(0), "{ranks} ranks");
        }
    }

    #[test]
    fn ranks_may_hold_nothing() {
        let shares = WeightShares::new([(Unit::Head, vec![("a".into(), 4)])].into(), 3);
        let of_first = UnitShare { names: vec!["a".into()], bytes: 4 };
        assert_eq!(shares.units()[&Unit::Head], [of_first, UnitShare::default(), UnitShare::default()]);
    }
}
