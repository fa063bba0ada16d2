//! Divides the memory of the cache between full-attention layers and sliding-window layers.

use super::options::{EngineOptions, EngineSizes, KvCache};
use crate::paged::PerKind;

/// Upper limit on the pages that take no memory and only record where texts are, in a model that has only
/// sliding-window layers: the scheduler lists them.
const MOST_WITHOUT_MEMORY: u64 = 1 << 22;

/// The number of pages of each kind that sequences need on each rank.
///
/// A sequence needs pages for all of its tokens in full-attention layers. In sliding-window layers it needs the pages
/// of the window and, while it reads its prompt, those of the chunk; so the longer sequences may be, the larger is the
/// share of the others.
#[derive(Debug, Clone, Copy)]
pub(super) struct PagePlan {
    page_bytes: PerKind<u64>,
    /// Pages of layers with a window that a sequence needs at most, and while it generates.
    reading: u64,
    generating: u64,
}

impl PagePlan {
    pub(super) fn new(options: &EngineOptions, sizes: &EngineSizes) -> Self {
        let Some(window) = sizes.window else {
            let page_bytes = PerKind { full: sizes.page_bytes, window: 0 };
            return Self { page_bytes, reading: 0, generating: 0 };
        };
        // Tokens in a row may begin in the middle of a page.
        let pages = |tokens: usize| (tokens.div_ceil(options.page) + 1).div_ceil(sizes.cp) as u64;
        Self {
            page_bytes: PerKind { full: sizes.page_bytes, window: window.page_bytes },
            // A step of a sequence computes a chunk, or a token and its drafts.
            reading: pages(
                window.lookback.saturating_add(options.prefill_chunk.max(options.num_speculative_tokens + 1)),
            ),
            generating: pages(window.lookback.saturating_add(options.num_speculative_tokens + 1)),
        }
    }

    /// The pages of windows in a quarter of the memory, but enough for one sequence. Most texts are shorter than the longest, so that
    /// more of them run; and the prefix cache goes on only where it has the window before.
    fn windows(&self, room: u64) -> u64 {
        (room / 4 / self.page_bytes.window.max(1)).max(self.reading)
    }

    /// The pages that the longest sequence may have on each rank, alone or together with the windows of others.
    pub(super) fn longest(&self, kv_cache: KvCache, room: u64, with_others: bool) -> u64 {
        if let KvCache::Pages(_) = kv_cache {
            return room.min(u32::MAX.into());
        }
        let PerKind { full, window } = self.page_bytes;
        // A sequence of few pages has all of them in its window.
        let short = room / (full + window).max(1);
        let in_windows = if with_others { self.windows(room) } else { self.reading };
        let longest = match (room.checked_sub(in_windows.saturating_mul(window)), full) {
            (Some(_), 0) => MOST_WITHOUT_MEMORY,
            (Some(rest), full) => (rest / full).max(short),
            (None, _) => short,
        };
        longest.min(u32::MAX.into())
    }

    /// Bytes of layers with a window that a sequence of `longest` pages needs.
    pub(super) fn window_bytes(&self, longest: u64) -> u64 {
        self.reading.min(longest) * self.page_bytes.window
    }

    /// Bytes that a sequence of `longest` pages needs.
    pub(super) fn sequence_bytes(&self, longest: u64) -> u64 {
        longest.saturating_mul(self.page_bytes.full).saturating_add(self.window_bytes(longest))
    }

    /// The numbers of pages, if the longest sequence has `longest` of them, which must fit.
    ///
    /// There are windows for as many sequences as fit with their longest texts, and at least a [quarter](Self::windows) of the memory is
    /// for windows if the longest text leaves it.
    pub(super) fn divide(&self, kv_cache: KvCache, room: u64, longest: u64, max_running: u64) -> PerKind<u64> {
        let most = u64::from(u32::MAX);
        if let KvCache::Pages(_) = kv_cache {
            return PerKind { full: room.min(most), window: if self.reading > 0 { room.min(most) } else { 0 } };
        }
        let PerKind { full, window } = self.page_bytes;
        if window == 0 {
            return PerKind { full: (room / full.max(1)).min(most), window: 0 };
        }
        let (reading, generating) = (self.reading.min(longest), self.generating.min(longest));
        let long_texts = room / (longest * full + generating * window);
        let wanted = (long_texts.saturating_mul(generating) + reading - generating).max(self.windows(room));
        let possible = (room - longest * full) / window;
        // A page in a window is a page of the text, too.
        let useful = (room / (full + window)).max(reading);
        let in_windows = match full {
            0 => room / window,
            _ => wanted.max(reading).min(possible).min(useful),
        };
        let pages = match full {
            // These take no memory: there are some for every text that runs, and for what windows leave in the prefix cache.
            0 => longest.saturating_mul(max_running).min(MOST_WITHOUT_MEMORY).max(longest).max(in_windows),
            full => (room - in_windows * window) / full,
        };
        PerKind { full: pages.min(most), window: in_windows.min(most) }
    }
}
