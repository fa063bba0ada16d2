//! The norm over channels, at each position alone: `x / |x| * sqrt(C) * gain`.

use candle_core::Tensor;
use ringspan_candle::activation::Activation;

/// The least length by which a vector is divided, as in PyTorch's `normalize`.
const LEAST: f32 = 1e-12;

/// The gains of a norm, times the root of the number of channels.
#[derive(Debug, Clone)]
pub(crate) struct ChannelNorm {
    gains: Vec<f32>,
}

impl ChannelNorm {
    /// The norm with a gain for each channel.
    ///
    /// # Errors
    /// A tensor that is not f32 on a CPU.
    pub(crate) fn new(gains: &Tensor) -> candle_core::Result<Self> {
        let gains: Vec<f32> = gains.flatten_all()?.to_vec1()?;
        let root = (gains.len() as f32).sqrt();
        Ok(Self { gains: gains.into_iter().map(|gain| gain * root).collect() })
    }

    /// A norm of a layer of which only the memory is asked for.
    pub(crate) fn without_gains() -> Self {
        Self { gains: Vec::new() }
    }

    /// Writes the norm of each position of `values` `[positions, C]`.
    #[inline(always)]
    pub(crate) fn write(&self, values: &[f32], out: &mut [f32]) {
        let channels = self.gains.len();
        for (values, out) in values.chunks_exact(channels).zip(out.chunks_exact_mut(channels)) {
            let factor = 1.0 / sum_of_squares(values).sqrt().max(LEAST);
            for ((out, value), gain) in out.iter_mut().zip(values).zip(&self.gains) {
                *out = value * factor * gain;
            }
        }
    }

    /// Writes SiLU of the norm of each position of `values` `[positions, C]`.
    #[inline(always)]
    pub(crate) fn write_activated(&self, values: &[f32], out: &mut [f32]) {
        self.write(values, out);
        Activation::Silu.apply(out);
    }
}

/// The sum of squares; with several partial sums the compiler uses vectors.
#[inline(always)]
fn sum_of_squares(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest: f32 = chunks.remainder().iter().map(|x| x * x).sum();
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x * x);
    }
    sums.iter().sum::<f32>() + rest
}
