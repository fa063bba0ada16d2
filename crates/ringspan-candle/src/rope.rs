//! Rotary position embedding as one operation with a backward (Su et al., 2021), in the rotate-half convention.

use crate::slices::cpu;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::sync::Arc;

/// The angles of T tokens: cosines and sines `[T, D/2]`, shared by all heads and layers.
#[derive(Debug, Clone)]
pub struct Rotation {
    cos: Arc<[f32]>,
    sin: Arc<[f32]>,
    half: usize,
}

impl Rotation {
    /// Angle of pair i at each position: `position * inverse_frequencies[i]`, in f64; cosines and sines times `scale`.
    pub fn new(positions: &[usize], inverse_frequencies: &[f64], scale: f64) -> Self {
        let angles = || positions.iter().flat_map(|&p| inverse_frequencies.iter().map(move |f| p as f64 * f));
        Self {
            cos: angles().map(|angle| (angle.cos() * scale) as f32).collect(),
            sin: angles().map(|angle| (angle.sin() * scale) as f32).collect(),
            half: inverse_frequencies.len(),
        }
    }

    fn reversed(&self) -> Self {
        Self { cos: self.cos.clone(), sin: self.sin.iter().map(|x| -x).collect(), half: self.half }
    }
}

/// Turns elements i and i + D/2 of every head by the token's angle i: x `[T, H, D]`, f32.
///
/// # Errors
/// Other types, and a rotation of other tokens or another width.
pub fn rope(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let (tokens, _, dim) = x.dims3()?;
    if dim != 2 * rotation.half || rotation.cos.len() != tokens * rotation.half {
        let pairs = rotation.half.max(1);
        bail!("a rotation of {} tokens x {pairs} pairs does not fit {:?}", rotation.cos.len() / pairs, x.shape());
    }
    x.contiguous()?.apply_op1(Rope { rotation: rotation.clone() })
}

struct Rope {
    rotation: Rotation,
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, heads, _) = layout.shape().dims3()?;
        let (x, half) = (cpu(x, layout)?, self.rotation.half);
        let mut out = Vec::with_capacity(x.len());
        for (row, head) in x.chunks_exact((2 * half).max(1)).enumerate() {
            let at = row / heads * half;
            let (cos, sin) = (&self.rotation.cos[at..at + half], &self.rotation.sin[at..at + half]);
            let (a, b) = head.split_at(half);
            out.extend(a.iter().zip(b).zip(cos.iter().zip(sin)).map(|((a, b), (cos, sin))| a * cos - b * sin));
            out.extend(a.iter().zip(b).zip(cos.iter().zip(sin)).map(|((a, b), (cos, sin))| b * cos + a * sin));
        }
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    fn bwd(&self, _x: &Tensor, _out: &Tensor, d_out: &Tensor) -> Result<Option<Tensor>> {
        // The transpose of a rotation is the rotation back.
        d_out.contiguous()?.apply_op1_no_bwd(&Rope { rotation: self.rotation.reversed() }).map(Some)
    }
}
