//! Linear layers of rows that several ranks have, each of which computes a share of the outputs.

use crate::cast::cast;
use crate::tensor_parallel::part;
use crate::weight::Weight;
use candle_core::{DType, Error, Result, Tensor, bail};
use ringspan::comm::{Buffer, Communicator};
use std::fmt::{self, Debug, Formatter};
use std::ops::Range;
use std::sync::Arc;

/// Ranks that all have the same rows of hidden states, as context-parallel ranks have those of sequences that are decoded. Each
/// computes a share of a linear layer's outputs, for which it reads that share of the weight only, and gathers those of the others.
/// An output is computed by one rank alone, from the whole row, so it does not depend on the number of ranks.
///
/// Shape letters: T rows, P ranks.
#[derive(Clone)]
pub struct ReplicatedRows {
    comm: Arc<dyn Communicator>,
    /// Ranks share layers whose weights take at least so many bytes.
    least_bytes: usize,
}

impl Debug for ReplicatedRows {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicatedRows")
            .field("ranks", &self.comm.size())
            .field("least_bytes", &self.least_bytes)
            .finish_non_exhaustive()
    }
}

/// Shares of outputs begin at multiples of this number, since products compute some outputs at a time.
const OUTPUTS_AT_A_TIME: usize = 16;

/// A linear layer: its weight `[out, in]` and its bias `[out]`.
pub(crate) type WeightAndBias<'a> = (&'a Weight, Option<&'a Tensor>);

impl ReplicatedRows {
    /// The ranks of `comm`, which share layers whose weights take at least `least_bytes`: for smaller ones an exchange would take
    /// longer than it saves. `None` for one rank.
    #[must_use]
    pub fn new(comm: Arc<dyn Communicator>, least_bytes: usize) -> Option<Self> {
        (comm.size() > 1).then_some(Self { comm, least_bytes })
    }

