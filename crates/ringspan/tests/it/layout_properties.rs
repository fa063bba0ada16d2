//! For any documents, layout and number of ranks, no token is lost, doubled or misplaced.

use proptest::prelude::*;
use ringspan::{Document, Documents, Layout, LayoutKind, Mask};

fn kinds() -> impl Strategy<Value = LayoutKind> {
    prop_oneof![
        Just(LayoutKind::Contiguous),
        Just(LayoutKind::Zigzag),
        Just(LayoutKind::PerDocumentZigzag),
        (1usize..70).prop_map(LayoutKind::Striped),
        proptest::option::of(1usize..40).prop_map(LayoutKind::Balanced),
    ]
}

/// Batches with padding anywhere, documents with gaps, documents in the gaps of others, empty documents, no documents.
fn batches() -> impl Strategy<Value = Documents> {
    let ids = (1usize..4, 1usize..90).prop_flat_map(|(rows, len)| {
        // Ids repeat several times, so that spans are longer than a token.
        let spans = proptest::collection::vec((0i32..5, 1usize..20), rows * len);
        spans.prop_map(move |spans| {
            let ids = spans.into_iter().flat_map(|(id, n)| std::iter::repeat_n(id, n)).take(rows * len);
            Documents::from_ids(&ids.collect::<Vec<_>>(), len).expect("full rows")
        })
    });
    let padded = (proptest::collection::vec(0usize..70, 0..5), 0usize..9).prop_map(|(lengths, more)| {
        let len = lengths.iter().max().unwrap_or(&0) + more;
        Documents::padded(&lengths, len).expect("they fit")
    });
    let rows = proptest::collection::vec(proptest::collection::vec(0usize..20, 0..5), 0..4)
        .prop_map(|rows| Documents::from_rows(&rows, 100).expect("they fit"));
    let boundaries = (proptest::collection::vec(0usize..30, 0..6), 0usize..9).prop_map(|(lengths, more)| {
        let ends = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let boundaries: Vec<usize> = std::iter::once(0).chain(ends).collect();
        let len = boundaries[boundaries.len() - 1] + more;
        Documents::from_boundaries(&boundaries, len).expect("they rise")
    });
    prop_oneof![ids, padded, rows, boundaries]
}

/// Rows of the flat batch that contain a token, with its document and position.
fn tokens(documents: &Documents) -> Vec<(usize, usize, usize)> {
    let of = |(index, document): (usize, &Document)| {
        let positions: Vec<usize> = document.spans.iter().flat_map(Clone::clone).collect();
        let offset = document.offset;
        positions.into_iter().map(move |position| (offset + position, index, position))
    };
    let mut all: Vec<_> = documents.iter().enumerate().flat_map(of).collect();
    all.sort_unstable();
    all
}

/// The tokens that a rank holds according to its layout: row, document and position.
fn held(layout: &Layout, rank: usize) -> Vec<(usize, usize, usize)> {
    let of_run = |run: &ringspan::Run| vec![run.document; run.len];
    let documents: Vec<usize> = layout.runs(rank).iter().flat_map(of_run).collect();
    let (rows, positions) = (layout.rows(rank), layout.positions(rank));
    assert!(rows.len() == layout.tokens(rank) && positions.len() == rows.len() && documents.len() == rows.len());
    rows.into_iter()
        .zip(documents)
        .zip(positions)
        .map(|((row, document), position)| (row, document, position))
        .collect()
}

