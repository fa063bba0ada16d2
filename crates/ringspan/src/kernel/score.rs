//! Score parameters: everything besides the mask that turns products into weights.

use crate::error::{Error, Result};
use std::ops::Range;

/// How the product of a query and a key becomes a weight, in this order:
///
/// 1. `s = scale * q.k`
/// 2. `s = softcap * tanh(s / softcap)` (Gemma 2, 2024)
/// 3. `s += relative(head, distance)`, [`Relative`]
/// 4. `s += bias[query, head, key]`, given with the inputs of a call
/// 5. the mask
/// 6. the softmax, whose sum also holds `exp(sinks[head])` (attention sinks; gpt-oss, 2025)
/// 7. dropout of the weights, [`Dropout`]
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Factor on `q . k`; usually 1/sqrt(D).
    pub scale: f32,
    /// Bound on the absolute value of a score.
    pub softcap: Option<f32>,
    /// Term that depends on the distance of query and key.
    pub relative: Option<Relative>,
    /// One logit per query head `[H]` that takes part in the softmax without a value; it is included in the log-sum-exp.
    pub sinks: Option<Vec<f32>>,
    /// Dropout of the weights.
    pub dropout: Option<Dropout>,
}

/// A term of the score that depends on the head and on the distance of the query behind the key.
#[derive(Debug, Clone, PartialEq)]
pub enum Relative {
    /// `-slopes[head] * |distance|` (ALiBi; Press et al., 2022, arXiv:2108.12409).
    Alibi {
        /// One slope per query head `[H]`.
        slopes: Vec<f32>,
    },
    /// A learned term for each bucket of distances (T5; Raffel et al., 2020, arXiv:1910.10683).
    Buckets(Buckets),
}

/// T5's buckets: one for each small distance, then logarithmically wider, and one for all distances from `max_distance` on.
#[derive(Debug, Clone, PartialEq)]
pub struct Buckets {
    /// The terms, `[H, count]`.
    pub table: Vec<f32>,
    /// Number of buckets per head.
    pub count: usize,
    /// Distance from which on all share the last bucket.
    pub max_distance: usize,
    /// Whether keys ahead of the query have their own buckets (encoders); otherwise they count as distance 0.
    pub bidirectional: bool,
}

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

impl Score {
    /// Largest absolute scale: queries up to 3e8 stay finite when they are scaled by it.
    pub const LARGEST_SCALE: f32 = 1e30;
    /// Largest softcap, sink, term of relative buckets and of a bias: the sum of three of them stays finite.
    pub const LARGEST_TERM: f32 = 1e38;
    /// Largest absolute ALiBi slope: with any distance that can be counted, its terms stay below
    /// [`LARGEST_TERM`](Self::LARGEST_TERM).
    pub const LARGEST_SLOPE: f32 = 1e18;

    /// Plain scaled dot products.
    pub const fn new(scale: f32) -> Self {
        Self { scale, softcap: None, relative: None, sinks: None, dropout: None }
    }

    /// Adds a zero logit to the softmax, so that a query may attend to nothing ("off by one"; Miller, 2023).
    pub fn off_by_one(self, heads: usize) -> Self {
        Self { sinks: Some(vec![0.0; heads]), ..self }
    }

    /// The relative term of `head` for a distance (query's position minus the key's).
    pub fn relative(&self, head: usize, distance: i64) -> f32 {
        match &self.relative {
            None => 0.0,
            Some(Relative::Alibi { slopes }) => -slopes[head] * distance.unsigned_abs() as f32,
            Some(Relative::Buckets(buckets)) => buckets.table[head * buckets.count + buckets.of(distance)],
        }
    }

    /// The parameters for some of the heads.
    pub fn heads(&self, heads: Range<usize>) -> Self {
        let relative = self.relative.as_ref().map(|relative| match relative {
            Relative::Alibi { slopes } => Relative::Alibi { slopes: slopes[heads.clone()].to_vec() },
            Relative::Buckets(buckets) => Relative::Buckets(Buckets {
                table: buckets.table[heads.start * buckets.count..heads.end * buckets.count].to_vec(),
                ..*buckets
            }),
        });
        Self {
            scale: self.scale,
            softcap: self.softcap,
            relative,
            sinks: self.sinks.as_ref().map(|sinks| sinks[heads.clone()].to_vec()),
            dropout: self.dropout.map(|dropout| Dropout { first_head: dropout.first_head + heads.start, ..dropout }),
        }
    }

    /// Whether scores or dropout depend on positions in the batch, and not only on which pairs are visible.
    pub(super) fn counts_positions(&self) -> bool {
        self.relative.is_some() || self.dropout.is_some_and(|dropout| dropout.rate > 0.0)
    }

    /// Number of elements of the table whose gradient the backward pass computes: `[H, count]`, or 0 without buckets.
    pub fn table_len(&self) -> usize {
        match &self.relative {
            Some(Relative::Buckets(buckets)) => buckets.table.len(),
            _ => 0,
        }
    }

