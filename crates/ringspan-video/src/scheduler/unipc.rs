//! UniPC: a predictor and a corrector of second order that share what the model predicted (Zhao et al., 2023, arXiv:2302.04867).
//!
//! With alpha = 1 - sigma and lambda = ln(alpha / sigma), latents follow from each other by an exponential integrator in lambda,
//! over which the predicted data x0 is a polynomial. The last noise level is 0, where lambda is infinite and the step ends at x0.

use super::{linspace, no_more_steps, shifted};
use crate::error::Result;
use candle_core::Tensor;

/// UniPC with the noise levels of diffusers' `UniPCMultistepScheduler` for flows, and its solver `bh2`.
#[derive(Debug)]
pub struct UniPc {
    timesteps: Vec<f32>,
    sigmas: Vec<f32>,
    order: usize,
    next: usize,
    /// The data x0 that the last two steps predicted, the newest last.
    predicted: Vec<Tensor>,
    /// The latents from which the last step began, and its order.
    last: Option<(Tensor, usize)>,
}

impl UniPc {
    pub(super) fn new(steps: usize, shift: f64, train_timesteps: usize, order: usize) -> Self {
        let all = train_timesteps as f64;
        let mut levels: Vec<f64> =
            linspace(1.0, 1.0 / all, steps + 1).take(steps).map(|sigma| shifted(sigma, shift)).collect();
        // At sigma 1 lambda would be infinite.
        if let Some(first) = levels.first_mut().filter(|first| (**first - 1.0).abs() < 1e-6) {
            *first -= 1e-6;
        }
        let timesteps = levels.iter().map(|sigma| (sigma * all).trunc() as f32).collect();
        let sigmas = levels.into_iter().chain([0.0]).map(|sigma| sigma as f32).collect();
        Self { timesteps, sigmas, order, next: 0, predicted: Vec::new(), last: None }
    }

    pub(super) fn timesteps(&self) -> &[f32] {
        &self.timesteps
    }

    pub(super) fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    pub(super) fn step(&mut self, latents: &Tensor, velocity: &Tensor) -> Result<Tensor> {
        let (step, steps) = (self.next, self.timesteps.len());
        if step >= steps {
            return Err(no_more_steps(steps));
        }
        self.next += 1;
        let predicted = (latents - (velocity * f64::from(self.sigmas[step]))?)?;
        let corrected = match self.last.take() {
            None => latents.clone(),
            Some((from, order)) => self.corrected(step, order, &from, &predicted)?,
        };
        self.predicted.push(predicted);
        if self.predicted.len() > 2 {
            self.predicted.remove(0);
        }
        // The first step knows one prediction, and the last one ends at the prediction.
        let order = self.order.min(steps - step).min(step + 1);
        let next = self.predicted(step, order, &corrected)?;
        self.last = Some((corrected, order));
        Ok(next)
    }

    fn sigma(&self, step: usize) -> f64 {
        f64::from(self.sigmas[step])
    }

    fn lambda(&self, step: usize) -> f64 {
        let sigma = self.sigma(step);
        (1.0 - sigma).ln() - sigma.ln()
    }

    /// The latents of `step`, computed again from those of the step before, `from`, now that the data at `step` is predicted.
    fn corrected(&self, step: usize, order: usize, from: &Tensor, predicted: &Tensor) -> Result<Tensor> {
        let h = self.lambda(step) - self.lambda(step - 1);
        let phi = (-h).exp_m1();
        let alpha = 1.0 - self.sigma(step);
        let newest = &self.predicted[self.predicted.len() - 1];
        let base = weighted([(from, self.sigma(step) / self.sigma(step - 1)), (newest, -alpha * phi)])?;
        let slope = (predicted - newest)?;
        if order == 1 {
            return weighted([(&base, 1.0), (&slope, -alpha * phi * 0.5)]);
        }
        let r = (self.lambda(step - 2) - self.lambda(step - 1)) / h;
        let older = ((&self.predicted[0] - newest)? / r)?;
        // The weights of both differences solve [[1, 1], [r, 1]] w = b.
        let k = phi / -h - 1.0;
        let b = [k / phi, 2.0 * (k / -h - 0.5) / phi];
        let of_older = (b[0] - b[1]) / (1.0 - r);
        let of_slope = b[0] - of_older;
        let weight = -alpha * phi;
        weighted([(&base, 1.0), (&older, weight * of_older), (&slope, weight * of_slope)])
    }

    /// The latents of the step after `step`, from those of `step` and the predictions up to it.
    fn predicted(&self, step: usize, order: usize, latents: &Tensor) -> Result<Tensor> {
        let newest = &self.predicted[self.predicted.len() - 1];
        if self.sigmas[step + 1] == 0.0 {
            return Ok(newest.clone());
        }
        let h = self.lambda(step + 1) - self.lambda(step);
        let phi = (-h).exp_m1();
        let alpha = 1.0 - self.sigma(step + 1);
        let base = weighted([(latents, self.sigma(step + 1) / self.sigma(step)), (newest, -alpha * phi)])?;
        if order == 1 {
            return Ok(base);
        }
        let r = (self.lambda(step - 1) - self.lambda(step)) / h;
        let older = ((&self.predicted[0] - newest)? / r)?;
        weighted([(&base, 1.0), (&older, -alpha * phi * 0.5)])
    }
}

/// The sum of tensors with weights.
fn weighted<const N: usize>(terms: [(&Tensor, f64); N]) -> Result<Tensor> {
    let mut terms = terms.into_iter().map(|(tensor, weight)| tensor * weight);
    let Some(first) = terms.next() else {
        return Err(candle_core::Error::Msg("a sum without terms".into()).into());
    };
    Ok(terms.try_fold(first?, |sum, term| sum + term?)?)
}
