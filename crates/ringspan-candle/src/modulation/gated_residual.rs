//! The residual sum on the CPU, with a gate that depends on the token.

use super::TableRows;
use super::tables::{by_parts, copy_by_parts, table_gradients};
use crate::cast::wide_values;
use crate::number::{Number, with_number};
use crate::slices::{elements, elements_of, widened};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

/// [`gated_residual`](super::gated_residual) of x and y `[T, C]` with gates `[M, C]`.
pub(super) struct GatedResidual {
    pub(super) rows: TableRows,
}

impl CustomOp3 for GatedResidual {
    fn name(&self) -> &'static str {
        "gated-residual"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        y: &CpuStorage,
        y_at: &Layout,
        gate: &CpuStorage,
        gate_at: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use candle_core::backend::BackendStorage;
        let (gate, (_, width)) = (&*widened(gate, gate_at)?, x_at.shape().dims2()?);
        let out = with_number!(x.dtype(), T => {
            let y = elements::<T>(y, y_at)?;
            let out = copy_by_parts(elements::<T>(x, x_at)?, width, #[inline(always)] |tokens, out| {
                let y = y[tokens.start * width..].chunks_exact(width);
                for ((token, y), out) in tokens.zip(y).zip(out.chunks_exact_mut(width)) {
                    let at = self.rows.of(token) * width;
                    for ((out, y), gate) in out.iter_mut().zip(y).zip(&gate[at..at + width]) {
                        *out = T::round_from(out.upcast() + y.upcast() * gate);
                    }
                }
            });
            T::to_cpu_storage_owned(out)
        });
        Ok((out, x_at.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        y: &Tensor,
        gate: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let (d_out, width) = (d_out.contiguous()?, x.dim(1)?);
        let (dy, [d_gate]) = with_number!(y.dtype(), T => {
            let (dy, sums) = elements_of::<T, _>(y, |ys| {
                wide_values(gate, |gates| {
                    let mut dy = elements_of::<T, _>(&d_out, |d| Ok(d.to_vec()))?;
                    let sums = by_parts(ys, &mut dy, width, |tokens, y, dy| {
                        let mut sums = vec![0.0f32; gates.len()];
                        for ((token, y), dy) in tokens.zip(y.chunks_exact(width)).zip(dy.chunks_exact_mut(width)) {
                            let at = self.rows.of(token) * width;
                            for i in 0..width {
                                let d = dy[i].upcast();
                                sums[at + i] += d * y[i].upcast();
                                dy[i] = T::round_from(d * gates[at + i]);
                            }
                        }
                        [sums]
                    });
                    Ok((dy, sums))
                })
            })?;
            (Tensor::from_vec(dy, y.shape(), y.device())?, table_gradients(sums, [gate])?)
        });
        Ok((Some(d_out), Some(dy), Some(d_gate)))
    }
}
