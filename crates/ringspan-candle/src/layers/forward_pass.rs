//! What a layer computes with beside its input.

use crate::activation_store::ActivationStore;
use crate::attend::Attend;
use crate::lora::Adapters;
use crate::model::StoredWeights;
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};

/// The parameters at hand, the way to other ranks, adapters, and where activations are stored for the backward pass.
#[derive(Clone, Copy)]
pub struct ForwardPass<'a> {
    weights: &'a StoredWeights,
    attend: &'a dyn Attend,
    adapters: &'a Adapters,
    store: Option<&'a ActivationStore<'a>>,
}

impl<'a> ForwardPass<'a> {
    /// A pass with these parameters, `adapters` beside some of the layers.
    pub fn new(weights: &'a StoredWeights, attend: &'a dyn Attend, adapters: &'a Adapters) -> Self {
        Self { weights, attend, adapters, store: None }
    }

    /// A pass of a layer that is computed for its gradients: `store` takes what it keeps, and hands it out the second time.
    pub fn storing(weights: &'a StoredWeights, adapters: &'a Adapters, store: &'a ActivationStore<'a>) -> Self {
        Self { weights, attend: store, adapters, store: Some(store) }
    }

    /// A parameter by its name.
    ///
    /// # Errors
    /// A parameter that is not at hand.
    pub fn weight(&self, name: &str) -> Result<&'a Weight> {
        parameter(self.weights, name)
    }

    /// A parameter that is never quantized: a norm's weight, a bias, an adapter's matrix.
    ///
    /// # Errors
    /// A parameter that is not at hand, and a quantized one.
    pub fn tensor(&self, name: &str) -> Result<&'a Tensor> {
        tensor(self.weights, name)
    }

    /// Attention, positions, experts and dropout.
    pub fn attend(&self) -> &'a dyn Attend {
        self.attend
    }

    /// Tokens of this rank; where ranks share layers, all of theirs.
    pub fn tokens(&self) -> usize {
        self.attend.positions().len()
    }

    /// The rows of all ranks that share layers, from this rank's rows: `[rows, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        match self.tokens() {
            0 => Ok(x.clone()),
            tokens => self.attend.tensor_parallel().gather(x, tokens),
        }
    }

    /// This rank's rows of the sum over the ranks that share layers: `[T, C]` to `[rows, C]`.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn reduce(&self, x: &Tensor) -> Result<Tensor> {
        match self.tokens() {
            0 => Ok(x.clone()),
            _ => self.attend.tensor_parallel().reduce(x),
        }
    }

    /// Whether the layer is computed for the second time, for its gradients.
    pub(crate) fn is_recomputed(&self) -> bool {
        self.store.is_some_and(ActivationStore::is_recomputing)
    }

    pub(crate) fn adapters(&self) -> &'a Adapters {
        self.adapters
    }

    pub(crate) fn store(&self) -> Option<&'a ActivationStore<'a>> {
        self.store
    }
}

/// A parameter by its name.
pub(super) fn parameter<'a>(weights: &'a StoredWeights, name: &str) -> Result<&'a Weight> {
    match weights.get(name) {
        Some(weight) => Ok(weight),
        None => bail!("the model needs the parameter {name}, which is not at hand"),
    }
}

/// The same of one that is never quantized.
pub(super) fn tensor<'a>(weights: &'a StoredWeights, name: &str) -> Result<&'a Tensor> {
    parameter(weights, name)?.tensor().map_err(|error| error.context(format!("the parameter {name}")))
}
