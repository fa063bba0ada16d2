//! A frozen linear layer with a LoRA adapter as one operation with a backward pass: the two outputs are summed without being
//! stored separately.
//!
//! Shape letters: T rows, R rank of the adapter.

use crate::cast::wide_values;
use crate::gated_mlp::TILE;
use crate::layer_adapter::AdaptedRows;
use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{self, Number, with_number};
use crate::slices::{elements, elements_of};
use crate::stored_activation::StoredActivation;
use crate::tape::{self, Reads};
use crate::weight::Weight;
use crate::weight_matrix::WeightMatrix;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;
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

    /// `x weight^T + bias`, and for some rows the contributions of adapters: x `[T, in]` to `[T, out]`, f32 or bf16; sums are f32 and are
    /// rounded once. It has no gradients.
    ///
    /// # Errors
    /// Shapes that do not fit.
    pub(crate) fn with_adapted_rows(self, x: &Tensor, adapted: &[AdaptedRows]) -> Result<Tensor> {
        with_number!(x.dtype(), T => self.adapted_rows::<T>(&x.contiguous()?, adapted))
    }

    fn adapted_rows<T: Number>(self, x: &Tensor, adapted: &[AdaptedRows]) -> Result<Tensor> {
        let ((tokens, width), outs) = (x.dims2()?, self.weight.dims().first().copied().unwrap_or(0));
        let bias = self.bias.map(Tensor::dims);
        if self.weight.dims() != [outs, width] || bias.is_some_and(|bias| bias != [outs]) {
            bail!("linear of {:?} with {:?} and bias {bias:?}: the shapes do not fit", x.dims(), self.weight.dims());
        }
        let mut deltas = Vec::new();
        for AdaptedRows { rows, delta } in adapted {
            if delta.dims() != [rows.len(), outs] {
                bail!("an adapter's {:?} for {} rows of a layer with {outs} outputs", delta.dims(), rows.len());
            }
            deltas.push((rows, delta.flatten_all()?.to_vec1::<f32>()?));
        }
        let add = |block: Range<usize>, sums: &mut [f32]| {
            for (of_delta, delta) in &deltas {
                let of_block = of_delta.iter().zip(delta.chunks_exact(outs.max(1)));
                for (row, delta) in of_block.filter(|(row, _)| block.contains(&(**row as usize))) {
                    let first = (*row as usize - block.start) * outs;
                    sums[first..first + outs].iter_mut().zip(delta).for_each(|(sum, delta)| *sum += delta);
                }
            }
        };
        let out =
            elements_of::<T, _>(x, |x| products(self.weight, self.bias, Matrix::new(x, tokens, width), outs, add))?;
        Tensor::from_vec(out, (tokens, outs), x.device())
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
        let add = |rows: Range<usize>, sums: &mut [f32]| product(narrow.rows(rows), b.t(), sums, Accumulate::Add);
        let out = products(&self.weight, self.bias.as_ref(), x, b.shape().0, add)?;
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

/// `x weight^T + bias` with what `add` adds to the sums of a range of rows: x `[T, in]` to `[T, out]`, in sums of f32 that are rounded
/// once.
fn products<T: Number>(
    weight: &Weight,
    bias: Option<&Tensor>,
    x: Matrix<T>,
    outs: usize,
    add: impl Fn(Range<usize>, &mut [f32]),
) -> Result<Vec<T>> {
    let tokens = x.shape().0;
    let bias = bias.map(|bias| wide_values(bias, |bias| Ok(bias.to_vec()))).transpose()?;
    let mut out = vec![T::ZERO; tokens * outs];
    // In bf16, f32 sums are buffered for some rows at a time before they are rounded; in f32, they are written to the output directly.
    let step = if T::DTYPE == DType::F32 { tokens } else { TILE };
    WeightMatrix::read(weight, |weight| {
        for (block, out) in out.chunks_mut((step * outs).max(1)).enumerate() {
            let rows = block * step..tokens.min((block + 1) * step);
            T::write_sums(out, |sums| {
                weight.forward(x.rows(rows.clone()), sums);
                add(rows, sums);
                if let Some(bias) = &bias {
                    let rows = sums.chunks_exact_mut(outs.max(1));
                    rows.for_each(|row| row.iter_mut().zip(bias).for_each(|(out, bias)| *out += bias));
                }
            });
        }
        Ok(())
    })?;
    Ok(out)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::{Format, QuantizedMatrix};
    use candle_core::Device;

    fn numbers(shape: (usize, usize), dtype: DType, pace: f32) -> Result<Tensor> {
        let values = (0..shape.0 * shape.1).map(|i| (i as f32 * pace).sin()).collect();
        Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
    }

    /// Rows of two adapters and of none, in more rows than are computed at a time, have what each adapter alone gives them.
    #[test]
    fn rows_of_several_adapters_have_the_outputs_of_each_alone() -> Result<()> {
        let (tokens, width, outs) = (2 * TILE + 3, 64, 48);
        let blocks =
            (0..outs * width / 32).flat_map(|at| [0, 0x2c].into_iter().chain((0..32).map(move |i| (at * 7 + i) as u8)));
        let quantized = QuantizedMatrix::new(Format::Q8_0, outs, width, blocks.collect::<Vec<u8>>().into())?;
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2)] {
            for weight in [Weight::from(numbers((outs, width), dtype, 0.3)?), quantized.clone().into()] {
                let (x, bias) = (numbers((tokens, width), dtype, 0.7)?, numbers((1, outs), dtype, 0.9)?.squeeze(0)?);
                let frozen = FrozenLinear::new(&weight, Some(&bias)).expect("a frozen layer");
                let adapters = [(numbers((tokens, 3), dtype, 0.2)?, numbers((outs, 3), dtype, 0.5)?, 0), {
                    (numbers((tokens, 5), dtype, 0.4)?, numbers((outs, 5), dtype, 0.6)?, 1)
                }];
                let mut expected = weight.linear(&x, Some(&bias))?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
                let mut adapted = Vec::new();
                for (narrow, b, first) in &adapters {
                    let rows: Vec<u32> = (*first..tokens as u32).step_by(3).collect();
                    let alone = frozen.with_adapter(&x, narrow, b)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
                    rows.iter().for_each(|row| expected[*row as usize].clone_from(&alone[*row as usize]));
                    let of_rows = narrow.index_select(&Tensor::new(rows.as_slice(), &Device::Cpu)?, 0)?;
                    adapted.push(AdaptedRows { rows, delta: crate::linear::linear_wide(&of_rows, b)? });
                }
                let both = frozen.with_adapted_rows(&x, &adapted)?;
                assert_eq!(both.dtype(), dtype);
                let both = both.to_dtype(DType::F32)?.to_vec2::<f32>()?;
                for (row, (both, expected)) in both.iter().zip(&expected).enumerate() {
                    let apart =
                        both.iter().zip(expected).map(|(a, b)| (a - b).abs() / (1.0 + b.abs())).fold(0.0, f32::max);
                    assert!(apart < tolerance, "row {row} in {dtype:?}: {apart}");
                }
                let wrong = AdaptedRows { rows: vec![0], delta: Tensor::zeros((2, outs), DType::F32, &Device::Cpu)? };
                assert!(frozen.with_adapted_rows(&x, &[wrong]).is_err());
            }
        }
        Ok(())
    }
}
