//! The norm on a GPU, for rows that may lie apart. The backward pass recomputes what it needs from x.

use crate::gpu::kernels::{Layer, Options, THREADS, launch};
use crate::gpu::operand::{Operand, StridedRows, in_rows, on_gpu, tensor, unwritten};
use crate::gpu::zeros;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::driver::DeviceRepr;
use candle_core::{CudaStorage, DType, Layout, Result, Shape, Tensor, bail};

/// Number of threads in a warp.
const WARP: usize = 32;
/// One warp handles a row if none of its threads makes more reads than this; longer rows take a whole block of threads.
const MAX_READS_PER_THREAD: usize = 4;

/// The gradient of the weight is summed over chunks of rows, then over the chunks: at most this many chunks, of at
/// least this many rows each.
const CHUNKS: usize = 512;
const CHUNK: usize = 64;

/// The arguments of a kernel launch, laid out as in `gpu/source/norm.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct NormParams {
    x: u64,
    y: u64,
    d: u64,
    other_gradient: u64,
    weight: u64,
    sum: u64,
    out: u64,
    inverse: u64,
    sums: u64,
    rows: i64,
    width: i64,
    x_stride: i64,
    y_stride: i64,
    d_stride: i64,
    chunk: i64,
    lanes: i32,
    eps: f32,
}

// SAFETY: the struct consists of plain numbers and is laid out as in C.
unsafe impl DeviceRepr for NormParams {}

/// The number of threads for a row of this many reads: all of a block, or a power of two up to a warp.
fn lanes(pieces: usize) -> usize {
    if pieces > MAX_READS_PER_THREAD * WARP { THREADS } else { pieces.next_power_of_two().min(WARP) }
}

/// Bytes of shared memory for a row that all threads of a block handle: two sums for each warp.
const SHARED_BYTES: usize = 2 * 4 * THREADS / WARP;

/// A tensor that is read, as its storage and layout.
type StoredTensor<'a> = (&'a CudaStorage, &'a Layout);

/// Computes the norm as an operation returns it: x consists of rows, the weight is contiguous.
pub(super) fn forward(x: StoredTensor, w: StoredTensor, eps: f64) -> Result<(CudaStorage, Shape)> {
    let (x_read, x_at) = x;
    if x_at.shape().elem_count() == 0 {
        return zeros(x_read, x_at.shape());
    }
    let out = unwritten(x_read.device(), x_at.shape(), x_read.dtype())?;
    Ok((written(x, None, w, eps, out)?, x_at.shape().clone()))
}

/// Computes x + y and the norm of this sum: x and y consist of rows and are not empty, the weight is contiguous.
pub(crate) fn forward_of_sum(x: StoredTensor, y: StoredTensor, w: StoredTensor, eps: f64) -> Result<[CudaStorage; 2]> {
    let (device, shape, dtype) = (x.0.device(), x.1.shape(), x.0.dtype());
    if y.0.dtype() != dtype || y.1.shape() != shape {
        let y = (y.0.dtype(), y.1.shape());
        bail!("{shape:?} of {dtype:?} and {:?} of {:?} cannot be added: shapes or types differ", y.1, y.0);
    }
    let mut sum = unwritten(device, shape, dtype)?;
    let out = written(x, Some((y, &mut sum)), w, eps, unwritten(device, shape, dtype)?)?;
    Ok([sum, out])
}

/// Fills `out` with the norm of x or, with `added`, with the norm of its sum with another tensor; the sum is written, too.
fn written(
    (x, x_at): StoredTensor,
    added: Option<(StoredTensor, &mut CudaStorage)>,
    (w, w_at): StoredTensor,
    eps: f64,
    mut out: CudaStorage,
) -> Result<CudaStorage> {
    let (rows, device) = (StridedRows::expected(x_at)?, x.device());
    let stream = device.cuda_stream();
    {
        let (x_read, w_read) = (Operand::read(x, x_at, &stream)?, Operand::read(w, w_at, &stream)?);
        let out = Operand::written(&mut out, &stream)?;
        let (mut addresses, mut sizes) = (vec![x_read.at, w_read.at, out.at], vec![rows.width, rows.stride]);
        let mut params = NormParams {
            x: x_read.at,
            weight: w_read.at,
            out: out.at,
            rows: rows.count as i64,
            width: rows.width as i64,
            x_stride: rows.stride as i64,
            eps: eps as f32,
            ..NormParams::default()
        };
        let mut name = "rms_norm";
        // The operands must live until the kernel is started.
        let mut held = None;
        if let Some(((y, y_at), sum)) = added {
            let (y_rows, y, sum) =
                (StridedRows::expected(y_at)?, Operand::read(y, y_at, &stream)?, Operand::written(sum, &stream)?);
            addresses.extend([y.at, sum.at]);
            sizes.push(y_rows.stride);
            params = NormParams { y: y.at, sum: sum.at, y_stride: y_rows.stride as i64, ..params };
            name = "rms_norm_of_sum";
            held = Some((y, sum));
        }
        let options = Options::new::<NormParams>(Layer::Norm, [x.dtype(), w.dtype()], &addresses, &sizes);
        let lanes = lanes(rows.width.div_ceil(options.at_once));
        let (params, blocks) = (NormParams { lanes: lanes as i32, ..params }, rows.count.div_ceil(THREADS / lanes));
        // SAFETY: x, the tensor that is added and the tensors that are written have as many rows, and the weight is as wide.
        unsafe { launch(device, &options, name, &params, (blocks, 1), SHARED_BYTES)? };
        drop(held);
    }
    Ok(out)
}

