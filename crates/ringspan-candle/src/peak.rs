//! Measures the speed of a large matrix product on a rank's threads or GPU, the peak to which other speeds are compared.

use crate::device::RankDevice;
use crate::matmul::{Accumulate, Matrix, product};
use candle_core::{Result, Tensor};
use std::time::Instant;

/// Rows and columns of the factors: large enough that packing costs little, small enough that a product takes about a
/// millisecond.
const SIZE: usize = 384;
/// Number of products; the first warms up the caches, and the fastest counts.
const TRIES: usize = 4;

/// Floating-point operations per second of f32 products on the threads of the current pool.
#[must_use]
pub fn flops() -> f64 {
    let (a, b) = (vec![1.0f32; SIZE * SIZE], vec![0.5f32; SIZE * SIZE]);
    let mut out = vec![0.0f32; SIZE * SIZE];
    let mut fastest = f64::INFINITY;
    for _ in 0..TRIES {
        let began = Instant::now();
        product(Matrix::new(&a, SIZE, SIZE), Matrix::new(&b, SIZE, SIZE), &mut out, Accumulate::Overwrite);
        fastest = fastest.min(began.elapsed().as_secs_f64());
    }
    std::hint::black_box(&out);
    2.0 * (SIZE * SIZE * SIZE) as f64 / fastest.max(1e-9)
}

/// Rows and columns of the factors on a GPU: from [`FIRST`], which is fast on any GPU, doubled until a product takes [`LONG`]
/// seconds, of which launching is a negligible part. [`LAST`] is enough for any GPU there is, and takes less than a gibibyte
/// of memory.
const FIRST: usize = 256;
const LAST: usize = 8192;
const LONG: f64 = 5e-3;

/// Floating-point operations per second of products on this device, in the type in which models compute there. A GPU should
/// be otherwise idle.
///
/// # Errors
/// A GPU that fails to compute.
pub fn flops_on(device: &RankDevice) -> Result<f64> {
    if device.tensors().is_cpu() {
        return Ok(flops());
    }
    let (mut size, mut reached) = (FIRST, 0.0);
    while size <= LAST {
        let seconds = match fastest(device, size) {
            // The GPU's memory may be full; the speed of a smaller product is nearly the same.
            Err(_) if reached > 0.0 => break,
            seconds => seconds?,
        };
        reached = 2.0 * (size as f64).powi(3) / seconds;
        if seconds >= LONG {
            break;
        }
        size *= 2;
    }
    Ok(reached)
}

/// Seconds of the fastest of several products of two square matrices of this size, measured from an idle GPU to an idle GPU.
fn fastest(device: &RankDevice, size: usize) -> Result<f64> {
    let tensors = device.tensors();
    // The numbers differ because a GPU multiplies zeros with less power, and therefore faster.
    let numbers: Vec<f32> = (0..size).map(|i| ((i * 7919 % 1009) as f32 - 504.0) / 504.0).collect();
    let column = Tensor::from_slice(&numbers, (size, 1), tensors)?;
    let of = |column: &Tensor| column.broadcast_mul(&column.t()?)?.to_dtype(device.precision().dtype());
    let (left, right) = (of(&column)?, of(&(column * 0.5)?)?);
    let mut fastest = f64::INFINITY;
    for _ in 0..TRIES {
        tensors.synchronize()?;
        let began = Instant::now();
        let out = left.matmul(&right)?;
        tensors.synchronize()?;
        fastest = fastest.min(began.elapsed().as_secs_f64());
        drop(out);
    }
    Ok(fastest.max(1e-9))
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_product_runs_at_some_speed() {
        let flops = super::flops();
        assert!(flops.is_finite() && flops > 1e6, "{flops}");
    }
}
