//! The interface between a model and attention: computes it, and says which positions the model's tokens have.

use crate::adapter_rows::AdapterSelection;
pub use crate::attention::AttentionInputs;
use crate::attention::SavedAttention;
use crate::dropout::InputDropout;
use crate::experts::Experts;
use crate::replicated_rows::ReplicatedRows;
use crate::rope::Rotations;
use crate::tensor_parallel::TensorParallel;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};

/// Attention, as a model calls it. The implementation decides which ranks hold the tokens, and how their keys and
/// values are brought together.
pub trait Attend {
    /// Attention of layer `layer`, `[T, H, Dv]`, differentiable in its inputs. The numbers in `score` are constants; sinks
    /// are passed in `inputs` instead.
    ///
    /// # Errors
    /// Shapes that do not fit, and failures of other ranks.
    fn layer_attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor>;

    /// Like [`layer_attention`](Self::layer_attention), for a layer that is recomputed: the first call stores its output in `memory`; the
    /// second takes it out and only provides the backward pass. An implementation without this method computes attention
    /// twice.
    ///
    /// # Errors
    /// As for [`layer_attention`](Self::layer_attention).
    fn attention_saving(
        &self,
        _memory: &mut SavedAttention,
        layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> Result<Tensor> {
        self.layer_attention(layer, inputs, mask, score)
    }

    /// The position of each of the T tokens inside its document.
    fn positions(&self) -> &[usize];

    /// The angles of the tokens, where layers find those that others have made; `None` if each layer makes its own. A wrapper
    /// around another `Attend` returns those of that one.
    fn rotations(&self) -> Option<&Rotations> {
        None
    }

    /// The length in tokens of the longest document that there is or will be on any rank. It must be equal on every rank, and
    /// for all calls whose keys meet in one attention: rotary embeddings whose frequencies depend on the length are made for
    /// it.
    fn length(&self) -> usize;

    /// Computes the experts of sparse layers. A wrapper around another `Attend` returns the experts of that one; without
    /// expert parallelism, [`Local`](crate::experts::Local) computes all experts on this rank.
    fn experts(&self) -> &dyn Experts;

    /// The tensor-parallel group. A wrapper around another `Attend` returns the group of that one; without tensor parallelism
    /// it is [`NO_TENSOR_PARALLEL`](crate::tensor_parallel::NO_TENSOR_PARALLEL).
    fn tensor_parallel(&self) -> &TensorParallel;

    /// The ranks that all have the rows of this call, and so may share the computation of linear layers; `None` if each rank has rows
    /// of its own.
    fn replicated_rows(&self) -> Option<&ReplicatedRows> {
        None
    }

    /// The dropout of layer inputs; `None` outside training. There is no default implementation, so that a wrapper cannot
    /// forget to pass it on: a model would then train without dropout, and nobody would notice.
    fn input_dropout(&self) -> Option<&InputDropout>;

    /// Which of several adapters each of the T tokens asks for; `None` if there is one for all. Layers with several refuse to compute
    /// without it.
    fn adapter_selection(&self) -> Option<&AdapterSelection> {
        None
    }
}
