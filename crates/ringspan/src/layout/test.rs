use super::*;
use crate::mesh::Grid;
use proptest::prelude::*;

fn kinds() -> impl Strategy<Value = LayoutKind> {
    prop_oneof![
        Just(LayoutKind::Contiguous),
        Just(LayoutKind::Zigzag),
        Just(LayoutKind::PerDocumentZigzag),
        (1usize..40).prop_map(LayoutKind::Striped),
        proptest::option::of(1usize..9).prop_map(LayoutKind::Balanced),
    ]
}

fn batches() -> impl Strategy<Value = Documents> {
    prop_oneof![
        (0usize..4, 0usize..70).prop_map(|(rows, len)| Documents::batch(rows, len)),
        proptest::collection::vec(0usize..40, 0..6).prop_map(|lengths| Documents::packed(&lengths)),
        proptest::collection::vec(0i32..4, 60).prop_map(|ids| Documents::from_ids(&ids, 20).expect("full rows")),
    ]
}

proptest! {
    #[test]
    fn every_token_is_on_exactly_one_rank(kind in kinds(), documents in batches(), ranks in 1usize..9) {
        let layout = Layout::new(kind, &documents, ranks).expect("ranks");
        let mut owner = vec![0; documents.size()];
        for rank in 0..ranks {
            prop_assert_eq!(layout.rows(rank).len(), layout.tokens(rank));
            for row in layout.rows(rank) {
                owner[row] += 1;
            }
        }
        let mut wanted = vec![0; documents.size()];
        for document in documents.iter() {
            for span in &document.spans {
                for position in span.clone() {
                    wanted[document.offset + position] += 1;
                }
            }
        }
        prop_assert_eq!(owner, wanted);
    }

    #[test]
    fn unshard_undoes_shard(kind in kinds(), documents in batches(), ranks in 1usize..9, width in 1usize..4) {
        let layout = Layout::new(kind, &documents, ranks).expect("ranks");
        let global: Vec<usize> = (1..=documents.size() * width).collect();
        let mut back = vec![0; global.len()];
        for rank in 0..ranks {
            let local = layout.shard(rank, &global, width).expect("size");
            layout.unshard(rank, &local, width, &mut back).expect("size");
        }
        for (index, (a, b)) in global.iter().zip(&back).enumerate() {
            prop_assert!(a == b || *b == 0, "element {index}");
        }
        prop_assert_eq!(back.iter().filter(|v| **v > 0).count(), documents.tokens() * width);
    }

    #[test]
    fn groups_hold_what_their_members_hold(kind in kinds(), documents in batches(), ring in 1usize..5, size in 1usize..5) {
        let layout = Layout::new(kind, &documents, ring * size).expect("ranks");
        for grid in [Grid::new(ring, size), Grid::new(ring, size).with_ulysses_outer()] {
            let grouped = layout.grouped(&grid.members());
            for (group, members) in grid.members().into_iter().enumerate() {
                let rows: Vec<usize> = members.into_iter().flat_map(|rank| layout.rows(rank)).collect();
                prop_assert_eq!(grouped.rows(group), rows);
            }
        }
    }

    #[test]
    fn long_rows_are_dealt_evenly(kind in kinds(), len in 0usize..500, ranks in 1usize..9) {
        let layout = Layout::new(kind, &Documents::batch(1, len), ranks).expect("ranks");
        let counts: Vec<usize> = (0..ranks).map(|rank| layout.tokens(rank)).collect();
        if let LayoutKind::Balanced(block) = kind {
            // A row of only a few whole blocks leaves some ranks without tokens.
            let block = block.unwrap_or(len.div_ceil(16 * ranks).max(1));
            prop_assert!(counts.iter().all(|&count| count <= len.div_ceil(ranks) + block), "{:?}", counts);
            return Ok(());
        }
        let slack = match kind { LayoutKind::Striped(width) => width, _ => 2 };
        let (least, most) = (counts.iter().min(), counts.iter().max());
        prop_assert!(most.zip(least).is_some_and(|(most, least)| most - least <= slack), "{:?}", counts);
    }
}

#[test]
fn zigzag_pairs_an_early_part_with_a_late_one() {
    let layout = Layout::new(LayoutKind::Zigzag, &Documents::batch(1, 8), 2).expect("ranks");
    assert_eq!(layout.rows(0), [0, 1, 6, 7]);
    assert_eq!(layout.rows(1), [2, 3, 4, 5]);
}

#[test]
fn striped_tokens_belong_to_rank_t_div_k_mod_p() {
    for width in [1, 2, 3, 16, 17, 64] {
        let layout = Layout::new(LayoutKind::Striped(width), &Documents::batch(1, 333), 3).expect("ranks");
        for rank in 0..3 {
            assert!(layout.rows(rank).iter().all(|t| (t / width) % 3 == rank), "width {width}");
        }
    }
}

#[test]
fn words_for_layouts_are_checked() {
    for word in ["contiguous", "zigzag", "striped:4", "per-document-zigzag", "balanced", "balanced:64"] {
        assert_eq!(word.parse::<LayoutKind>().map(|kind| kind.to_string()), Ok(word.to_owned()));
    }
    for word in ["striped:0", "striped:x", "balanced:0", "balanced:", "zig", ""] {
        assert!(word.parse::<LayoutKind>().is_err(), "{word}");
    }
}

#[test]
fn bad_documents_are_refused_with_their_numbers() {
    let message = |result: Result<Documents>| result.err().map(|error| error.to_string()).unwrap_or_default();
    assert!(message(Documents::from_boundaries(&[0, 5, 3], 8)).contains("5..3"));
    assert!(message(Documents::from_boundaries(&[0, 9], 8)).contains("0..9"));
    assert!(message(Documents::padded(&[3, 9], 8)).contains("length 9"));
    assert!(message(Documents::from_ids(&[1, -2], 2)).contains("-2"));
}

#[test]
fn stripes_and_blocks_of_nothing_are_refused() {
    let documents = Documents::batch(1, 16);
    for kind in [LayoutKind::Striped(0), LayoutKind::Balanced(Some(0))] {
        for given in [&documents, &Documents::batch(0, 0)] {
            let message = Layout::new(kind, given, 2).expect_err("no token at a time").to_string();
            assert!(message.contains(&kind.to_string()) && message.contains("at least 1"), "{message}");
        }
    }
}

#[test]
fn tokens_of_a_document_in_pieces_are_neighbours_in_the_order_of_their_positions() {
    let ids: Vec<i32> = (0..200).map(|token: i32| (token * token / 3 + token) % 3).collect();
    let documents = Documents::from_ids(&ids, 200).expect("a row");
    for kind in ["contiguous", "zigzag", "per-document-zigzag", "striped:1", "striped:5", "balanced", "balanced:1"] {
        let layout = Layout::new(kind.parse().expect("a layout"), &documents, 3).expect("ranks");
        for rank in 0..3 {
            let tokens: Vec<(usize, usize)> =
                layout.runs(rank).iter().flat_map(|run| run.positions().map(|at| (run.document, at))).collect();
            assert!(tokens.is_sorted(), "{kind}, rank {rank}: {tokens:?}");
        }
    }
}
