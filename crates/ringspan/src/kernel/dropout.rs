//! Dropout of attention weights, by a generator that gives the same weights on every mesh.

use std::ops::Range;

/// Dropout of attention weights. Its generator uses global indices, so that any mesh drops the same weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability that a weight is dropped, in 0..1. The others are scaled by `1 / (1 - rate)`.
    pub rate: f32,
    /// Seed of the generator.
    pub seed: u64,
    /// Global index of head 0 of a call: a Ulysses share starts at a later head.
    pub first_head: usize,
    /// Global index of query 0 of the flat batch `[B, Sq]`, if a call has only some rows of a larger batch.
    pub first_query: usize,
}

impl Dropout {
    /// Whether the weight of a query and a key is kept. `query` is the query's index in the flat batch `[B, Sq]`, `key` the
    /// key's index in its batch row.
    pub fn keeps(&self, head: usize, query: usize, key: usize) -> bool {
        let row = self.row(head, query);
        keeps(row, column(key), self.threshold())
    }

    /// Applies dropout to `rows`, one row of a head per query and one number per key. Other dropout in training uses the
    /// same generator through this function.
    pub fn drop_rows(&self, head: usize, queries: &[usize], keys: Range<usize>, rows: &mut [f32]) {
        let columns: Vec<u32> = keys.map(column).collect();
        let (threshold, scale) = (self.threshold(), self.scale());
        for (row, query) in rows.chunks_exact_mut(columns.len().max(1)).zip(queries) {
            let words = self.row(head, *query);
            for (x, column) in row.iter_mut().zip(&columns) {
                *x = if keeps(words, *column, threshold) { *x * scale } else { 0.0 };
            }
        }
    }

    /// The two random words of a query and head.
    pub(super) fn row(&self, head: usize, query: usize) -> [u32; 2] {
        let query = (self.first_query + query) as u64;
        let word = mix(mix(self.seed ^ mix((self.first_head + head) as u64 + 1)) ^ query);
        [word as u32, (word >> 32) as u32]
    }

    /// The rate as a 32-bit threshold, for backends that compute the generator of [`keeps`](Self::keeps) themselves: a weight is
    /// dropped if the hash of its query and key is below it.
    pub fn threshold(&self) -> u32 {
        (f64::from(self.rate) * 4_294_967_296.0) as u32
    }

    /// Factor on the weights that are kept: `1 / (1 - rate)`.
    pub fn scale(&self) -> f32 {
        1.0 / (1.0 - self.rate)
    }
}

/// The random word of a key.
#[inline(always)]
pub(super) fn column(key: usize) -> u32 {
    mix(key as u64) as u32
}

/// Two rounds of multiply and shift over the words of a pair, so that a loop over lanes compiles to vector instructions.
#[inline(always)]
pub(super) fn keeps(row: [u32; 2], column: u32, threshold: u32) -> bool {
    let mut x = (row[0] ^ column).wrapping_mul(0x9E37_79B1);
    x = (x ^ (x >> 15)).wrapping_add(row[1]).wrapping_mul(0x85EB_CA77);
    x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE3D);
    x ^ (x >> 16) >= threshold
}

/// SplitMix64's output function (Steele et al., 2014).
fn mix(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::super::Score;
    use super::*;

    #[test]
    fn dropout_drops_the_asked_share_and_no_pattern() {
        let dropout = Dropout { rate: 0.3, seed: 5, first_head: 0, first_query: 0 };
        let (queries, keys) = (200, 500);
        let mut kept = 0;
        let mut pairs = [0; 2];
        for query in 0..queries {
            for key in 0..keys {
                let keeps = dropout.keeps(1, query, key);
                kept += usize::from(keeps);
                // Neighbours in a row and in a column agree as often as by chance: 0.49 + 0.09.
                pairs[0] += usize::from(keeps == dropout.keeps(1, query, key + 1));
                pairs[1] += usize::from(keeps == dropout.keeps(1, query + 1, key));
            }
        }
        let of = |n: usize| n as f64 / (queries * keys) as f64;
        assert!((of(kept) - 0.7).abs() < 0.01, "{}", of(kept));
        for pairs in pairs {
            assert!((of(pairs) - 0.58).abs() < 0.01, "{}", of(pairs));
        }
        let of_share = Score { dropout: Some(dropout), ..Score::new(1.0) }.heads(1..3).dropout.expect("still there");
        let of_rows = Dropout { first_query: 5, ..dropout };
        for key in 0..64 {
            assert_eq!(of_share.keeps(0, 7, key), dropout.keeps(1, 7, key));
            assert_eq!(of_rows.keeps(1, 2, key), dropout.keeps(1, 7, key));
        }
    }

    #[test]
    fn rows_are_dropped_as_their_pairs_are() {
        let dropout = Dropout { rate: 0.25, seed: 8, first_head: 0, first_query: 0 };
        let (queries, keys) = ([70, 3, 1 << 40], 5..12);
        let mut rows: Vec<f32> = (0..21).map(|i| i as f32 - 9.5).collect();
        let before = rows.clone();
        dropout.drop_rows(2, &queries, keys.clone(), &mut rows);
        for (at, (x, before)) in rows.iter().zip(before).enumerate() {
            let stays = dropout.keeps(2, queries[at / 7], keys.start + at % 7);
            assert_eq!(*x, if stays { before * dropout.scale() } else { 0.0 });
        }
        dropout.drop_rows(0, &queries, 3..3, &mut []);
    }
}
