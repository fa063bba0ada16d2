//! Measures how well a step uses the machine: operations against the peak, waiting time, the balance of attention.

use crate::{
    error::{Result, model_error},
    setup::Setup,
};
use ringspan::{
    comm::{Buffer, Communicator, numbers, timed::TimedCommunicator},
    schedule::HeadShare,
};
use ringspan_candle::{RankDevice, context::Context, peak};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Measures the utilization of a rank's steps.
pub(super) struct UtilizationMeter {
    /// The communicator, which counts the time that this rank waits.
    timed: Arc<TimedCommunicator>,
    /// Floating-point operations per second that all ranks, computing at once, reach in matrix products.
    peak: f64,
    /// Floating-point operations per token outside attention, forward and backward.
    of_token: f64,
    /// Floating-point operations per visible query-key pair of one head, forward and backward.
    of_pair: f64,
    began: Instant,
    waited: Duration,
    /// Sum over layers of the visible pairs times heads that this rank computes in the step.
    pairs: f64,
}

/// How a step used the machine; the same on all ranks.
pub(super) struct Utilization {
    pub(super) seconds: f64,
    pub(super) peak_share: f64,
    pub(super) waited: f64,
    pub(super) imbalance: f64,
}

impl UtilizationMeter {
    pub(super) fn new(setup: &Setup, device: &RankDevice, timed: Arc<TimedCommunicator>) -> Result<Self> {
        // All ranks measure at once, as they will compute; of ranks that share a GPU, one measures while the others leave it
        // alone.
        let first = is_first(&*timed, device.id()?)?;
        let own = if first { peak::flops_on(device)? } else { 0.0 };
        let peak = all(&*timed, own)?.iter().sum::<f64>();
        let [dim, value_dim] = setup.spec.decoder.head_dims().map(|dim| dim as f64);
        // Attention has two products forward and five backward, with two operations per element: four over the width of queries
        // and keys, three over that of values.
        Ok(Self {
            timed,
            peak,
            of_token: of_token(setup),
            of_pair: 8.0 * dim + 6.0 * value_dim,
            began: Instant::now(),
            waited: Duration::ZERO,
            pairs: 0.0,
        })
    }

    /// Begins to measure a step.
    pub(super) fn start(&mut self) {
        (self.began, self.waited, self.pairs) = (Instant::now(), self.timed.waited(), 0.0);
    }

    /// Adds the attention of a micro-batch, which is computed with `context`.
    pub(super) fn add(&mut self, setup: &Setup, context: &Context) -> Result<()> {
        let (model, group) = (setup.spec.decoder.config(), context.group());
        let tp = setup.spec.mesh.parallel_rank(self.timed.rank()).tp;
        let heads = setup.spec.decoder.head_counts().of_rank(tp).map_err(model_error)?;
        let shares = HeadShare::all(heads.queries.len(), heads.key_values.len(), group.grid())?;
        let (_, ulysses) = group.grid().coordinates(group.rank());
        let heads = shares.get(ulysses).map_or(0, |share| share.query.len()) as f64;
        for layer in 0..model.num_hidden_layers {
            self.pairs += heads * context.schedule(setup.spec.decoder.mask(layer))?.pairs(group.rank()) as f64;
        }
        Ok(())
    }

    /// Ends the measurement of a step over `tokens` tokens of all ranks.
    pub(super) fn stop(&self, tokens: u64) -> Result<Utilization> {
        let seconds = self.began.elapsed().as_secs_f64().max(1e-9);
        let waited = (self.timed.waited() - self.waited).as_secs_f64();
        let pairs = all(&*self.timed, self.pairs)?;
        let most_waited = all(&*self.timed, waited)?.into_iter().fold(0.0, f64::max);
        let (sum, most) = (pairs.iter().sum::<f64>(), pairs.iter().copied().fold(0.0, f64::max));
        let operations = tokens as f64 * self.of_token + sum * self.of_pair;
        Ok(Utilization {
            seconds,
            peak_share: operations / seconds / self.peak.max(1.0),
            waited: (most_waited / seconds).min(1.0),
            imbalance: if sum > 0.0 { most * pairs.len() as f64 / sum } else { 1.0 },
        })
    }
}

/// Operations per token in products with parameters: two forward, two for the gradient of the input, and two for the gradient of
/// the parameters where these are trained. An embedding is looked up, and a token visits only some of the experts.
fn of_token(setup: &Setup) -> f64 {
    let (decoder, model) = (&setup.spec.decoder, setup.spec.decoder.config());
    let of = |(name, shape): (&String, &Vec<usize>)| {
        let looked_up = name == decoder.embedding_name() && !model.tie_word_embeddings;
        if shape.len() < 2 || name.ends_with("bias") || looked_up {
            return 0.0;
        }
        let seen = if name.contains(".experts.") { decoder.expert_share_per_token() } else { 1.0 };
        let passes = if decoder.trains(name) { 6.0 } else { 4.0 };
        passes * seen * shape.iter().product::<usize>() as f64
    };
    setup.spec.shapes.iter().map(of).sum()
}

/// Whether no rank before this one computes on the same GPU. On CPUs, where ranks have threads of their own, it is always true.
fn is_first(world: &dyn Communicator, id: Option<[u8; 16]>) -> Result<bool> {
    let own = Buffer::U8(id.map_or_else(Vec::new, |id| id.to_vec()));
    let all = world.all_gather(own.clone())?;
    Ok(id.is_none() || !all.iter().take(world.rank()).any(|other| **other == own))
}

/// Gathers a number of each rank, in rank order.
fn all(world: &dyn Communicator, own: f64) -> Result<Vec<f64>> {
    Ok(numbers::all_gather(world, &[own])?.concat())
}

#[cfg(test)]
mod tests {
    use super::is_first;
    use ringspan::comm::threads;

    #[test]
    fn one_of_the_ranks_that_share_a_gpu_measures_it() {
        let ids = [Some([1; 16]), Some([2; 16]), Some([1; 16]), None, None];
        let first = threads::run(ids.len(), threads::Options::default(), |world| is_first(&*world, ids[world.rank()]));
        assert_eq!(first.unwrap(), [true, true, false, true, true]);
    }
}
