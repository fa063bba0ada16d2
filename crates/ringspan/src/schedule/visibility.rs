//! Which ring ranks see keys of which other ring ranks.

use crate::documents::{Run, Strand};
use crate::layout::Layout;
use crate::mask::{Mask, VisiblePairs};
use std::collections::HashMap;
use std::ops::Range;

/// A bit for every pair of ring ranks, indexed by queries and by keys: a ring of 10,000 ranks has 10^8 pairs, and every
/// step looks up the next rank that sees a block.
#[derive(Debug, Clone)]
pub(super) struct Visibility {
    /// Row q: the ranks whose keys rank q sees.
    owners: Bits,
    /// Row k: the ranks that see keys of rank k.
    users: Bits,
}

impl Visibility {
    /// Computes which ranks see each other under `mask`; both layouts have the same ranks and documents.
    pub(super) fn new(query: &Layout, key: &Layout, mask: &Mask) -> Self {
        let ranks = query.ranks();
        let keys = keys_by_document(key);
        let (mut owners, mut users) = (Bits::new(ranks), Bits::new(ranks));
        for rank in 0..ranks {
            for q in query.runs(rank) {
                let seq_lens = (query.documents().get(q.document).seq_len, key.documents().get(q.document).seq_len);
                for held in keys.get(&q.document).into_iter().flatten() {
                    if held.ranks.iter().all(|&owner| owners.has(rank, owner)) {
                        continue;
                    }
                    mask.search(q, held.strand.runs(), seq_lens, |seen| match seen {
                        VisiblePairs::Whole { runs, .. } => held.owners(runs).for_each(|owner| owners.set(rank, owner)),
                        VisiblePairs::BandedTile { run, .. } => {
                            held.owners(run..run + 1).for_each(|owner| owners.set(rank, owner));
                        }
                    });
                }
            }
            owners.set_bits(rank, 0..ranks).for_each(|owner| users.set(owner, rank));
        }
        Self { owners, users }
    }

    /// Whether rank `q` sees a key of rank `k`.
    pub(super) fn sees(&self, q: usize, k: usize) -> bool {
        self.owners.has(q, k)
    }

    /// The ranks other than `owner` that see its keys, in ascending ring order.
    pub(super) fn users(&self, owner: usize) -> impl Iterator<Item = usize> {
        self.users.set_bits(owner, owner + 1..self.users.len).chain(self.users.set_bits(owner, 0..owner))
    }

    /// The ranks other than `rank` whose keys it sees, in descending ring order.
    pub(super) fn owners(&self, rank: usize) -> impl Iterator<Item = usize> {
        self.owners.set_bits(rank, 0..rank).rev().chain(self.owners.set_bits(rank, rank + 1..self.owners.len).rev())
    }

    /// The lowest and the highest rank among `owner` and the ranks that see its keys.
    pub(super) fn reach(&self, owner: usize) -> (usize, usize) {
        let lowest = self.users.set_bits(owner, 0..owner).next();
        let highest = self.users.set_bits(owner, owner + 1..self.users.len).next_back();
        (lowest.unwrap_or(owner), highest.unwrap_or(owner))
    }

    /// The next rank after `from`, in ring order up to the owner, that sees keys of `owner`.
    pub(super) fn user_after(&self, owner: usize, from: usize) -> Option<usize> {
        self.users.after(owner, from)
    }

    /// The next rank before `from`, in ring order down to the owner, that sees keys of `owner`.
    pub(super) fn user_before(&self, owner: usize, from: usize) -> Option<usize> {
        self.users.before(owner, from)
    }

    /// The next rank after `from`, in ring order up to `rank`, whose keys `rank` sees.
    pub(super) fn owner_after(&self, rank: usize, from: usize) -> Option<usize> {
        self.owners.after(rank, from)
    }

    /// The next rank before `from`, in ring order down to `rank`, whose keys `rank` sees.
    pub(super) fn owner_before(&self, rank: usize, from: usize) -> Option<usize> {
        self.owners.before(rank, from)
    }
}

/// A strand of keys of a document, with the ranks that hold its runs.
struct OwnedStrand {
    strand: Strand,
    /// Stretches of consecutive runs on the same rank: the index after the last run, and the rank.
    stretches: Vec<(usize, usize)>,
    /// The ranks, sorted and without duplicates.
    ranks: Vec<usize>,
}

impl OwnedStrand {
    /// Makes the strand of sorted runs with their ranks; `None` if there are no runs.
    fn new(runs: &[(Run, usize)]) -> Option<Self> {
        let strand = Strand::of_sorted(runs.iter().map(|(run, _)| *run))?;
        let mut stretches: Vec<(usize, usize)> = Vec::new();
        for (number, (_, rank)) in runs.iter().enumerate() {
            match stretches.last_mut() {
                Some((end, last)) if last == rank => *end = number + 1,
                _ => stretches.push((number + 1, *rank)),
            }
        }
        let mut ranks: Vec<usize> = stretches.iter().map(|(_, rank)| *rank).collect();
        ranks.sort_unstable();
        ranks.dedup();
        Some(Self { strand, stretches, ranks })
    }

    /// The ranks that hold the runs with indices `runs`; a rank may occur several times.
    fn owners(&self, runs: Range<usize>) -> impl Iterator<Item = usize> {
        let first = self.stretches.partition_point(|(end, _)| *end <= runs.start);
        // A stretch begins at the end of the one before it.
        let last = self.stretches[first..].partition_point(|(end, _)| *end < runs.end);
        self.stretches[first..].iter().take(last + 1).map(|(_, rank)| *rank)
    }
}

