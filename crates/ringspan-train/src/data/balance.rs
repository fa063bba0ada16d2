//! Assigns the documents of a step to its sequences so that attention costs each sequence about the same.
//!
//! A document of n tokens has n (n + 1) / 2 visible query-key pairs, so of two sequences of S tokens the one with a long document costs
//! many times the one with short ones, and its ranks make the others wait. Documents stay whole and are distributed, the longest first,
//! each to the sequence with fewest pairs so far among those with room. Where none has room, the one with most room takes a part. In the
//! end every sequence is full, and the tokens are those of packing in order.
//!
//! Nothing here depends on the mesh. Sequences are then ordered so that contiguous parts of them, which copies of the model and
//! micro-batches take, cost about the same as well: first halves, then quarters.

use super::{Sequence, sequence::Span};
use std::{cmp::Reverse, collections::BinaryHeap};

#[derive(Debug, Clone, Default)]
struct Bin {
    /// Spans, each with its index among the spans of the step.
    spans: Vec<(usize, Span)>,
    tokens: usize,
    pairs: u64,
}

impl Bin {
    fn push(&mut self, span_index: usize, span: Span) {
        self.spans.push((span_index, span));
        self.tokens += span.len;
        self.pairs += pairs(span.len);
    }
}

/// Assigns `spans`, none longer than `length` and together `length * count` tokens, to `count` sequences.
pub(super) fn balance_spans(spans: Vec<Span>, length: usize, count: usize) -> Vec<Vec<Span>> {
    let mut bins = vec![Bin::default(); count];
    // The longest is taken first; of equally long ones, the earlier.
    let mut heap: BinaryHeap<(usize, Reverse<(usize, usize)>)> =
        spans.iter().enumerate().map(|(span_index, span)| (span.len, Reverse((span_index, span.start)))).collect();
    while let Some((len, Reverse((span_index, start)))) = heap.pop() {
        let room = |bin: &Bin| length - bin.tokens;
        let whole = (0..count).filter(|&i| room(&bins[i]) >= len).min_by_key(|&i| (bins[i].pairs, i));
        let emptiest = || (0..count).max_by_key(|&i| (room(&bins[i]), Reverse(i))).filter(|&i| room(&bins[i]) > 0);
        let Some(index) = whole.or_else(emptiest) else { break };
        let take = len.min(room(&bins[index]));
        bins[index].push(span_index, Span { document: spans[span_index].document, start, len: take });
        if take < len {
            heap.push((len - take, Reverse((span_index, start + take))));
        }
    }
    order_by_halves(bins)
}

/// Assigns the whole spans of `sequences`, of at most `length` tokens each, anew, and cuts none. Where a span finds no room, the
/// sequences keep their spans and only change their order.
pub(super) fn balance_whole_spans(sequences: Vec<Vec<Span>>, length: usize) -> Vec<Vec<Span>> {
    let mut spans: Vec<(usize, Span)> = sequences.iter().flatten().copied().enumerate().collect();
    spans.sort_by_key(|(span_index, span)| (Reverse(span.len), *span_index));
    let mut bins = vec![Bin::default(); sequences.len()];
    for (span_index, span) in spans {
        let room = (0..bins.len()).filter(|&i| bins[i].tokens + span.len <= length);
        let Some(index) = room.min_by_key(|&i| (bins[i].pairs, i)) else {
            let bin = |spans: &Vec<Span>| {
                let mut bin = Bin::default();
                spans.iter().enumerate().for_each(|(span_index, span)| bin.push(span_index, *span));
                bin
            };
            return order_by_halves(sequences.iter().map(bin).collect());
        };
        bins[index].push(span_index, span);
    }
    order_by_halves(bins)
}

/// Returns the spans of each bin in the order of the documents, and the bins in the order of [`balance_halves`].
fn order_by_halves(mut bins: Vec<Bin>) -> Vec<Vec<Span>> {
    let mut order: Vec<usize> = (0..bins.len()).collect();
    balance_halves(&mut order, &bins);
    let spans = |index: usize| {
        let mut spans = std::mem::take(&mut bins[index].spans);
        spans.sort_by_key(|(span_index, span)| (*span_index, span.start));
        spans.into_iter().map(|(_, span)| span).collect()
    };
    order.into_iter().map(spans).collect()
}