    /// `x weight^T + bias` of layers with the same input x `[T, in]`, by one exchange: `[T, out]` each, in the type of x. `None` if
    /// these layers are not worth an exchange, which all ranks decide alike.
    ///
    /// # Errors
    /// Shapes and types that do not fit, and failures of other ranks.
    pub(crate) fn linear<const N: usize>(
        &self,
        x: &Tensor,
        layers: [WeightAndBias<'_>; N],
    ) -> Result<Option<[Tensor; N]>> {
        let bytes: usize = layers.iter().map(|(weight, _)| weight.bytes()).sum();
        let widths = layers.map(|(weight, _)| weight.dims()[0]);
        let narrowest = widths.iter().min().copied().unwrap_or(0);
        let on_cpu = x.device().is_cpu() && layers.iter().all(|(weight, _)| weight.device().is_cpu());
        if !on_cpu || bytes < self.least_bytes || narrowest < OUTPUTS_AT_A_TIME * self.comm.size() {
            return Ok(None);
        }
        let mut own = Vec::new();
        for ((weight, bias), width) in layers.into_iter().zip(widths) {
            let share = self.share(width, self.comm.rank());
            let bias = bias.map(|bias| bias.narrow(0, share.start, share.len())).transpose()?;
            let out = weight.row_range(share)?.linear(x, bias.as_ref())?;
            own.extend(cast(&out, DType::F32)?.flatten_all()?.to_vec1::<f32>()?);
        }
        let shares = self.comm.all_gather(Buffer::F32(own)).map_err(Error::wrap)?;
        let outputs = self.assemble(&shares, x.dim(0)?, widths)?;
        let tensor = |(values, width): (Vec<f32>, usize)| {
            cast(&Tensor::from_vec(values, (x.dim(0)?, width), x.device())?, x.dtype())
        };
        let outputs = outputs.into_iter().zip(widths).map(tensor).collect::<Result<Vec<_>>>()?;
        Ok(outputs.try_into().ok())
    }

    /// The outputs of a layer of this width that a rank computes.
    fn share(&self, width: usize, rank: usize) -> Range<usize> {
        let shares = part(width.div_ceil(OUTPUTS_AT_A_TIME), rank, self.comm.size());
        (shares.start * OUTPUTS_AT_A_TIME).min(width)..(shares.end * OUTPUTS_AT_A_TIME).min(width)
    }

    /// The outputs `[rows, width]` of each layer from the shares of all ranks, in which a rank's outputs of one layer, `[rows, share]`,
    /// follow those of the layer before.
    fn assemble<const N: usize>(
        &self,
        shares: &[Arc<Buffer>],
        rows: usize,
        widths: [usize; N],
    ) -> Result<[Vec<f32>; N]> {
        let mut outputs = widths.map(|width| vec![0.0; rows * width]);
        for (rank, sent) in shares.iter().enumerate() {
            let ranges = widths.map(|width| self.share(width, rank));
            let expected = rows * ranges.iter().map(Range::len).sum::<usize>();
            let mut sent = sent.f32().map_err(Error::wrap)?;
            if sent.len() != expected {
                bail!("rank {rank} sent {} outputs of linear layers instead of {expected}", sent.len());
            }
            for ((output, range), width) in outputs.iter_mut().zip(ranges).zip(widths) {
                let (of_layer, rest) = sent.split_at(rows * range.len());
                for (to, from) in output.chunks_exact_mut(width).zip(of_layer.chunks_exact(range.len())) {
                    to[range.clone()].copy_from_slice(from);
                }
                sent = rest;
            }
        }
        Ok(outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::{Format, QuantizedMatrix};
    use candle_core::Device;
    use ringspan::Result as Done;
    use ringspan::comm::threads::{self, Options};

    fn numbers(shape: &[usize], dtype: DType) -> Tensor {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (0..count).map(|i| ((i * 37 + 11) % 101) as f32 / 50.0 - 1.0).collect();
        Tensor::from_vec(values, shape, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    /// A matrix of Q8_0 blocks, each a factor of 0.5 and 32 integers.
    fn quantized(rows: usize, columns: usize) -> Weight {
        let block = |at: usize| [0x00, 0x38].into_iter().chain((0..32).map(move |i| (at * 7 + i * 3) as u8));
        let bytes: Vec<u8> = (0..rows * columns / 32).flat_map(block).collect();
        QuantizedMatrix::new(Format::Q8_0, rows, columns, bytes.into()).unwrap().into()
    }

    /// The outputs of three layers for the same rows on one rank, and on each of some ranks.
    fn outputs(ranks: usize, rows: usize, dtype: DType, weights: &[Weight; 3]) -> (Vec<Tensor>, Vec<Vec<Tensor>>) {
        let x = numbers(&[rows, 64], dtype);
        let bias = numbers(&[weights[1].dims()[0]], dtype);
        let layers = || [(&weights[0], None), (&weights[1], Some(&bias)), (&weights[2], None)];
        let alone = layers().into_iter().map(|(weight, bias)| weight.linear(&x, bias).unwrap()).collect();
        let shared = threads::run(ranks, Options::default(), |comm| -> Done<_> {
            let ranks = ReplicatedRows::new(comm, 1).unwrap();
            Ok(ranks.linear(&x, layers()).unwrap().unwrap().to_vec())
        });
        (alone, shared.unwrap())
    }

    fn assert_close(a: &Tensor, b: &Tensor) {
        assert_eq!((a.dims(), a.dtype()), (b.dims(), b.dtype()));
        let f32 = |t: &Tensor| t.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (a, b) = (f32(a), f32(b));
        let size = a.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        assert!(size > 1.0 && a.iter().zip(&b).all(|(a, b)| (a - b).abs() <= 1e-6 * size), "{a:?} {b:?}");
    }

    #[test]
    fn ranks_that_share_layers_have_the_outputs_of_one_rank() {
        for (ranks, rows) in [(2, 1), (3, 1), (3, 5), (4, 8)] {
            for dtype in [DType::F32, DType::BF16] {
                // Widths that no number of ranks divides.
                let dense = [75, 133, 65].map(|width| Weight::Dense(numbers(&[width, 64], dtype)));
                let stored = [quantized(75, 64), quantized(133, 64), Weight::Dense(numbers(&[65, 64], dtype))];
                for weights in [dense, stored] {
                    let (alone, shared) = outputs(ranks, rows, dtype, &weights);
                    for of_rank in shared {
                        alone.iter().zip(&of_rank).for_each(|(alone, shared)| assert_close(alone, shared));
                    }
                }
            }
        }
    }

    #[test]
    fn small_layers_are_not_shared() {
        let declined = threads::run(2, Options::default(), |comm| -> Done<_> {
            let x = numbers(&[1, 64], DType::F32);
            let of_width = |width: usize, least_bytes: usize| {
                let weight = Weight::Dense(numbers(&[width, 64], DType::F32));
                ReplicatedRows::new(comm.clone(), least_bytes).unwrap().linear(&x, [(&weight, None)]).unwrap().is_none()
            };
            // Fewer bytes than an exchange is worth, and fewer outputs than each rank computes at a time.
            Ok([of_width(64, 64 * 64 * 4 + 1), of_width(31, 1), of_width(64, 64 * 64 * 4)])
        });
        assert_eq!(declined.unwrap(), [[true, true, false]; 2]);
    }
}
