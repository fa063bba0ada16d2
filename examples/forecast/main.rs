//! A model that is not one of language, trained unit by unit on series whose readings are distributed over ranks.
//!
//! `cargo run --release --example forecast [RANKS [STEPS [READINGS]]]` trains on RANKS threads (4 by default) and
//! on one, and prints both losses: they are equal but for rounding. The model (`model.rs`) implements `Model` and `TrainableModel`;
//! gradients come from `loss_and_gradients`, the optimizer and the loop from `ringspan-train`, all as the trainer of language models
//! and that of videos use them.

mod model;
mod sensors;

use candle_core::{Device, Tensor};
use model::{Forecaster, Readings};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan::{Rank, World};
use ringspan_candle::gradients::loss_and_gradients;
use ringspan_candle::model::{Init, Parameter};
use ringspan_candle::{Context, Model, Recompute, Weights};
use ringspan_train::{Optimizer, OptimizerConfig, StepOutcome, Steps, TrainingRun, UpdateArguments, run_steps};
use sensors::SENSORS;
use std::collections::BTreeMap;
use std::time::Instant;

type Error = Box<dyn std::error::Error + Send + Sync>;

fn main() -> Result<(), Error> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |default| arguments.next().map_or(Ok(default), |number| number.parse::<usize>());
    let (ranks, steps, readings) = (number(4)?, number(200)?, number(1023)?);
    println!(
        "{ranks} ranks, then one; {steps} steps, each with a new series of {readings} readings of {SENSORS} sensors"
    );
    let [many, one] = [ranks, 1].map(|ranks| {
        let start = Instant::now();
        let losses = train(ranks, steps, readings)?;
        println!("{ranks} {}: {:.1} s", if ranks == 1 { "rank" } else { "ranks" }, start.elapsed().as_secs_f64());
        Ok::<_, Error>(losses)
    });
    let (many, one) = (many?, one?);
    println!("{:>6} {:>14} {:>14} {:>20}", "step", format!("{ranks} ranks"), "1 rank", "repeating the last");
    for step in (0..steps).filter(|step| step % 10 == 0 || step + 1 == steps) {
        let repeating = sensors::error_of_repeating(&sensors::series(readings + 1, step as u64));
        println!("{step:>6} {:>14.5} {:>14.5} {repeating:>20.5}", many[step], one[step]);
    }
    Ok(())
}

/// Trains a new model, and returns the mean squared error of each step.
fn train(ranks: usize, steps: usize, readings: usize) -> Result<Vec<f32>, Error> {
    if readings == 0 {
        return Err("a series needs at least one reading".into());
    }
    let mut losses = World::threads(ranks)?.run(|rank| {
        let context = Context::builder(rank).batch(1, readings).build()?;
        let (model, method) =
            (Forecaster::new(), OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.0 });
        let weights = model.all_parameters().iter().map(initial).collect::<Result<_, _>>()?;
        let mut run =
            Run { rank, context, model, weights, optimizer: Optimizer::new(method), readings, losses: vec![] };
        run_steps(&mut run, Steps { first: 0, total: steps as u64, save_every: None })?;
        Ok::<_, Error>(run.losses)
    })?;
    Ok(losses.swap_remove(0))
}

/// A training as one rank takes part in it. Each rank holds all weights and some readings of each series.
struct Run<'a> {
    rank: &'a Rank,
    context: Context,
    model: Forecaster,
    weights: Weights,
    optimizer: Optimizer,
    /// Number of readings of a series.
    readings: usize,
    /// The loss of each step.
    losses: Vec<f32>,
}

impl TrainingRun for Run<'_> {
    type Error = Error;

    fn agreed_to_stop(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    fn step(&mut self, index: u64) -> Result<StepOutcome<Error>, Error> {
        let series =
            Tensor::from_vec(sensors::series(self.readings + 1, index), (1, self.readings + 1, SENSORS), &Device::Cpu)?;
        let shard = |first| self.context.shard(&series.narrow(1, first, self.readings)?)?.squeeze(0);
        let (inputs, targets) = (shard(0)?, shard(1)?);
        let batch = Readings { inputs: &inputs, targets: &targets, count: self.readings * SENSORS };
        let mut gradients = BTreeMap::new();
        let loss = loss_and_gradients(
            &self.model,
            &self.weights,
            &batch,
            Recompute::Full,
            &self.context,
            &mut |_, of_unit| {
                for (name, gradient) in of_unit {
                    let mut sum = gradient.flatten_all()?.to_vec1::<f32>()?;
                    self.rank.communicator().all_reduce(&mut sum).map_err(candle_core::Error::wrap)?;
                    gradients.insert(name, sum);
                }
                Ok(())
            },
        )?;
        self.losses.push(self.context.all_reduce_sum(loss as f32)?);
        let arguments = UpdateArguments { step: index, lr: 3e-3, scale: 1.0, has_weight_decay: false };
        for (name, gradient) in gradients {
            let weight =
                self.weights.get_mut(&name).ok_or_else(|| format!("a gradient of {name}, which has no weight"))?;
            let mut values = weight.flatten_all()?.to_vec1::<f32>()?;
            self.optimizer.update(&name, arguments, &mut values, &gradient)?;
            *weight = Tensor::from_vec(values, weight.shape(), &Device::Cpu)?;
        }
        Ok(StepOutcome::Done)
    }

    fn save(&mut self, _steps: u64) -> Result<(), Error> {
        // The example shows losses, and keeps no model.
        Ok(())
    }
}

/// The initial values of a parameter, the same on all ranks and in each run.
fn initial(parameter: &Parameter) -> Result<(String, Tensor), Error> {
    let Parameter { name, shape, init, .. } = parameter;
    let seed = name.bytes().fold(0_u64, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte)));
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let deviation = 1.0 / (shape.last().map_or(1.0, |inputs| *inputs as f32)).sqrt();
    let mut value = || match init {
        Init::Constant(value) => *value,
        // Uniform, with this standard deviation.
        Init::Normal => deviation * 3f32.sqrt() * (random.next_u32() as f32 / (1u32 << 31) as f32 - 1.0),
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| value()).collect();
    Ok((name.clone(), Tensor::from_vec(values, shape.as_slice(), &Device::Cpu)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_do_not_depend_on_the_number_of_ranks_and_fall_below_those_of_repeating() {
        let one = train(1, 100, 61).expect("a training");
        for ranks in [2, 3] {
            let many = train(ranks, 100, 61).expect("a training");
            let are_equal = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-3 * b;
            assert!(many.iter().zip(&one).all(are_equal), "{ranks} ranks: {many:?}, one: {one:?}");
        }
        let repeating: f32 = (90..100).map(|step| sensors::error_of_repeating(&sensors::series(62, step))).sum();
        let forecast: f32 = one[90..].iter().sum();
        assert!(forecast < repeating, "{forecast} and {repeating}: {one:?}");
    }

    #[test]
    fn ranks_may_have_no_readings() {
        let (one, four) = (train(1, 3, 2).expect("a training"), train(4, 3, 2).expect("a training"));
        assert!(four.iter().zip(&one).all(|(a, b)| (a - b).abs() <= 1e-4 * b), "{four:?} {one:?}");
    }
}
