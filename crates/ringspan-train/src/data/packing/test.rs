use super::*;
use crate::data::{IGNORE, NOT_LEARNED, Overlong};
use proptest::prelude::*;

/// Documents whose tokens tell their document and their offset in it.
fn marked(lengths: &[usize]) -> DocumentStore {
    let document = |(d, &n): (usize, &usize)| (0..n).map(|i| (d * 1000 + i) as u32).collect();
    DocumentStore::new(&lengths.iter().enumerate().map(document).collect::<Vec<Vec<u32>>>())
}

fn next(packer: &mut Packer) -> Sequence {
    packer.next_sequences(1).remove(0)
}

proptest! {
    #[test]
    fn every_token_comes_once_a_pass_in_order_and_targets_stay_in_their_segment(
        lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70, seed: u64,
    ) {
        let documents = marked(&lengths);
        let mut packer = Packer::new(documents.clone(), length, seed, PackerPosition::default());
        let mut seen = vec![0usize; lengths.len()];
        while packer.position().epoch == 0 {
            let sequence = next(&mut packer);
            prop_assert_eq!(sequence.tokens.len(), length);
            prop_assert_eq!(sequence.segment_lengths.iter().sum::<usize>(), length);
            let mut at = 0;
            for &segment in &sequence.segment_lengths {
                let tokens = &sequence.tokens[at..at + segment];
                prop_assert!(segment > 0 && tokens.windows(2).all(|w| w[1] == w[0] + 1), "a segment is one document's");
                prop_assert_eq!(&sequence.targets[at..at + segment - 1], &tokens[1..]);
                prop_assert_eq!(sequence.targets[at + segment - 1], IGNORE);
                let (document, offset) = (tokens[0] as usize / 1000, tokens[0] as usize % 1000);
                // Once all documents are placed, the rest of the sequence is of the next pass.
                if seen != lengths {
                    prop_assert_eq!(seen[document], offset);
                    seen[document] += segment;
                }
                at += segment;
            }
        }
        prop_assert_eq!(seen, lengths);
    }

    #[test]
    fn a_packer_at_a_saved_position_packs_the_same_sequences(
        lengths in prop::collection::vec(2usize..90, 1..12), length in 2usize..70, seed: u64, before in 0usize..9,
        count in 1usize..4, balanced: bool, whole: bool,
    ) {
        let documents = marked(&lengths);
        let packing = if balanced { Packing::Balanced } else { Packing::InOrder };
        let spans = PackableSpans::new(&documents, length, whole, Overlong::Split);
        let packer = |at| Packer::new(documents.clone(), length, seed, at).with_spans(spans.clone()).with_packing(packing);
        let (mut packer, again) = (packer(PackerPosition::default()), packer);
        for _ in 0..before { packer.next_sequences(count); }
        let saved = serde_json::to_string(&packer.position()).unwrap();
        let mut again = again(serde_json::from_str(&saved).unwrap());
        for _ in 0..5 { prop_assert_eq!(again.next_sequences(count), packer.next_sequences(count)); }
        prop_assert_eq!(again.position(), packer.position());
    }

    #[test]
    fn whole_documents_come_once_a_pass_and_are_never_cut(
        lengths in prop::collection::vec(2usize..70, 1..40), seed: u64, count in 1usize..4, balanced: bool,
    ) {
        let documents = marked(&lengths);
        let (length, packing) = (70, if balanced { Packing::Balanced } else { Packing::InOrder });
        let spans = PackableSpans::new(&documents, length, true, Overlong::Truncate);
        let mut packer = Packer::new(documents.clone(), length, seed, PackerPosition::default()).with_spans(spans).with_packing(packing);
        let mut seen = vec![0usize; lengths.len()];
        let passes = 3;
        while packer.position().epoch < passes {
            for sequence in packer.next_sequences(count) {
                prop_assert!(sequence.tokens.len() <= length);
                let mut at = 0;
                for &segment in &sequence.segment_lengths {
                    let (document, offset) = (sequence.tokens[at] as usize / 1000, sequence.tokens[at] as usize % 1000);
                    prop_assert_eq!((offset, segment), (0, lengths[document]));
                    seen[document] += 1;
                    at += segment;
                }
                prop_assert_eq!(at, sequence.tokens.len());
            }
        }
        // A step may reach into the next pass.
        prop_assert!(seen.iter().all(|&times| times >= passes as usize && times <= passes as usize + count));
    }

    #[test]
    fn pack_once_keeps_whole_documents_whole(lengths in prop::collection::vec(2usize..90, 1..12), most in 1usize..300) {
        let documents = marked(&lengths);
        let spans = PackableSpans::new(&documents, 60, true, Overlong::Truncate);
        let sequences = Packer::pack_once(&documents, &spans, 60, most);
        let segments: Vec<usize> = sequences.iter().flat_map(|s| s.segment_lengths.clone()).collect();
        let wanted: Vec<usize> = lengths.iter().map(|&len| len.min(60)).collect();
        prop_assert_eq!(&segments[..], &wanted[..segments.len()]);
        prop_assert!(sequences.iter().all(|s| s.tokens.len() <= 60));
        let tokens = segments.iter().sum::<usize>();
        prop_assert!(segments.len() == 1 || tokens <= most);
        prop_assert!(segments.len() == wanted.len() || tokens + wanted[segments.len()] > most);
    }

    #[test]
    fn pack_once_packs_every_token_once(lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70) {
        let documents = marked(&lengths);
        let spans = PackableSpans::for_text(&documents);
        let sequences = Packer::pack_once(&documents, &spans, length, usize::MAX);
        let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
        prop_assert_eq!(tokens, documents.documents().collect::<Vec<_>>().concat());
        prop_assert!(sequences.iter().rev().skip(1).all(|s| s.tokens.len() == length));
        let few = Packer::pack_once(&documents, &spans, length, 3);
        prop_assert_eq!(few.iter().map(|s| s.tokens.len()).sum::<usize>(), 3.min(lengths.iter().sum()));
    }
}

#[test]
fn a_token_that_is_given_is_read_but_no_target() {
    let documents = DocumentStore::new(&[vec![1 | NOT_LEARNED, 2 | NOT_LEARNED, 3, 4 | NOT_LEARNED, 5]]);
    let [sequence] = &Packer::pack_once(&documents, &PackableSpans::for_text(&documents), 8, usize::MAX)[..] else {
        panic!("one sequence")
    };
    assert_eq!(sequence.tokens, [1, 2, 3, 4, 5]);
    assert_eq!(sequence.targets, [IGNORE, 3, IGNORE, 5, IGNORE]);
}

#[test]
fn the_order_changes_with_the_pass_and_with_the_seed_and_never_with_the_version() {
    assert_ne!(shuffled(50, 1, 0), shuffled(50, 1, 1));
    assert_ne!(shuffled(50, 1, 0), shuffled(50, 2, 0));
    let mut sorted = shuffled(50, 1, 0);
    sorted.sort_unstable();
    assert_eq!(sorted, (0..50).collect::<Vec<u32>>());
}
