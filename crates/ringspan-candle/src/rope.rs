//! Rotary position embedding as one operation with a backward pass (Su et al., 2021): of pairs that are half a head apart
//! (rotate-half), or of neighbours.

#[cfg_attr(not(feature = "cuda"), path = "rope/without_gpu.rs")]
pub(crate) mod on_gpu;

use crate::number::{Number, with_number};
use crate::slices::elements;
use crate::tape::{self, Reads};
use crate::{gpu, pool};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

/// Cosines and sines `[T, D/2]` of the angles of T tokens, shared by all heads and layers.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    half: usize,
    /// Cosines and sines on the first GPU that asked for them.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    uploaded: Arc<OnceLock<[Tensor; 2]>>,
}

impl RotaryTable {
    /// The angle of pair i at each position is `position * inverse_frequencies[i]`, computed in f64; cosines and sines are
    /// multiplied by `scale`.
    pub fn new(positions: &[usize], inverse_frequencies: &[f64], scale: f64) -> Self {
        let half = inverse_frequencies.len();
        let parts = pool::map(pool::parts(positions.len(), 8 * half), |tokens| {
            let angles = positions[tokens].iter().flat_map(|&p| inverse_frequencies.iter().map(move |f| p as f64 * f));
            let rotations = angles.map(f64::sin_cos).map(|(sin, cos)| ((cos * scale) as f32, (sin * scale) as f32));
            rotations.unzip::<f32, f32, Vec<_>, Vec<_>>()
        });
        let (cos, sin): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Self { cos: cos.concat().into(), sin: sin.concat().into(), half, uploaded: Arc::default() }
    }
}

impl RotaryTable {
    /// The angles of tokens on a grid of N axes: the first pairs turn with the first coordinate, the next with the second, and so
    /// on. `frequencies[axis]` has the radians per step of that axis's pairs.
    pub fn on_grid<const N: usize>(coordinates: &[[usize; N]], frequencies: [&[f64]; N]) -> Self {
        let half = frequencies.iter().map(|of_axis| of_axis.len()).sum();
        // Coordinates repeat on every axis, so cosines and sines are computed once for each and copied.
        let of_axis = |axis: usize| {
            let most = coordinates.iter().map(|at| at[axis]).max().map_or(0, |most| most + 1);
            Self::new(&(0..most).collect::<Vec<_>>(), frequencies[axis], 1.0)
        };
        let axes: [Self; N] = std::array::from_fn(of_axis);
        let mut all = [Vec::with_capacity(coordinates.len() * half), Vec::with_capacity(coordinates.len() * half)];
        for at in coordinates {
            for (table, at) in axes.iter().zip(at) {
                let range = at * table.half..(at + 1) * table.half;
                all[0].extend_from_slice(&table.cos[range.clone()]);
                all[1].extend_from_slice(&table.sin[range]);
            }
        }
        let [cos, sin] = all;
        Self { cos: cos.into(), sin: sin.into(), half, uploaded: Arc::default() }
    }
}

/// The rotary tables of a forward pass: layers whose rotary embeddings have the same id share one.
#[derive(Debug, Default)]
pub struct Rotations(RefCell<HashMap<usize, RotaryTable>>);

impl Rotations {
    /// The table of the rotary embedding `id`; `make` computes it on the first call.
    pub(crate) fn table(&self, id: usize, make: impl FnOnce() -> RotaryTable) -> RotaryTable {
        self.0.borrow_mut().entry(id).or_insert_with(make).clone()
    }
}

/// Rotates elements i and i + D/2 of every head by the token's angle i: x `[T, H, D]`, f32 or bf16; the result is rounded
/// once.
///
/// # Errors
/// Other types, and a rotation of another number of tokens or another width.
pub fn rope(x: &Tensor, rotation: &RotaryTable) -> Result<Tensor> {
    rotated(x, rotation, false)
}

/// Like [`rope`], for pairs of neighbours: rotates elements 2i and 2i + 1 by the token's angle i.
///
/// # Errors
/// As for [`rope`].
pub fn rope_interleaved(x: &Tensor, rotation: &RotaryTable) -> Result<Tensor> {
    if !gpu::holds(x) {
        return rotated(x, rotation, true);
    }
    let (tokens, heads, dim) = x.dims3()?;
    let apart = |x: &Tensor, from| x.reshape((tokens, heads, from, dim / from))?.transpose(2, 3)?.contiguous();
    let halves = apart(&x.contiguous()?, dim / 2)?.reshape((tokens, heads, dim))?;
    apart(&rotated(&halves, rotation, false)?, 2)?.reshape((tokens, heads, dim))
}