    /// Checks that the parameters fit `heads` query heads, and that their values are in the allowed ranges.
    ///
    /// # Errors
    /// The first parameter that does not, with its value.
    pub fn check(&self, heads: usize) -> Result<()> {
        let per_head = |what, len: usize, each: usize| {
            if len == heads * each {
                return Ok(());
            }
            Err(Error::Score(format!("{what} has {len} elements, but {heads} query heads need {}", heads * each)))
        };
        let each = |what: &str, values: &[f32], holds: fn(f32) -> bool| match values.iter().find(|x| !holds(**x)) {
            None => Ok(()),
            Some(bad) => Err(Error::Score(format!("{what}, not {bad:?}"))),
        };
        let is_logit = |x: f32| x <= Self::LARGEST_TERM;
        let (most, scale) = (Self::LARGEST_TERM, self.scale);
        if !scale.is_finite() {
            return Err(Error::Score(format!("the scale {scale} is not finite")));
        }
        if scale.abs() > Self::LARGEST_SCALE {
            let most = Self::LARGEST_SCALE;
            return Err(Error::Score(format!("the scale {scale:?} lies outside -{most:?}..{most:?}")));
        }
        if let Some(cap) = self.softcap {
            if !(cap > 0.0 && cap <= most) {
                return Err(Error::Score(format!(
                    "a softcap must be a number above 0 and up to {most:?}, not {cap:?}"
                )));
            }
            // The factor that products are multiplied by before tanh.
            let share = scale / cap;
            if scale != 0.0 && !(f32::MIN_POSITIVE..=Self::LARGEST_SCALE).contains(&share.abs()) {
                return Err(Error::Score(format!(
                    "the scale {scale:?} is {share:?} of the softcap {cap:?}; a share lies in {:?}..{:?}",
                    f32::MIN_POSITIVE,
                    Self::LARGEST_SCALE
                )));
            }
        }
        match &self.relative {
            Some(Relative::Alibi { slopes }) => {
                per_head("alibi_slopes", slopes.len(), 1)?;
                let is_slope = |x: f32| x.abs() <= Self::LARGEST_SLOPE;
                each(&format!("an ALiBi slope is a number up to {:?}", Self::LARGEST_SLOPE), slopes, is_slope)?;
            }
            Some(Relative::Buckets(buckets)) => {
                per_head("the table of relative buckets", buckets.table.len(), buckets.count)?;
                each(
                    &format!("a term of relative buckets is a number up to {most:?}, or -inf"),
                    &buckets.table,
                    is_logit,
                )?;
                let exact = buckets.exact();
                if exact == 0 || buckets.max_distance <= exact {
                    return Err(Error::Score(format!(
                        "{} relative buckets up to distance {} leave {exact} exact ones; there must be some, and the \
                         distance must lie beyond them",
                        buckets.count, buckets.max_distance
                    )));
                }
            }
            None => (),
        }
        if let Some(sinks) = &self.sinks {
            per_head("sinks", sinks.len(), 1)?;
            each(&format!("a sink is a number up to {most:?}, or -inf for none"), sinks, is_logit)?;
        }
        match self.dropout {
            Some(Dropout { rate, .. }) if !(0.0..1.0).contains(&rate) => {
                Err(Error::Score(format!("a dropout rate lies in 0..1, not at {rate}")))
            }
            _ => Ok(()),
        }
    }
}

impl Buckets {
    /// The bucket of a distance (query's position minus the key's).
    pub fn of(&self, distance: i64) -> usize {
        let (count, first) = match (self.bidirectional, distance < 0) {
            (true, ahead) => (self.count / 2, if ahead { self.count / 2 } else { 0 }),
            (false, _) => (self.count, 0),
        };
        let distance = if self.bidirectional { distance.unsigned_abs() } else { distance.max(0) as u64 };
        let exact = self.exact() as u64;
        if distance < exact {
            return first + distance as usize;
        }
        let part = (distance as f64 / exact as f64).ln() / (self.max_distance as f64 / exact as f64).ln();
        first + (exact as usize + (part * (count - exact as usize) as f64) as usize).min(count - 1)
    }

    /// The smallest distance of each bucket in one direction, in order: `[count]`, or `[count / 2]` if keys ahead of the query
    /// have their own buckets. With it a backend finds a bucket by bisection: the bucket of a distance is the last one whose smallest
    /// distance is not greater.
    pub fn first(&self) -> Vec<u64> {
        let side = if self.bidirectional { self.count / 2 } else { self.count };
        // Buckets increase with the distance, so bisection finds the smallest distance of each.
        let least = |bucket: usize| {
            let (mut low, mut high) = (0, self.max_distance as i64);
            while low < high {
                let middle = (low + high) / 2;
                if self.of(middle) >= bucket { high = middle } else { low = middle + 1 }
            }
            low as u64
        };
        (0..side).map(least).collect()
    }

