//! Rotary position embedding as a layer (Su et al., 2021).

use super::ForwardPass;
use crate::rope::{Rotation, rope};
use candle_core::{Result, Tensor};

/// Turns pairs of a head's elements by angles that grow with the token's position.
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    /// Which of the model's rotary embeddings it is: layers that share one share its angles.
    pub id: usize,
    /// Radians per position of each pair of elements. The first elements of a head make pairs, two for each of these; the others
    /// are not turned.
    pub frequencies: Vec<f64>,
    /// Whether neighbours make a pair, not elements that are half of the turned width apart.
    pub interleaved: bool,
    /// Factor on cosines and sines, so its square is one on the scores.
    pub scale: f64,
    /// How angles depend on the length, if they do.
    pub by_length: Option<ByLength>,
}

/// Angles of texts that are longer than those the model was trained with at first.
#[derive(Debug, Clone)]
pub enum ByLength {
    /// The base grows with the length (NTK-aware scaling; bloc97 and emozilla, 2023).
    DynamicBase {
        /// The base of texts that are not too long.
        theta: f64,
        /// How fast it grows.
        factor: f64,
        /// Positions the model was trained with.
        trained: f64,
    },
    /// Pairs turn at other speeds in all texts that are longer (LongRoPE; Ding et al., 2024).
    Long {
        /// Radians per position of each pair.
        frequencies: Vec<f64>,
        /// Positions the model was trained with at first.
        original: f64,
    },
}

impl RotaryEmbedding {
    /// x `[T, H, D]` with each head turned. Interleaved pairs come out with all first elements before all second ones: scores
    /// are sums over elements, so that queries and keys need only agree.
    ///
    /// # Errors
    /// Other shapes.
    pub fn forward(&self, x: Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let (tokens, heads, dim) = x.dims3()?;
        if tokens == 0 {
            return Ok(x);
        }
        let make = || self.rotation(pass.attend().positions(), pass.attend().length());
        let rotation = pass.store().map_or_else(make, |store| store.rotation(self.id, make));
        let pairs = self.frequencies.len();
        let mut turned = if 2 * pairs == dim { x.clone() } else { x.narrow(2, 0, 2 * pairs)? };
        if self.interleaved {
            turned = turned.contiguous()?.reshape((tokens, heads, pairs, 2))?.transpose(2, 3)?;
            turned = turned.contiguous()?.reshape((tokens, heads, 2 * pairs))?;
        }
        let turned = rope(&turned, &rotation)?;
        match dim - 2 * pairs {
            0 => Ok(turned),
            rest => Tensor::cat(&[turned, x.narrow(2, 2 * pairs, rest)?], 2),
        }
    }

    /// Cosines and sines of tokens at `positions` in a batch whose longest document has `length` tokens.
    ///
    /// Only some embeddings ask for the length. It is one number for the whole batch and for all ranks, because a query
    /// meets keys that other ranks have turned. So a token's angles depend on the longest document of its batch, as
    /// they do at Hugging Face; and a text that grows is turned for its final length from the start, while Hugging Face
    /// leaves cached keys at the base of the length they were made with.
    #[must_use]
    pub fn rotation(&self, positions: &[usize], length: usize) -> Rotation {
        let length = length as f64;
        match &self.by_length {
            Some(ByLength::DynamicBase { theta, factor, trained }) if length > *trained => {
                let dim = 2.0 * self.frequencies.len() as f64;
                let growth = factor * length / trained - (factor - 1.0);
                let frequencies = inverse_frequencies(theta * growth.powf(dim / (dim - 2.0)), dim as usize);
                Rotation::new(positions, &frequencies, self.scale)
            }
            Some(ByLength::Long { frequencies, original }) if length > *original => {
                Rotation::new(positions, frequencies, self.scale)
            }
            _ => Rotation::new(positions, &self.frequencies, self.scale),
        }
    }
}

/// `theta^(-2i / D)`. Hugging Face computes these in f32; what a model was trained with is the rounded value.
#[must_use]
pub fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|i| f64::from(1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32))).collect()
}
