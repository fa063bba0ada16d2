//! Packs whole documents into sequences by best-fit decreasing, which leaves little padding.

use std::collections::BTreeSet;

/// Packs items, none longer than `length`, into sequences of at most `length` tokens: the longest first, of equally long ones the
/// earlier in `order`, each into the sequence with least room among those with enough. `len` gives an item's tokens.
pub(super) fn pack(order: &[u32], len: impl Fn(u32) -> usize, length: usize) -> Vec<Vec<u32>> {
    let mut longest_first = order.to_vec();
    longest_first.sort_by_key(|&item| std::cmp::Reverse(len(item)));
    let mut sequences: Vec<Vec<u32>> = Vec::new();
    let mut free_tokens: BTreeSet<(usize, usize)> = BTreeSet::new();
    for item in longest_first {
        let least = free_tokens.range((len(item), 0)..).next().copied();
        let (free, index) = least.unwrap_or((length, sequences.len()));
        match sequences.get_mut(index) {
            Some(sequence) => sequence.push(item),
            None => sequences.push(vec![item]),
        }
        free_tokens.remove(&(free, index));
        free_tokens.insert((free - len(item), index));
    }
    sequences
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_item_is_in_one_sequence_with_room_and_no_two_half_empty_ones_are_left(
            lens in prop::collection::vec(1usize..=60, 0..200), length in 60usize..100,
        ) {
            let order: Vec<u32> = (0..lens.len() as u32).collect();
            let sequences = pack(&order, |item| lens[item as usize], length);
            let sum = |sequence: &Vec<u32>| sequence.iter().map(|&item| lens[item as usize]).sum::<usize>();
            prop_assert!(sequences.iter().all(|sequence| !sequence.is_empty() && sum(sequence) <= length));
            let mut all = sequences.concat();
            all.sort_unstable();
            prop_assert_eq!(all, order);
            prop_assert!(sequences.iter().filter(|sequence| 2 * sum(sequence) <= length).count() <= 1);
        }
    }

    #[test]
    fn items_that_fit_exactly_share_a_sequence() {
        let lens = [60, 30, 70, 40];
        assert_eq!(pack(&[0, 1, 2, 3], |item| lens[item as usize], 100), [[2, 1], [0, 3]]);
    }
}
