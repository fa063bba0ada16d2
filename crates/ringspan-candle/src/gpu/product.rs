//! Matrix products by cuBLAS that candle does not offer: of bf16 with f32 results, and added to the output.

use super::operand::{Operand, unwritten};
use crate::matmul::Accumulate;
use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::cublas::{result, sys};
use candle_core::{CudaStorage, DType, Layout, Result, Shape, bail};

/// A matrix whose rows or columns are consecutive in memory.
pub(crate) type Factor<'a> = (&'a CudaStorage, &'a Layout);

/// The output of a product: consecutive rows of f32 or bf16 in a storage, from element `first` on.
pub(crate) struct Output<'a> {
    pub(crate) of: &'a mut CudaStorage,
    pub(crate) first: usize,
}

/// The product of two matrices in f32, whatever their type: `shape` is that of the product.
pub(crate) fn wide(a: Factor, b: Factor, shape: &Shape) -> Result<CudaStorage> {
    let mut out = unwritten(a.0.device(), shape, DType::F32)?;
    product(a, b, Output { of: &mut out, first: 0 }, Accumulate::Overwrite)?;
    Ok(out)
}

/// `a b`: a `[m, k]` and b `[k, n]`, both f32 or both bf16, to `[m, n]`. Sums are f32, without TF32, and are rounded once if
/// the output is bf16. Nothing is written if a size is 0.
///
/// # Errors
/// Other types or layouts, an output that is too small, sizes beyond those of cuBLAS; failures of cuBLAS.
pub(crate) fn product((a, a_at): Factor, (b, b_at): Factor, to: Output, into: Accumulate) -> Result<()> {
    let ((m, k), (inner, n)) = (a_at.shape().dims2()?, b_at.shape().dims2()?);
    if inner != k || a.dtype() != b.dtype() {
        let (a, b) = ((a_at.shape(), a.dtype()), (b_at.shape(), b.dtype()));
        bail!("a product of {a:?} and {b:?}: shapes or types do not fit");
    }
    let (device, dtype) = (a.device().clone(), to.of.dtype());
    if to.first + m * n > length(to.of)? {
        bail!("a product of {m} x {n} does not fit after {} elements", to.first);
    }
    if m * n * k == 0 {
        return Ok(());
    }
    let size = |size: usize| i32::try_from(size).map_err(candle_core::Error::wrap);
    let (one, before) = (1.0f32, if into == Accumulate::Add { 1.0f32 } else { 0.0 });
    let (a_type, a_op, a_leading) = (kind(a.dtype())?, transposed(a_at)?, leading(a_at)?);
    let (b_type, b_op, b_leading) = (kind(b.dtype())?, transposed(b_at)?, leading(b_at)?);
    let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
    let (a, b) = (Operand::read(a, a_at, &stream)?, Operand::read(b, b_at, &stream)?);
    let written = Operand::written(to.of, &stream)?;
    let out = written.at + (to.first * dtype.size_in_bytes()) as u64;
    // cuBLAS stores matrices by columns, so the result is [n, m], the product of b [n, k] and a [k, m].
    // SAFETY: both factors and the output have these sizes, on the stream of the handle, and the factors outlive the call.
    unsafe {
        result::gemm_strided_batched_ex(
            *blas.handle(),
            b_op,
            a_op,
            size(n)?,
            size(m)?,
            size(k)?,
            (&raw const one).cast(),
            b.at as *const _,
            b_type,
            size(b_leading)?,
            0,
            a.at as *const _,
            a_type,
            size(a_leading)?,
            0,
            (&raw const before).cast(),
            out as *mut _,
            kind(dtype)?,
            size(n)?,
            0,
            1,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
        )
    }
    .map_err(candle_core::Error::wrap)
}

fn kind(dtype: DType) -> Result<sys::cudaDataType_t> {
    match dtype {
        DType::F32 => Ok(sys::cudaDataType_t::CUDA_R_32F),
        DType::BF16 => Ok(sys::cudaDataType_t::CUDA_R_16BF),
        other => bail!("products are of F32 and BF16 on GPUs, given {other:?}"),
    }
}

fn transposed(at: &Layout) -> Result<sys::cublasOperation_t> {
    match (at.is_contiguous(), at.is_fortran_contiguous()) {
        (true, _) => Ok(sys::cublasOperation_t::CUBLAS_OP_N),
        (_, true) => Ok(sys::cublasOperation_t::CUBLAS_OP_T),
        _ => bail!("a product of {at:?}: neither rows nor columns follow each other"),
    }
}

/// The distance from one row to the next, or from one column to the next, in elements.
fn leading(at: &Layout) -> Result<usize> {
    let (rows, columns) = at.shape().dims2()?;
    Ok(if at.is_contiguous() { columns } else { rows })
}

fn length(of: &CudaStorage) -> Result<usize> {
    match of.dtype() {
        DType::F32 => Ok(of.as_cuda_slice::<f32>()?.len()),
        _ => Ok(of.as_cuda_slice::<half::bf16>()?.len()),
    }
}
