//! The gated activation on a GPU, for rows that may lie apart, such as the halves of a product with gate and up in one
//! matrix.

use crate::activation::Activation;
use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, StridedRows, in_rows, on_gpu, tensor, unwritten};
use crate::gpu::zeros;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};

/// The arguments of a kernel launch, laid out as in `gpu/source/gate.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct SwigluParams {
    gate: u64,
    up: u64,
    d: u64,
    out: u64,
    d_gate: u64,
    d_up: u64,
    count: i64,
    width: i64,
    gate_stride: i64,
    up_stride: i64,
    d_stride: i64,
}

// SAFETY: the struct consists of plain numbers and is laid out as in C.
unsafe impl DeviceRepr for SwigluParams {}

/// Computes the activation as an operation returns it: gate and up consist of rows.
pub(super) fn forward(
    (gate, gate_at): (&CudaStorage, &Layout),
    (up, up_at): (&CudaStorage, &Layout),
    activation: Activation,
) -> Result<(CudaStorage, Shape)> {
    let (gate_rows, up_rows, shape) = (StridedRows::expected(gate_at)?, StridedRows::expected(up_at)?, gate_at.shape());
    if gate.dtype() != up.dtype() {
        bail!("a gate of {:?} for {:?}: the types differ", gate.dtype(), up.dtype());
    }
    if shape.elem_count() == 0 {
        return zeros(gate, shape);
    }
    let (device, dtype) = (gate.device(), gate.dtype());
    let (mut out, stream) = (unwritten(device, shape, dtype)?, device.cuda_stream());
    {
        let (gate, up) = (Operand::read(gate, gate_at, &stream)?, Operand::read(up, up_at, &stream)?);
        let written = Operand::written(&mut out, &stream)?;
        let sizes = [gate_rows.width, gate_rows.stride, up_rows.stride];
        let addresses = [gate.at, up.at, written.at];
        let options = Options::new::<SwigluParams>(Layer::Gate(activation), [dtype; 2], &addresses, &sizes);
        let params = SwigluParams {
            gate: gate.at,
            up: up.at,
            out: written.at,
            count: shape.elem_count() as i64,
            width: gate_rows.width as i64,
            gate_stride: gate_rows.stride as i64,
            up_stride: up_rows.stride as i64,
            ..SwigluParams::default()
        };
        let blocks = (shape.elem_count() / options.at_once).div_ceil(THREADS);
        // SAFETY: gate and up are read in their rows, and the result has as many elements.
        unsafe { launch(device, &options, "gate", &params, (blocks, 1), 0)? };
    }
    Ok((out, shape.clone()))
}

/// Gradients of gate and up.
pub(super) fn backward(gate: &Tensor, up: &Tensor, d: &Tensor, activation: Activation) -> Result<[Tensor; 2]> {
    let (d, shape, dtype) = (in_rows(d)?, gate.shape(), gate.dtype());
    if d.dtype() != dtype {
        bail!("a gradient of {:?} for a gate of {dtype:?}: the types differ", d.dtype());
    }
    if shape.elem_count() == 0 {
        return Ok([gate.zeros_like()?, up.zeros_like()?]);
    }
    let ((gate_held, gate_at), (up_held, up_at), (d_held, d_at)) =
        (gate.storage_and_layout(), up.storage_and_layout(), d.storage_and_layout());
    let (gate_rows, up_rows, d_rows) =
        (StridedRows::expected(gate_at)?, StridedRows::expected(up_at)?, StridedRows::expected(d_at)?);
    let device = on_gpu(&gate_held)?.device();
    let (mut d_gate, mut d_up) = (unwritten(device, shape, dtype)?, unwritten(device, shape, dtype)?);
    let stream = device.cuda_stream();
    {
        let gate = Operand::read(on_gpu(&gate_held)?, gate_at, &stream)?;
        let up = Operand::read(on_gpu(&up_held)?, up_at, &stream)?;
        let d = Operand::read(on_gpu(&d_held)?, d_at, &stream)?;
        let (d_gate, d_up) = (Operand::written(&mut d_gate, &stream)?, Operand::written(&mut d_up, &stream)?);
        let sizes = [gate_rows.width, gate_rows.stride, up_rows.stride, d_rows.stride];
        let addresses = [gate.at, up.at, d.at, d_gate.at, d_up.at];
        let options = Options::new::<SwigluParams>(Layer::Gate(activation), [dtype; 2], &addresses, &sizes);
        let params = SwigluParams {
            gate: gate.at,
            up: up.at,
            d: d.at,
            d_gate: d_gate.at,
            d_up: d_up.at,
            count: shape.elem_count() as i64,
            width: gate_rows.width as i64,
            gate_stride: gate_rows.stride as i64,
            up_stride: up_rows.stride as i64,
            d_stride: d_rows.stride as i64,
            ..SwigluParams::default()
        };
        let blocks = (shape.elem_count() / options.at_once).div_ceil(THREADS);
        // SAFETY: gate, up and d are read in their rows, and the gradients have as many elements.
        unsafe { launch(device, &options, "gate_backward", &params, (blocks, 1), 0)? };
    }
    Ok([tensor(d_gate, shape), tensor(d_up, shape)])
}
