//! The sizes of an engine, which follow from its options, the model and the free memory.

use super::options::{EngineOptions, EngineSizes, KvCacheSize};
use super::page_plan::PagePlan;
use super::request::Limits;
use crate::error::{Error, Result};

impl EngineOptions {
    /// The sizes of an engine with these options.
    ///
    /// # Errors
    /// An option out of its range, and a cache that is too small for one sequence of `max_model_len` tokens.
    pub fn limits(&self, sizes: &EngineSizes) -> Result<Limits> {
        self.limits_with(sizes, Ok)
    }

    /// Like [`limits`](Self::limits); `agree` makes one number of the bytes, or pages, for which each process has room.
    ///
    /// # Errors
    /// Fails as [`limits`](Self::limits) does, and where `agree` fails.
    pub(super) fn limits_with(&self, sizes: &EngineSizes, agree: impl FnOnce(u64) -> Result<u64>) -> Result<Limits> {
        let Self { page_size, max_running, max_waiting, .. } = *self;
        self.check_ranges(sizes)?;
        let pages = PagePlan::new(self, sizes);
        let room = agree(self.room(sizes)?)?;
        let is_alone = matches!(self.kv_cache, KvCacheSize::OneSequence(_));
        let max_sequence_pages = pages.longest(self.kv_cache, room, self.max_model_len.is_none() && !is_alone);
        let capacity_tokens = max_sequence_pages.saturating_mul(sizes.cp as u64).saturating_mul(page_size as u64);
        let capacity_tokens = usize::try_from(capacity_tokens).unwrap_or(usize::MAX);
        let max_model_len =
            self.max_model_len.unwrap_or(capacity_tokens.min(sizes.trained_length.unwrap_or(usize::MAX))).max(1);
        let max_model_len =
            if is_alone && capacity_tokens > 0 { max_model_len.min(capacity_tokens) } else { max_model_len };
        let needed = max_model_len.div_ceil(page_size).div_ceil(sizes.cp);
        if capacity_tokens < max_model_len {
            let EngineSizes { page_bytes, attn_dp, .. } = *sizes;
            // A sequence has pages of the ranks of one replica.
            let ranks = sizes.ranks / attn_dp;
            let (pages_per_rank, window_bytes) = (max_sequence_pages as usize, pages.window_bytes(needed as u64));
            return Err(Error::CacheTooSmall {
                asked: max_model_len,
                page_size,
                ranks,
                needed,
                pages_per_rank,
                page_bytes,
                window_bytes,
                holds: capacity_tokens,
            });
        }
        let room = if is_alone { pages.sequence_bytes(needed as u64) } else { room };
        let pages = pages.divide(self.kv_cache, room, needed as u64, max_running as u64);
        let window_page_bytes = sizes.window.map_or(0, |window| window.page_bytes);
        Ok(Limits {
            max_model_len,
            vocabulary: sizes.vocabulary,
            hidden_size: sizes.hidden_size,
            max_running,
            max_waiting,
            ranks: sizes.ranks,
            attn_dp: sizes.attn_dp,
            cp: sizes.cp,
            pp: sizes.pp,
            page_size,
            pages_per_rank: pages.full as usize,
            window_pages_per_rank: pages.window as usize,
            window_lookback: sizes.window.map(|window| window.lookback),
            has_full_layers: sizes.page_bytes > 0,
            cache_bytes: sizes.page_bytes * pages.full + window_page_bytes * pages.window,
            kv_dtype: self.kv_dtype,
            prefix_cache: self.prefix_cache,
        })
    }

    /// Refuses options that are outside their ranges.
    fn check_ranges(&self, sizes: &EngineSizes) -> Result<()> {
        let Self { page_size, max_running, max_waiting, prefill_chunk, .. } = *self;
        let wrong = |option, given: String, possible| Err(Error::InvalidOption { option, given, possible });
        for (option, given) in [
            ("attn-dp", sizes.attn_dp),
            ("page", page_size),
            ("max-model-len", self.max_model_len.unwrap_or(1)),
            ("max-running", max_running),
            ("max-waiting", max_waiting),
            ("prefill-chunk", prefill_chunk),
            ("mixed-chunk", self.mixed_chunk.unwrap_or(1)),
        ] {
            if given == 0 {
                return wrong(option, "0".into(), "a number of at least 1");
            }
        }
        if let Some(mixed) = self.mixed_chunk.filter(|mixed| *mixed > prefill_chunk) {
            return wrong(
                "mixed-chunk",
                mixed.to_string(),
                "at most prefill-chunk: no step has more tokens of prompts",
            );
        }
        if let KvCacheSize::Share(share) | KvCacheSize::OneSequence(share) = self.kv_cache
            && !(share > 0.0 && share <= 1.0)
        {
            return wrong("kv-cache", share.to_string(), "a share of the free memory above 0 and up to 1");
        }
        Ok(())
    }

