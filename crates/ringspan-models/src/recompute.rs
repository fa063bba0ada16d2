//! What a layer keeps from its forward pass for its backward, and what it computes again.

use crate::decoder::Weights;
use crate::error::Result;
use crate::gradients::Gradients;
use candle_core::{Tensor, Var};
use ringspan::{Mask, Score};
use ringspan_candle::attention::Kept;
use ringspan_candle::{Attend, Experts, TensorParallel, cotangent};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::{fmt, str::FromStr};

/// What is computed again before a layer's backward. All give the same gradients, to the last bit.
///
/// Kept for each token and layer, with C hidden size, H query heads of width Dv, G key-value heads, in f32:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// The whole layer: C numbers are kept, its input.
    Full,
    /// All but attention: C + H (Dv + 1) numbers. The longer the sequence, the more of a layer is attention.
    #[default]
    KeepAttention,
    /// Nothing but what the fused layers compute again by themselves: about 7 C + 3 (H + G) Dv numbers, and another copy of
    /// the layer's weights.
    Nothing,
}

impl FromStr for Recompute {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
        match given {
            "full" => Ok(Self::Full),
            "keep-attention" => Ok(Self::KeepAttention),
            "nothing" => Ok(Self::Nothing),
            _ => Err(ringspan::Error::Unknown {
                what: "recompute",
                given: given.into(),
                possible: "full, keep-attention, nothing",
            }),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::KeepAttention => "keep-attention",
            Self::Nothing => "nothing",
        })
    }
}

/// Attention that keeps what it computes in the forward pass of a layer, and gives it back when the layer is computed
/// again.
pub(crate) struct Keeper<'a> {
    attend: &'a dyn Attend,
    layers: RefCell<BTreeMap<usize, Option<Kept>>>,
}

impl<'a> Keeper<'a> {
    /// Keeps nothing yet.
    pub(crate) fn new(attend: &'a dyn Attend) -> Self {
        Self { attend, layers: RefCell::default() }
    }
}

impl Attend for Keeper<'_> {
    fn attention(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Mask,
        score: &Score,
    ) -> candle_core::Result<Tensor> {
        let mut layers = self.layers.borrow_mut();
        self.attend.attention_keeping(layers.entry(layer).or_default(), layer, q, k, v, mask, score)
    }

    fn positions(&self) -> &[usize] {
        self.attend.positions()
    }

    fn length(&self) -> usize {
        self.attend.length()
    }

    fn experts(&self) -> &dyn Experts {
        self.attend.experts()
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        self.attend.tensor_parallel()
    }
}

/// A computed function of an input and parameters that can still be differentiated.
pub(crate) struct Graph {
    input: Var,
    /// Those that are trained.
    parameters: Weights,
    output: Tensor,
}

impl Graph {
    /// Computes `f` of parameters and input, to be differentiated in the input and in the parameters that are trained.
    pub(crate) fn new(
        x: &Tensor,
        parameters: Weights,
        trains: impl Fn(&str) -> bool,
        f: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let input = Var::from_tensor(x)?;
        // One by one, so that no more than a parameter is there twice.
        let variable = |(name, tensor): (String, Tensor)| match trains(&name) {
            true => Ok((name, Var::from_tensor(&tensor)?.into_inner())),
            false => Ok((name, tensor)),
        };
        let mut parameters: Weights = parameters.into_iter().map(variable).collect::<Result<_>>()?;
        let output = f(&parameters, input.as_tensor())?;
        parameters.retain(|name, _| trains(name));
        Ok(Self { input, parameters, output })
    }

    /// The result, free of the graph.
    pub(crate) fn output(&self) -> Tensor {
        self.output.detach()
    }

    /// Gradients of `sum(dy * output)`: of the input, and of each parameter that is trained.
    pub(crate) fn backward(self, dy: &Tensor) -> Result<(Tensor, Gradients)> {
        let mut store = cotangent::backward(&self.output, dy)?;
        // Zeros of what took no part.
        let mut gradient = |tensor: &Tensor| match store.remove(tensor) {
            Some(gradient) => Ok(gradient.detach()),
            None => tensor.zeros_like(),
        };
        let dx = gradient(self.input.as_tensor())?;
        let of = |(name, tensor): (String, Tensor)| Ok((name, gradient(&tensor)?));
        Ok((dx, self.parameters.into_iter().map(of).collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_are_written_and_others_refused() {
        for policy in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
            assert_eq!(policy.to_string().parse::<Recompute>().expect("its own name"), policy);
        }
        let refused = "none".parse::<Recompute>().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("none") && refused.contains("full, keep-attention, nothing"), "{refused}");
    }
}
