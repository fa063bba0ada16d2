//! A model in memory, and the ranks it runs on.

use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::comm::ranks::Ranks;
use ringspan::comm::threads;
use ringspan_candle::{Attend, Devices, StoredWeights, Weight, model::on_device, pool};
use ringspan_models::Decoder;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A decoder and its weights; ranks of one process share them, or those of a device its own.
#[derive(Debug)]
pub struct Model {
    decoder: Decoder,
    /// On each device.
    weights: Vec<StoredWeights>,
    /// Bytes of each format in which they came.
    stored: BTreeMap<String, usize>,
    vocabulary: usize,
}

impl Model {
    /// Takes a decoder and its weights, dense or as they are stored.
    ///
    /// # Errors
    /// Weights without an embedding.
    pub fn new<W: Into<Weight>>(decoder: Decoder, weights: BTreeMap<String, W>) -> Result<Self> {
        let weights: StoredWeights = weights.into_iter().map(|(name, weight)| (name, weight.into())).collect();
        let vocabulary = decoder.parameter(&weights, decoder.head_name())?.dims().first().copied().unwrap_or(0);
        let mut stored: BTreeMap<String, usize> = BTreeMap::new();
        for weight in weights.values() {
            let dense = || weight.computed_in().as_str().to_uppercase();
            let format = weight.format().map_or_else(dense, |format| format.to_string());
            *stored.entry(format).or_default() += weight.bytes();
        }
        Ok(Self { decoder, weights: vec![weights], stored, vocabulary })
    }

    /// The same with its weights on the devices of the ranks that will compute with it, in the type in which these compute:
    /// activations and the cache of keys and values have that of the weights.
    ///
    /// # Errors
    /// A GPU without memory for them.
    pub fn on(self, devices: &Devices) -> Result<Self> {
        let weights =
            devices.iter().map(|device| on_device(&self.weights[0], device)).collect::<candle_core::Result<_>>()?;
        Ok(Self { weights, ..self })
    }

    /// How its weights lie on the devices that compute with it, in words: in which formats, in how many bytes. None where files
    /// store f32 alone.
    pub fn held(&self, devices: &Devices) -> Option<String> {
        if self.stored.keys().all(|format| format == "F32") {
            return None;
        }
        let each = self.stored.iter().map(|(format, bytes)| format!("{:.1} MB in {format}", *bytes as f64 / 1e6));
        let each = each.collect::<Vec<_>>().join(", ");
        Some(match devices.are_gpus() {
            true => format!("weights: {each} in the file; expanded to {} on the GPU", devices.of(0).precision()),
            false => format!("weights: {each}, held as they are stored"),
        })
    }

    /// The computation.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The numbers, where a rank computes.
    pub fn weights(&self, rank: usize) -> &StoredWeights {
        &self.weights[rank % self.weights.len()]
    }

    /// Tokens V that the model knows.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.decoder.config().num_hidden_layers
    }

    /// Hidden states of `tokens` before the last norm, by a rank: `[T, C]`.
    ///
    /// # Errors
    /// Tokens the model does not know, failures of other ranks.
    pub fn hidden(&self, rank: usize, tokens: &[u32], attend: &dyn Attend) -> Result<Tensor> {
        let weights = self.weights(rank);
        let mut hidden = self.decoder.embed(weights, tokens, attend.tensor_parallel())?;
        for layer in 0..self.layers() {
            hidden = self.decoder.layer(weights, layer, &hidden, attend)?;
        }
        Ok(hidden)
    }

    /// # Errors
    /// The first token the model does not know.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().position(|token| *token as usize >= self.vocabulary) {
            None => Ok(()),
            Some(position) => Err(Error::Vocabulary { token: tokens[position], position, vocabulary: self.vocabulary }),
        }
    }
}

/// `ring x ulysses` ranks, and where they run.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Threads of each rank.
    pub threads: usize,
    /// How long a rank waits for another.
    pub deadline: Duration,
    /// What ranks compute on.
    pub devices: Devices,
    /// Threads of this process, or processes.
    pub ranks: Ranks,
}

impl Mesh {
    /// One rank with one thread.
    pub const fn single() -> Self {
        Self {
            ring: 1,
            ulysses: 1,
            threads: 1,
            deadline: Duration::from_secs(600),
            devices: Devices::CPU,
            ranks: Ranks::threads(),
        }
    }

    /// Runs `work` on every rank and returns what each rank of this process returns, in rank order.
    ///
    /// # Errors
    /// Another number of processes than ranks; the error of the rank that failed first.
    pub fn run<T: Send>(&self, work: impl Fn(Arc<Group>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let Self { ring, ulysses, threads, deadline, .. } = *self;
        let options = threads::Options { deadline, ..Default::default() };
        let ranks = ring.saturating_mul(ulysses);
        self.ranks.run(ranks, options, |comm| {
            let kernel = self.devices.of(comm.rank()).kernel(threads)?;
            let group = Arc::new(Group::new(comm, (ring, ulysses), kernel)?);
            pool::run(threads, || work(group))?
        })
    }
}
