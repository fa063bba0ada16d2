//! Sessions: the prefix cache is saved to a file, and restored by a later engine.

use super::executor::KvRowLayout;
use super::prefix_cache::PrefixCache;
use super::prefix_tree::Namespace;
use super::rank::EngineRank;
use super::session_file::{RowFormat, SessionIndex, SessionPage, SessionReader, SessionWriter};
use super::step::CachePage;
use crate::error::Result;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The size of a session.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SessionSize {
    /// Tokens whose keys and values were saved or restored; those of a common beginning count once.
    pub tokens: usize,
    /// Bytes of their keys and values.
    pub bytes: u64,
    /// Tokens in the file that could not be restored: those of adapters that are not loaded, and as many as the file has more of than
    /// there is room for in the cache.
    pub left_out: usize,
}

/// The form of the rows in the file and on all ranks, if sessions are possible.
fn row_format(model: String, ranks: &EngineRank) -> Result<(RowFormat, KvRowLayout), String> {
    let rows = ranks.executor.row_layout().ok_or("the engine's cache cannot be saved")?;
    Ok((RowFormat { model, dtype: rows.dtype, width: rows.width, full: rows.full.clone() }, rows))
}

/// The number of a context-parallel rank, counted over attention replicas.
fn cp_rank(cache: &PrefixCache, replica: usize, rank: usize) -> usize {
    replica * cache.pages().ranks() + rank
}

/// Saves the prefix caches of all attention replicas. The inner error is a sentence; the outer one ends the engine.
pub(super) fn save(
    file: &Path,
    model: String,
    caches: &[PrefixCache],
    adapters: &BTreeMap<u64, String>,
    ranks: &mut EngineRank,
) -> Result<Result<SessionSize, String>> {
    let (format, parts) = match row_format(model, ranks) {
        Ok(formats) => formats,
        Err(problem) => return Ok(Err(problem)),
    };
    let failed = |error: std::io::Error| format!("{} cannot be written: {error}", file.display());
    let names: Vec<u64> = adapters.keys().copied().collect();
    // Texts of adapters whose files could not be read have no identity. Those with a salt are left out: the file would have to
    // have the salt, which is a secret of those who know it.
    let is_saved = |namespace: &Namespace| {
        namespace.salt.is_none() && namespace.adapter.is_none_or(|slot| adapters.contains_key(&slot))
    };
    let (mut index, mut places) =
        (SessionIndex { adapters: adapters.values().cloned().collect(), ..Default::default() }, Vec::new());
    let latest = caches.iter().map(PrefixCache::clock).max().unwrap_or(0);
    // Beginnings that several replicas have are saved once.
    let mut numbers = HashMap::new();
    for (replica, cache) in caches.iter().enumerate() {
        let all = cache.cached_pages();
        let mut number = vec![None; all.len()];
        for (at, page) in all.iter().enumerate().filter(|(_, page)| is_saved(page.namespace)) {
            let in_window = page.page.window.is_some();
            let parent = page.parent.and_then(|parent| number[parent]);
            let adapter = page.namespace.adapter.and_then(|slot| names.binary_search(&slot).ok());
            let key = (parent, adapter, in_window, page.tokens);
            // Each cache has a clock of its own; it is shifted so that all clocks end at the same time.
            let last_used = page.last_used + (latest - cache.clock());
            if let Some(&saved) = numbers.get(&key) {
                number[at] = Some(saved);
                let saved: &mut SessionPage = &mut index.pages[saved];
                saved.last_used = saved.last_used.max(last_used);
                continue;
            }
            number[at] = Some(index.pages.len());
            numbers.insert(key, index.pages.len());
            index.pages.push(SessionPage { parent, adapter, last_used, in_window, tokens: page.tokens.to_vec() });
            places.push((cp_rank(cache, replica, page.rank), page.page, page.tokens.len()));
        }
    }
    let mut writer = match SessionWriter::create(file, &format, &index) {
        Ok(writer) => writer,
        Err(error) => return Ok(Err(failed(error))),
    };
    for (rank, page, rows) in &places {
        let mut rows = ranks.read_page(&parts, *rank, *page, *rows)?;
        if page.window.is_none() {
            let Some(full) = parts.full.cut(&rows, parts.width) else {
                return Ok(Err("the rows of a page are of another type than the cache".to_owned()));
            };
            rows = full;
        }
        if let Err(error) = writer.page(&rows) {
            return Ok(Err(failed(error)));
        }
    }
    let tokens = places.iter().map(|(.., rows)| rows).sum();
    let bytes = index.numbers(&format) * format.dtype.size_in_bytes() as u64;
    Ok(writer.finish().map(|()| SessionSize { tokens, bytes, left_out: 0 }).map_err(failed))
}

