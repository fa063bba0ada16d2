//! The differentiable computation of one unit.

use super::Gradients;
use crate::error::Result;
use candle_core::{Tensor, Var};
use ringspan_candle::tape::Tape;
use ringspan_candle::{StoredWeights, Weights};

/// A function of an input and parameters that has been computed, and recorded so that it can be differentiated.
pub(crate) struct Graph {
    input: Var,
    /// The parameters that receive gradients.
    parameters: Weights,
    output: Tensor,
    tape: Tape,
}

impl Graph {
    /// Computes `f` of parameters and input, and records it for gradients with respect to the input and the trained parameters.
    pub(crate) fn new(
        x: Tensor,
        parameters: StoredWeights,
        trains: impl Fn(&str) -> bool,
        f: impl FnOnce(&StoredWeights, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let input = Var::from_tensor(&x)?;
        drop(x);
        // `Var::from_tensor` copies tensors that are no variables yet. One parameter is copied at a time, so at most one is in
        // memory twice.
        let (mut weights, mut trained) = (StoredWeights::new(), Weights::new());
        for (name, weight) in parameters {
            if !trains(&name) {
                weights.insert(name, weight.detach());
                continue;
            }
            let variable = Var::from_tensor(weight.tensor()?)?.into_inner();
            weights.insert(name.clone(), variable.clone().into());
            trained.insert(name, variable);
        }
        let (output, tape) = Tape::record(|| f(&weights, input.as_tensor()))?;
        Ok(Self { input, parameters: trained, output, tape })
    }

    /// The result of the computation, without its graph.
    pub(crate) fn output(&self) -> Tensor {
        self.output.detach()
    }

    /// The gradients of `sum(dy * output)` with respect to the input and to each trained parameter.
    pub(crate) fn backward(self, dy: Tensor) -> Result<(Tensor, Gradients)> {
        let mut gradients = self.tape.backward(self.output, dy)?;
        // A tensor that took no part in the output has a gradient of zeros.
        let mut gradient = |tensor: &Tensor| match gradients.remove(tensor) {
            Some(gradient) => Ok(gradient),
            None => tensor.zeros_like(),
        };
        let dx = gradient(self.input.as_tensor())?;
        let of = |(name, tensor): (String, Tensor)| Ok((name, gradient(&tensor)?));
        Ok((dx, self.parameters.into_iter().map(of).collect::<Result<_>>()?))
    }
}
