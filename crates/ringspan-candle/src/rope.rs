//! Rotary position embedding as one operation with a backward pass (Su et al., 2021), in the rotate-half convention.

#[cfg(feature = "cuda")]
pub(crate) mod on_gpu;

use crate::number::{Number, with_number};
use crate::slices::elements;
use crate::tape::{self, Reads};
use crate::{gpu, pool};
#[cfg(feature = "cuda")]
use candle_core::CudaStorage;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

/// Cosines and sines `[T, D/2]` of the angles of T tokens, shared by all heads and layers.
#[derive(Debug, Clone)]
pub struct RotaryTable {
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    half: usize,
    /// Cosines and sines on the first GPU that asked for them.
    #[cfg(feature = "cuda")]
    uploaded: Arc<std::sync::OnceLock<[Tensor; 2]>>,
}

impl RotaryTable {
    /// The angle of pair i at each position is `position * inverse_frequencies[i]`, computed in f64; cosines and sines are
    /// multiplied by `scale`.
    pub fn new(positions: &[usize], inverse_frequencies: &[f64], scale: f64) -> Self {
        let half = inverse_frequencies.len();
        let parts = pool::map(pool::parts(positions.len(), 8 * half), |tokens| {
            let angles = positions[tokens].iter().flat_map(|&p| inverse_frequencies.iter().map(move |f| p as f64 * f));
            let turns = angles.map(f64::sin_cos).map(|(sin, cos)| ((cos * scale) as f32, (sin * scale) as f32));
            turns.unzip::<f32, f32, Vec<_>, Vec<_>>()
        });
        let (cos, sin): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        Self {
            cos: cos.concat().into(),
            sin: sin.concat().into(),
            half,
            #[cfg(feature = "cuda")]
            uploaded: Arc::default(),
        }
    }
}

/// The tables of a forward pass: layers whose rotary embeddings have the same id share one.
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
    let (tokens, _, dim) = x.dims3()?;
    if dim != 2 * rotation.half || rotation.cos.len() != tokens * rotation.half {
        let pairs = rotation.half.max(1);
        bail!("a rotation of {} tokens x {pairs} pairs does not fit {:?}", rotation.cos.len() / pairs, x.shape());
    }
    tape::apply(Rope { rotation: rotation.clone(), back: false }, [&placed(x)?], Reads::Nothing)
}

/// Returns x as the kernels read it: with any strides on a GPU, contiguous on the CPU.
fn placed(x: &Tensor) -> Result<Tensor> {
    if gpu::holds(x) { Ok(x.clone()) } else { x.contiguous() }
}

struct Rope {
    rotation: RotaryTable,
    /// Rotates by the negative angles.
    back: bool,
}

impl Rope {
    /// Rotates the heads of consecutive tokens, beginning with token `first`: x and out `[.., heads, D]`.
    #[inline(always)]
    fn turn<T: Number>(&self, first: usize, heads: usize, x: &[T], out: &mut [T]) {
        let half = self.rotation.half;
        let sign = if self.back { -1.0 } else { 1.0 };
        let width = (heads * 2 * half).max(1);
        for (token, (x, out)) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)).enumerate() {
            let at = (first + token) * half;
            let (cos, sin) = (&self.rotation.cos[at..at + half], &self.rotation.sin[at..at + half]);
            for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
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
            let mut out = vec![T::ZERO; x.len()];
            let part = pool::part(tokens, width);
            let parts = x.chunks(part * width).zip(out.chunks_mut(part * width)).enumerate().collect();
            pool::map(parts, |(index, (x, out)): (usize, (&[T], &mut [T]))| {
                pool::vectorized(|| self.turn(index * part, heads, x, out));
            });
            T::to_cpu_storage_owned(out)
        });
        Ok((out, layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        on_gpu::turned(x, layout, &self.rotation, self.back)
    }

    fn bwd(&self, _x: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        // The transpose of a rotation is the rotation by the negative angle.
        placed(d_out)?.apply_op1_no_bwd(&Rope { rotation: self.rotation.clone(), back: !self.back }).map(Some)
    }
}