    /// Number of distances that have their own bucket.
    fn exact(&self) -> usize {
        self.count / if self.bidirectional { 4 } else { 2 }
    }
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
        let (threshold, growth) = (self.threshold(), self.growth());
        for (row, query) in rows.chunks_exact_mut(columns.len().max(1)).zip(queries) {
            let words = self.row(head, *query);
            for (x, column) in row.iter_mut().zip(&columns) {
                *x = if keeps(words, *column, threshold) { *x * growth } else { 0.0 };
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
    pub fn growth(&self) -> f32 {
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
    use super::*;

    fn buckets(count: usize, max_distance: usize, bidirectional: bool) -> Buckets {
        Buckets { table: vec![0.0; count], count, max_distance, bidirectional }
    }

    #[test]
    fn buckets_are_exact_then_logarithmic_then_one() {
        // T5's defaults are 32 buckets and 128: a decoder has 16 exact ones, an encoder 8 in each direction.
        let decoder = buckets(32, 128, false);
        let of: Vec<usize> = [-5, 0, 1, 15, 16, 20, 64, 127, 128, 100_000].map(|d| decoder.of(d)).to_vec();
        assert_eq!(of, [0, 0, 1, 15, 16, 17, 26, 31, 31, 31]);
        let encoder = buckets(32, 128, true);
        let of: Vec<usize> = [0, 7, 8, 127, 5000, -1, -7, -8, -5000].map(|d| encoder.of(d)).to_vec();
        assert_eq!(of, [0, 7, 8, 15, 15, 17, 23, 24, 31]);
    }

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
            assert_eq!(*x, if stays { before * dropout.growth() } else { 0.0 });
        }
        dropout.drop_rows(0, &queries, 3..3, &mut []);
    }

    #[test]
    fn parameters_that_do_not_fit_name_their_numbers() {
        let score = Score::new(1.0);
        let refused = |score: Score| score.check(4).expect_err("must not fit").to_string();
        assert!(score.check(4).is_ok() && score.clone().off_by_one(4).check(4).is_ok());
        let sinks = Score { sinks: Some(vec![0.0; 3]), ..score.clone() };
        assert!(refused(sinks).contains("3 elements, but 4 query heads"));
        let slopes = Some(Relative::Alibi { slopes: vec![0.0; 5] });
        assert!(refused(Score { relative: slopes, ..score.clone() }).contains("alibi_slopes has 5"));
        let few = Some(Relative::Buckets(Buckets { table: vec![0.0; 8], ..buckets(2, 128, true) }));
        assert!(refused(Score { relative: few, ..score.clone() }).contains("2 relative buckets"));
        for bad in [f32::NAN, f32::INFINITY] {
            let message = refused(Score { sinks: Some(vec![0.0, bad, 0.0, 0.0]), ..score.clone() });
            assert!(message.contains("a sink is") && message.contains(&bad.to_string()), "{message}");
            let slopes = Some(Relative::Alibi { slopes: vec![0.5, 0.5, 0.5, bad] });
            assert!(refused(Score { relative: slopes, ..score.clone() }).contains("slope"));
            let table = Buckets { table: [vec![0.0; 31], vec![bad]].concat(), ..buckets(8, 128, false) };
            let table = Some(Relative::Buckets(table));
            assert!(refused(Score { relative: table, ..score.clone() }).contains("relative buckets"));
        }
        let none = Score { sinks: Some(vec![f32::NEG_INFINITY; 4]), ..score.clone() };
        assert!(none.check(4).is_ok());
        for cap in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(refused(Score { softcap: Some(cap), ..score.clone() }).contains("softcap"));
        }
        for (limit, score) in [
            ("1e38", Score { softcap: Some(2.4e38), ..score.clone() }),
            ("1e30", Score { scale: 1e38, ..score.clone() }),
            ("1e30", Score { scale: -1e38, ..score.clone() }),
            ("1e30", Score { softcap: Some(1e-31), ..score.clone() }),
            ("1.1754944e-38", Score { scale: 0.1, softcap: Some(9e37), ..score.clone() }),
            ("1e38", Score { sinks: Some(vec![0.0, 3e38, 0.0, 0.0]), ..score.clone() }),
            ("1e18", Score { relative: Some(Relative::Alibi { slopes: vec![-1e19; 4] }), ..score.clone() }),
        ] {
            let message = refused(score);
            assert!(message.contains(limit), "{message}");
        }
        for hidden in [f32::MIN, f32::NEG_INFINITY] {
            let table = Buckets { table: vec![hidden; 32], ..buckets(8, 128, false) };
            let relative = Some(Relative::Buckets(table));
            assert!(Score { relative, sinks: Some(vec![hidden; 4]), ..score.clone() }.check(4).is_ok());
        }
        let all = Some(Dropout { rate: 1.0, seed: 0, first_head: 0, first_query: 0 });
        assert!(refused(Score { dropout: all, ..score }).contains("dropout"));
    }
}
