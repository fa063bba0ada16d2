//! Schedulers of flow matching: which noise levels the steps of a run have, and how a step follows from the velocity.
//!
//! Latents of noise level sigma are `(1 - sigma) x0 + sigma noise`, and the model predicts the velocity `noise - x0`. All arithmetic
//! on latents is f32, with coefficients in f64.

mod config;
mod euler;
mod unipc;

pub use config::SchedulerConfig;
pub use euler::FlowMatchEuler;
pub use unipc::UniPc;

use crate::error::{Error, Result};
use candle_core::Tensor;
use std::fmt;
use std::str::FromStr;

/// Which scheduler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchedulerKind {
    /// Steps along the velocity: diffusers' `FlowMatchEulerDiscreteScheduler`.
    Euler,
    /// A multistep predictor and corrector of second order (Zhao et al., 2023, arXiv:2302.04867): diffusers'
    /// `UniPCMultistepScheduler`.
    UniPc,
}

impl FromStr for SchedulerKind {
    type Err = Error;

    fn from_str(given: &str) -> Result<Self> {
        match given {
            "euler" => Ok(Self::Euler),
            "unipc" => Ok(Self::UniPc),
            _ => Err(Error::Input(format!("scheduler '{given}': possible are unipc, euler"))),
        }
    }
}

impl fmt::Display for SchedulerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Euler => "euler",
            Self::UniPc => "unipc",
        })
    }
}

/// A scheduler in the middle of a run.
#[derive(Debug)]
pub enum Scheduler {
    /// Euler's method.
    Euler(FlowMatchEuler),
    /// UniPC.
    UniPc(UniPc),
}

impl Scheduler {
    /// A scheduler for a run of so many steps.
    ///
    /// # Errors
    /// No step, more steps than time steps of training, a shift that is not above 0, and an order other than 1 and 2.
    pub fn new(config: &SchedulerConfig, steps: usize) -> Result<Self> {
        let SchedulerConfig { kind, shift, train_timesteps, solver_order } = *config;
        if steps == 0 || !(shift > 0.0 && shift.is_finite()) {
            return Err(Error::Input(format!(
                "{steps} steps with shift {shift}: steps must be at least 1, and shift above 0"
            )));
        }
        if steps > train_timesteps {
            return Err(Error::Input(format!(
                "{steps} steps, and the model was trained on {train_timesteps} time steps (num_train_timesteps)"
            )));
        }
        if !(1..=2).contains(&solver_order) {
            return Err(Error::Input(format!("solver_order is {solver_order}; 1 and 2 are implemented")));
        }
        Ok(match kind {
            SchedulerKind::Euler => Self::Euler(FlowMatchEuler::new(steps, shift, train_timesteps)),
            SchedulerKind::UniPc => Self::UniPc(UniPc::new(steps, shift, train_timesteps, solver_order)),
        })
    }

    /// The time steps, as the model takes them.
    #[must_use]
    pub fn timesteps(&self) -> &[f32] {
        match self {
            Self::Euler(euler) => euler.timesteps(),
            Self::UniPc(unipc) => unipc.timesteps(),
        }
    }

    /// The noise levels of the steps, and 0 at the end.
    #[must_use]
    pub fn sigmas(&self) -> &[f32] {
        match self {
            Self::Euler(euler) => euler.sigmas(),
            Self::UniPc(unipc) => unipc.sigmas(),
        }
    }

    /// The latents of the next noise level, from those of this one and their velocity, both of one shape in f32.
    ///
    /// # Errors
    /// More steps than there are, and shapes that differ.
    pub fn step(&mut self, latents: &Tensor, velocity: &Tensor) -> Result<Tensor> {
        if latents.shape() != velocity.shape() {
            let problem = format!("latents {:?} with a velocity {:?}", latents.shape(), velocity.shape());
            return Err(Error::Input(problem));
        }
        match self {
            Self::Euler(euler) => euler.step(latents, velocity),
            Self::UniPc(unipc) => unipc.step(latents, velocity),
        }
    }
}

/// The noise level `sigma` after a shift: more steps at high levels, for many tokens (Esser et al., 2024, arXiv:2403.03206).
fn shifted(sigma: f64, shift: f64) -> f64 {
    shift * sigma / (1.0 + (shift - 1.0) * sigma)
}

/// `count` equally spaced numbers from `first` to `last`.
fn linspace(first: f64, last: f64, count: usize) -> impl Iterator<Item = f64> {
    let step = (last - first) / count.saturating_sub(1).max(1) as f64;
    (0..count).map(move |index| if index > 0 && index + 1 == count { last } else { first + step * index as f64 })
}

/// An error for a step after the last.
fn no_more_steps(steps: usize) -> Error {
    Error::Input(format!("all {steps} steps have been taken"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Row {
        kind: SchedulerName,
        shift: f64,
        steps: usize,
        timesteps: Vec<f32>,
        sigmas: Vec<f32>,
        path: Vec<f64>,
    }

    #[derive(Deserialize, Clone, Copy)]
    #[serde(rename_all = "lowercase")]
    enum SchedulerName {
        Euler,
        Unipc,
    }

    #[test]
    fn numbers_of_steps_and_orders_that_are_impossible_are_refused() {
        let refused = |config: SchedulerConfig, steps: usize, words: &str| {
            let found = Scheduler::new(&config, steps).expect_err("must be refused").to_string();
            assert!(found.contains(words), "{found}");
        };
        for kind in [SchedulerKind::Euler, SchedulerKind::UniPc] {
            let config = SchedulerConfig::new(kind);
            refused(config, 0, "0 steps");
            refused(config, 4_000_000_000, "4000000000 steps, and the model was trained on 1000");
            refused(SchedulerConfig { solver_order: 0, ..config }, 4, "solver_order is 0");
            refused(SchedulerConfig { train_timesteps: 0, ..config }, 1, "trained on 0");
        }
    }

    /// Noise levels and time steps to the bit, and the trajectory of a known velocity, with 1 to 50 steps.
    #[test]
    fn schedules_and_steps_are_those_of_diffusers() -> Result<()> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/transformer/schedules.json");
        let rows: Vec<Row> = crate::tensor_folder::read_json(path.as_ref())?;
        assert_eq!(rows.len(), 14);
        for Row { kind, shift, steps, timesteps, sigmas, path } in rows {
            let kind = match kind {
                SchedulerName::Euler => SchedulerKind::Euler,
                SchedulerName::Unipc => SchedulerKind::UniPc,
            };
            let mut scheduler = Scheduler::new(&SchedulerConfig { shift, ..SchedulerConfig::new(kind) }, steps)?;
            assert_eq!(scheduler.timesteps(), timesteps, "{kind}, shift {shift}");
            assert_eq!(scheduler.sigmas(), sigmas, "{kind}, shift {shift}");
            let mut x = Tensor::ones(1, candle_core::DType::F32, &Device::Cpu)?;
            for (index, wanted) in path.into_iter().enumerate() {
                let velocity = ((&x * 0.5)? + f64::from(sigmas[index]).powi(2))?;
                x = scheduler.step(&x, &velocity)?;
                let got = f64::from(x.to_vec1::<f32>()?[0]);
                assert!(
                    (got - wanted).abs() < 1e-5 * wanted.abs().max(1.0),
                    "{kind} {shift}, {index}: {got}, not {wanted}"
                );
            }
            let refused = scheduler.step(&x, &x).expect_err("no step is left").to_string();
            assert!(refused.contains(&steps.to_string()), "{refused}");
        }
        Ok(())
    }
}