/// The key runs of all ranks, grouped into strands by document.
fn keys_by_document(key: &Layout) -> HashMap<usize, Vec<OwnedStrand>> {
    let mut runs: Vec<(Run, usize)> =
        (0..key.ranks()).flat_map(|rank| key.runs(rank).iter().map(move |run| (*run, rank))).collect();
    runs.retain(|(run, _)| run.len > 0);
    runs.sort_by_key(|(run, _)| (run.document, run.start));
    let mut keys: HashMap<usize, Vec<OwnedStrand>> = HashMap::new();
    for of_document in runs.chunk_by(|a, b| a.0.document == b.0.document) {
        // Striped runs interleave, so each of them is a strand of its own.
        let rises = |pair: &[(Run, usize)]| pair[0].0.last() < pair[1].0.start;
        let apart = if of_document.windows(2).all(rises) { of_document.len() } else { 1 };
        let of = keys.entry(of_document[0].0.document).or_default();
        of.extend(of_document.chunks(apart).filter_map(OwnedStrand::new));
    }
    keys
}

/// A square matrix of bits.
#[derive(Debug, Clone)]
struct Bits {
    len: usize,
    /// Number of words in a row.
    width: usize,
    words: Vec<u64>,
}

impl Bits {
    fn new(len: usize) -> Self {
        let width = len.div_ceil(64);
        Self { len, width, words: vec![0; len * width] }
    }

    fn has(&self, row: usize, at: usize) -> bool {
        self.words[row * self.width + at / 64] >> (at % 64) & 1 == 1
    }

    fn set(&mut self, row: usize, at: usize) {
        self.words[row * self.width + at / 64] |= 1 << (at % 64);
    }

    /// The positions inside `range` whose bits are set in a row.
    fn set_bits(&self, row: usize, range: Range<usize>) -> SetBits<'_> {
        SetBits { words: &self.words[row * self.width..(row + 1) * self.width], range }
    }

    /// The first set bit in row `own` after `from`, wrapping around at the end, up to bit `own`.
    fn after(&self, own: usize, from: usize) -> Option<usize> {
        let first = |range: Range<usize>| self.set_bits(own, range).next();
        if from < own { first(from + 1..own) } else { first(from + 1..self.len).or_else(|| first(0..own)) }
    }

    /// The first set bit in row `own` before `from`, wrapping around at the start, down to bit `own`.
    fn before(&self, own: usize, from: usize) -> Option<usize> {
        let last = |range: Range<usize>| self.set_bits(own, range).next_back();
        if from > own { last(own + 1..from) } else { last(0..from).or_else(|| last(own + 1..self.len)) }
    }
}

/// Iterates over the positions of set bits, from both ends.
#[derive(Debug, Clone)]
struct SetBits<'a> {
    words: &'a [u64],
    /// The range that is not searched yet.
    range: Range<usize>,
}

impl Iterator for SetBits<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        while self.range.start < self.range.end {
            let word = self.words[self.range.start / 64] >> (self.range.start % 64);
            if word != 0 {
                let at = self.range.start + word.trailing_zeros() as usize;
                self.range.start = at + 1;
                return (at < self.range.end).then_some(at);
            }
            self.range.start = (self.range.start / 64 + 1) * 64;
        }
        None
    }
}

impl DoubleEndedIterator for SetBits<'_> {
    fn next_back(&mut self) -> Option<usize> {
        while self.range.start < self.range.end {
            let last = self.range.end - 1;
            let word = self.words[last / 64] << (63 - last % 64);
            if word != 0 {
                // If the word begins before the range, the bit found may be outside the range.
                let at = last.checked_sub(word.leading_zeros() as usize);
                self.range.end = at.unwrap_or(0);
                return at.filter(|&at| at >= self.range.start);
            }
            self.range.end = last / 64 * 64;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bits_are_found_from_both_ends_and_round_the_ring(
            set in prop::collection::vec(prop::bool::weighted(0.1), 1..200), cuts in (0usize..200, 0usize..200), sparse in any::<bool>(),
        ) {
            let len = set.len();
            let mut bits = Bits::new(len);
            let holds = |at: usize| set[at] && (!sparse || at.is_multiple_of(7));
            let row = cuts.0 % len;
            (0..len).filter(|&at| holds(at)).for_each(|at| bits.set(row, at));
            let range = cuts.0.min(cuts.1).min(len)..cuts.0.max(cuts.1).min(len);
            let wanted: Vec<usize> = range.clone().filter(|&at| holds(at)).collect();
            prop_assert_eq!(bits.set_bits(row, range.clone()).collect::<Vec<_>>(), wanted.clone());
            let back: Vec<usize> = bits.set_bits(row, range).rev().collect();
            prop_assert_eq!(back, wanted.into_iter().rev().collect::<Vec<_>>());
            let from = cuts.1 % len;
            let way = |step: usize| (1..=len).map(|n| (from + n * step) % len).take_while(|&at| at != row).find(|&at| holds(at));
            prop_assert_eq!(bits.after(row, from), way(1));
            prop_assert_eq!(bits.before(row, from), way(len - 1));
            prop_assert!((0..len).all(|at| bits.has(row, at) == holds(at)));
        }
    }
}
