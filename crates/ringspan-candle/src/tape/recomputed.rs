//! Outputs that a tape recomputes instead of holding them, because computing them costs little.

use super::Operation;
use candle_core::op::BackpropOp;
use candle_core::{Result, Storage, Tensor};
use std::cell::OnceCell;
use std::rc::Rc;

/// An output that is computed again when a backward pass reads it. The entries that read it share it, so it is computed once,
/// and the last of them frees it.
pub(super) struct Recomputed {
    compute: Box<dyn Fn() -> Result<Tensor>>,
    value: OnceCell<Tensor>,
}

impl Recomputed {
    /// The output of an operation on the CPU.
    pub(super) fn new<const N: usize>(op: impl Operation<N>, inputs: [&Tensor; N]) -> Self {
        let inputs = inputs.map(Clone::clone);
        let compute = Box::new(move || {
            let (storage, shape) = op.compute(inputs.each_ref())?;
            Ok(Tensor::from_storage(Storage::Cpu(storage), shape, BackpropOp::none(), true))
        });
        Self { compute, value: OnceCell::new() }
    }

    fn value(&self) -> Result<Tensor> {
        if let Some(value) = self.value.get() {
            return Ok(value.clone());
        }
        let value = (self.compute)()?;
        Ok(self.value.get_or_init(|| value).clone())
    }
}

/// A value that a backward pass reads.
pub(super) enum SavedValue {
    Tensor(Tensor),
    Recomputed(Rc<Recomputed>),
}

impl SavedValue {
    pub(super) fn tensor(self) -> Result<Tensor> {
        match self {
            Self::Tensor(tensor) => Ok(tensor),
            Self::Recomputed(recomputed) => recomputed.value(),
        }
    }
}
