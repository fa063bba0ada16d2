//! The graph of one unit.

use super::Gradients;
use crate::error::Result;
use candle_core::{Tensor, Var};
use ringspan_candle::tape::Tape;
use ringspan_candle::{StoredWeights, Weights};

/// A computed function of an input and parameters that can still be differentiated.
pub(crate) struct Graph {
    input: Var,
    /// The parameters that are trained.
    parameters: Weights,
    output: Tensor,
    tape: Tape,
}

impl Graph {
    /// Computes `f` of parameters and input, to be differentiated in the input and in the parameters that are trained.
    pub(crate) fn new(
        x: Tensor,
        parameters: StoredWeights,
        trains: impl Fn(&str) -> bool,
        f: impl FnOnce(&StoredWeights, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let input = Var::from_tensor(&x)?;
        drop(x);
        // A variable is taken as it is. Others are copied one by one, so that no more than a parameter is there twice.
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

    /// Gradients of `sum(dy * output)`: of the input, and of each parameter that is trained.
    pub(crate) fn backward(self, dy: Tensor) -> Result<(Tensor, Gradients)> {
        let mut gradients = self.tape.backward(self.output, dy)?;
        // Zeros of what took no part.
        let mut gradient = |tensor: &Tensor| match gradients.remove(tensor) {
            Some(gradient) => Ok(gradient),
            None => tensor.zeros_like(),
        };
        let dx = gradient(self.input.as_tensor())?;
        let of = |(name, tensor): (String, Tensor)| Ok((name, gradient(&tensor)?));
        Ok((dx, self.parameters.into_iter().map(of).collect::<Result<_>>()?))
    }
}
