//! Steps in which the blocks of the transformer are skipped: they add what they added in an earlier step, as long as the time step has
//! changed little. The decision is TeaCache's (Liu et al., 2024, arXiv:2411.19108), as its authors made it for WAN 2.1.

use crate::transformer::WanConfig;
use candle_core::Tensor;

/// By how much the output changes with the embedding of the time step: a polynomial of the relative change of the embedding.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ChangeEstimate {
    /// The model whose authors have fitted the polynomial.
    pub(super) model: Option<&'static str>,
    /// Coefficients, that of the highest power first.
    pub(super) coefficients: &'static [f64],
}

/// The relative change itself.
const PLAIN: ChangeEstimate = ChangeEstimate { model: None, coefficients: &[1.0, 0.0] };
const T2V_1_3B: ChangeEstimate = ChangeEstimate {
    model: Some("WAN 2.1 T2V 1.3B"),
    coefficients: &[2.396_767_52e3, -1.311_105_45e3, 2.013_319_79e2, -8.298_559_75, 1.378_877_74e-1],
};
const T2V_14B: ChangeEstimate = ChangeEstimate {
    model: Some("WAN 2.1 T2V 14B"),
    coefficients: &[-5_784.549_753_74, 5_449.509_119_66, -1_811.165_917_83, 256.271_784_29, -13.022_524_04],
};

impl ChangeEstimate {
    /// The estimate of a model, which its sizes tell, in a pipeline of so many transformers. The checkpoints for images have the
    /// same sizes for 480 and for 720 lines but other polynomials, so theirs is the relative change itself, as for all other models.
    pub(super) fn of(config: &WanConfig, transformers: usize) -> Self {
        let is_plain_text = config.vace_layers.is_none() && config.image_dim.is_none() && config.in_channels == 16;
        match (config.width(), config.num_layers, transformers) {
            (1536, 30, 1) if is_plain_text => T2V_1_3B,
            (5120, 40, 1) if is_plain_text => T2V_14B,
            _ => PLAIN,
        }
    }

    /// The estimated change of the output.
    fn at(self, change: f64) -> f64 {
        self.coefficients.iter().fold(0.0, |sum, coefficient| sum * change + coefficient)
    }
}

/// What a branch of guidance has of the steps before.
#[derive(Debug, Default)]
pub(super) struct FeatureCache {
    /// The embedding of the last time step.
    embedding: Option<Vec<f32>>,
    /// The estimated change since the blocks were last computed.
    change: f64,
    /// What the blocks added to this rank's tokens, `[T, C]`.
    pub(super) added: Option<Tensor>,
}

impl FeatureCache {
    /// Whether a step with this embedding of its time step can do without the blocks. It is asked in each step, in the order of steps.
    pub(super) fn skips(&mut self, embedding: Vec<f32>, estimate: ChangeEstimate, threshold: f64) -> bool {
        let last = self.embedding.replace(embedding);
        let (Some(last), Some(embedding)) = (last, &self.embedding) else { return false };
        let sum = |terms: &mut dyn Iterator<Item = f64>| terms.map(f64::abs).sum::<f64>();
        let apart = sum(&mut embedding.iter().zip(&last).map(|(a, b)| f64::from(*a) - f64::from(*b)));
        let change = estimate.at(apart / sum(&mut last.iter().map(|x| f64::from(*x))));
        // Polynomials are negative where nothing was measured, near 0; a change is not. No number stays no number.
        self.change += if change < 0.0 { 0.0 } else { change };
        // A change that is no number counts as large.
        let skips = self.change < threshold;
        if !skips {
            self.change = 0.0;
        }
        skips
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slowly, then quickly changing embeddings.
    fn embeddings() -> Vec<Vec<f32>> {
        let of_step = |step: i32| (0..7).map(|at| (at as f32 - 3.0) * (1.0 + 0.004 * (step * step) as f32)).collect();
        (0..20).map(of_step).collect()
    }

    fn decisions(estimate: ChangeEstimate, threshold: f64) -> Vec<bool> {
        let mut cache = FeatureCache::default();
        embeddings().into_iter().map(|embedding| cache.skips(embedding, estimate, threshold)).collect()
    }

    /// The decision in plain words: powers instead of Horner's scheme, sums over stored changes instead of a running one.
    fn plainly(estimate: ChangeEstimate, threshold: f64) -> Vec<bool> {
        let (all, mut skipped, mut since) = (embeddings(), vec![false], Vec::new());
        for pair in all.windows(2) {
            let mean = |x: Vec<f64>| x.iter().sum::<f64>() / x.len() as f64;
            let apart =
                mean(pair[0].iter().zip(&pair[1]).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).collect());
            let change = apart / mean(pair[0].iter().map(|a| f64::from(a.abs())).collect());
            let powers = estimate.coefficients.iter().rev().enumerate();
            let estimated = powers.map(|(power, factor)| factor * change.powi(power as i32)).sum::<f64>();
            since.push(if estimated < 0.0 { 0.0 } else { estimated });
            let skips = since.iter().sum::<f64>() < threshold;
            if !skips {
                since.clear();
            }
            skipped.push(skips);
        }
        skipped
    }

    /// Values by hand from the coefficients that TeaCache's authors publish.
    #[test]
    fn polynomials_have_the_published_values() {
        assert!((T2V_14B.at(0.16) - 0.1453).abs() < 1e-3, "{}", T2V_14B.at(0.16));
        assert!((T2V_1_3B.at(0.1) - 0.2499).abs() < 1e-3, "{}", T2V_1_3B.at(0.1));
    }

    #[test]
    fn decisions_are_those_in_plain_words() {
        for estimate in [PLAIN, T2V_1_3B] {
            let mut counts = Vec::new();
            for threshold in [1e-6, 0.03, 0.1, 0.3, 1e6] {
                let found = decisions(estimate, threshold);
                assert_eq!(found, plainly(estimate, threshold), "{estimate:?}, {threshold}");
                counts.push(found.iter().filter(|skips| **skips).count());
            }
            assert!(counts.is_sorted() && counts[1] < counts[2] && counts[2] < counts[3], "{counts:?}");
            assert_eq!(counts[4], 19, "all but the first");
        }
    }

    #[test]
    fn a_change_that_is_no_number_skips_nothing() {
        let mut cache = FeatureCache::default();
        let found = [0.0, 0.0, f32::NAN, 1.0].map(|x| cache.skips(vec![x], PLAIN, 1e9));
        assert_eq!(found, [false; 4]);
    }

    #[test]
    fn a_model_is_known_by_its_sizes() {
        let sizes = |heads, layers, channels| {
            let mut config = WanConfig::default();
            (config.num_attention_heads, config.num_layers, config.in_channels) = (heads, layers, channels);
            config
        };
        assert_eq!(ChangeEstimate::of(&sizes(12, 30, 16), 1), T2V_1_3B);
        assert_eq!(ChangeEstimate::of(&sizes(40, 40, 16), 1), T2V_14B);
        for (config, transformers) in [(sizes(40, 40, 16), 2), (sizes(40, 40, 36), 1), (sizes(12, 29, 16), 1)] {
            assert_eq!(ChangeEstimate::of(&config, transformers), PLAIN);
        }
    }
}
