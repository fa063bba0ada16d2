//! Parameters that an operation of candle's reads beside its arguments, of which it has three at most.
//!
//! Each parameter is tied into the graph by one element. The backward pass of the operation comes first and leaves the
//! gradients where the ties of the parameters find them.

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Gradients on their way from an operation to the parameters that are tied to it, by the numbers of these.
#[derive(Debug, Clone, Default)]
pub(crate) struct LinkedGradients(Arc<Mutex<HashMap<usize, Tensor>>>);

impl LinkedGradients {
    /// Leaves the gradient of a parameter for its tie.
    pub(crate) fn leave(&self, number: usize, gradient: Tensor) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(number, gradient);
    }

    fn take(&self, number: usize) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&number)
    }

    /// Ties f32 parameters on the CPU, numbered in their order, into one tensor, which is to be an argument of the operation.
    ///
    /// # Errors
    /// Other types.
    pub(crate) fn tie<'a>(&self, parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<Tensor> {
        let mut ties = Vec::new();
        for (number, parameter) in parameters.into_iter().enumerate() {
            ties.push(parameter.contiguous()?.apply_op1(Tie { gradients: self.clone(), number })?);
        }
        if ties.is_empty() { Tensor::zeros(1, DType::F32, &Device::Cpu) } else { Tensor::cat(&ties, 0) }
    }
}

struct Tie {
    gradients: LinkedGradients,
    number: usize,
}

impl CustomOp1 for Tie {
    fn name(&self) -> &'static str {
        "tie"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match storage {
            CpuStorage::F32(_) => Ok((CpuStorage::F32(vec![0.0]), Shape::from(1))),
            _ => bail!("parameters are tied in f32, given others"),
        }
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.gradients.take(self.number))
    }
}
