//! The parts of a language model.

use super::Layer;
use crate::layers::{RmsNorm, VocabEmbedding, VocabHead};
use std::fmt;

/// The parts of a language model: embedding, layers, norm, output head. A [`Model`](super::Model) of language, such as the decoders of
/// `ringspan-models`, holds them.
///
/// It defines what is computed, and holds no weights. Tensor parallelism, adapters, dropout and the storage of
/// activations are left to its layers (see [`layers`](crate::layers)).
pub trait LanguageModel: fmt::Debug + Send + Sync {
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
