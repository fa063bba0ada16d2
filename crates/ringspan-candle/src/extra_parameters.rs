//! Parameters that an operation reads in addition to its inputs, since a candle operation has at most three inputs.
//!
//! Each parameter is connected to the graph by a tie: an operation with one output element. The backward pass of the
//! operation that reads the parameters runs first and stores their gradients where the backward passes of the ties find them.

use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Parameters on the CPU that an operation reads, numbered in the order in which they are tied.
#[derive(Debug, Default)]
pub(crate) struct ExtraParameters {
    gradients: ExtraGradients,
    ties: Vec<Tensor>,
}

impl ExtraParameters {
    /// Connects a parameter, f32 or bf16, to the operation.
    ///
    /// # Errors
    /// Other types.
    pub(crate) fn tie(&mut self, parameter: &Tensor) -> Result<()> {
        let tie = ConnectParameter { gradients: self.gradients.clone(), number: self.len() };
        self.ties.push(tape::apply(tie, [&parameter.contiguous()?], Reads::Nothing)?);
        Ok(())
    }

    /// The number of tied parameters, which is also the number of the next one.
    pub(crate) fn len(&self) -> usize {
        self.ties.len()
    }

    /// Returns the one input of the operation that stands for all parameters, and the object in which it stores their
    /// gradients.
    ///
    /// # Errors
    /// None that a caller can cause.
    pub(crate) fn argument(self) -> Result<(Tensor, ExtraGradients)> {
        let argument = match self.ties.is_empty() {
            true => Tensor::zeros(1, DType::F32, &Device::Cpu)?,
            false => Tensor::cat(&self.ties, 0)?,
        };
        Ok((argument, self.gradients))
    }
}

/// Gradients by the number of the parameter, handed from an operation's backward pass to the ties of its parameters.
#[derive(Debug, Clone, Default)]
pub(crate) struct ExtraGradients(Arc<Mutex<HashMap<usize, Tensor>>>);

impl ExtraGradients {
    /// Stores the gradient of a parameter for its tie.
    pub(crate) fn leave(&self, number: usize, gradient: Tensor) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(number, gradient);
    }

    fn take(&self, number: usize) -> Option<Tensor> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&number)
    }
}

struct ConnectParameter {
    gradients: ExtraGradients,
    number: usize,
}

impl CustomOp1 for ConnectParameter {
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