proptest! {
    #[test]
    fn every_token_is_on_one_rank_at_its_position(kind in kinds(), documents in batches(), ranks in 1usize..=17) {
        let layout = Layout::new(kind, &documents, ranks).expect("ranks");
        prop_assert_eq!((layout.ranks(), layout.kind()), (ranks, kind));
        let mut all: Vec<_> = (0..ranks).flat_map(|rank| held(&layout, rank)).collect();
        all.sort_unstable();
        prop_assert_eq!(all, tokens(&documents));
    }

    #[test]
    fn runs_are_not_empty_and_lie_in_spans(kind in kinds(), documents in batches(), ranks in 1usize..=17) {
        let layout = Layout::new(kind, &documents, ranks).expect("ranks");
        for run in (0..ranks).flat_map(|rank| layout.runs(rank)) {
            prop_assert!(run.len > 0 && run.step > 0, "{:?}", run);
            let document = documents.get(run.document);
            for position in run.positions() {
                prop_assert!(document.spans.iter().any(|span| span.contains(&position)), "{run:?} in {document:?}");
                prop_assert!(position < document.seq_len);
            }
        }
    }

    #[test]
    fn shard_then_unshard_is_the_identity_on_tokens_and_leaves_padding(
        kind in kinds(), documents in batches(), ranks in 1usize..=17, width in 0usize..4
    ) {
        let layout = Layout::new(kind, &documents, ranks).expect("ranks");
        let global: Vec<i64> = (0..(documents.size() * width) as i64).collect();
        let mut back = vec![-1; global.len()];
        for rank in 0..ranks {
            let local = layout.shard(rank, &global, width).expect("size");
            prop_assert_eq!(local.len(), layout.tokens(rank) * width);
            layout.unshard(rank, &local, width, &mut back).expect("size");
        }
        let mut expected = vec![-1; global.len()];
        for (row, ..) in tokens(&documents) {
            expected[row * width..(row + 1) * width].copy_from_slice(&global[row * width..(row + 1) * width]);
        }
        prop_assert_eq!(back, expected);
    }

    #[test]
    fn a_group_holds_what_its_members_hold(
        kind in kinds(), documents in batches(), ring in 1usize..5, ulysses in 1usize..5
    ) {
        let layout = Layout::new(kind, &documents, ring * ulysses).expect("ranks");
        let members: Vec<Vec<usize>> = (0..ring).map(|r| (r * ulysses..(r + 1) * ulysses).collect()).collect();
        let groups = layout.grouped(&members);
        for (group, members) in members.iter().enumerate() {
            let all: Vec<_> = members.iter().flat_map(|&rank| held(&layout, rank)).collect();
            prop_assert_eq!(held(&groups, group), all);
        }
    }

    #[test]
    fn queries_and_keys_of_one_batch_are_dealt_alike(
        kind in kinds(), documents in batches(), ranks in 1usize..=17, window in proptest::option::of(0usize..40)
    ) {
        let mask = Mask::causal().window(window, None);
        let (query, key) = Layout::pair(kind, &documents, &documents, &mask, ranks).expect("a pair");
        prop_assert_eq!(&query, &key);
        prop_assert_eq!(&query, &Layout::pair(kind, &documents, &documents, &mask, ranks).expect("a pair").0);
    }

    #[test]
    fn keys_of_other_lengths_are_all_dealt(
        kind in kinds(), lengths in proptest::collection::vec((0usize..50, 0usize..50), 0..5), ranks in 1usize..=17
    ) {
        let side = |which: fn(&(usize, usize)) -> usize| {
            Documents::padded(&lengths.iter().map(which).collect::<Vec<_>>(), 50).expect("they fit")
        };
        let (queries, keys) = (side(|pair| pair.0), side(|pair| pair.1));
        let (query, key) = Layout::pair(kind, &queries, &keys, &Mask::causal_bottom_right(), ranks).expect("a pair");
        for (layout, documents) in [(query, queries), (key, keys)] {
            let mut all: Vec<_> = (0..ranks).flat_map(|rank| held(&layout, rank)).collect();
            all.sort_unstable();
            prop_assert_eq!(all, tokens(&documents));
        }
    }

    #[test]
    fn zigzag_and_contiguous_deal_evenly(
        kind in prop_oneof![Just(LayoutKind::Contiguous), Just(LayoutKind::Zigzag)],
        len in 0usize..300,
        ranks in 1usize..=17,
    ) {
        let layout = Layout::new(kind, &Documents::batch(1, len), ranks).expect("ranks");
        let tokens: Vec<usize> = (0..ranks).map(|rank| layout.tokens(rank)).collect();
        let (least, most) = (tokens.iter().min().expect("a rank"), tokens.iter().max().expect("a rank"));
        // Zigzag assigns two chunks, each at most one token longer than the shortest.
        prop_assert!(most - least <= if kind == LayoutKind::Zigzag { 2 } else { 1 }, "{:?}", tokens);
    }
}
