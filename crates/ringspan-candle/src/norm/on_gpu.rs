//! The same on a GPU, of rows that may lie apart. For the backward pass nothing is kept but x.

use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, Rows, in_rows, on_gpu, tensor, unwritten};
use crate::gpu::zeros;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};

/// Threads of a warp, and what they read of a row before more share it.
const WARP: usize = 32;
const STEPS: usize = 4;

/// Chunks of rows, at most, whose sums are added up at the end, and rows of a chunk, at least.
const CHUNKS: usize = 512;
const CHUNK: usize = 64;

/// What a launch is told, as in `gpu/source/norm.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Job {
    x: u64,
    d: u64,
    weight: u64,
    out: u64,
    inverse: u64,
    sums: u64,
    rows: i64,
    width: i64,
    x_stride: i64,
    d_stride: i64,
    chunk: i64,
    lanes: i32,
    eps: f32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for Job {}

/// Threads that have a row of so many pieces: all of a block, or a power of two of them up to a warp.
fn lanes(pieces: usize) -> usize {
    if pieces > STEPS * WARP { THREADS } else { pieces.next_power_of_two().min(WARP) }
}

/// Shared memory of a row that all threads of a block have: two sums of each warp.
const SHARED_BYTES: usize = 2 * 4 * THREADS / WARP;

/// As an operation returns it: x in rows, the weight contiguous.
pub(super) fn forward(
    (x, x_at): (&CudaStorage, &Layout),
    (w, w_at): (&CudaStorage, &Layout),
    eps: f64,
) -> Result<(CudaStorage, Shape)> {
    let (rows, shape, device) = (Rows::expected(x_at)?, x_at.shape(), x.device());
    if shape.elem_count() == 0 {
        return zeros(x, shape);
    }
    let (mut out, stream) = (unwritten(device, shape, x.dtype())?, device.cuda_stream());
    {
        let (x_read, w_read) = (Operand::read(x, x_at, &stream)?, Operand::read(w, w_at, &stream)?);
        let written = Operand::written(&mut out, &stream)?;
        let addresses = [x_read.at, w_read.at, written.at];
        let types = [x.dtype(), w.dtype()];
        let options = Options::new::<Job>(Layer::Norm, types, &addresses, &[rows.width, rows.stride]);
        let lanes = lanes(rows.width.div_ceil(options.at_once));
        let job = Job {
            x: x_read.at,
            weight: w_read.at,
            out: written.at,
            rows: rows.count as i64,
            width: rows.width as i64,
            x_stride: rows.stride as i64,
            lanes: lanes as i32,
            eps: eps as f32,
            ..Job::default()
        };
        let blocks = rows.count.div_ceil(THREADS / lanes);
        // SAFETY: rows of x and as many of the result, which was made for them, are there; so is a weight of their width.
        unsafe { launch(device, &options, "rms_norm", &job, (blocks, 1), SHARED_BYTES)? };
    }
    Ok((out, shape.clone()))
}

/// Gradients of x and, if it is trained, of the weight.
pub(super) fn backward(x: &Tensor, w: &Tensor, d: &Tensor, eps: f64) -> Result<(Tensor, Option<Tensor>)> {
    let (d, trained, types) = (in_rows(d)?, w.track_op(), [x.dtype(), w.dtype()]);
    if d.dtype() != x.dtype() {
        bail!("a gradient of {:?} for a norm of {:?}: the types differ", d.dtype(), x.dtype());
    }
    if x.elem_count() == 0 {
        return Ok((x.zeros_like()?, if trained { Some(w.zeros_like()?) } else { None }));
    }
    let ((x_held, x_at), (w_held, w_at), (d_held, d_at)) =
        (x.storage_and_layout(), w.storage_and_layout(), d.storage_and_layout());
    let (rows, d_rows, device) = (Rows::expected(x_at)?, Rows::expected(d_at)?, on_gpu(&x_held)?.device());
    let (mut dx, stream) = (unwritten(device, x.shape(), x.dtype())?, device.cuda_stream());
    let mut inverse = unwritten(device, &Shape::from(rows.count), DType::F32)?;
    let chunk = rows.count.div_ceil(CHUNKS).max(CHUNK);
    let chunks = rows.count.div_ceil(chunk);
    let mut weight = match trained {
        true => Some((
            unwritten(device, w.shape(), w.dtype())?,
            unwritten(device, &Shape::from((chunks, rows.width)), DType::F32)?,
        )),
        false => None,
    };
    {
        let x = Operand::read(on_gpu(&x_held)?, x_at, &stream)?;
        let w = Operand::read(on_gpu(&w_held)?, w_at, &stream)?;
        let d = Operand::read(on_gpu(&d_held)?, d_at, &stream)?;
        let (dx, inverse) = (Operand::written(&mut dx, &stream)?, Operand::written(&mut inverse, &stream)?);
        let sizes = [rows.width, rows.stride, d_rows.stride];
        let options = Options::new::<Job>(Layer::Norm, types, &[x.at, w.at, d.at, dx.at], &sizes);
        let lanes = lanes(rows.width.div_ceil(options.at_once));
        let job = Job {
            x: x.at,
            d: d.at,
            weight: w.at,
            out: dx.at,
            inverse: inverse.at,
            sums: 0,
            rows: rows.count as i64,
            width: rows.width as i64,
            x_stride: rows.stride as i64,
            d_stride: d_rows.stride as i64,
            chunk: chunk as i64,
            lanes: lanes as i32,
            eps: eps as f32,
        };
        let blocks = rows.count.div_ceil(THREADS / lanes);
        // SAFETY: x, d, a weight of their width and what is written, made for as many rows, are there.
        unsafe { launch(device, &options, "rms_norm_backward", &job, (blocks, 1), SHARED_BYTES)? };
        if let Some((dw, sums)) = &mut weight {
            let (dw, sums) = (Operand::written(dw, &stream)?, Operand::written(sums, &stream)?);
            let options = Options::new::<Job>(Layer::Norm, types, &[x.at, d.at, dw.at, sums.at], &sizes);
            let pieces = rows.width.div_ceil(options.at_once);
            let lanes = pieces.next_power_of_two().min(WARP);
            let (blocks, shared_bytes) = (pieces.div_ceil(lanes), 4 * THREADS * options.at_once);
            let job = Job { sums: sums.at, lanes: lanes as i32, ..job };
            // SAFETY: as above; the sums are of so many chunks.
            unsafe { launch(device, &options, "rms_norm_weight", &job, (blocks, chunks), shared_bytes)? };
            let job = Job { rows: chunks as i64, out: dw.at, ..job };
            // SAFETY: as above; the gradient is as wide as the sums.
            unsafe { launch(device, &options, "rms_norm_weight_sum", &job, (blocks, 1), shared_bytes)? };
        }
    }
    Ok((tensor(dx, x.shape()), weight.map(|(dw, _)| tensor(dw, w.shape()))))
}
