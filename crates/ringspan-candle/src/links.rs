//! Parameters that an operation of candle's reads beside its arguments, of which it has three at most.
//!
//! Each parameter is tied into the graph by one element. The backward pass of the operation comes first and leaves the
//! gradients where the ties of the parameters find them.

use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Parameters on the CPU that an operation reads, numbered in the order in which they are tied.
#[derive(Debug, Default)]
pub(crate) struct Links {
    gradients: LinkedGradients,
    ties: Vec<Tensor>,
}

impl Links {
    /// Ties a parameter, f32 or bf16.
    ///
    /// # Errors
    /// Other types.
    pub(crate) fn tie(&mut self, parameter: &Tensor) -> Result<()> {
        let tie = Tie { gradients: self.gradients.clone(), number: self.len() };
        self.ties.push(tape::apply(tie, [&parameter.contiguous()?], Reads::Nothing)?);
        Ok(())
    }

    /// Parameters that are tied: the number of the next.
    pub(crate) fn len(&self) -> usize {
        self.ties.len()
    }

    /// The argument of the operation that stands for all of them, and where its backward pass leaves their gradients.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub(crate) fn argument(self) -> Result<(Tensor, LinkedGradients)> {
        let argument = match self.ties.is_empty() {
            true => Tensor::zeros(1, DType::F32, &Device::Cpu)?,
            false => Tensor::cat(&self.ties, 0)?,
        };
        Ok((argument, self.gradients))
    }
}

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
        if !matches!(storage.dtype(), DType::F32 | DType::BF16) {
            bail!("layers on the CPU compute in F32 and BF16, given {:?}", storage.dtype());
        }
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(self.gradients.take(self.number))
    }
}
