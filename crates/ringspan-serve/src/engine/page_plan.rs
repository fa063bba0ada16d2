//! Divides the memory of the cache between full-attention layers and sliding-window layers.

use super::options::{EngineOptions, EngineSizes, KvCacheSize};
use crate::paged::PerKind;

/// Upper limit on the pages that take no memory and only record where texts are, in a model that has only
/// sliding-window layers: the scheduler lists them.
const MOST_WITHOUT_MEMORY: u64 = 1 << 22;

/// The number of pages of each kind that sequences need on each rank.
///
/// A sequence needs pages for all of its tokens in full-attention layers. In sliding-window layers it needs the pages
/// of the window and, while its prompt is prefilled, those of the chunk; so the longer sequences may be, the larger is
/// the share of memory for full-attention layers.
#[derive(Debug, Clone, Copy)]
pub(super) struct PagePlan {
    page_bytes: PerKind<u64>,
    /// Pages of sliding-window layers that a sequence needs at most, and while it decodes.
    prefill_window_pages: u64,
    decode_window_pages: u64,
}

impl PagePlan {
    pub(super) fn new(options: &EngineOptions, sizes: &EngineSizes) -> Self {
        let Some(window) = sizes.window else {
            let page_bytes = PerKind { full: sizes.page_bytes, window: 0 };
            return Self { page_bytes, prefill_window_pages: 0, decode_window_pages: 0 };
        };
        // Tokens in a row may begin in the middle of a page.
        let pages = |tokens: usize| (tokens.div_ceil(options.page_size) + 1).div_ceil(sizes.cp) as u64;
        Self {
            page_bytes: PerKind { full: sizes.page_bytes, window: window.page_bytes },
            // A step of a sequence computes a chunk, or a token and its drafts.
            prefill_window_pages: pages(
                window.lookback.saturating_add(options.prefill_chunk.max(options.num_speculative_tokens + 1)),
            ),
            decode_window_pages: pages(window.lookback.saturating_add(options.num_speculative_tokens + 1)),
        }
    }

    /// The number of sliding-window pages that fit into a quarter of the memory, and at least as many as one sequence needs. They get
    /// a quarter because most sequences are shorter than the longest, so that more of them run at a time, and because a hit of the
    /// prefix cache needs the window pages before its end.
    fn min_window_pages(&self, room: u64) -> u64 {
        (room / 4 / self.page_bytes.window.max(1)).max(self.prefill_window_pages)
    }

    /// The pages that the longest sequence may have on each rank, alone or together with the windows of others.
    pub(super) fn longest(&self, kv_cache: KvCacheSize, room: u64, with_others: bool) -> u64 {
        if let KvCacheSize::Pages(_) = kv_cache {
            return room.min(u32::MAX.into());
        }
        let PerKind { full, window } = self.page_bytes;
        // A sequence of few pages has all of them in its window.
        let short = room / (full + window).max(1);
        let in_windows = if with_others { self.min_window_pages(room) } else { self.prefill_window_pages };
        let longest = match (room.checked_sub(in_windows.saturating_mul(window)), full) {
            (Some(_), 0) => MOST_WITHOUT_MEMORY,
            (Some(rest), full) => (rest / full).max(short),
            (None, _) => short,
        };
        longest.min(u32::MAX.into())
    }

    /// Bytes of layers with a window that a sequence of `longest` pages needs.
    pub(super) fn window_bytes(&self, longest: u64) -> u64 {
        self.prefill_window_pages.min(longest) * self.page_bytes.window
    }

    /// Bytes that a sequence of `longest` pages needs.
    pub(super) fn sequence_bytes(&self, longest: u64) -> u64 {
        longest.saturating_mul(self.page_bytes.full).saturating_add(self.window_bytes(longest))
    }

    /// The numbers of pages, if the longest sequence has `longest` of them, which must fit.
    ///
    /// There are windows for as many sequences as fit with their longest texts, and at least a [quarter](Self::min_window_pages) of the
    /// memory is for windows if the longest text leaves it.
    pub(super) fn divide(&self, kv_cache: KvCacheSize, room: u64, longest: u64, max_running: u64) -> PerKind<u64> {
        let most = u64::from(u32::MAX);
        if let KvCacheSize::Pages(_) = kv_cache {
            return PerKind {
                full: room.min(most),
                window: if self.prefill_window_pages > 0 { room.min(most) } else { 0 },
            };
        }
        let PerKind { full, window } = self.page_bytes;
        if window == 0 {
            return PerKind { full: (room / full.max(1)).min(most), window: 0 };
        }
        let (prefill_window_pages, decode_window_pages) =
            (self.prefill_window_pages.min(longest), self.decode_window_pages.min(longest));
        let long_texts = room / (longest * full + decode_window_pages * window);
        let wanted = (long_texts.saturating_mul(decode_window_pages) + prefill_window_pages - decode_window_pages)
            .max(self.min_window_pages(room));
        let possible = (room - longest * full) / window;
        // More window pages would be useless, since each of them also needs a full-attention page.
        let useful = (room / (full + window)).max(prefill_window_pages);
        let in_windows = match full {
            0 => room / window,
            _ => wanted.max(prefill_window_pages).min(possible).min(useful),
        };
        let pages = match full {
            // Without full-attention layers these pages take no memory: there are enough for `max_running` sequences of the longest
            // length, up to a limit, and at least as many as window pages.
            0 => longest.saturating_mul(max_running).min(MOST_WITHOUT_MEMORY).max(longest).max(in_windows),
            full => (room - in_windows * window) / full,
        };
        PerKind { full: pages.min(most), window: in_windows.min(most) }
    }
}
