//! The differentiable computation of one unit, in one recording or in several.

use super::Gradients;
use crate::model::{StoredWeights, Weights};
use crate::tape::{self, Tape};
use candle_core::{Result, Tensor, Var};

/// The parameters of a unit that is differentiated, and the gradients that are known so far.
pub struct Graph {
    weights: StoredWeights,
    /// The parameters that receive gradients.
    trained: Weights,
    gradients: tape::Gradients,
}

/// A recorded computation.
pub struct Recording {
    output: Tensor,
    tape: Tape,
}

impl Recording {
    /// The values of the output, for computations that are not recorded.
    #[must_use]
    pub fn output(&self) -> Tensor {
        self.output.detach()
    }
}

impl Graph {
    /// A unit with these parameters, of which `trains` names those that receive gradients.
    ///
    /// # Errors
    /// A trained parameter that is quantized, a device without memory for a copy of it.
    pub fn new(parameters: StoredWeights, trains: impl Fn(&str) -> bool) -> Result<Self> {
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
        Ok(Self { weights, trained, gradients: tape::Gradients::default() })
    }

    /// Computes `f` of the parameters, and records it for gradients with respect to variables.
    ///
    /// # Errors
    /// Errors of `f`.
    pub fn record(&self, f: impl FnOnce(&StoredWeights) -> Result<Tensor>) -> Result<Recording> {
        let (output, tape) = Tape::record(|| f(&self.weights))?;
        Ok(Recording { output, tape })
    }

    /// Like [`record`](Self::record), but computes norms again where a backward pass reads them.
    ///
    /// # Errors
    /// Errors of `f`.
    pub fn record_without_norms(&self, f: impl FnOnce(&StoredWeights) -> Result<Tensor>) -> Result<Recording> {
        let (output, tape) = Tape::record_without_norms(|| f(&self.weights))?;
        Ok(Recording { output, tape })
    }

    /// Computes `f` without recording it.
    ///
    /// # Errors
    /// Errors of `f`.
    pub fn compute(&self, f: impl FnOnce(&StoredWeights) -> Result<Tensor>) -> Result<Tensor> {
        let detached = self.weights.iter().map(|(name, weight)| (name.clone(), weight.detach())).collect();
        f(&detached)
    }

    /// Adds the gradients of `sum(dy * output)` to those that are known.
    ///
    /// # Errors
    /// A `dy` of another shape than the output, and failures of the operations' backward passes.
    pub fn differentiate(&mut self, Recording { output, tape }: Recording, dy: Tensor) -> Result<()> {
        self.gradients = tape.backward_from(std::mem::take(&mut self.gradients), output, dy)?;
        Ok(())
    }

    /// Takes out the gradient of a variable; zeros if it took no part in an output.
    ///
    /// # Errors
    /// A device without memory for the zeros.
    pub fn take(&mut self, variable: &Tensor) -> Result<Tensor> {
        self.take_known(variable).map_or_else(|| variable.zeros_like(), Ok)
    }

    /// Takes out the gradient of a variable, if it took part in an output.
    pub fn take_known(&mut self, variable: &Tensor) -> Option<Tensor> {
        self.gradients.remove(variable)
    }

    /// The gradients of all trained parameters.
    ///
    /// # Errors
    /// As for [`take`](Self::take).
    pub fn finish(mut self) -> Result<Gradients> {
        let trained = std::mem::take(&mut self.trained);
        trained.into_iter().map(|(name, tensor)| Ok((name, self.take(&tensor)?))).collect()
    }
}

/// A variable with the values of x, which is freed: the values are copied.
///
/// # Errors
/// A device without memory for them.
pub fn variable(x: Tensor) -> Result<Tensor> {
    Ok(Var::from_tensor(&x)?.into_inner())
}
