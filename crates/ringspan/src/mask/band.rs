//! Bands, the one form of mask that kernels support.

/// The visible part of a tile: query `i` sees key `j` iff `lo <= i - j <= hi`, in tile-local indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Band {
    /// The smallest visible `i - j`.
    pub lo: i64,
    /// The largest visible `i - j`.
    pub hi: i64,
}

impl Band {
    /// The band of a tile in which every query sees every key.
    pub(crate) fn whole(queries: usize, keys: usize) -> Self {
        Self { lo: 1 - keys as i64, hi: queries as i64 - 1 }
    }

    /// Whether query `i` sees key `j`.
    pub fn sees(self, i: usize, j: usize) -> bool {
        let d = i as i64 - j as i64;
        self.lo <= d && d <= self.hi
    }

    /// The band limited to values of i - j that occur in a tile of `queries x keys`, or `None` if no pair is visible.
    pub fn clamp(self, queries: usize, keys: usize) -> Option<Band> {
        if queries == 0 || keys == 0 {
            return None;
        }
        let lo = self.lo.max(1 - keys as i64);
        let hi = self.hi.min(queries as i64 - 1);
        (lo <= hi).then_some(Band { lo, hi })
    }

    /// Whether every query of the tile sees every key of it.
    pub fn is_full(self, queries: usize, keys: usize) -> bool {
        self.lo <= 1 - keys as i64 && self.hi >= queries as i64 - 1
    }

    /// The keys that query `i` sees in a tile of `keys` keys: `start..end`, empty if `start >= end`.
    pub fn keys(self, i: usize, keys: usize) -> std::ops::Range<usize> {
        let start = (i as i64).saturating_sub(self.hi).clamp(0, keys as i64);
        let end = (i as i64).saturating_sub(self.lo).saturating_add(1).clamp(0, keys as i64);
        start as usize..(end.max(start)) as usize
    }

    /// Number of visible pairs in a tile of `queries x keys`, in constant time.
    pub fn pairs(self, queries: usize, keys: usize) -> u64 {
        let (n, m) = (queries as i64, keys as i64);
        let Some(Band { lo, hi }) = self.clamp(queries, keys) else { return 0 };
        // Pairs with i - j <= d, for -m < d < n: a staircase whose row i holds min(m, max(0, m - (i - d))) keys.
        let upto = |d: i64| -> i64 {
            if d <= -m {
                return 0;
            }
            // Rows i <= d see all m keys; rows d < i < d + m see m - (i - d); later rows see none.
            let full = (d + 1).clamp(0, n);
            let (first, last) = (full.max(0), n.min(d + m));
            let partial = if last > first {
                let (a, b) = (m - (first - d), m - (last - 1 - d));
                (a + b) * (last - first) / 2
            } else {
                0
            };
            full * m + partial
        };
        (upto(hi) - upto(lo - 1)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pairs_and_keys_agree_with_counting(n in 0usize..14, m in 0usize..14, lo in -20i64..20, w in -2i64..30) {
            let band = Band { lo, hi: lo + w };
            let mut count = 0;
            for i in 0..n {
                let seen: Vec<usize> = (0..m).filter(|&j| band.sees(i, j)).collect();
                prop_assert_eq!(&seen, &band.keys(i, m).collect::<Vec<_>>());
                count += seen.len();
            }
            prop_assert_eq!(band.pairs(n, m), count as u64);
            prop_assert_eq!(band.clamp(n, m).is_none() || count > 0 , true);
            if n > 0 && m > 0 { prop_assert_eq!(band.is_full(n, m), count == n * m); }
        }
    }
}
