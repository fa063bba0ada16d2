//! A model as a stack of units, each with the parameters that it needs: what a trainer gathers, computes and lets go one by
//! one.

mod builder;
mod causal_lm;
mod parameter;
mod weights;

pub use builder::{ModelBuilder, Scope};
pub use causal_lm::CausalLm;
pub use parameter::{Init, LinearLayer, Parameter, UnitParameters};
pub use weights::{StoredWeights, Weights, constant, on_device, stored};

use crate::layers::{Attention, ForwardPass, MixtureOfExperts, RmsNorm, VocabEmbedding, VocabHead};
use candle_core::{Result, Tensor};
use std::fmt;

/// Parameters that are needed together, and travel together where ranks shard them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// The embedding; with tied weights also the output head.
    Embedding,
    /// A layer, counted from 0.
    Layer(usize),
    /// The norm after the last layer and, unless it is tied, the output head.
    Head,
}

/// A language model: embedding, layers, norm, output head.
///
/// A model says what is computed, and holds no weights. Ranks, adapters, dropout and what is stored for the backward pass are
/// the business of its layers (see [`layers`](crate::layers)).
pub trait Model: fmt::Debug + Send + Sync {
    /// The embedding.
    fn embedding(&self) -> &VocabEmbedding;

    /// Layers between embedding and norm, in the order in which they are computed.
    fn layers(&self) -> Vec<&dyn Layer>;

    /// Layer `index`.
    fn layer(&self, index: usize) -> &dyn Layer {
        self.layers()[index]
    }

    /// The norm after the last layer.
    fn norm(&self) -> &RmsNorm;

    /// The output head.
    fn head(&self) -> &VocabHead;
}

/// A layer of a model.
pub trait Layer: fmt::Debug + Send + Sync {
    /// x `[T, C]` to `[T, C]`, with the parameters of the layer's unit in `pass`.
    ///
    /// # Errors
    /// Missing parameters, failures of attention and of other ranks.
    fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor>;

    /// Its attention.
    fn attention(&self) -> &Attention;

    /// Its experts, if its feed-forward part has any.
    fn experts(&self) -> Option<&MixtureOfExperts> {
        None
    }
}
