//! Operations of one to three inputs with a backward pass.

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Storage, Tensor, bail};

/// An operation of N inputs that either candle's graph or a tape can track.
pub(crate) trait Operation<const N: usize>: Send + Sync + Sized + 'static {
    /// Computes the result; candle tracks it.
    fn apply(self, inputs: [&Tensor; N]) -> Result<Tensor>;

    /// Computes the result of inputs on the CPU, untracked.
    fn compute(&self, inputs: [&Tensor; N]) -> Result<(CpuStorage, Shape)>;

    /// Computes the gradients of the N inputs; `None` for an input without a gradient.
    fn gradients(&self, inputs: &[Tensor], output: &Tensor, d_output: &Tensor) -> Result<Vec<Option<Tensor>>>;
}

/// Calls `f` with the CPU storage and the layout of a tensor.
fn on_cpu<T>(tensor: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(storage, layout),
        _ => bail!("expected a tensor on the CPU, given one on {:?}", tensor.device()),
    }
}

impl<O: CustomOp1 + Send + Sync + 'static> Operation<1> for O {
    fn apply(self, [x]: [&Tensor; 1]) -> Result<Tensor> {
        x.apply_op1(self)
    }

    fn compute(&self, [x]: [&Tensor; 1]) -> Result<(CpuStorage, Shape)> {
        on_cpu(x, |x, x_at| self.cpu_fwd(x, x_at))
    }

    fn gradients(&self, inputs: &[Tensor], output: &Tensor, d_output: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x] = inputs else { bail!("{} has 1 input, not {}", self.name(), inputs.len()) };
        Ok(vec![self.bwd(x, output, d_output)?])
    }
}

impl<O: CustomOp2 + Send + Sync + 'static> Operation<2> for O {
    fn apply(self, [x, y]: [&Tensor; 2]) -> Result<Tensor> {
        x.apply_op2(y, self)
    }

    fn compute(&self, [x, y]: [&Tensor; 2]) -> Result<(CpuStorage, Shape)> {
        on_cpu(x, |x, x_at| on_cpu(y, |y, y_at| self.cpu_fwd(x, x_at, y, y_at)))
    }

    fn gradients(&self, inputs: &[Tensor], output: &Tensor, d_output: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, y] = inputs else { bail!("{} has 2 inputs, not {}", self.name(), inputs.len()) };
        let (dx, dy) = self.bwd(x, y, output, d_output)?;
        Ok(vec![dx, dy])
    }
}

impl<O: CustomOp3 + Send + Sync + 'static> Operation<3> for O {
    fn apply(self, [x, y, z]: [&Tensor; 3]) -> Result<Tensor> {
        x.apply_op3(y, z, self)
    }

    fn compute(&self, [x, y, z]: [&Tensor; 3]) -> Result<(CpuStorage, Shape)> {
        on_cpu(x, |x, x_at| on_cpu(y, |y, y_at| on_cpu(z, |z, z_at| self.cpu_fwd(x, x_at, y, y_at, z, z_at))))
    }

    fn gradients(&self, inputs: &[Tensor], output: &Tensor, d_output: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let [x, y, z] = inputs else { bail!("{} has 3 inputs, not {}", self.name(), inputs.len()) };
        let (dx, dy, dz) = self.bwd(x, y, z, output, d_output)?;
        Ok(vec![dx, dy, dz])
    }
}
