//! Row-wise functions, computed tile by tile, forward and backward, so that intermediate tensors are in memory for the rows
//! of one tile only (sequence tiling; Bekman et al., 2025, arXiv:2506.13996).
//!
//! Shape letters: T rows, C width of the input, N width of the output.

use crate::cast::cast;
use crate::extra_parameters::{ExtraGradients, ExtraParameters};
use crate::gated_mlp::TILE;
use crate::number::{self, Number, with_number};
use crate::slices::elements_of;
use crate::stored_activation::StoredActivation;
use crate::tape::{self, Reads, Tape};
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, Var, WithDType};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// A function that is applied to each row, with its parameters.
pub(crate) trait RowFunction: Clone + Send + Sync + 'static {
    /// The parameters, always in the same order.
    fn parameters(&mut self) -> Vec<&mut Tensor>;

    /// The width N of the output.
    ///
    /// # Errors
    /// Parameters that are not matrices.
    fn width(&self) -> Result<usize>;

    /// Maps the rows `rows` of the whole input, x `[n, C]`, to `[n, N]`; differentiable. Unless `needs_values`, nothing
    /// reads the output values, only gradients.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn forward(&self, x: &Tensor, rows: Range<usize>, needs_values: bool) -> Result<Tensor>;
}

/// Applies the function to x `[T, C]`, f32 or bf16 on the CPU; returns `[T, N]` of the same type. The backward pass
/// recomputes each tile and differentiates it with respect to x and the tracked parameters.
///
/// # Errors
/// Errors of the function, and other types.
pub(crate) fn tiled(x: &Tensor, function: impl RowFunction) -> Result<Tensor> {
    apply(x, function, OutputSource::First)
}

/// Like [`tiled`], for the second pass of a recomputed layer: the output is the stored one, `known`, or zeros if nothing
/// reads its values.
///
/// # Errors
/// As for [`tiled`], and a stored output of another shape.
pub(crate) fn tiled_recomputed(
    x: &Tensor,
    function: impl RowFunction,
    known: Option<StoredActivation>,
) -> Result<Tensor> {
    let shape = [x.dim(0)?, function.width()?];
    let known = known.map(|known| known.values(&shape)).transpose()?;
    apply(x, function, known.map_or(OutputSource::Unused, |known| OutputSource::Known(Mutex::new(known))))
}

fn apply<F: RowFunction>(x: &Tensor, mut function: F, pass: OutputSource) -> Result<Tensor> {
    let x = x.contiguous()?;
    let parameters = function.parameters();
    let mut extra = ExtraParameters::default();
    parameters.iter().filter(|parameter| parameter.track_op()).try_for_each(|parameter| extra.tie(parameter))?;
    let (ties, gradients) = extra.argument()?;
    let trained = parameters.iter().map(|parameter| parameter.track_op()).collect();
    // The graph refers to the operation, so the operation holds detached parameters, which do not refer to the graph.
    // Variables have no graph.
    for parameter in parameters {
        if !parameter.is_variable() {
            *parameter = parameter.detach();
        }
    }
    let shape = (x.dim(0)?, function.width()?);
    let is_unused = matches!(pass, OutputSource::Unused);
    let op = Tiled { x: x.detach(), function, trained, gradients, pass };
    match is_unused {
        true => tape::apply_unused(op, [&x, &ties], Reads::Nothing, (shape, x.dtype())),
        false => tape::apply(op, [&x, &ties], Reads::Nothing),
    }
}

struct Tiled<F> {
    x: Tensor,
    function: F,
    /// Says for each of the function's parameters whether it needs a gradient.
    trained: Vec<bool>,
    gradients: ExtraGradients,
    pass: OutputSource,
}

/// The source of the output values.
enum OutputSource {
    /// The function computes them.
    First,
    /// They are the stored output.
    Known(Mutex<Vec<f32>>),
    /// Nothing reads them, so they are zeros.
    Unused,
}

impl<F: RowFunction> Tiled<F> {
    fn tiles(&self) -> Result<impl Iterator<Item = Range<usize>> + use<F>> {
        let rows = self.x.dim(0)?;
        Ok((0..rows).step_by(TILE).map(move |first| first..rows.min(first + TILE)))
    }

    fn values<T: Number>(&self) -> Result<Vec<T>> {
        let mut out = Vec::with_capacity(self.x.dim(0)? * self.function.width()?);
        for tile in self.tiles()? {
            let x = self.x.narrow(0, tile.start, tile.len())?;
            elements_of(&self.function.forward(&x, tile, true)?.contiguous()?, |tile| {
                out.extend_from_slice(tile);
                Ok(())
            })?;
        }
        Ok(out)
    }
}

