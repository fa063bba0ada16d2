//! Score parameters: everything besides the mask that turns products into weights.

use super::{Buckets, Dropout, RelativeBias};
use crate::error::{Error, Result};
use std::ops::Range;

/// How the product of a query and a key becomes a weight, in this order:
///
/// 1. `s = scale * q.k`
/// 2. `s = softcap * tanh(s / softcap)` (Gemma 2, 2024)
/// 3. `s += relative(head, distance)`, [`RelativeBias`]
/// 4. `s += bias[query, head, key]`, given with the inputs of a call
/// 5. the mask
/// 6. the softmax, whose sum also holds `exp(sinks[head])` (attention sinks; gpt-oss, 2025)
/// 7. dropout of the weights, [`Dropout`]
///
/// ```
/// use ringspan::Score;
/// use ringspan::kernel::RelativeBias;
///
/// // Two heads with ALiBi's slopes, and a softmax that may attend to nothing.
/// let relative = Some(RelativeBias::Alibi { slopes: vec![0.5, 0.25] });
/// let score = Score { relative, ..Score::new(0.125).off_by_one(2) };
/// assert_eq!(score.relative(0, 3), -1.5);                       // three keys back
/// assert!(score.check(2).is_ok() && score.check(4).is_err());   // the slopes and sinks are those of two heads
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Score {
    /// Factor on `q . k`; usually 1/sqrt(D).
    pub scale: f32,
    /// Bound on the absolute value of a score.
    pub softcap: Option<f32>,
    /// Term that depends on the distance of query and key.
    pub relative: Option<RelativeBias>,
    /// One logit per query head `[H]` that takes part in the softmax without a value; it is included in the log-sum-exp.
    pub sinks: Option<Vec<f32>>,
    /// Dropout of the weights.
    pub dropout: Option<Dropout>,
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
            Some(RelativeBias::Alibi { slopes }) => -slopes[head] * distance.unsigned_abs() as f32,
            Some(RelativeBias::Buckets(buckets)) => buckets.table[head * buckets.count + buckets.of(distance)],
        }
    }

    /// The parameters for some of the heads.
    pub fn heads(&self, heads: Range<usize>) -> Self {
        let relative = self.relative.as_ref().map(|relative| match relative {
            RelativeBias::Alibi { slopes } => RelativeBias::Alibi { slopes: slopes[heads.clone()].to_vec() },
            RelativeBias::Buckets(buckets) => RelativeBias::Buckets(Buckets {
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
            Some(RelativeBias::Buckets(buckets)) => buckets.table.len(),
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
            Some(RelativeBias::Alibi { slopes }) => {
                per_head("alibi_slopes", slopes.len(), 1)?;
                let is_slope = |x: f32| x.abs() <= Self::LARGEST_SLOPE;
                each(&format!("an ALiBi slope is a number up to {:?}", Self::LARGEST_SLOPE), slopes, is_slope)?;
            }
            Some(RelativeBias::Buckets(buckets)) => {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn buckets(count: usize, max_distance: usize, bidirectional: bool) -> Buckets {
        Buckets { table: vec![0.0; count], count, max_distance, bidirectional }
    }

    #[test]
    fn parameters_that_do_not_fit_name_their_numbers() {
        let score = Score::new(1.0);
        let refused = |score: Score| score.check(4).expect_err("must not fit").to_string();
        assert!(score.check(4).is_ok() && score.clone().off_by_one(4).check(4).is_ok());
        let sinks = Score { sinks: Some(vec![0.0; 3]), ..score.clone() };
        assert!(refused(sinks).contains("3 elements, but 4 query heads"));
        let slopes = Some(RelativeBias::Alibi { slopes: vec![0.0; 5] });
        assert!(refused(Score { relative: slopes, ..score.clone() }).contains("alibi_slopes has 5"));
        let few = Some(RelativeBias::Buckets(Buckets { table: vec![0.0; 8], ..buckets(2, 128, true) }));
        assert!(refused(Score { relative: few, ..score.clone() }).contains("2 relative buckets"));
        for bad in [f32::NAN, f32::INFINITY] {
            let message = refused(Score { sinks: Some(vec![0.0, bad, 0.0, 0.0]), ..score.clone() });
            assert!(message.contains("a sink is") && message.contains(&bad.to_string()), "{message}");
            let slopes = Some(RelativeBias::Alibi { slopes: vec![0.5, 0.5, 0.5, bad] });
            assert!(refused(Score { relative: slopes, ..score.clone() }).contains("slope"));
            let table = Buckets { table: [vec![0.0; 31], vec![bad]].concat(), ..buckets(8, 128, false) };
            let table = Some(RelativeBias::Buckets(table));
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
            ("1e18", Score { relative: Some(RelativeBias::Alibi { slopes: vec![-1e19; 4] }), ..score.clone() }),
        ] {
            let message = refused(score);
            assert!(message.contains(limit), "{message}");
        }
        for hidden in [f32::MIN, f32::NEG_INFINITY] {
            let table = Buckets { table: vec![hidden; 32], ..buckets(8, 128, false) };
            let relative = Some(RelativeBias::Buckets(table));
            assert!(Score { relative, sinks: Some(vec![hidden; 4]), ..score.clone() }.check(4).is_ok());
        }
        let all = Some(Dropout { rate: 1.0, seed: 0, first_head: 0, first_query: 0 });
        assert!(refused(Score { dropout: all, ..score }).contains("dropout"));
    }
}