    /// Bytes, or pages if their number is given, for which this process has room on each of its ranks.
    fn room(&self, sizes: &EngineSizes) -> Result<u64> {
        match self.kv_cache {
            KvCacheSize::Pages(pages) => Ok(pages as u64),
            KvCacheSize::Bytes(bytes) => Ok(bytes),
            KvCacheSize::Share(share) => {
                let free = ringspan::memory::available().ok_or(Error::UnknownMemory)?;
                Ok((free as f64 * share / sizes.local_ranks.max(1) as f64) as u64)
            }
            // Where the free memory is unknown, the sequence is as long as was asked.
            KvCacheSize::OneSequence(share) => {
                let of_rank = |free: u64| (free as f64 * share / sizes.local_ranks.max(1) as f64) as u64;
                Ok(ringspan::memory::available().map_or(u64::MAX, of_rank))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::options::WindowSizes;

    fn sizes() -> EngineSizes {
        EngineSizes {
            vocabulary: 10,
            hidden_size: 4,
            ranks: 3,
            attn_dp: 1,
            cp: 3,
            pp: 1,
            local_ranks: 3,
            page_bytes: 1000,
            window: None,
            trained_length: Some(4096),
        }
    }

    #[test]
    fn the_longest_sequence_is_what_model_and_cache_allow() {
        let with = |kv_cache, max_model_len| {
            let options = EngineOptions { page_size: 8, kv_cache, max_model_len, ..EngineOptions::default() };
            options.limits(&sizes())
        };
        let limits = with(KvCacheSize::Bytes(20_999), None).expect("limits");
        assert_eq!((limits.pages_per_rank, limits.max_model_len), (20, 20 * 3 * 8));
        assert_eq!(with(KvCacheSize::Bytes(1 << 40), None).expect("limits").max_model_len, 4096);
        assert_eq!(with(KvCacheSize::Pages(4), Some(96)).expect("limits").max_model_len, 96);
        let refused = with(KvCacheSize::Pages(4), Some(97)).expect_err("97 tokens in 12 pages").to_string();
        for part in ["97 tokens", "5 pages", "5000 bytes", "4 pages", "96 tokens"] {
            assert!(refused.contains(part), "{refused}");
        }
        let refused = with(KvCacheSize::Bytes(999), None).expect_err("no page").to_string();
        assert!(refused.contains("1000 bytes"), "{refused}");
        assert!(with(KvCacheSize::Share(0.0), None).expect_err("nothing").to_string().contains("kv-cache 0"));
        assert!(with(KvCacheSize::Share(0.3), None).expect("limits").pages_per_rank > 0);
    }

    #[test]
    fn sizes_of_zero_are_refused() {
        let refused = |change: fn(&mut EngineOptions)| {
            let mut options = EngineOptions { kv_cache: KvCacheSize::Pages(9), ..EngineOptions::default() };
            change(&mut options);
            options.limits(&sizes()).expect_err("0").to_string()
        };
        assert!(refused(|options| options.page_size = 0).starts_with("page 0"));
        assert!(refused(|options| options.max_model_len = Some(0)).starts_with("max-model-len 0"));
        assert!(refused(|options| options.max_running = 0).starts_with("max-running 0"));
        assert!(refused(|options| options.max_waiting = 0).starts_with("max-waiting 0"));
        assert!(refused(|options| options.prefill_chunk = 0).starts_with("prefill-chunk 0"));
        assert!(refused(|options| options.mixed_chunk = Some(0)).starts_with("mixed-chunk 0"));
        assert!(refused(|options| options.mixed_chunk = Some(513)).contains("at most prefill-chunk"));
    }

    #[test]
    fn one_sequence_is_as_long_as_memory_allows() {
        let kv_cache = KvCacheSize::OneSequence(1e-5);
        let options =
            EngineOptions { page_size: 8, kv_cache, max_model_len: Some(1 << 40), ..EngineOptions::default() };
        // A small part of some gigabytes: pages of 1000 bytes on each of three ranks.
        let limits = options.limits(&sizes()).expect("a shorter sequence");
        assert_eq!(limits.max_model_len, limits.pages_per_rank * 3 * 8);
        let free = ringspan::memory::available().expect("known here") as f64;
        let expected = free * 1e-5 / 3.0;
        assert!((limits.cache_bytes as f64 - expected).abs() < 1000.0 + expected / 2.0, "{limits:?}, {expected} bytes");
        let none = EngineSizes { page_bytes: 1 << 40, ..sizes() };
        let refused = options.limits(&none).expect_err("no page").to_string();
        assert!(refused.contains("0 tokens"), "{refused}");
    }

    /// Gemma 3 270M in f32: 18 layers of one head of 256, of which 15 see a window of 512 tokens.
    #[test]
    fn a_long_text_of_a_model_with_windows_takes_a_fifth_of_the_memory() {
        let of_layer = 64 * 2 * 256 * 4;
        let sizes = |full: u64, window: u64| EngineSizes {
            ranks: 1,
            cp: 1,
            page_bytes: full * of_layer,
            window: (window > 0).then_some(WindowSizes { lookback: 511, page_bytes: window * of_layer }),
            trained_length: None,
            ..sizes()
        };
        // The fewest bytes that hold one text.
        let least = |sizes: EngineSizes, tokens| {
            let fits = |bytes: &u64| {
                let (kv_cache, max_model_len) = (KvCacheSize::Bytes(*bytes), Some(tokens));
                EngineOptions { kv_cache, max_model_len, ..EngineOptions::default() }.limits(&sizes).is_ok()
            };
            let (mut below, mut enough) = (0, 1 << 40);
            while enough - below > 1 {
                let middle = (below + enough) / 2;
                if fits(&middle) { enough = middle } else { below = middle }
            }
            enough
        };
        let kv_cache = KvCacheSize::OneSequence(0.9);
        for (full, window) in [(18, 0), (3, 15), (0, 18)] {
            let sizes = sizes(full, window);
            let options =
                EngineOptions { kv_cache, max_model_len: Some(2048), max_running: 1, ..EngineOptions::default() };
            let limits = options.limits(&sizes).expect("less than the free memory");
            assert_eq!(
                (limits.cache_bytes, limits.max_model_len),
                (least(sizes, 2048), 2048),
                "{full} and {window} layers"
            );
        }
        for (tokens, whole, windows) in [(32_768, 1_207_959_552, 234_749_952), (131_072, 4_831_838_208, 838_729_728)] {
            assert_eq!(least(sizes(18, 0), tokens), whole, "{tokens} tokens");
            assert_eq!(least(sizes(3, 15), tokens), windows, "{tokens} tokens");
        }
    }
}
