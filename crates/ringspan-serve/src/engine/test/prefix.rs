//! Tests of the prefix cache alone.

use super::super::page_pool::PagePool;
use super::super::prefix_cache::PrefixCache;
use super::super::prefix_tree::Namespace;

/// Puts a text of full and partial pages into the cache, as a sequence would that ends; returns its pages.
fn keep(cache: &mut PrefixCache, namespace: impl Into<Namespace>, text: &[u32]) -> Option<Vec<u32>> {
    let namespace = namespace.into();
    let (mut node, mut pages) = (None, Vec::new());
    for (index, tokens) in text.chunks(4).enumerate() {
        let mut page = cache.allocate(index)?;
        if let Some((inserted, kept)) = cache.insert(&namespace, node, tokens, page.into()) {
            (node, page) = (Some(inserted), kept.full);
        }
        pages.push(page);
    }
    pages.iter().enumerate().for_each(|(index, page)| cache.release(index, *page));
    cache.check();
    Some(pages)
}

/// Number of first tokens of a text that are in the cache.
fn found(cache: &mut PrefixCache, namespace: impl Into<Namespace>, text: &[u32]) -> usize {
    let hit = cache.hold_prefix(&namespace.into(), text);
    cache.check();
    let rows = hit.partial.map_or(0, |(_, rows)| rows);
    let partial = hit.partial.map(|(page, _)| page);
    for (index, page) in hit.pages.iter().copied().chain(partial).enumerate() {
        cache.release(index, page);
    }
    cache.check();
    hit.pages.len() * 4 + rows
}

fn cache(pages: u32) -> PrefixCache {
    PrefixCache::new(PagePool::new(2, pages), 4, true)
}

#[test]
fn the_longest_common_beginning_is_found_also_in_the_middle_of_a_page() {
    let mut cache = cache(20);
    keep(&mut cache, None, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).expect("pages");
    keep(&mut cache, None, &[1, 2, 3, 4, 5, 6, 0, 0]).expect("pages");
    keep(&mut cache, None, &[1, 2, 9, 9]).expect("pages");
    for (text, len) in [
        (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11][..], 10),
        (&[1, 2, 3, 4, 5, 6, 7, 8, 9][..], 9),
        (&[1, 2, 3, 4, 5, 6, 0, 1][..], 7),
        (&[1, 2, 3, 4, 5, 6, 9][..], 6),
        (&[1, 2, 3, 4][..], 4),
        (&[1, 2, 3][..], 3),
        (&[1, 2, 9, 9, 5, 6][..], 4),
        (&[1, 2, 9, 8][..], 3),
        (&[1, 0][..], 1),
        (&[2][..], 0),
        (&[][..], 0),
    ] {
        assert_eq!(found(&mut cache, None, text), len, "{text:?}");
    }
}

#[test]
fn texts_of_other_adapters_are_not_found() {
    let mut cache = cache(20);
    keep(&mut cache, Some(1), &[1, 2, 3, 4, 5]).expect("pages");
    assert_eq!(found(&mut cache, None, &[1, 2, 3, 4, 5]), 0);
    assert_eq!(found(&mut cache, Some(2), &[1, 2, 3, 4, 5]), 0);
    assert_eq!(found(&mut cache, Some(1), &[1, 2, 3, 4, 5]), 5);
}

/// The namespace of a client's salt.
fn salted(salt: &str) -> Namespace {
    Namespace { adapter: None, salt: Some(salt.into()) }
}

#[test]
fn texts_of_other_salts_are_not_found() {
    let mut cache = cache(20);
    let text = [1, 2, 3, 4, 5];
    let pages = keep(&mut cache, salted("mine"), &text).expect("pages");
    assert_eq!(found(&mut cache, None, &text), 0);
    assert_eq!(found(&mut cache, salted("yours"), &text), 0);
    assert_eq!(found(&mut cache, Namespace { adapter: Some(1), ..salted("mine") }, &text), 0);
    assert_eq!(found(&mut cache, salted("mine"), &text), 5);
    // The same text of another client has pages of its own.
    let others = keep(&mut cache, salted("yours"), &text).expect("pages");
    assert!(pages.iter().zip(&others).all(|(one, other)| one != other), "{pages:?} {others:?}");
}

/// Clients choose salts, so what the tree has for each must go with its pages.
#[test]
fn salts_whose_pages_are_gone_take_no_memory() {
    let mut cache = cache(2);
    for client in 0..100 {
        keep(&mut cache, salted(&client.to_string()), &[1, 2, 3, 4, 5]).expect("pages");
    }
    let salts: std::collections::BTreeSet<_> =
        cache.cached_pages().iter().map(|page| page.namespace.salt.clone()).collect();
    // The cache checks that no other salt has a root.
    assert!(salts.len() <= 4, "{salts:?}");
}

#[test]
fn a_longer_page_replaces_a_shorter_one() {
    let mut cache = cache(20);
    keep(&mut cache, None, &[1, 2]).expect("pages");
    keep(&mut cache, None, &[1, 2, 3]).expect("pages");
    assert_eq!(cache.pages().cached(0), 1);
    keep(&mut cache, None, &[1]).expect("pages");
    assert_eq!(cache.pages().cached(0), 1, "the shorter one adds nothing");
    keep(&mut cache, None, &[1, 2, 3]).expect("pages");
    assert_eq!(cache.pages().cached(0), 1, "the same one adds nothing");
    assert_eq!(found(&mut cache, None, &[1, 2, 3]), 3);
}

#[test]
fn the_least_recently_used_text_goes_first_and_from_its_end() {
    // Four pages on each of two ranks: two texts of two pages each on both ranks.
    let mut cache = cache(4);
    let text = |first: u32| (0..16).map(|i| first + i).collect::<Vec<u32>>();
    keep(&mut cache, None, &text(0)).expect("pages");
    keep(&mut cache, None, &text(100)).expect("pages");
    assert_eq!(found(&mut cache, None, &text(0)), 16);
    keep(&mut cache, None, &[200, 201]).expect("pages");
    // Rank 0 had to give a page: the last page of the text that was not used is on rank 1, the one before on rank 0.
    assert_eq!(found(&mut cache, None, &text(100)), 8);
    assert_eq!(found(&mut cache, None, &text(0)), 16);
    keep(&mut cache, None, &text(300)).expect("pages");
    assert_eq!(found(&mut cache, None, &text(300)), 16);
}

#[test]
fn held_pages_are_never_evicted() {
    let mut cache = cache(2);
    let text: Vec<u32> = (0..16).collect();
    let pages = keep(&mut cache, None, &text).expect("pages");
    let hit = cache.hold_prefix(&Namespace::default(), &text);
    assert_eq!(hit.pages, pages);
    assert_eq!((cache.allocate(0), cache.allocate(1)), (None, None));
    hit.pages.iter().enumerate().for_each(|(index, page)| cache.release(index, *page));
    assert!(cache.allocate(0).is_some());
}
