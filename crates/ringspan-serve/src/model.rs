//! A model in memory, and the mesh of ranks that it runs on.

use crate::error::{Error, Result};
use candle_core::Tensor;
use ringspan::attention::Group;
use ringspan::comm::ranks::Ranks;
use ringspan::comm::timed::Timed;
use ringspan::comm::{Communicator, threads};
use ringspan_candle::{Attend, Devices, StoredWeights, Weight, model::on_device, pool};
use ringspan_models::Decoder;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// A decoder and its weights. Ranks of one process share the weights; on GPUs, the ranks of each device share theirs.
#[derive(Debug)]
pub struct Model {
    decoder: Decoder,
    /// The weights on each device.
    weights: Vec<StoredWeights>,
    /// Bytes of the weights by the format in which files stored them.
    stored: BTreeMap<String, usize>,
    vocabulary: usize,
}

impl Model {
    /// Makes a model of a decoder and its weights, dense or as they are stored.
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

    /// Puts the weights on the devices of the ranks that will compute with them, in the type in which these compute;
    /// activations and the KV cache have the same type.
    ///
    /// # Errors
    /// A GPU without enough memory for the weights.
    pub fn on(self, devices: &Devices) -> Result<Self> {
        let weights =
            devices.iter().map(|device| on_device(&self.weights[0], device)).collect::<candle_core::Result<_>>()?;
        Ok(Self { weights, ..self })
    }

    /// Describes in which formats, and in how many bytes, the weights are stored and held on the devices; `None` if files store
    /// f32 alone.
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

    /// The model's structure and its forward functions.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The weights on the device of a rank.
    pub fn weights(&self, rank: usize) -> &StoredWeights {
        &self.weights[rank % self.weights.len()]
    }

    /// Number of tokens V in the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.decoder.config().num_hidden_layers
    }

    /// Computes the hidden states `[T, C]` of this rank's `tokens`, before the last norm.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, failures of other ranks.
    pub fn hidden(&self, rank: usize, tokens: &[u32], attend: &dyn Attend) -> Result<Tensor> {
        let weights = self.weights(rank);
        let mut hidden = self.decoder.embed(weights, tokens, attend)?;
        for layer in 0..self.layers() {
            hidden = self.decoder.layer(weights, layer, &hidden, attend)?;
        }
        Ok(hidden)
    }

    /// Checks that all tokens are in the vocabulary.
    ///
    /// # Errors
    /// The first token outside the vocabulary.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().position(|token| *token as usize >= self.vocabulary) {
            None => Ok(()),
            Some(position) => Err(Error::Vocabulary { token: tokens[position], position, vocabulary: self.vocabulary }),
        }
    }
}

/// A mesh of `ring x ulysses` ranks, and the devices and threads or processes that run them.
#[derive(Debug, Clone)]
pub struct Mesh {
    /// Ring size R.
    pub ring: usize,
    /// Ulysses size U.
    pub ulysses: usize,
    /// Number of CPU threads of each rank.
    pub threads: usize,
    /// Upper limit on the time that a rank waits for another.
    pub deadline: Duration,
    /// The devices on which ranks compute.
    pub devices: Devices,
    /// Whether ranks are threads of this process, or processes.
    pub ranks: Ranks,
}

impl Mesh {
    /// A mesh of one rank with one thread.
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

    /// Runs `work` on every rank, and returns the results of the ranks of this process, in rank order.
    ///
    /// # Errors
    /// A number of processes that is not the number of ranks; the error of the rank that failed first.
    pub fn run<T: Send>(&self, work: impl Fn(Arc<Group>) -> Result<T> + Sync) -> Result<Vec<T>> {
        self.run_with(|comm| self.on_rank(comm, &work))
    }

    /// Like [`run`](Self::run), and measures how long each rank waits for others.
    ///
    /// # Errors
    /// As for [`run`](Self::run).
    pub(crate) fn run_timed<T: Send>(&self, work: impl Fn(Arc<Group>, &Timed) -> Result<T> + Sync) -> Result<Vec<T>> {
        self.run_with(|comm| {
            let timed = Arc::new(Timed::new(comm));
            self.on_rank(timed.clone(), |group| work(group, &timed))
        })
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.ring.saturating_mul(self.ulysses)
    }

    fn run_with<T: Send>(&self, work: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync) -> Result<Vec<T>> {
        let options = threads::Options { deadline: self.deadline, ..Default::default() };
        self.ranks.run(self.size(), options, work)
    }

    fn on_rank<T: Send>(
        &self,
        comm: Arc<dyn Communicator>,
        work: impl Fn(Arc<Group>) -> Result<T> + Sync,
    ) -> Result<T> {
        let kernel = self.devices.of(comm.rank()).kernel(self.threads)?;
        let group = Arc::new(Group::new(comm, (self.ring, self.ulysses), kernel)?);
        pool::run(self.threads, || work(group))?
    }
}
