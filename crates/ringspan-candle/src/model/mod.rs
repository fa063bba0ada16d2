//! A model as a stack of units: groups of parameters that a trainer gathers, computes with and frees one after the other.

mod causal_lm;

pub use crate::parameters::{
    Init, LinearLayer, ModelBuilder, ModelParameters, Parameter, Scope, StoredWeights, Unit, UnitParameters, Weights,
    constant, on_device, stored,
};
pub use causal_lm::CausalLm;

use crate::layers::{Attention, ForwardPass, MixtureOfExperts, RmsNorm, VocabEmbedding, VocabHead};
use candle_core::{Result, Tensor};
use std::fmt;

/// A language model: embedding, layers, norm, output head.
///
/// A model defines what is computed, and holds no weights. Tensor parallelism, adapters, dropout and the storage of
/// activations are left to its layers (see [`layers`](crate::layers)).
pub trait Model: fmt::Debug + Send + Sync {
    /// The embedding.
    fn embedding(&self) -> &VocabEmbedding;

    /// The layers between embedding and norm, in the order in which they are computed.
    fn layers(&self) -> Vec<&dyn Layer>;

    /// The layer with this index.
    fn layer(&self, index: usize) -> &dyn Layer {
        self.layers()[index]
    }

    /// The norm after the last layer.
    fn norm(&self) -> &RmsNorm;

    /// The output head.
    fn head(&self) -> &VocabHead;
}

/// A layer of a model, in two parts with attention between them.
///
/// A trainer differentiates the parts one after the other, so that the activations of one are freed before those of the other
/// are computed again.
pub trait Layer: fmt::Debug + Send + Sync {
    /// Queries `[T, H, D]`, keys `[T, G, D]` and values `[T, G, Dv]` of x `[T, C]`, as attention takes them. The parameters of
    /// the layer's unit are in `pass`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]>;

    /// The layer's output `[T, C]` for its input x `[T, C]` and attention's output `attended` `[T, H * Dv]`.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor>;

    /// The layer's attention.
    fn attention(&self) -> &Attention;

    /// The layer's experts, if its feed-forward part is a mixture of experts.
    fn experts(&self) -> Option<&MixtureOfExperts> {
        None
    }

    /// Attention's output `[T, H * Dv]` for the layer's input x `[T, C]`.
    ///
    /// # Errors
    /// As for [`attention_inputs`](Self::attention_inputs), and failures of attention.
    fn attended(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let [q, k, v] = self.attention_inputs(x, pass)?;
        self.attention().forward(&q, &k, &v, pass)
    }

    /// x `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// As for the parts, and failures of attention.
    fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        self.output(x, &self.attended(x, pass)?, pass)
    }
}
