//! Weights to start from.

use crate::decoder::{Decoder, Weights};
use crate::error::Result;
use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Standard deviation of new matrices.
const DEVIATION: f64 = 0.02;

impl Decoder {
    /// New weights: matrices normal with deviation 0.02, norms that change nothing, biases 0. The same seed gives the same weights.
    ///
    /// # Errors
    /// Sizes that do not fit in memory.
    pub fn init(&self, seed: u64) -> Result<Weights> {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut weights = Weights::new();
        for (name, shape) in self.shapes() {
            let count: usize = shape.iter().product();
            let values = match shape.len() {
                1 if name.ends_with(".bias") => vec![0.0; count],
                1 => vec![1.0 - self.model.norm_offset as f32; count],
                _ => (0..count).map(|_| (normal(&mut random) * DEVIATION) as f32).collect(),
            };
            weights.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(weights)
    }
}

/// Box and Muller, 1958; one of the pair.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    // 53 bits, in (0, 1]: the logarithm stays finite.
    let mut uniform = || ((random.next_u64() >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
    (-2.0 * uniform().ln()).sqrt() * (2.0 * std::f64::consts::PI * uniform()).cos()
}
