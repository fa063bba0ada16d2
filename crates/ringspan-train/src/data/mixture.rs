//! A mixture of several sources of documents, in fixed shares.

use super::{Packer, PackerPosition, Packing, Sequence, balance};
use serde::{Deserialize, Serialize};

/// The position in one of several sources.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourcePosition {
    /// Position of the source's packer.
    pub position: PackerPosition,
    /// Number of sequences taken from the source.
    pub sequences: u64,
}

/// Takes sequences from one or several sources. A sequence is of one source: the one that is furthest behind its share of all
/// sequences so far. So the order follows from the shares alone, and is the same on every mesh and when a run is resumed.
#[derive(Debug, Clone)]
pub struct Mixture {
    sources: Vec<MixedSource>,
    packing: Packing,
}

#[derive(Debug, Clone)]
struct MixedSource {
    packer: Packer,
    /// Share of all sequences that come from this source.
    share: f64,
    sequences_taken: u64,
}

impl Mixture {
    /// Sources with their weights, which are above 0; `packing` says how the sequences of a step are filled.
    #[must_use]
    pub fn new(sources: Vec<(Packer, f64)>, packing: Packing) -> Self {
        let sum: f64 = sources.iter().map(|(_, weight)| weight).sum();
        let source = |(packer, weight): (Packer, f64)| MixedSource {
            packer: packer.with_packing(packing),
            share: weight / sum,
            sequences_taken: 0,
        };
        Self { sources: sources.into_iter().map(source).collect(), packing }
    }

    /// The next `count` sequences, which make up a step.
    pub fn next_sequences(&mut self, count: usize) -> Vec<Sequence> {
        let order: Vec<usize> = (0..count).map(|_| self.next_source()).collect();
        let mut taken: Vec<_> = (0..self.sources.len())
            .map(|source| {
                let of_source = order.iter().filter(|&&next| next == source).count();
                self.sources[source].packer.next_sequences(of_source).into_iter()
            })
            .collect();
        let sequences = order.into_iter().filter_map(|source| taken[source].next()).collect();
        match (self.packing, self.sources.len()) {
            (Packing::Balanced, 2..) => balance::order_sequences_by_halves(sequences),
            _ => sequences,
        }
    }

    /// The source of the next sequence.
    fn next_source(&mut self) -> usize {
        let number = self.sources.iter().map(|source| source.sequences_taken).sum::<u64>() + 1;
        let deficit = |source: &MixedSource| source.share * number as f64 - source.sequences_taken as f64;
        let mut next = 0;
        for index in 1..self.sources.len() {
            // If sources are equally late, the first one is taken.
            if deficit(&self.sources[index]) > deficit(&self.sources[next]) {
                next = index;
            }
        }
        self.sources[next].sequences_taken += 1;
        next
    }

    /// The `count` fullest sequences of a pass, where some source has documents that stay whole; none where every sequence is
    /// full.
    pub(crate) fn fullest_sequences(&self, count: usize) -> Option<Vec<Sequence>> {
        let of_each: Vec<_> = self.sources.iter().map(|source| source.packer.fullest_sequences(count)).collect();
        if of_each.iter().all(Option::is_none) {
            return None;
        }
        // Sequences of the other sources are full anyway.
        let of_source = |(source, fullest_sequences): (&MixedSource, Option<Vec<Sequence>>)| {
            fullest_sequences.unwrap_or_else(|| source.packer.clone().next_sequences(count))
        };
        let mut all: Vec<Sequence> = self.sources.iter().zip(of_each).flat_map(of_source).collect();
        all.sort_by_key(|sequence| std::cmp::Reverse(sequence.tokens.len()));
        all.truncate(count);
        Some(all)
    }

    /// Number of sequences that a pass over all sources fills, and for each source the number of a pass over it and its share.
    #[must_use]
    pub fn sequences_per_epoch(&self) -> (f64, Vec<(f64, f64)>) {
        let each: Vec<_> =
            self.sources.iter().map(|source| (source.packer.sequences_per_epoch(), source.share)).collect();
        (each.iter().map(|(sequences, _)| sequences).sum(), each)
    }

    /// The position in each source.
    #[must_use]
    pub fn positions(&self) -> Vec<SourcePosition> {
        let of = |source: &MixedSource| SourcePosition {
            position: source.packer.position(),
            sequences: source.sequences_taken,
        };
        self.sources.iter().map(of).collect()
    }

