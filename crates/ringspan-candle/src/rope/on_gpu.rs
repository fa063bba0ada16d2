//! Rotary position embedding on a GPU, which reads x with its strides.

use super::RotaryTable;
use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, on_gpu, unwritten};
use crate::gpu::zeros;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, DType, Device, Layout, Result, Shape, Tensor};

/// The arguments of a kernel launch, laid out as in `gpu/source/rope.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RopeParams {
    x: u64,
    out: u64,
    cos: u64,
    sin: u64,
    tokens: i64,
    heads: i64,
    half: i64,
    token_stride: i64,
    head_stride: i64,
    stride: i64,
    sign: f32,
}

// SAFETY: the struct consists of plain numbers and is laid out as in C.
unsafe impl DeviceRepr for RopeParams {}

impl RotaryTable {
    /// Cosines and sines on a device, `[T, D/2]`.
    fn on(&self, device: &Device) -> Result<[Tensor; 2]> {
        if let Some(uploaded) = self.uploaded.get().filter(|[cos, _]| cos.device().same_device(device)) {
            return Ok(uploaded.clone());
        }
        let shape = (self.cos.len() / self.half.max(1), self.half);
        let made = [Tensor::from_slice(&self.cos, shape, device)?, Tensor::from_slice(&self.sin, shape, device)?];
        // A rank has one device. A second device uploads its own copy and does not store it.
        let _ = self.uploaded.set(made.clone());
        Ok(made)
    }
}

/// Rotates x `[T, H, D]` forward or, with `back`, backward, as an operation returns it.
pub(super) fn rotated(
    x: &CudaStorage,
    at: &Layout,
    rotation: &RotaryTable,
    back: bool,
) -> Result<(CudaStorage, Shape)> {
    let ((tokens, heads, _), half, device) = (at.shape().dims3()?, rotation.half, x.device());
    if at.shape().elem_count() == 0 {
        return zeros(x, at.shape());
    }
    let [cos, sin] = rotation.on(&Device::Cuda(device.clone()))?;
    let ((cos_held, cos_at), (sin_held, sin_at)) = (cos.storage_and_layout(), sin.storage_and_layout());
    let (mut out, stream) = (unwritten(device, at.shape(), x.dtype())?, device.cuda_stream());
    {
        let x_read = Operand::read(x, at, &stream)?;
        let cos = Operand::read(on_gpu(&cos_held)?, cos_at, &stream)?;
        let sin = Operand::read(on_gpu(&sin_held)?, sin_at, &stream)?;
        let written = Operand::written(&mut out, &stream)?;
        let &[token_stride, head_stride, stride] = at.stride() else {
            candle_core::bail!("strides {:?} of a tensor [tokens, heads, width]", at.stride());
        };
        // Elements that lie apart are read one at a time.
        let apart = if stride == 1 { half } else { 1 };
        let addresses = [x_read.at, cos.at, sin.at, written.at];
        let sizes = [half, token_stride, head_stride, apart];
        let options = Options::new::<RopeParams>(Layer::Rope, [x.dtype(), DType::F32], &addresses, &sizes);
        let params = RopeParams {
            x: x_read.at,
            out: written.at,
            cos: cos.at,
            sin: sin.at,
            tokens: tokens as i64,
            heads: heads as i64,
            half: half as i64,
            token_stride: token_stride as i64,
            head_stride: head_stride as i64,
            stride: stride as i64,
            sign: if back { -1.0 } else { 1.0 },
        };
        let blocks = (tokens * heads * (half / options.at_once)).div_ceil(THREADS);
        // SAFETY: x is read with its strides, the result has as many elements, and cosines and sines are those of its tokens.
        unsafe { launch(device, &options, "rope", &params, (blocks, 1), 0)? };
    }
    Ok((out, at.shape().clone()))
}