/// Puts sequences into the order of [`balance_halves`].
pub(super) fn order_sequences_by_halves(sequences: Vec<Sequence>) -> Vec<Sequence> {
    let bin = |sequence: &Sequence| Bin {
        pairs: sequence.segment_lengths.iter().map(|&len| pairs(len)).sum(),
        ..Bin::default()
    };
    let bins: Vec<Bin> = sequences.iter().map(bin).collect();
    let mut order: Vec<usize> = (0..bins.len()).collect();
    balance_halves(&mut order, &bins);
    let mut sequences: Vec<Option<Sequence>> = sequences.into_iter().map(Some).collect();
    order.into_iter().filter_map(|index| sequences[index].take()).collect()
}

/// Orders sequences so that the first half of them costs about as much as the second, and so on inside each half.
fn balance_halves(order: &mut [usize], bins: &[Bin]) {
    if order.len() < 2 {
        return;
    }
    order.sort_by_key(|&index| (Reverse(bins[index].pairs), index));
    let sizes = [order.len().div_ceil(2), order.len() / 2];
    let (mut halves, mut sums) = ([Vec::new(), Vec::new()], [0, 0]);
    for &index in order.iter() {
        let half = match (halves[0].len() < sizes[0], halves[1].len() < sizes[1]) {
            (true, true) => usize::from(sums[1] < sums[0]),
            (first, _) => usize::from(!first),
        };
        halves[half].push(index);
        sums[half] += bins[index].pairs;
    }
    order.copy_from_slice(&halves.concat());
    let (first, second) = order.split_at_mut(sizes[0]);
    balance_halves(first, bins);
    balance_halves(second, bins);
}

