//! One training step on one batch, with all that it computes, so that meshes can be compared.

use crate::{
    config::TrainConfig,
    data::Batch,
    error::Result,
    rank::{Rank, Stepped},
    setup::Setup,
};
use ringspan::comm::{ranks::Ranks, threads::Options};
use ringspan_candle::{Devices, Weights, pool};
use ringspan_models::Decoder;
use std::collections::BTreeMap;

/// The results of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trial {
    /// The mean loss over all targets, plus the auxiliary loss that balances the load of experts.
    pub loss: f64,
    /// Logits `[B * S, V]`, 0 in padding.
    pub logits: Vec<f32>,
    /// Gradients of the loss, by parameter.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// The parameters after one step of the optimiser.
    pub updated: BTreeMap<String, Vec<f32>>,
    /// How blocks travelled between GPUs, in words, where ranks are processes.
    pub blocks: Option<String>,
}

/// Runs one step of a model on a batch, on the mesh of `config`; returns none in a process without rank 0. All processes must
/// call this.
///
/// # Errors
/// A model that cannot be sharded over the mesh, and failures of ranks.
pub fn trial(
    ranks: &Ranks,
    config: &TrainConfig,
    (decoder, weights): (&Decoder, &Weights),
    batch: &Batch,
) -> Result<Option<Trial>> {
    let devices = Devices::open(config.device, ranks.local_rank())?.computing_in(config.dtype);
    let setup = Setup::of_batch(config, decoder.clone(), weights.clone(), batch.clone())?;
    let options = Options { deadline: config.deadline, ..Options::default() };
    let (ranks, blocks) = devices.connect(ranks, config.deadline)?;
    let trials = ranks.run(config.ranks(), options, |world| {
        let first = world.rank() == 0;
        let mine = pool::run(config.threads, || on_rank(Rank::new(config, &setup, &devices, world)?, &setup, batch))??;
        Ok::<_, crate::Error>(mine).map(|trial| if first { trial } else { Trial::default() })
    })?;
    Ok(trials.into_iter().next().filter(|_| ranks.lead()).map(|trial| Trial { blocks, ..trial }))
}

fn on_rank(mut rank: Rank<'_>, setup: &Setup, batch: &Batch) -> Result<Trial> {
    let logits = rank.logits(batch)?;
    let Stepped { loss, gradients } = rank.gradients_of(0, std::slice::from_ref(batch))?;
    let mut trial = Trial { loss, logits, ..Trial::default() };
    for unit in setup.decoder.units() {
        trial.gradients.extend(numbers(rank.shards().whole_gradients(&setup.decoder, unit, &gradients)?)?);
    }
    rank.update(0, loss, &gradients)?;
    for unit in setup.decoder.units() {
        trial.updated.extend(numbers(rank.shards().whole(&setup.decoder, unit)?)?);
    }
    Ok(trial)
}

fn numbers(weights: Weights) -> Result<Vec<(String, Vec<f32>)>> {
    weights.into_iter().map(|(name, tensor)| Ok((name, tensor.flatten_all()?.to_vec1()?))).collect()
}
