//! A frozen linear layer with a LoRA adapter as one operation with a backward pass: the two outputs are summed without being
//! stored separately.
//!
//! Shape letters: T rows, R rank of the adapter.

use crate::cast::wide_values;
use crate::gated_mlp::TILE;
use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{self, Number, with_number};
use crate::slices::{elements, elements_of};
use crate::stored_activation::StoredActivation;
use crate::tape::{self, Reads};
use crate::weight::Weight;
use crate::weight_matrix::WeightMatrix;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use std::sync::{Mutex, PoisonError};

/// A frozen linear layer on the CPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FrozenLinear<'a> {
    weight: &'a Weight,
    bias: Option<&'a Tensor>,
}

impl<'a> FrozenLinear<'a> {
    /// The layer of weight `[out, in]` and bias `[out]`; `None` if one of them is trained or the weight is not on the CPU.
    pub(crate) fn new(weight: &'a Weight, bias: Option<&'a Tensor>) -> Option<Self> {
        let is_trained = match weight {
            Weight::Dense(weight) => weight.track_op(),
            Weight::Quantized(_) | Weight::Stack(_) => false,
        };
        let is_frozen = !is_trained && bias.is_none_or(|bias| !bias.track_op());
        (is_frozen && weight.device().is_cpu()).then_some(Self { weight, bias })
    }

    /// `x weight^T + bias + narrow b^T`: x `[T, in]`, narrow `[T, R]`, b `[out, R]` to `[T, out]`. All are f32 or all bf16;
    /// sums are f32 and are rounded once. Differentiable in x, narrow and b.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub(crate) fn with_adapter(self, x: &Tensor, narrow: &Tensor, b: &Tensor) -> Result<Tensor> {
        self.apply(x, narrow, b, None)
    }

    /// Like [`with_adapter`](Self::with_adapter), for the second pass of a recomputed layer: the output is the stored one,
    /// `known`, or zeros if nothing reads its values, and no product is computed.
    ///
    /// # Errors
    /// As for [`with_adapter`](Self::with_adapter), and a stored output of another shape.
    pub(crate) fn with_adapter_recomputed(
        self,
        x: &Tensor,
        narrow: &Tensor,
        b: &Tensor,
        known: Option<StoredActivation>,
    ) -> Result<Tensor> {
        let shape = [x.dim(0)?, b.dim(0)?];
        let known = known.map_or_else(|| Ok(vec![0.0; shape[0] * shape[1]]), |known| known.values(&shape))?;
        self.apply(x, narrow, b, Some(known))
    }

    fn apply(self, x: &Tensor, narrow: &Tensor, b: &Tensor, known: Option<Vec<f32>>) -> Result<Tensor> {
        let ((tokens, width), (outs, rank)) = (x.dims2()?, b.dims2()?);
        let bias = self.bias.map(|bias| bias.dims().to_vec());
        let fits = self.weight.dims() == [outs, width]
            && narrow.dims() == [tokens, rank]
            && bias.as_ref().is_none_or(|bias| *bias == [outs]);
        if !fits {
            let (x, weight, narrow, b) = (x.dims(), self.weight.dims(), narrow.dims(), b.dims());
            bail!("linear of {x:?} and {narrow:?} with {weight:?}, {b:?} and bias {bias:?}: the shapes do not fit");
        }
        let (weight, bias) = (self.weight.detach(), self.bias.map(Tensor::contiguous).transpose()?);
        let op = AdaptedLinear { weight, bias, known: Mutex::new(known) };
        tape::apply(op, [&x.contiguous()?, &narrow.contiguous()?, &b.contiguous()?], Reads::Inputs)
    }
}

struct AdaptedLinear {
    weight: Weight,
    bias: Option<Tensor>,
    /// The output, if this is a recomputation.
    known: Mutex<Option<Vec<f32>>>,
}

