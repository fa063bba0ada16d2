//! The softmax of a row of logits, of which a rank may hold a shard: its statistics, and the gradient.

use crate::activation::exp;

/// The softmax statistics of a row of logits.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowStatistics {
    /// The largest logit.
    pub(super) max: f32,
    /// The sum of the exponentials relative to the maximum.
    pub(super) sum: f64,
    /// The target's logit; 0 if this row does not contain it.
    pub(super) of_target: f64,
}

impl RowStatistics {
    pub(super) const NONE: Self = Self { max: f32::NEG_INFINITY, sum: 0.0, of_target: 0.0 };

    pub(super) fn nll(&self) -> f64 {
        f64::from(self.max) + self.sum.ln() - self.of_target
    }

    /// The factor that turns the exponentials of a shard of the vocabulary, with statistics `part`, into `scale` times
    /// probabilities.
    pub(super) fn factor(&self, part: &Self, scale: f32) -> f32 {
        (f64::from(scale) / self.sum * f64::from(part.max - self.max).exp()) as f32
    }

    /// Combines the statistics with those of another shard of the vocabulary.
    pub(super) fn add(&mut self, other: &Self) {
        // f32::max would ignore a NaN.
        let max = if other.max > self.max || other.max.is_nan() { other.max } else { self.max };
        let relative = |part: &Self| if part.sum == 0.0 { 0.0 } else { part.sum * f64::from(part.max - max).exp() };
        *self = Self { max, sum: relative(self) + relative(other), of_target: self.of_target + other.of_target };
    }
}

/// Turns a row of logits into exponentials relative to its maximum, and returns its statistics.
#[inline(always)]
pub(super) fn row_statistics(row: &mut [f32], target: Option<usize>) -> RowStatistics {
    let of_target = target.map_or(0.0, |target| f64::from(row[target]));
    let (max, sum) = exponentials(row);
    RowStatistics { max, sum, of_target }
}

/// `cap * tanh(x / cap)`.
#[inline(always)]
pub(super) fn capped(x: f32, cap: f32) -> f32 {
    let u = x / cap;
    // 1 - 2 / (e^2u + 1) loses digits where u is small, so there tanh is computed by its series up to u^9.
    let square = u * u;
    let terms = 1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0)));
    let closed = 1.0 - 2.0 / (exp(2.0 * u) + 1.0);
    cap * if square < 0.0625 { u * (1.0 - square * terms) } else { closed }
}

/// Turns a row of exponentials into `scale` times the gradient of the negative log-likelihood of the target, which is at
/// `index` if it is in this row. `sums` are the statistics of the row, `totals` those of the whole vocabulary. With a
/// softcap, the result is the gradient with respect to the logits before the cap.
#[inline(always)]
pub(super) fn gradient(
    row: &mut [f32],
    index: Option<usize>,
    scale: f32,
    sums: &RowStatistics,
    totals: &RowStatistics,
    softcap: Option<f32>,
) {
    let factor = totals.factor(sums, scale);
    let Some(cap) = softcap else {
        row.iter_mut().for_each(|x| *x *= factor);
        if let Some(index) = index {
            row[index] -= scale;
        }
        return;
    };
    // The capped logit is recovered from its exponential; where the exponential is 0, so is the gradient.
    let slope = |y: f32| 1.0 - (y / cap) * (y / cap);
    let of_target = index.map(|index| (index, (row[index] * factor - scale) * slope(sums.of_target as f32)));
    for x in row.iter_mut() {
        *x = if *x > 0.0 { *x * factor * slope(sums.max + x.ln()) } else { *x };
    }
    if let Some((index, gradient)) = of_target {
        row[index] = gradient;
    }
}

/// Turns a row into exponentials relative to its maximum; returns the maximum and their sum.
#[inline(always)]
fn exponentials(row: &mut [f32]) -> (f32, f64) {
    /// The maximum and the sum are computed in this many lanes, so that they vectorise; after each `BLOCK` of elements,
    /// f64 takes over the f32 sums.
    const LANES: usize = 16;
    const BLOCK: usize = 32 * LANES;
    let mut most = [f32::NEG_INFINITY; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder().iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for chunk in chunks {
        most.iter_mut().zip(chunk).for_each(|(most, x)| *most = if *x > *most { *x } else { *most });
    }
    let max = most.into_iter().fold(rest, f32::max);
    let mut sum = 0.0f64;
    for block in row.chunks_mut(BLOCK) {
        block.iter_mut().for_each(|x| *x = exp(*x - max));
        let mut sums = [0.0f32; LANES];
        let chunks = block.chunks_exact(LANES);
        sum += chunks.remainder().iter().map(|&x| f64::from(x)).sum::<f64>();
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x);
        }
        sum += sums.into_iter().map(f64::from).sum::<f64>();
    }
    (max, sum)
}