    /// The same sources, continued from other positions, one for each source.
    #[must_use]
    pub fn resume_at(self, positions: &[SourcePosition]) -> Self {
        let at = |(source, at): (MixedSource, &SourcePosition)| MixedSource {
            packer: source.packer.resume_at(at.position),
            sequences_taken: at.sequences,
            ..source
        };
        Self { sources: self.sources.into_iter().zip(positions).map(at).collect(), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{DocumentStore, Overlong, PackableSpans};

    /// A packer of documents of a hundred tokens, whose ids name their source.
    fn packer(source: u32, documents: usize) -> Packer {
        let store = DocumentStore::new(&vec![vec![source; 100]; documents]);
        Packer::new(store, 64, 3, PackerPosition::default())
    }

    fn sources(sequences: &[Sequence]) -> Vec<u32> {
        let of = |sequence: &Sequence| {
            assert!(sequence.tokens.iter().all(|token| *token == sequence.tokens[0]), "one source a sequence");
            sequence.tokens[0]
        };
        sequences.iter().map(of).collect()
    }

    #[test]
    fn sequences_are_dealt_by_their_shares_at_every_moment() {
        let weights = [3.0, 1.0, 6.0];
        let mix = || Mixture::new((0..3).map(|i| (packer(i, 7), weights[i as usize])).collect(), Packing::InOrder);
        let all = sources(&mix().next_sequences(1000));
        for upto in 1..=1000 {
            for source in 0..3 {
                let count = all[..upto].iter().filter(|&&of| of == source).count() as f64;
                let due = weights[source as usize] / 10.0 * upto as f64;
                assert!((count - due).abs() < 1.5, "{count} of source {source} among {upto}");
            }
        }
        // The order does not depend on the number of sequences in a step.
        for steps in [1, 7, 100] {
            let mut mixture = mix();
            let taken: Vec<u32> = (0..1000 / steps).flat_map(|_| sources(&mixture.next_sequences(steps))).collect();
            assert_eq!(taken, all[..taken.len()]);
        }
    }

    #[test]
    fn a_mixture_goes_on_from_where_it_stood() {
        let mix =
            || Mixture::new(vec![(packer(1, 5), 0.7), (packer(2, 9), 0.2), (packer(3, 1), 0.1)], Packing::InOrder);
        let (mut first, mut whole) = (mix(), mix());
        for _ in 0..9 {
            first.next_sequences(3);
            whole.next_sequences(3);
        }
        let saved = serde_json::to_string(&first.positions()).unwrap();
        let mut resumed = mix().resume_at(&serde_json::from_str::<Vec<SourcePosition>>(&saved).unwrap());
        for _ in 0..9 {
            assert_eq!(resumed.next_sequences(3), whole.next_sequences(3));
        }
    }

    #[test]
    fn one_source_is_dealt_as_its_packer_deals() {
        for packing in [Packing::InOrder, Packing::Balanced] {
            let mut alone = packer(1, 30).with_packing(packing);
            let mut mixture = Mixture::new(vec![(packer(1, 30), 0.4)], packing);
            for _ in 0..9 {
                assert_eq!(mixture.next_sequences(4), alone.next_sequences(4));
            }
        }
    }

    #[test]
    fn the_fullest_sequences_are_those_of_any_source() {
        let whole = |source: u32| {
            let store = DocumentStore::new(&[vec![source; 40], vec![source; 30]]);
            let spans = PackableSpans::new(&store, 64, true, Overlong::Truncate);
            Packer::new(store, 64, 3, PackerPosition::default()).with_spans(spans)
        };
        let text = Mixture::new(vec![(packer(1, 5), 1.0), (packer(2, 5), 1.0)], Packing::InOrder);
        assert!(text.fullest_sequences(2).is_none());
        let both = Mixture::new(vec![(whole(1), 1.0), (packer(2, 5), 1.0)], Packing::Balanced);
        assert_eq!(both.fullest_sequences(2).unwrap().iter().map(|s| s.tokens.len()).collect::<Vec<_>>(), [64, 64]);
        let chats = Mixture::new(vec![(whole(1), 1.0), (whole(2), 1.0)], Packing::InOrder);
        assert_eq!(
            chats.fullest_sequences(3).unwrap().iter().map(|s| s.tokens.len()).collect::<Vec<_>>(),
            [40, 40, 40]
        );
    }
}