fn rotated(x: &Tensor, rotation: &RotaryTable, interleaved: bool) -> Result<Tensor> {
    let (tokens, _, dim) = x.dims3()?;
    if dim != 2 * rotation.half || rotation.cos.len() != tokens * rotation.half {
        let pairs = rotation.half.max(1);
        bail!("a rotation of {} tokens x {pairs} pairs does not fit {:?}", rotation.cos.len() / pairs, x.shape());
    }
    tape::apply(Rope { rotation: rotation.clone(), interleaved, back: false }, [&readable(x)?], Reads::Nothing)
}

/// Returns x as the kernels read it: with any strides on a GPU, contiguous on the CPU.
fn readable(x: &Tensor) -> Result<Tensor> {
    if gpu::holds(x) { Ok(x.clone()) } else { x.contiguous() }
}

struct Rope {
    rotation: RotaryTable,
    /// Whether pairs are neighbours.
    interleaved: bool,
    /// Rotates by the negative angles.
    back: bool,
}

impl Rope {
    /// Rotates the heads of consecutive tokens, beginning with token `first`: x and out `[.., heads, D]`.
    #[inline(always)]
    fn rotate<T: Number>(&self, first: usize, heads: usize, x: &[T], out: &mut [T]) {
        let half = self.rotation.half;
        let sign = if self.back { -1.0 } else { 1.0 };
        let width = (heads * 2 * half).max(1);
        for (token, (x, out)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
            let at = (first + token) * half;
            let (cos, sin) = (&self.rotation.cos[at..at + half], &self.rotation.sin[at..at + half]);
            for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
                if self.interleaved {
                    for (((x, out), cos), sin) in x.chunks_exact(2).zip(out.chunks_exact_mut(2)).zip(cos).zip(sin) {
                        let (a, b, sin) = (x[0].upcast(), x[1].upcast(), sin * sign);
                        out[0] = T::round_from(a * cos - b * sin);
                        out[1] = T::round_from(b * cos + a * sin);
                    }
                    continue;
                }
                let ((a, b), (out_a, out_b)) = (x.split_at(half), out.split_at_mut(half));
                for i in 0..half {
                    let sin = sin[i] * sign;
                    let (a, b) = (a[i].upcast(), b[i].upcast());
                    out_a[i] = T::round_from(a * cos[i] - b * sin);
                    out_b[i] = T::round_from(b * cos[i] + a * sin);
                }
            }
        }
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, heads, dim) = layout.shape().dims3()?;
        let out = with_number!(x.dtype(), T => {
            let (x, width) = (elements::<T>(x, layout)?, (heads * dim).max(1));
            T::to_cpu_storage_owned(pool::map_copy(x, pool::part(tokens, width) * width, |first, out| {
                let x = &x[first..first + out.len()];
                pool::vectorized(#[inline(always)] || self.rotate(first / width, heads, x, out));
            }))
        });
        Ok((out, layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        on_gpu::rotated(x, layout, &self.rotation, self.back)
    }

    fn bwd(&self, _x: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        // The transpose of a rotation is the rotation by the negative angle.
        let back = Rope { rotation: self.rotation.clone(), back: !self.back, ..*self };
        readable(d_out)?.apply_op1_no_bwd(&back).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// Pairs of neighbours turn as pairs that are half a head apart do; a position on a grid has the angles of its coordinates.
    #[test]
    fn neighbours_turn_by_the_angles_of_their_coordinates() -> Result<()> {
        let (grid, frequencies) = ([[0, 2], [3, 1], [3, 2]], [&[1.0, 0.5][..], &[0.25]]);
        let table = RotaryTable::on_grid(&grid, frequencies);
        let x = Tensor::arange(0f32, 36.0, &Device::Cpu)?.reshape((3, 2, 6))?;
        let got = rope_interleaved(&x, &table)?.to_vec3::<f32>()?;
        let x = x.to_vec3::<f32>()?;
        for (token, [a, b]) in grid.into_iter().enumerate() {
            let angles = [a as f64, a as f64 * 0.5, b as f64 * 0.25];
            for (head, (pair, angle)) in (0..2).flat_map(|head| angles.iter().enumerate().map(move |pair| (head, pair)))
            {
                let of = |index: usize| f64::from(x[token][head][2 * pair + index]);
                let wanted = [of(0) * angle.cos() - of(1) * angle.sin(), of(1) * angle.cos() + of(0) * angle.sin()];
                for (index, wanted) in wanted.into_iter().enumerate() {
                    assert!((f64::from(got[token][head][2 * pair + index]) - wanted).abs() < 1e-5);
                }
            }
        }
        let none = Tensor::zeros((0, 2, 6), DType::F32, &Device::Cpu)?;
        assert_eq!(rope_interleaved(&none, &RotaryTable::on_grid(&[], frequencies))?.dims(), [0, 2, 6]);
        Ok(())
    }
}
