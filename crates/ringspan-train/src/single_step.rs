//! One training step on one batch, with all of its results, so that meshes can be compared.

use crate::{
    config::TrainConfig,
    data::Batch,
    error::{Error, Result},
    mesh::start_world,
    rank::{LossAndGradients, Rank},
    setup::Setup,
};
use ringspan::comm::process_group::ProcessGroup;
use ringspan_candle::{Devices, Recompute, Weights, pool};
use ringspan_models::Decoder;
use std::collections::BTreeMap;

/// The results of a step.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepResults {
    /// The mean loss over all targets, plus the auxiliary loss that balances the load of experts.
    pub loss: f64,
    /// Logits `[B * S, V]`, 0 in padding.
    pub logits: Vec<f32>,
    /// Gradients of the loss, by parameter.
    pub gradients: BTreeMap<String, Vec<f32>>,
    /// The parameters after one step of the optimiser.
    pub updated: BTreeMap<String, Vec<f32>>,
    /// How blocks travelled between GPUs, in words, where ranks are processes.
    pub block_transport: Option<String>,
}

/// Runs one step of a model on a batch, on the mesh of `config`; returns none in a process without rank 0. All processes must
/// call this.
///
/// # Errors
/// A model that cannot be sharded over the mesh, and failures of ranks.
pub fn single_step(
    processes: &ProcessGroup,
    config: &TrainConfig,
    (decoder, weights): (&Decoder, &Weights),
    batch: &Batch,
) -> Result<Option<StepResults>> {
    let devices = Devices::open(config.device, processes.local_rank())?.computing_in(config.dtype);
    let Some(recompute) = config.recompute else {
        let possible = Recompute::ALL.map(|recompute| recompute.to_string()).join(", ");
        return Err(Error::Settings(format!(
            "--recompute auto needs a plan of a training: possible here are {possible}"
        )));
    };
    let setup = Setup::for_batch(config, decoder.clone(), weights.clone(), batch.clone())?;
    let (connected, block_transport) = devices.connect(processes, config.deadline)?;
    let shared_gathers = setup.shared_gathers(&connected);
    let results = start_world(&connected, config)?.run(|rank| {
        config.isa.map_or(Ok(()), pool::set_isa)?;
        let world = rank.communicator().clone();
        let results =
            run_rank(Rank::new(config, &setup, recompute, &devices, shared_gathers.clone(), world)?, &setup, batch)?;
        Ok::<_, Error>(if rank.index() == 0 { results } else { StepResults::default() })
    })?;
    Ok(results
        .into_iter()
        .next()
        .filter(|_| processes.lead())
        .map(|results| StepResults { block_transport, ..results }))
}

fn run_rank(mut rank: Rank<'_>, setup: &Setup, batch: &Batch) -> Result<StepResults> {
    let logits = rank.logits(batch)?;
    let LossAndGradients { loss, gradients } = rank.loss_and_gradients(0, std::slice::from_ref(batch))?;
    let mut results = StepResults { loss, logits, ..StepResults::default() };
    for unit in setup.spec.decoder.units() {
        results.gradients.extend(to_values(rank.shards().whole_gradients(&setup.spec.decoder, unit, &gradients)?)?);
    }
    rank.update(0, loss, &gradients)?;
    for unit in setup.spec.decoder.units() {
        results.updated.extend(to_values(rank.shards().whole(&setup.spec.decoder, unit)?)?);
    }
    Ok(results)
}

fn to_values(weights: Weights) -> Result<Vec<(String, Vec<f32>)>> {
    weights.into_iter().map(|(name, tensor)| Ok((name, tensor.flatten_all()?.to_vec1()?))).collect()
}
