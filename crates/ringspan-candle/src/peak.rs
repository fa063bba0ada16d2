//! What a rank's threads reach in a matrix product: the speed that everything else is a share of.

use crate::matmul::{Into, Matrix, product};
use std::time::Instant;

/// Large enough that packing costs little, small enough to take a millisecond.
const SIZE: usize = 384;
/// The first try warms the caches up; the best of the others counts.
const TRIES: usize = 4;

/// Floating-point operations a second of f32 products on the threads of this pool.
#[must_use]
pub fn flops() -> f64 {
    let (a, b) = (vec![1.0f32; SIZE * SIZE], vec![0.5f32; SIZE * SIZE]);
    let mut out = vec![0.0f32; SIZE * SIZE];
    let mut fastest = f64::INFINITY;
    for _ in 0..TRIES {
        let began = Instant::now();
        product(Matrix::new(&a, SIZE, SIZE), Matrix::new(&b, SIZE, SIZE), &mut out, Into::Fresh);
        fastest = fastest.min(began.elapsed().as_secs_f64());
    }
    std::hint::black_box(&out);
    2.0 * (SIZE * SIZE * SIZE) as f64 / fastest.max(1e-9)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_product_runs_at_some_speed() {
        let flops = super::flops();
        assert!(flops.is_finite() && flops > 1e6, "{flops}");
    }
}
