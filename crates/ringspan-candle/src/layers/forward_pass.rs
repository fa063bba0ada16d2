//! The arguments of a layer's forward pass besides its input.

use crate::activation_store::ActivationStore;
use crate::adapter_rows::AdapterRows;
use crate::attend::Attend;
use crate::lora::Adapters;
use crate::parameters::StoredWeights;
use crate::replicated_rows::ReplicatedRows;
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};

/// The parameters' values, attention over the ranks, the adapters, and the store of activations for the backward pass.
#[derive(Clone, Copy)]
pub struct ForwardPass<'a> {
    weights: &'a StoredWeights,
    attend: &'a dyn Attend,
    adapters: &'a Adapters,
    store: Option<&'a ActivationStore<'a>>,
}

impl<'a> ForwardPass<'a> {
    /// A pass with these parameter values; `adapters` says which layers are adapted.
    pub fn new(weights: &'a StoredWeights, attend: &'a dyn Attend, adapters: &'a Adapters) -> Self {
        Self { weights, attend, adapters, store: None }
    }

    /// A pass that stores activations: a layer puts them in `store`, and takes them out when it is recomputed for its
    /// gradients.
    pub fn storing(weights: &'a StoredWeights, adapters: &'a Adapters, store: &'a ActivationStore<'a>) -> Self {
        Self { weights, attend: store, adapters, store: Some(store) }
    }

    /// The values of all parameters in this pass.
    pub fn weights(&self) -> &'a StoredWeights {
        self.weights
    }

    /// The value of a parameter.
    ///
    /// # Errors
    /// A parameter that has no value in this pass.
    pub fn weight(&self, name: &str) -> Result<&'a Weight> {
        parameter(self.weights, name)
    }

    /// The value of a parameter that is never quantized: a norm's weight, a bias, an adapter's matrix.
    ///
    /// # Errors
    /// A parameter that has no value in this pass, and a quantized one.
    pub fn tensor(&self, name: &str) -> Result<&'a Tensor> {
        tensor(self.weights, name)
    }

    /// Provides attention, positions, experts and dropout.
    pub fn attend(&self) -> &'a dyn Attend {
        self.attend
    }

    /// Number of tokens of this rank; with tensor parallelism, of the group, whose ranks have the same tokens.
    pub fn tokens(&self) -> usize {
        self.attend.positions().len()
    }

    /// All-gathers rows over the tensor-parallel group: `[rows, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn gather(&self, x: &Tensor) -> Result<Tensor> {
        match self.tokens() {
            0 => Ok(x.clone()),
            tokens => self.attend.tensor_parallel().gather(x, tokens),
        }
    }

    /// Reduce-scatters rows over the tensor-parallel group, so that this rank receives its rows of the sum: `[T, C]` to
    /// `[rows, C]`.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub fn reduce(&self, x: &Tensor) -> Result<Tensor> {
        match self.tokens() {
            0 => Ok(x.clone()),
            _ => self.attend.tensor_parallel().reduce(x),
        }
    }

    /// The ranks that have the rows of this pass and share linear layers. Nothing is stored for gradients in such a pass.
    pub(crate) fn replicated_rows(&self) -> Option<&'a ReplicatedRows> {
        self.attend.replicated_rows().filter(|_| self.store.is_none())
    }

    /// Whether the layer is being recomputed for its gradients.
    pub(crate) fn is_recomputed(&self) -> bool {
        self.store.is_some_and(ActivationStore::is_recomputing)
    }

    /// What adapters need to know of this rank's tokens.
    pub(crate) fn adapter_rows(&self) -> Option<AdapterRows> {
        let selection = self.attend.adapter_selection().cloned().map(AdapterRows::Selection);
        selection.or_else(|| self.attend.input_dropout().cloned().map(AdapterRows::Dropout))
    }

    pub(crate) fn adapters(&self) -> &'a Adapters {
        self.adapters
    }

    pub(crate) fn store(&self) -> Option<&'a ActivationStore<'a>> {
        self.store
    }
}

/// The value of the parameter with this name.
pub(super) fn parameter<'a>(weights: &'a StoredWeights, name: &str) -> Result<&'a Weight> {
    match weights.get(name) {
        Some(weight) => Ok(weight),
        None => bail!("the model needs the parameter {name}, which is not at hand"),
    }
}

/// Like [`parameter`], for one that is never quantized.
pub(super) fn tensor<'a>(weights: &'a StoredWeights, name: &str) -> Result<&'a Tensor> {
    parameter(weights, name)?.tensor().map_err(|error| error.context(format!("the parameter {name}")))
}
