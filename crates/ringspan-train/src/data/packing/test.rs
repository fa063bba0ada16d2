use super::*;
use crate::data::Overlong;
use proptest::prelude::*;

/// Documents whose tokens tell their document and their offset in it.
fn marked(lengths: &[usize]) -> Store {
    let document = |(d, &n): (usize, &usize)| (0..n).map(|i| (d * 1000 + i) as u32).collect();
    Store::new(&lengths.iter().enumerate().map(document).collect::<Vec<Vec<u32>>>())
}

fn next(packer: &mut Packer) -> Sequence {
    packer.next_sequences(1).remove(0)
}

proptest! {
    #[test]
    fn every_token_comes_once_a_pass_in_order_and_targets_stay_in_their_piece(
        lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70, seed: u64,
    ) {
        let documents = marked(&lengths);
        let mut packer = Packer::new(documents.clone(), length, seed, Position::default());
        let mut seen = vec![0usize; lengths.len()];
        while packer.position().epoch == 0 {
            let sequence = next(&mut packer);
            prop_assert_eq!(sequence.tokens.len(), length);
            prop_assert_eq!(sequence.pieces.iter().sum::<usize>(), length);
            let mut at = 0;
            for &piece in &sequence.pieces {
                let tokens = &sequence.tokens[at..at + piece];
                prop_assert!(piece > 0 && tokens.windows(2).all(|w| w[1] == w[0] + 1), "a piece is one document's");
                prop_assert_eq!(&sequence.targets[at..at + piece - 1], &tokens[1..]);
                prop_assert_eq!(sequence.targets[at + piece - 1], IGNORE);
                let (document, offset) = (tokens[0] as usize / 1000, tokens[0] as usize % 1000);
                // Once all documents are dealt, the rest of the sequence is of the next pass.
                if seen != lengths {
                    prop_assert_eq!(seen[document], offset);
                    seen[document] += piece;
                }
                at += piece;
            }
        }
        prop_assert_eq!(seen, lengths);
    }

    #[test]
    fn a_packer_at_a_saved_position_deals_the_same_sequences(
        lengths in prop::collection::vec(2usize..90, 1..12), length in 2usize..70, seed: u64, before in 0usize..9,
        count in 1usize..4, balanced: bool, whole: bool,
    ) {
        let documents = marked(&lengths);
        let packing = if balanced { Packing::Balanced } else { Packing::InOrder };
        let fit = Fit::new(&documents, length, whole, Overlong::Split);
        let packer = |at| Packer::new(documents.clone(), length, seed, at).fitted(fit.clone()).with(packing);
        let (mut packer, again) = (packer(Position::default()), packer);
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
        let fit = Fit::new(&documents, length, true, Overlong::Truncate);
        let mut packer = Packer::new(documents.clone(), length, seed, Position::default()).fitted(fit).with(packing);
        let mut seen = vec![0usize; lengths.len()];
        let passes = 3;
        while packer.position().epoch < passes {
            for sequence in packer.next_sequences(count) {
                prop_assert!(sequence.tokens.len() <= length);
                let mut at = 0;
                for &piece in &sequence.pieces {
                    let (document, offset) = (sequence.tokens[at] as usize / 1000, sequence.tokens[at] as usize % 1000);
                    prop_assert_eq!((offset, piece), (0, lengths[document]));
                    seen[document] += 1;
                    at += piece;
                }
                prop_assert_eq!(at, sequence.tokens.len());
            }
        }
        // A step may reach into the next pass.
        prop_assert!(seen.iter().all(|&times| times >= passes as usize && times <= passes as usize + count));
    }

    #[test]
    fn once_keeps_whole_documents_whole(lengths in prop::collection::vec(2usize..90, 1..12), most in 1usize..300) {
        let documents = marked(&lengths);
        let fit = Fit::new(&documents, 60, true, Overlong::Truncate);
        let sequences = Packer::once(&documents, &fit, 60, most);
        let pieces: Vec<usize> = sequences.iter().flat_map(|s| s.pieces.clone()).collect();
        let wanted: Vec<usize> = lengths.iter().map(|&len| len.min(60)).collect();
        prop_assert_eq!(&pieces[..], &wanted[..pieces.len()]);
        prop_assert!(sequences.iter().all(|s| s.tokens.len() <= 60));
        let tokens = pieces.iter().sum::<usize>();
        prop_assert!(pieces.len() == 1 || tokens <= most);
        prop_assert!(pieces.len() == wanted.len() || tokens + wanted[pieces.len()] > most);
    }

    #[test]
    fn once_deals_every_token_once(lengths in prop::collection::vec(1usize..90, 1..12), length in 2usize..70) {
        let documents = marked(&lengths);
        let fit = Fit::text(&documents);
        let sequences = Packer::once(&documents, &fit, length, usize::MAX);
        let tokens: Vec<u32> = sequences.iter().flat_map(|s| s.tokens.clone()).collect();
        prop_assert_eq!(tokens, documents.documents().collect::<Vec<_>>().concat());
        prop_assert!(sequences.iter().rev().skip(1).all(|s| s.tokens.len() == length));
        let few = Packer::once(&documents, &fit, length, 3);
        prop_assert_eq!(few.iter().map(|s| s.tokens.len()).sum::<usize>(), 3.min(lengths.iter().sum()));
    }
}

#[test]
fn a_token_that_is_given_is_read_but_no_target() {
    let documents = Store::new(&[vec![1 | GIVEN, 2 | GIVEN, 3, 4 | GIVEN, 5]]);
    let [sequence] = &Packer::once(&documents, &Fit::text(&documents), 8, usize::MAX)[..] else {
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
