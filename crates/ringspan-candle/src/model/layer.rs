//! A layer of a model.

use crate::layers::{Attention, ForwardPass, MixtureOfExperts};
use candle_core::{Result, Tensor};
use std::fmt;

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

impl<L: Layer + ?Sized> Layer for &L {
    fn attention_inputs(&self, x: &Tensor, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        (**self).attention_inputs(x, pass)
    }

    fn output(&self, x: &Tensor, attended: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        (**self).output(x, attended, pass)
    }

    fn attention(&self) -> &Attention {
        (**self).attention()
    }

    fn experts(&self) -> Option<&MixtureOfExperts> {
        (**self).experts()
    }

    fn attended(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        (**self).attended(x, pass)
    }

    fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        (**self).forward(x, pass)
    }
}