/// Restores a session, the text that was used last at the end, so that it stays longest. The inner error is a sentence; the outer
/// one ends the engine.
pub(super) fn restore(
    file: &Path,
    model: String,
    vocabulary: usize,
    caches: &mut [PrefixCache],
    adapters: &BTreeMap<u64, String>,
    ranks: &mut EngineRank,
) -> Result<Result<SessionSize, String>> {
    let opened = row_format(model, ranks).and_then(|(format, parts)| {
        SessionReader::open(file, &format, vocabulary).map(|reader| (format, parts, reader))
    });
    let (format, parts, mut reader) = match opened {
        Ok(opened) => opened,
        Err(problem) => return Ok(Err(problem)),
    };
    let mut restored = SessionSize { left_out: left_out(&reader.index, adapters, caches), ..SessionSize::default() };
    for leaf in leaves(&reader.index) {
        match restore_text(leaf, &mut reader, caches, adapters, (ranks, &parts))? {
            Ok(text) => {
                restored.tokens += text.tokens;
                restored.bytes += text.numbers * format.dtype.size_in_bytes() as u64;
            }
            Err(problem) => return Ok(Err(problem)),
        }
    }
    Ok(Ok(restored))
}

/// The number of tokens of adapters that are not loaded, and of those that the caches have no room for, even if they are empty.
fn left_out(index: &SessionIndex, adapters: &BTreeMap<u64, String>, caches: &[PrefixCache]) -> usize {
    let is_loaded = |of: usize| adapters.values().any(|identity| *identity == index.adapters[of]);
    let (of_loaded, of_others): (Vec<&SessionPage>, _) =
        index.pages.iter().partition(|page| page.adapter.is_none_or(is_loaded));
    let tokens = |pages: &[&SessionPage]| pages.iter().map(|page| page.tokens.len()).sum::<usize>();
    let room: usize = caches.iter().map(|cache| cache.page_size() * cache.pages().count()).sum();
    tokens(&of_others) + tokens(&of_loaded).saturating_sub(room)
}

/// The last pages of texts, the one that was used last at the end.
fn leaves(index: &SessionIndex) -> Vec<usize> {
    let mut is_leaf = vec![true; index.pages.len()];
    index.pages.iter().filter_map(|page| page.parent).for_each(|parent| is_leaf[parent] = false);
    let mut leaves: Vec<usize> = (0..is_leaf.len()).filter(|page| is_leaf[*page]).collect();
    leaves.sort_by_key(|page| index.pages[*page].last_used);
    leaves
}

/// The part of a text that was restored and was not in the cache yet: its tokens, and their keys and values.
#[derive(Default)]
struct RestoredText {
    tokens: usize,
    numbers: u64,
}

/// The tokens of the text that ends with a page, and where each token's row is: its page, and the number of the row in it.
fn text_of_leaf(leaf: usize, index: &SessionIndex) -> (Vec<u32>, Vec<(usize, usize)>) {
    let mut path = vec![leaf];
    while let Some(parent) = path.last().and_then(|page| index.pages[*page].parent) {
        path.push(parent);
    }
    let (mut text, mut sources) = (Vec::new(), Vec::new());
    for page in path.into_iter().rev() {
        let tokens = &index.pages[page].tokens;
        sources.extend((0..tokens.len()).map(|row| (page, row)));
        text.extend_from_slice(tokens);
    }
    (text, sources)
}

