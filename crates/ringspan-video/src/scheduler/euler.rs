//! Euler's method on the flow of noise to data.

use super::{linspace, no_more_steps, shifted};
use crate::error::Result;
use candle_core::Tensor;

/// Euler's method, with the noise levels of diffusers' `FlowMatchEulerDiscreteScheduler`.
#[derive(Debug)]
pub struct FlowMatchEuler {
    timesteps: Vec<f32>,
    sigmas: Vec<f32>,
    next: usize,
}

impl FlowMatchEuler {
    pub(super) fn new(steps: usize, shift: f64, train_timesteps: usize) -> Self {
        let all = train_timesteps as f64;
        // The levels of training are shifted in f32. Their ends are shifted once more with all between them.
        let of_training = |index: usize| {
            let (sigma, shift) = (index as f32 / train_timesteps as f32, shift as f32);
            shift * sigma / (1.0 + (shift - 1.0) * sigma)
        };
        let (first, last) = (f64::from(of_training(train_timesteps)), f64::from(of_training(1)));
        let levels = linspace(first * all, last * all, steps).map(|time| shifted(time / all, shift) as f32);
        let mut sigmas: Vec<f32> = levels.collect();
        let timesteps = sigmas.iter().map(|sigma| sigma * train_timesteps as f32).collect();
        sigmas.push(0.0);
        Self { timesteps, sigmas, next: 0 }
    }

    pub(super) fn timesteps(&self) -> &[f32] {
        &self.timesteps
    }

    pub(super) fn sigmas(&self) -> &[f32] {
        &self.sigmas
    }

    pub(super) fn step(&mut self, latents: &Tensor, velocity: &Tensor) -> Result<Tensor> {
        let Some([sigma, next]) = self.sigmas.get(self.next..self.next + 2) else {
            return Err(no_more_steps(self.timesteps.len()));
        };
        self.next += 1;
        Ok((latents + (velocity * f64::from(next - sigma))?)?)
    }
}