/// Number of visible query-key pairs in a document of `len` tokens under a causal mask.
fn pairs(len: usize) -> u64 {
    len as u64 * (len as u64 + 1) / 2
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cost(spans: &[Span]) -> u64 {
        spans.iter().map(|span| pairs(span.len)).sum()
    }

    /// The spans of a step of documents with these lengths, repeated.
    fn spans(lengths: &[usize], length: usize, count: usize) -> Vec<Span> {
        let (mut spans, mut left) = (Vec::new(), length * count);
        for (document, &whole) in lengths.iter().cycle().enumerate() {
            let mut start = 0;
            while start < whole && left > 0 {
                let len = (whole - start).min(length).min(left);
                spans.push(Span { document, start, len });
                (start, left) = (start + len, left - len);
            }
            if left == 0 {
                return spans;
            }
        }
        spans
    }

    proptest! {
        #[test]
        fn sequences_are_full_and_hold_every_token_once(
            lengths in prop::collection::vec(1usize..150, 1..30), length in 2usize..100, count in 1usize..9,
        ) {
            let given = spans(&lengths, length, count);
            let balanced = balance_spans(given.clone(), length, count);
            prop_assert_eq!(balanced.len(), count);
            prop_assert!(balanced.iter().all(|spans| spans.iter().map(|span| span.len).sum::<usize>() == length));
            let tokens = |spans: &[Span]| {
                let each = |span: &Span| (span.start..span.start + span.len).map(|at| (span.document, at)).collect::<Vec<_>>();
                let mut all: Vec<_> = spans.iter().flat_map(each).collect();
                all.sort_unstable();
                all
            };
            prop_assert_eq!(tokens(&balanced.concat()), tokens(&given));
        }
    }

    /// The cost of the costliest of `parts` equal parts, as a multiple of the mean.
    fn worst_ratio(sequences: &[Vec<Span>], parts: usize) -> f64 {
        let group = |group: &[Vec<Span>]| group.iter().map(|spans| cost(spans)).sum::<u64>();
        let costs: Vec<u64> = sequences.chunks(sequences.len() / parts).map(group).collect();
        *costs.iter().max().expect("some") as f64 / costs.iter().sum::<u64>() as f64 * parts as f64
    }

    fn in_order(given: &[Span], length: usize, count: usize) -> Vec<Vec<Span>> {
        let mut sequences = vec![Vec::new(); count];
        let mut at = 0;
        for span in given {
            let mut done = 0;
            while done < span.len {
                let len = (span.len - done).min(length - at % length);
                sequences[at / length].push(Span { start: span.start + done, len, ..*span });
                (done, at) = (done + len, at + len);
            }
        }
        sequences
    }

    #[test]
    fn documents_as_long_as_files_of_source_are_dealt_more_evenly_than_they_come() {
        // Many documents are short; some are twice as long as a sequence.
        let lengths: Vec<usize> = (0..400u64).map(|i| 200 + ((i * i * 7919 % 1009).pow(2) / 60) as usize).collect();
        for (length, count, parts) in [(8192, 64, 8), (8192, 64, 64), (65536, 8, 2), (65536, 8, 8)] {
            let given = spans(&lengths, length, count);
            let (before, after) = (in_order(&given, length, count), balance_spans(given, length, count));
            let (before_ratio, balanced) = (worst_ratio(&before, parts), worst_ratio(&after, parts));
            assert!(
                balanced < before_ratio,
                "S {length}, {count} sequences, {parts} parts: {before_ratio:.3} in order, {balanced:.3} balanced"
            );
            let span_count = |sequences: &[Vec<Span>]| sequences.iter().map(Vec::len).sum::<usize>();
            assert!(span_count(&after) <= span_count(&before) + count, "few documents are cut");
        }
    }

    #[test]
    fn many_documents_are_dealt_to_within_two_percent() {
        let lengths: Vec<usize> = (0..997).map(|i| 20 + (i * i * 31 % 97) * (i % 11) / (1 + i % 5)).collect();
        let given = spans(&lengths, 8192, 8);
        assert!(worst_ratio(&in_order(&given, 8192, 8), 8) > 1.05, "these documents need it");
        let balanced = balance_spans(given.clone(), 8192, 8);
        assert!([2, 4, 8].iter().all(|&parts| worst_ratio(&balanced, parts) < 1.02), "{}", worst_ratio(&balanced, 8));
        assert_eq!(balanced, balance_spans(given, 8192, 8));
    }

    #[test]
    fn whole_documents_are_dealt_evenly_where_there_is_room() {
        let sequence = |lens: &[usize]| lens.iter().map(|&len| Span { document: len, start: 0, len }).collect();
        let given: Vec<Vec<Span>> = vec![sequence(&[90]), sequence(&[40, 41]), sequence(&[10, 11]), sequence(&[80])];
        let balanced = balance_whole_spans(given.clone(), 100);
        assert!(worst_ratio(&given, 2) > 1.25 && worst_ratio(&balanced, 2) < 1.1, "{}", worst_ratio(&balanced, 2));
        let lens = |sequences: &[Vec<Span>]| {
            let mut all: Vec<usize> = sequences.concat().iter().map(|span| span.len).collect();
            all.sort_unstable();
            all
        };
        assert_eq!(lens(&balanced), lens(&given));
        // Best fit found room that dealing by cost does not find.
        let tight: Vec<Vec<Span>> = vec![sequence(&[60, 40]), sequence(&[35, 35, 30])];
        let unchanged = balance_whole_spans(tight.clone(), 100);
        assert!(unchanged.iter().all(|spans| spans.iter().map(|span| span.len).sum::<usize>() <= 100));
        assert_eq!(lens(&unchanged), lens(&tight));
    }

    #[test]
    fn one_long_document_is_whole_and_halves_share_the_long_ones() {
        let balanced = balance_spans(spans(&[100, 1, 1, 90, 4, 4, 80, 20, 50, 50], 100, 4), 100, 4);
        assert_eq!(balanced[0], [Span { document: 0, start: 0, len: 100 }]);
        let sums = |group: &[Vec<Span>]| group.iter().map(|spans| cost(spans)).sum::<u64>();
        // The halves cost 5050 + about 2600 and about 4100 + 3500.
        assert!(sums(&balanced[..2]).abs_diff(sums(&balanced[2..])) < 300, "{balanced:?}");
    }
}
