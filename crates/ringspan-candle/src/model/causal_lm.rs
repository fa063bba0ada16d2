//! A model whose layers are all of one type.

use super::{LanguageModel, Layer};
use crate::layers::{RmsNorm, VocabEmbedding, VocabHead};

/// Embedding, layers of one type, norm and output head.
#[derive(Debug)]
pub struct CausalLm<L> {
    /// The embedding.
    pub embed_tokens: VocabEmbedding,
    /// The layers.
    pub layers: Vec<L>,
    /// The norm after the last layer.
    pub norm: RmsNorm,
    /// The output head.
    pub lm_head: VocabHead,
}

impl<L: Layer> LanguageModel for CausalLm<L> {
    fn embedding(&self) -> &VocabEmbedding {
        &self.embed_tokens
    }

    fn layers(&self) -> Vec<&dyn Layer> {
        self.layers.iter().map(|layer| layer as &dyn Layer).collect()
    }

    fn layer(&self, index: usize) -> &dyn Layer {
        &self.layers[index]
    }

    fn norm(&self) -> &RmsNorm {
        &self.norm
    }

    fn head(&self) -> &VocabHead {
        &self.lm_head
    }
}