impl<F: RowFunction> Tiled<F> {
    /// Returns the gradient of x, and stores those of the parameters for their ties.
    fn backward<T: Number>(&self, x: &Tensor, d_out: &Tensor) -> Result<Tensor> {
        let mut function = self.function.clone();
        let mut variables = Vec::new();
        for (parameter, trained) in function.parameters().into_iter().zip(&self.trained) {
            if *trained {
                let variable = Var::from_tensor(parameter)?.into_inner();
                *parameter = variable.clone();
                variables.push((variable, None::<Tensor>));
            }
        }
        let mut dx = Vec::with_capacity(x.elem_count());
        for tile in self.tiles()? {
            let of_tile = Var::from_tensor(&self.x.narrow(0, tile.start, tile.len())?)?;
            let d_out = d_out.narrow(0, tile.start, tile.len())?.contiguous()?;
            let (out, tape) = Tape::record(|| function.forward(of_tile.as_tensor(), tile, false))?;
            let mut gradients = tape.backward(out, d_out)?;
            let d_tile = gradients.remove(of_tile.as_tensor()).map_or_else(|| of_tile.zeros_like(), Ok)?;
            elements_of::<T, _>(&d_tile.contiguous()?, |d_tile| {
                dx.extend_from_slice(d_tile);
                Ok(())
            })?;
            for (variable, sum) in &mut variables {
                if let Some(gradient) = gradients.remove(variable) {
                    // Gradients are summed over tiles in f32, too.
                    let gradient = cast(&gradient, DType::F32)?;
                    *sum = Some(match sum.take() {
                        Some(sum) => (sum + gradient)?.detach(),
                        None => gradient,
                    });
                }
            }
        }
        for (number, (variable, sum)) in variables.into_iter().enumerate() {
            let sum = sum.map_or_else(|| variable.zeros_like(), |sum| cast(&sum, variable.dtype()))?;
            self.gradients.leave(number, sum);
        }
        Tensor::from_vec(dx, x.shape(), x.device())
    }
}

impl<F: RowFunction> CustomOp2 for Tiled<F> {
    fn name(&self) -> &'static str {
        "tiled"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = Shape::from((self.x.dim(0)?, self.function.width()?));
        let out = match &self.pass {
            OutputSource::First => with_number!(self.x.dtype(), T => T::to_cpu_storage_owned(self.values::<T>()?)),
            OutputSource::Known(known) => {
                let known = std::mem::take(&mut *known.lock().unwrap_or_else(PoisonError::into_inner));
                number::storage(known, self.x.dtype())?
            }
            OutputSource::Unused => number::storage(vec![0.0; shape.elem_count()], self.x.dtype())?,
        };
        Ok((out, shape))
    }

    fn bwd(&self, x: &Tensor, ties: &Tensor, _: &Tensor, d_out: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let dx = with_number!(x.dtype(), T => self.backward::<T>(x, d_out)?);
        Ok((Some(dx), Some(ties.zeros_like()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backward_from;
    use crate::stored_activation::Storage;
    use candle_core::Device;

    /// The function `silu(x a^T) + i b`, where i is the index of the row.
    #[derive(Clone)]
    struct OfRows {
        a: Tensor,
        b: Tensor,
    }

    impl RowFunction for OfRows {
        fn parameters(&mut self) -> Vec<&mut Tensor> {
            vec![&mut self.a, &mut self.b]
        }

        fn width(&self) -> Result<usize> {
            self.a.dim(0)
        }

        fn forward(&self, x: &Tensor, rows: Range<usize>, _needs_values: bool) -> Result<Tensor> {
            let numbers = Tensor::arange(rows.start as f32, rows.end as f32, &Device::Cpu)?.unsqueeze(1)?;
            x.matmul(&self.a.t()?)?.silu()? + numbers.matmul(&self.b.unsqueeze(0)?)?
        }
    }

    fn close(got: &Tensor, wanted: &Tensor) -> Result<()> {
        let (got, wanted) = (got.flatten_all()?.to_vec1::<f32>()?, wanted.flatten_all()?.to_vec1::<f32>()?);
        let most = wanted.iter().fold(0f32, |most, x| most.max(x.abs()));
        assert_eq!(got.len(), wanted.len());
        assert!(got.iter().zip(&wanted).all(|(got, wanted)| (got - wanted).abs() <= 1e-5 * most));
        Ok(())
    }

    #[test]
    fn values_and_gradients_are_those_of_all_rows_at_once() -> Result<()> {
        let random = |shape: &[usize]| Tensor::randn(0f32, 1.0, shape, &Device::Cpu);
        for rows in [1, TILE, 2 * TILE + 37] {
            let (x, a, b) = (random(&[rows, 3])?, random(&[5, 3])?, random(&[5])?);
            let dy = random(&[rows, 5])?;
            for trains_a in [true, false] {
                let (x, var_a, b) = (Var::from_tensor(&x)?, Var::from_tensor(&a)?, Var::from_tensor(&b)?);
                let a = if trains_a { var_a.as_tensor().clone() } else { a.clone() };
                let function = OfRows { a, b: b.as_tensor().clone() };
                let plain = function.forward(x.as_tensor(), 0..rows, true)?;
                let wanted = backward_from::backward(&plain, &dy)?;
                let known = Some(StoredActivation::new(&plain.detach(), Storage::F32)?);
                let all = [
                    tiled(x.as_tensor(), function.clone())?,
                    tiled_recomputed(x.as_tensor(), function.clone(), known)?,
                    tiled_recomputed(x.as_tensor(), function, None)?,
                ];
                close(&all[0], &plain)?;
                close(&all[1], &plain)?;
                for out in all {
                    let got = backward_from::backward(&out, &dy)?;
                    assert_eq!(got.get(var_a.as_tensor()).is_some(), trains_a);
                    for variable in [&x, &var_a, &b] {
                        if let Some(wanted) = wanted.get(variable.as_tensor()) {
                            close(got.get(variable.as_tensor()).expect("tracked"), wanted)?;
                        }
                    }
                }
            }
        }
        Ok(())
    }
}
