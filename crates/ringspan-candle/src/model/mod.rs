//! A model as a stack of units: groups of parameters that a trainer gathers, computes with and frees one after the other.

mod causal_lm;
mod language_model;
mod layer;
mod unit_weights;

pub use crate::parameters::{
    Init, LinearLayer, ModelBuilder, ModelParameters, Parameter, Scope, StoredWeights, Unit, UnitParameters, Weights,
    constant, on_device, stored,
};
pub use causal_lm::CausalLm;
pub use language_model::LanguageModel;
pub use layer::Layer;
pub use unit_weights::{UnitSequence, UnitWeights};

use crate::layers::ForwardPass;
use crate::lora::Adapters;
use candle_core::{Result, Tensor};
use std::fmt;

/// A model as a stack of units: an embedding, layers, an output head.
///
/// It defines what is computed, and holds no weights: a pass takes them unit by unit from [`UnitWeights`]. Models with a loss are
/// [`TrainableModel`](crate::gradients::TrainableModel)s. `examples/forecast` implements both for a model of its own.
pub trait Model: fmt::Debug + Send + Sync {
    /// What a pass computes with: tokens and their targets, or noisy latents, time steps, a prompt and the velocity.
    type Batch<'a>;

    /// What the embedding computes beside the input of the first layer, and all layers read: embedded time steps and prompts, or
    /// nothing.
    type Conditions;

    /// The parameters of all units, with the matrices of adapters.
    fn all_parameters(&self) -> &ModelParameters;

    /// The sizes of all adapters, by layer, and their dropout.
    fn adapter_sizes(&self) -> &Adapters;

    /// Number of layers.
    fn layer_count(&self) -> usize;

    /// Number of experts of each sparse layer; 0 if there is none.
    fn experts(&self) -> usize {
        0
    }

    /// The input of the first layer, `[T, C]`, and what all layers read beside it. The parameters of the embedding's unit are in
    /// `pass`.
    ///
    /// # Errors
    /// A batch that does not fit the model, missing parameters, failures of other ranks.
    fn embedded(&self, batch: &Self::Batch<'_>, pass: &ForwardPass) -> Result<(Tensor, Self::Conditions)>;

    /// The layer with this index, under the conditions of a pass.
    fn conditioned_layer<'a>(
        &'a self,
        index: usize,
        batch: &'a Self::Batch<'_>,
        conditions: &'a Self::Conditions,
    ) -> Box<dyn Layer + 'a>;
}