/// The gradients of x and, if it is trained, of the weight. `other_gradient`, a further gradient of x, is added to the former.
pub(crate) fn backward(
    x: &Tensor,
    w: &Tensor,
    d: &Tensor,
    other_gradient: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Option<Tensor>)> {
    let other_gradient = other_gradient.map(Tensor::contiguous).transpose()?;
    let (d, trained, types) = (in_rows(d)?, w.track_op(), [x.dtype(), w.dtype()]);
    if let Some(other) = other_gradient.iter().chain([&d]).find(|d| d.dtype() != x.dtype()) {
        bail!("a gradient of {:?} for a norm of {:?}: the types differ", other.dtype(), x.dtype());
    }
    if x.elem_count() == 0 {
        return Ok((x.zeros_like()?, if trained { Some(w.zeros_like()?) } else { None }));
    }
    let ((x_held, x_at), (w_held, w_at), (d_held, d_at)) =
        (x.storage_and_layout(), w.storage_and_layout(), d.storage_and_layout());
    let other_gradient_held = other_gradient.as_ref().map(Tensor::storage_and_layout);
    let (rows, d_rows, device) =
        (StridedRows::expected(x_at)?, StridedRows::expected(d_at)?, on_gpu(&x_held)?.device());
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
        let other_gradient = match &other_gradient_held {
            Some((held, at)) => Some(Operand::read(on_gpu(held)?, at, &stream)?),
            None => None,
        };
        let other_gradient_at = other_gradient.as_ref().map_or(0, |other_gradient| other_gradient.at);
        let sizes = [rows.width, rows.stride, d_rows.stride];
        let options =
            Options::new::<NormParams>(Layer::Norm, types, &[x.at, w.at, d.at, dx.at, other_gradient_at], &sizes);
        let lanes = lanes(rows.width.div_ceil(options.at_once));
        let params = NormParams {
            x: x.at,
            d: d.at,
            other_gradient: other_gradient_at,
            weight: w.at,
            out: dx.at,
            inverse: inverse.at,
            rows: rows.count as i64,
            width: rows.width as i64,
            x_stride: rows.stride as i64,
            d_stride: d_rows.stride as i64,
            chunk: chunk as i64,
            lanes: lanes as i32,
            eps: eps as f32,
            ..NormParams::default()
        };
        let blocks = rows.count.div_ceil(THREADS / lanes);
        // SAFETY: x, d, the further gradient and the tensors that are written have as many rows, and the weight is as wide.
        unsafe { launch(device, &options, "rms_norm_backward", &params, (blocks, 1), SHARED_BYTES)? };
        if let Some((dw, sums)) = &mut weight {
            let (dw, sums) = (Operand::written(dw, &stream)?, Operand::written(sums, &stream)?);
            let options = Options::new::<NormParams>(Layer::Norm, types, &[x.at, d.at, dw.at, sums.at], &sizes);
            let pieces = rows.width.div_ceil(options.at_once);
            let lanes = pieces.next_power_of_two().min(WARP);
            let (blocks, shared_bytes) = (pieces.div_ceil(lanes), 4 * THREADS * options.at_once);
            let params = NormParams { sums: sums.at, lanes: lanes as i32, ..params };
            // SAFETY: as above; the sums have a row for each chunk.
            unsafe { launch(device, &options, "rms_norm_weight", &params, (blocks, chunks), shared_bytes)? };
            let params = NormParams { rows: chunks as i64, out: dw.at, ..params };
            // SAFETY: as above; the gradient is as wide as the sums.
            unsafe { launch(device, &options, "rms_norm_weight_sum", &params, (blocks, 1), shared_bytes)? };
        }
    }
    Ok((tensor(dx, x.shape()), weight.map(|(dw, _)| tensor(dw, w.shape()))))
}
