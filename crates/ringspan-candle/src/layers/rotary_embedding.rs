//! Rotary position embedding as a layer (Su et al., 2021).

use super::ForwardPass;
use crate::rope::{RotaryTable, rope};
use candle_core::{Result, Tensor};

/// Rotates pairs of a head's elements by angles that grow with the token's position.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, RotaryEmbedding};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// // A quarter turn per position.
/// let frequencies = vec![std::f64::consts::FRAC_PI_2];
/// let rotary = RotaryEmbedding { id: 0, frequencies, interleaved: false, scale: 1.0, by_length: None };
/// let rotated = World::threads(1)?.run(|rank| {
///     let context = Context::builder(rank).batch(1, 3).build()?;
///     let x = Tensor::new(&[[[1f32, 0.0]], [[1.0, 0.0]], [[1.0, 0.0]]], &Device::Cpu)?;                // [T, H, D]
///     let y = rotary.forward(x, &ForwardPass::new(&Default::default(), &context, &Adapters::none()))?;
///     Ok::<_, Error>(y.flatten_all()?.to_vec1::<f32>()?.iter().map(|x| x.round()).collect::<Vec<_>>())
/// })?;
/// assert_eq!(rotated[0], [1.0, 0.0, 0.0, 1.0, -1.0, 0.0]);
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct RotaryEmbedding {
    /// Identifies the embedding in the model: layers with the same id share their angles.
    pub id: usize,
    /// Radians per position for each pair of elements. The first `2 * frequencies.len()` elements of a head form the pairs;
    /// the others are not rotated.
    pub frequencies: Vec<f64>,
    /// Whether pairs are neighbouring elements, rather than elements that are half of the rotated width apart.
    pub interleaved: bool,
    /// Factor of cosines and sines; scores are multiplied by its square.
    pub scale: f64,
    /// How frequencies depend on the sequence length, if they do.
    pub by_length: Option<ByLength>,
}

/// Frequencies for sequences longer than those the model was first trained with.
#[derive(Debug, Clone)]
pub enum ByLength {
    /// The base grows with the length (NTK-aware scaling; bloc97 and emozilla, 2023).
    DynamicBase {
        /// The base of sequences that are not too long.
        theta: f64,
        /// The factor that determines how fast the base grows.
        factor: f64,
        /// The number of positions the model was trained with.
        trained: f64,
    },
    /// Other frequencies are used in sequences that are longer (LongRoPE; Ding et al., 2024).
    Long {
        /// Radians per position for each pair.
        frequencies: Vec<f64>,
        /// The number of positions the model was first trained with.
        original: f64,
    },
}

impl RotaryEmbedding {
    /// Rotates each head of x `[T, H, D]`. The elements of interleaved pairs are reordered, all first elements before all
    /// second ones: scores are sums over elements, so queries and keys only need the same order.
    ///
    /// # Errors
    /// Other shapes.
    pub fn forward(&self, x: Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let (tokens, heads, dim) = x.dims3()?;
        if tokens == 0 {
            return Ok(x);
        }
        let make = || self.rotation(pass.attend().positions(), pass.attend().length());
        let rotation = pass.attend().rotations().map_or_else(make, |tables| tables.table(self.id, make));
        let pairs = self.frequencies.len();
        let mut rotated = if 2 * pairs == dim { x.clone() } else { x.narrow(2, 0, 2 * pairs)? };
        if self.interleaved {
            rotated = rotated.contiguous()?.reshape((tokens, heads, pairs, 2))?.transpose(2, 3)?;
            rotated = rotated.contiguous()?.reshape((tokens, heads, 2 * pairs))?;
        }
        let rotated = rope(&rotated, &rotation)?;
        match dim - 2 * pairs {
            0 => Ok(rotated),
            rest => Tensor::cat(&[rotated, x.narrow(2, 2 * pairs, rest)?], 2),
        }
    }

    /// Cosines and sines for tokens at `positions` in a batch whose longest document has `length` tokens.
    ///
    /// Only some embeddings depend on the length. It is one number for the whole batch and for all ranks, because a query
    /// meets keys that other ranks have rotated. So a token's angles depend on the longest document of its batch, as they do
    /// in Hugging Face transformers. A growing sequence is rotated for its final length from the start, while transformers
    /// leaves cached keys at the base of the length for which they were computed.
    #[must_use]
    pub fn rotation(&self, positions: &[usize], length: usize) -> RotaryTable {
        let length = length as f64;
        match &self.by_length {
            Some(ByLength::DynamicBase { theta, factor, trained }) if length > *trained => {
                let dim = 2.0 * self.frequencies.len() as f64;
                let growth = factor * length / trained - (factor - 1.0);
                let frequencies = inverse_frequencies(theta * growth.powf(dim / (dim - 2.0)), dim as usize);
                RotaryTable::new(positions, &frequencies, self.scale)
            }
            Some(ByLength::Long { frequencies, original }) if length > *original => {
                RotaryTable::new(positions, frequencies, self.scale)
            }
            _ => RotaryTable::new(positions, &self.frequencies, self.scale),
        }
    }
}

/// The frequencies `theta^(-2i / D)`. Hugging Face computes them in f32, and models were trained with the rounded values.
#[must_use]
pub fn inverse_frequencies(theta: f64, dim: usize) -> Vec<f64> {
    (0..dim / 2).map(|i| f64::from(1.0 / (theta as f32).powf((2 * i) as f32 / dim as f32))).collect()
}