/// The cache, with the number of its attention replica, that has at least half of a text, or else the one with most room.
fn choose_cache<'a>(
    caches: &'a mut [PrefixCache],
    namespace: &Namespace,
    text: &[u32],
) -> Option<(usize, &'a mut PrefixCache)> {
    let suits = |(_, cache): &(usize, &mut PrefixCache)| {
        let pages = cache.pages();
        let cached: usize = (0..pages.ranks()).map(|rank| pages.cached(rank)).sum();
        let found = cache.prefix_len(namespace, text);
        (if 2 * found >= text.len() { found } else { 0 }, Reverse(cached))
    };
    caches.iter_mut().enumerate().max_by_key(suits)
}

/// Restores the text that ends with a page, in the attention replica whose [cache suits](choose_cache) best.
fn restore_text(
    leaf: usize,
    reader: &mut SessionReader,
    caches: &mut [PrefixCache],
    adapters: &BTreeMap<u64, String>,
    (ranks, parts): (&mut EngineRank, &KvRowLayout),
) -> Result<Result<RestoredText, String>> {
    let namespace: Namespace = match reader.index.pages[leaf].adapter {
        None => None,
        Some(of) => match adapters.iter().find(|(_, identity)| **identity == reader.index.adapters[of]) {
            Some((slot, _)) => Some(*slot),
            None => return Ok(Ok(RestoredText::default())),
        },
    }
    .into();
    let (text, sources) = text_of_leaf(leaf, &reader.index);
    let Some((replica, cache)) = choose_cache(caches, &namespace, &text) else {
        return Ok(Ok(RestoredText::default()));
    };
    let hit = cache.hold_prefix(&namespace, &text);
    if let Some((page, _)) = hit.partial {
        cache.release(hit.pages.len(), page);
    }
    let in_window = (hit.window.first..).zip(hit.window.pages);
    in_window.chain(hit.partial_window.map(|page| (hit.pages.len(), page))).for_each(|(index, page)| {
        cache.release_window(index, page);
    });
    let (mut held, mut node, mut restored, mut problem) = (hit.pages, hit.node, RestoredText::default(), None);
    let size = cache.page_size();
    while held.len() * size < text.len() {
        let index = held.len();
        let range = index * size..text.len().min((index + 1) * size);
        let has_window = sources[range.clone()].iter().all(|(page, _)| reader.index.pages[*page].in_window);
        // A text with the same prefix may have brought this page already.
        if let Some((child, page)) = cache.hold_child(&namespace, node, &text[range.clone()], has_window) {
            held.push(page);
            node = Some(child);
            continue;
        }
        let Some(page) = cache.allocate(index).map(CachePage::from) else { break };
        let mut rows = Vec::new();
        let read = sources[range.clone()].iter().try_for_each(|(page, row)| reader.append_row(*page, *row, &mut rows));
        if let Err(error) = read {
            cache.release(index, page.full);
            problem = Some(error);
            break;
        }
        // If no window page is free, this evicts the one that was released longest ago, so the pages restored last keep theirs.
        let window = if has_window { cache.allocate_window(index) } else { None };
        let page = CachePage { window, ..page };
        ranks.write_page(parts, cp_rank(cache, replica, cache.rank_of(index)), page, &reader.message(&rows))?;
        match cache.insert(&namespace, node, &text[range.clone()], page) {
            Some((inserted, kept)) => {
                held.push(kept.full);
                kept.window.into_iter().for_each(|page| cache.release_window(index, page));
                node = Some(inserted);
                // Otherwise the page was there without its rows of sliding-window layers.
                if kept.full == page.full {
                    restored.tokens += range.len();
                    restored.numbers += (range.len() * reader.format().row_width(has_window)) as u64;
                }
            }
            // A longer text with these tokens is there, or there is no prefix cache.
            None => {
                cache.release(index, page.full);
                page.window.into_iter().for_each(|page| cache.release_window(index, page));
                break;
            }
        }
    }
    for (index, page) in held.into_iter().enumerate() {
        cache.release(index, page);
    }
    Ok(problem.map_or(Ok(restored), Err))
}
