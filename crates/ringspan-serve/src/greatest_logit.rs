//! The most likely token of a vocabulary, parts of which may be on other ranks.

use crate::error::{Error, Result};
use ringspan_candle::pool;

/// The greatest logit of some tokens, or the first of them that is NaN or infinite, with which no token can be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct GreatestLogit {
    token: usize,
    logit: f32,
}

impl GreatestLogit {
    /// The greatest of the logits of the tokens from `first` on, with the lowest token among equals; `None` if there are no logits.
    pub(crate) fn new(logits: &[f32], first: usize) -> Option<Self> {
        let max = pool::vectorized(
            #[inline(always)]
            || greatest(logits),
        );
        let index = match max {
            Some(max) => logits.iter().position(|logit| *logit == max),
            None => logits.iter().position(|logit| is_invalid_logit(*logit)),
        };
        index.map(|index| Self { token: first + index, logit: logits[index] })
    }

    /// The greatest of the logits of both, which are of different tokens.
    pub(crate) fn or(self, other: Self) -> Self {
        let (low, high) = if self.token < other.token { (self, other) } else { (other, self) };
        let only_high_is_wrong = is_invalid_logit(high.logit) && !is_invalid_logit(low.logit);
        if only_high_is_wrong || high.logit > low.logit { high } else { low }
    }

    /// The token, the most likely one of a vocabulary of this size.
    ///
    /// # Errors
    /// Logits with which no token can be drawn.
    pub(crate) fn token(self, vocabulary: usize) -> Result<usize> {
        let Self { token, logit } = self;
        let refused = |problem| Err(Error::Logits { vocabulary, problem });
        match logit {
            _ if is_invalid_logit(logit) => refused(format!("the one of token {token} is {logit}")),
            f32::NEG_INFINITY => refused("all are -inf".into()),
            _ => Ok(token),
        }
    }

    /// Token and logit as words of a message.
    pub(crate) fn to_words(self) -> [u64; 2] {
        [self.token as u64, u64::from(self.logit.to_bits())]
    }

    /// The reverse of [`to_words`](Self::to_words); `None` for words that it does not return.
    pub(crate) fn from_words([token, logit]: [u64; 2]) -> Option<Self> {
        Some(Self { token: token.try_into().ok()?, logit: f32::from_bits(logit.try_into().ok()?) })
    }
}

/// Whether a logit is invalid: NaN or +inf. -inf is valid: it excludes a token.
fn is_invalid_logit(logit: f32) -> bool {
    logit.is_nan() || logit == f32::INFINITY
}

/// The greatest logit, -inf if there are none; `None` if one is NaN or +inf.
#[inline(always)]
fn greatest(logits: &[f32]) -> Option<f32> {
    // With a single maximum the compiler must keep the order of comparisons; maxima of columns are computed by vector instructions.
    const LANES: usize = 32;
    let (mut max, mut is_logit) = ([f32::NEG_INFINITY; LANES], [true; LANES]);
    let chunks = logits.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for ((max, is_logit), logit) in max.iter_mut().zip(&mut is_logit).zip(chunk) {
            *max = if *logit > *max { *logit } else { *max };
            *is_logit &= *logit < f32::INFINITY;
        }
    }
    let all_are = is_logit.into_iter().all(|is_logit| is_logit) && !rest.iter().any(|logit| is_invalid_logit(*logit));
    all_are.then(|| max.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers with equal ones and, at the places in `wrong`, others.
    fn logits(count: usize, wrong: &[(usize, f32)]) -> Vec<f32> {
        let mut logits: Vec<f32> = (0..count).map(|index| (index * 7919 % 101) as f32 - 200.0).collect();
        wrong.iter().for_each(|(index, logit)| logits[*index] = *logit);
        logits
    }

    /// Token by token, as a person would look for it.
    fn plain(logits: &[f32]) -> Option<usize> {
        let wrong = logits.iter().position(|logit| is_invalid_logit(*logit));
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        wrong.or_else(|| logits.iter().position(|logit| *logit == max))
    }

    #[test]
    fn the_lowest_of_the_greatest_is_found_wherever_a_vocabulary_is_divided() {
        let (nan, inf) = (f32::NAN, f32::INFINITY);
        for count in [1, 31, 32, 33, 517] {
            let last = count - 1;
            for wrong in [&[][..], &[(last, nan)], &[(last / 2, inf), (last, nan)], &[(0, -inf)], &[(last, 7.0)]] {
                let logits = logits(count, wrong);
                let whole = GreatestLogit::new(&logits, 0).expect("logits");
                assert_eq!(Some(whole.token), plain(&logits), "{count} {wrong:?}");
                for cut in [1, count / 3, count / 2, last] {
                    let (low, high) = logits.split_at(cut);
                    let parts = [GreatestLogit::new(low, 0), GreatestLogit::new(high, cut)];
                    for parts in [parts, [parts[1], parts[0]]] {
                        let joined = parts.into_iter().flatten().reduce(GreatestLogit::or).expect("logits");
                        assert_eq!(joined.to_words(), whole.to_words(), "{count} {wrong:?} {cut}");
                        assert_eq!(
                            GreatestLogit::from_words(joined.to_words()).map(|from| from.token),
                            Some(whole.token)
                        );
                    }
                }
            }
        }
        assert_eq!(GreatestLogit::new(&[], 0), None);
        assert_eq!(GreatestLogit::from_words([0, u64::MAX]), None);
    }
}
