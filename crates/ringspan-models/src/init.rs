//! Random weights of a new model.

use crate::decoder::Decoder;
use crate::error::{Error, Result};
use candle_core::{Device, Tensor};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use ringspan_candle::Weights;
use ringspan_candle::model::{Init, Parameter};
use std::collections::BTreeMap;
use std::ops::Range;

/// Words of 32 bits that the generator spends on each number: a number takes two draws of 64 bits.
const WORDS: u128 = 4;

/// The weights of a new model. Each is drawn when it is read, so memory never has to hold them all.
///
/// They follow the initialisation of Hugging Face: matrices are normal with standard deviation `initializer_range`,
/// norms multiply by 1, biases are 0. The embedding's row of padding is drawn like any other, since padding is never
/// looked up. The same seed gives the same weights, whichever rows are read, and by which rank.
#[derive(Debug, Clone)]
pub struct NewWeights {
    seed: u64,
    deviation: f64,
    /// Per parameter: its shape, its initialisation, and how many random numbers are drawn for the parameters before it.
    parameters: BTreeMap<String, (Vec<usize>, Init, u128)>,
}

impl NewWeights {
    /// The weights of the model of `decoder`. Nothing is drawn yet.
    ///
    /// # Errors
    /// An `initializer_range` that is not above 0, with which nothing could be learnt.
    pub fn new(decoder: &Decoder, seed: u64) -> Result<Self> {
        let deviation = decoder.config().initializer_range();
        if !(deviation > 0.0 && deviation.is_finite()) {
            let problem = format!("initializer_range is {deviation}; a new model needs one above 0");
            return Err(Error::Config(problem));
        }
        let mut drawn = 0;
        let all = decoder.units().flat_map(|unit| decoder.parameters(unit));
        let by_name: BTreeMap<&String, &Parameter> = all.map(|parameter| (&parameter.name, parameter)).collect();
        let mut numbered = |Parameter { name, shape, init, .. }: &Parameter| {
            let before = drawn;
            drawn += if *init == Init::Normal { shape.iter().product::<usize>() as u128 } else { 0 };
            (name.clone(), (shape.clone(), *init, before))
        };
        let parameters = by_name.into_values().map(&mut numbered).collect();
        Ok(Self { seed, deviation, parameters })
    }

    /// Whether the model has a parameter.
    pub fn has(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// Draws rows `rows` of a parameter's first dimension.
    ///
    /// # Errors
    /// An unknown parameter, or rows outside it.
    pub fn read(&self, name: &str, rows: Range<usize>) -> Result<Tensor> {
        let Some((shape, init, before)) = self.parameters.get(name) else {
            return Err(Error::Unknown { name: name.to_owned(), shape: Vec::new() });
        };
        let mut part = shape.clone();
        let Some(first) = part.first_mut().filter(|first| rows.start <= rows.end && rows.end <= **first) else {
            return Err(Error::Rows { name: name.to_owned(), rows, shape: shape.clone() });
        };
        *first = rows.len();
        let width: usize = shape[1..].iter().product();
        let values = match init {
            Init::Constant(value) => vec![*value; rows.len() * width],
            Init::Normal => {
                let mut random = ChaCha8Rng::seed_from_u64(self.seed);
                random.set_word_pos(WORDS * (before + (rows.start * width) as u128));
                (0..rows.len() * width).map(|_| (normal(&mut random) * self.deviation) as f32).collect()
            }
        };
        Ok(Tensor::from_vec(values, part, &Device::Cpu)?)
    }
}

impl Decoder {
    /// Draws all of [`NewWeights`].
    ///
    /// # Errors
    /// As for [`NewWeights::new`], and sizes that do not fit in memory.
    pub fn init(&self, seed: u64) -> Result<Weights> {
        let new = NewWeights::new(self, seed)?;
        let whole = |(name, (shape, ..)): (&String, &(Vec<usize>, Init, u128))| {
            Ok((name.clone(), new.read(name, 0..shape.first().copied().unwrap_or(0))?))
        };
        new.parameters.iter().map(whole).collect()
    }
}

/// A normal number by Box and Muller, 1958; the second number of the pair is not used.
fn normal(random: &mut ChaCha8Rng) -> f64 {
    // 53 bits, in (0, 1]: 0 is left out, so the logarithm stays finite.
    let mut uniform = || ((random.next_u64() >> 11) as f64 + 1.0) / (1u64 << 53) as f64;
    (-2.0 * uniform().ln()).sqrt() * (2.0 * std::f64::consts::PI * uniform()).cos()
}
