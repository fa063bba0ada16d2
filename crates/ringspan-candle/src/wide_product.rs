//! A product of bf16 on a GPU whose sums stay f32: cuBLAS gives it, and candle does not ask for it.

use candle_core::backend::BackendStorage;
use candle_core::cuda::cudarc::cublas::{result, sys};
use candle_core::cuda::cudarc::driver::{DevicePtr, DevicePtrMut};
use candle_core::{CudaStorage, Layout, Result, bail};
use half::bf16;

/// `x w^T`: x `[m, k]` and w `[n, k]`, bf16, row after row, to `[m, n]`, f32, row after row. No size is 0.
///
/// # Errors
/// Other types, rows that lie apart, sizes beyond those of cuBLAS; a GPU without memory, failures of cuBLAS.
pub(crate) fn of_bf16(x: &CudaStorage, x_at: &Layout, w: &CudaStorage, w_at: &Layout) -> Result<CudaStorage> {
    let ((m, k), (n, inner)) = (x_at.shape().dims2()?, w_at.shape().dims2()?);
    let (Some((x_start, x_end)), Some((w_start, w_end))) = (x_at.contiguous_offsets(), w_at.contiguous_offsets())
    else {
        bail!("a product of {x_at:?} and {w_at:?}: rows lie apart");
    };
    let size = |size: usize| i32::try_from(size).map_err(candle_core::Error::wrap);
    let (device, [rows, columns, terms]) = (x.device().clone(), [size(m)?, size(n)?, size(k)?]);
    if inner != k || m * n * k == 0 {
        bail!("a product of {:?} and {:?}: the shapes do not fit", x_at.shape(), w_at.shape());
    }
    let (x, w) = (x.as_cuda_slice::<bf16>()?.slice(x_start..x_end), w.as_cuda_slice::<bf16>()?.slice(w_start..w_end));
    // SAFETY: the product writes all elements, or fails and nobody gets them.
    let mut out = unsafe { device.alloc::<f32>(m * n)? };
    let (stream, blas) = (device.cuda_stream(), device.cublas_handle());
    let (one, zero) = (1.0f32, 0.0f32);
    {
        let ((x, _x_read), (w, _w_read)) = (x.device_ptr(&stream), w.device_ptr(&stream));
        let (to, _written) = out.device_ptr_mut(&stream);
        // cuBLAS counts column after column, where w is [k, n], x is [k, m], and the result [n, m].
        // SAFETY: the slices have n k, m k and m n elements, on the stream of the handle, and the factors outlive the call.
        unsafe {
            result::gemm_strided_batched_ex(
                *blas.handle(),
                sys::cublasOperation_t::CUBLAS_OP_T,
                sys::cublasOperation_t::CUBLAS_OP_N,
                columns,
                rows,
                terms,
                (&raw const one).cast(),
                w as *const _,
                sys::cudaDataType_t::CUDA_R_16BF,
                terms,
                (n * k) as i64,
                x as *const _,
                sys::cudaDataType_t::CUDA_R_16BF,
                terms,
                (m * k) as i64,
                (&raw const zero).cast(),
                to as *mut _,
                sys::cudaDataType_t::CUDA_R_32F,
                columns,
                (m * n) as i64,
                1,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT_TENSOR_OP,
            )
            .map_err(candle_core::Error::wrap)?;
        }
    }
    Ok(CudaStorage::wrap_cuda_slice(out, device))
}