impl AdaptedLinear {
    /// The gradient of x, in rows of `width` elements.
    fn dx<T: Number>(&self, dy: Matrix<T>, width: usize) -> Result<Vec<T>> {
        let mut dx = vec![T::ZERO; dy.shape().0 * width];
        WeightMatrix::read(&self.weight, |weight| {
            weight.backward(dy, &mut dx);
            Ok(dx)
        })
    }
}

impl AdaptedLinear {
    /// Computes the output for x `[T, in]`, narrow `[T, R]` and b `[out, R]`.
    fn forward<T: Number>(&self, x: Matrix<T>, narrow: Matrix<T>, b: Matrix<T>) -> Result<CpuStorage> {
        let (tokens, outs) = (x.shape().0, b.shape().0);
        let bias = self.bias.as_ref().map(|bias| wide_values(bias, |bias| Ok(bias.to_vec()))).transpose()?;
        let mut out = vec![T::ZERO; tokens * outs];
        // In bf16, f32 sums are buffered for some rows at a time before they are rounded; in f32, they are written to the
        // output directly.
        let step = if T::DTYPE == DType::F32 { tokens } else { TILE };
        WeightMatrix::read(&self.weight, |weight| {
            for (block, out) in out.chunks_mut((step * outs).max(1)).enumerate() {
                let rows = block * step..tokens.min((block + 1) * step);
                T::write_sums(out, |sums| {
                    weight.forward(x.rows(rows.clone()), sums);
                    product(narrow.rows(rows), b.t(), sums, Accumulate::Add);
                    if let Some(bias) = &bias {
                        let rows = sums.chunks_exact_mut(outs.max(1));
                        rows.for_each(|row| row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias));
                    }
                });
            }
            Ok(())
        })?;
        Ok(T::to_cpu_storage_owned(out))
    }

    /// Gradients of x, if it needs one, of narrow and of b.
    fn backward<T: Number>(
        &self,
        [x, narrow, b]: [&Tensor; 3],
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let ((tokens, width), (outs, rank)) = (x.dims2()?, b.dims2()?);
        let (mut d_narrow, mut d_b) = (vec![T::ZERO; tokens * rank], vec![T::ZERO; outs * rank]);
        let dx = elements_of::<T, _>(&d_out.contiguous()?, |dy| {
            let dy = Matrix::new(dy, tokens, outs);
            elements_of::<T, _>(b, |b| {
                T::product(dy, Matrix::new(b, outs, rank), &mut d_narrow);
                Ok(())
            })?;
            elements_of::<T, _>(narrow, |narrow| {
                T::product(dy.t(), Matrix::new(narrow, tokens, rank), &mut d_b);
                Ok(())
            })?;
            if x.track_op() { self.dx(dy, width).map(Some) } else { Ok(None) }
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device());
        let dx = dx.map(|dx| tensor(dx, x)).transpose()?;
        Ok((dx, Some(tensor(d_narrow, narrow)?), Some(tensor(d_b, b)?)))
    }
}

impl CustomOp3 for AdaptedLinear {
    fn name(&self) -> &'static str {
        "linear with adapter"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        narrow: &CpuStorage,
        narrow_at: &Layout,
        b: &CpuStorage,
        b_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let ((tokens, width), (outs, rank)) = (x_at.shape().dims2()?, b_at.shape().dims2()?);
        let shape = Shape::from((tokens, outs));
        if let Some(known) = self.known.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Ok((number::storage(known, x.dtype())?, shape));
        }
        let out = with_number!(x.dtype(), T => {
            let x = Matrix::new(elements::<T>(x, x_at)?, tokens, width);
            let narrow = Matrix::new(elements(narrow, narrow_at)?, tokens, rank);
            self.forward(x, narrow, Matrix::new(elements(b, b_at)?, outs, rank))?
        });
        Ok((out, shape))
    }

    fn bwd(
        &self,
        x: &Tensor,
        narrow: &Tensor,
        b: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        with_number!(x.dtype(), T => self.backward::<T>([x, narrow, b], d_out))
    }
}
