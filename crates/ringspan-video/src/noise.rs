//! The noise from which a video begins: a function of the seed and the shape alone, so that every rank and every mesh has the same.

use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Standard normal numbers of this shape, in f32.
///
/// # Errors
/// A shape that does not fit in memory.
pub fn noise(seed: u64, shape: &[usize]) -> Result<Tensor> {
    let too_large = || Error::Input(format!("noise of shape {shape:?} does not fit in memory"));
    let count = shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size)).ok_or_else(too_large)?;
    let mut values: Vec<f32> = Vec::new();
    values.try_reserve_exact(count).map_err(|_| too_large())?;
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    values.extend((0..count).map(|_| normal(&mut random) as f32));
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Uniform numbers in (0, 1].
#[must_use]
pub fn uniform(seed: u64, count: usize) -> Vec<f64> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..count).map(|_| above_zero(&mut random)).collect()
}

/// A normal number by Box and Muller, 1958; the second number of the pair is not used.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    // 0 is left out, so the logarithm stays finite.
    let mut uniform = || above_zero(random);
    (-2.0 * uniform().ln()).sqrt() * (2.0 * std::f64::consts::PI * uniform()).cos()
}

/// A uniform number of 53 bits in (0, 1].
fn above_zero(random: &mut ChaCha8Rng) -> f64 {
    ((random.next_u64() >> 11) as f64 + 1.0) / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_is_normal_and_follows_from_its_seed() -> Result<()> {
        let values = |seed| noise(seed, &[2, 10_000]).and_then(|noise| Ok(noise.flatten_all()?.to_vec1::<f32>()?));
        let found = values(7)?;
        let mean = |f: &dyn Fn(f64) -> f64| found.iter().map(|x| f(f64::from(*x))).sum::<f64>() / found.len() as f64;
        assert!(mean(&|x| x).abs() < 0.03 && (mean(&|x| x * x) - 1.0).abs() < 0.05 && mean(&|x| x.powi(3)).abs() < 0.1);
        assert_eq!(found, values(7)?);
        assert_ne!(found, values(8)?);
        Ok(())
    }

    #[test]
    fn shapes_beyond_memory_are_refused() {
        for shape in [[1 << 40, 1 << 40], [1 << 31, 1 << 31]] {
            let refused = noise(0, &shape).expect_err("too large").to_string();
            assert!(refused.contains(&shape[0].to_string()), "{refused}");
        }
    }
}
