//! Linear layers of rows that several ranks have, each of which computes a share of the outputs.

use crate::activation::Activation;
use crate::collective;
use crate::swiglu::gated;
use crate::tensor_parallel::part;
use crate::weight::Weight;
use candle_core::{Error, Result, Tensor};
use ringspan::comm::Communicator;
use std::fmt::{self, Debug, Formatter};
use std::ops::Range;
use std::sync::Arc;

/// Ranks that all have the same rows of hidden states, as context-parallel ranks have those of sequences that are decoded. Each
/// computes a share of a linear layer's outputs, for which it reads that share of the weight only, and gathers those of the others
/// (Bhatia et al., 2025, arXiv:2507.07120). An output is computed by one rank alone, from the whole row, so it has the same bits on
/// any number of ranks.
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

    /// Whether layers with these weights, which have the same input, are worth an exchange. All ranks decide alike. Layers on GPUs are
    /// not.
    pub(crate) fn share(&self, weights: &[&Weight]) -> bool {
        let bytes: usize = weights.iter().map(|weight| weight.bytes()).sum();
        bytes >= self.least_bytes
            && weights.iter().all(|weight| weight.device().is_cpu() && self.all_have_outputs_of(weight.dims()[0]))
    }

    /// Whether each rank has a share of a layer with so many outputs.
    pub(crate) fn all_have_outputs_of(&self, width: usize) -> bool {
        width >= OUTPUTS_AT_A_TIME * self.comm.size()
    }

    /// `x weight^T + bias` of layers with the same input x `[T, in]`, by one exchange: `[T, out]` each, sent in the type of x.
    ///
    /// # Errors
    /// Shapes and types that do not fit, and failures of other ranks.
    pub(crate) fn linear<const N: usize>(&self, x: &Tensor, layers: [WeightAndBias<'_>; N]) -> Result<[Tensor; N]> {
        let widths = layers.map(|(weight, _)| weight.dims()[0]);
        let own = layers.into_iter().map(|layer| self.share_of_outputs(x, layer)).collect::<Result<Vec<_>>>()?;
        let outputs = self.gathered(&own, &widths)?;
        outputs.try_into().map_err(|outputs: Vec<_>| Error::msg(format!("{} outputs of {N} layers", outputs.len())))
    }

    /// `act(x gate^T) * (x up^T)` of layers with the same input x `[T, in]`, with their biases, by one exchange of what a rank has after
    /// the activation: `[T, out]`.
    ///
    /// # Errors
    /// As for [`linear`](Self::linear).
    pub(crate) fn gated(
        &self,
        x: &Tensor,
        [gate, up]: [WeightAndBias<'_>; 2],
        activation: Activation,
    ) -> Result<Tensor> {
        let width = gate.0.dims()[0];
        let own = gated(&self.share_of_outputs(x, gate)?, &self.share_of_outputs(x, up)?, activation)?;
        let mut outputs = self.gathered(&[own], &[width])?;
        outputs.pop().ok_or_else(|| Error::msg("no output of a gated layer"))
    }

    /// This rank's share of a layer's outputs.
    fn share_of_outputs(&self, x: &Tensor, (weight, bias): WeightAndBias<'_>) -> Result<Tensor> {
        let range = share_of(weight.dims()[0], self.comm.rank(), self.comm.size());
        let bias = bias.map(|bias| bias.narrow(0, range.start, range.len())).transpose()?;
        weight.row_range(range)?.linear(x, bias.as_ref())
    }

    /// All outputs of layers of these widths, of which each rank has its share.
    fn gathered(&self, own: &[Tensor], widths: &[usize]) -> Result<Vec<Tensor>> {
        let ranks = self.comm.size();
        let of_rank = |rank: usize| widths.iter().map(|width| share_of(*width, rank, ranks).len()).collect();
        collective::all_gather_columns(&*self.comm, own, &of_rank)
    }
}

/// The outputs of a layer of this width that a rank computes.
fn share_of(width: usize, rank: usize, ranks: usize) -> Range<usize> {
    let shares = part(width.div_ceil(OUTPUTS_AT_A_TIME), rank, ranks);
    (shares.start * OUTPUTS_AT_A_TIME).min(width)..(shares.end * OUTPUTS_AT_A_TIME).min(width)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quantized::{Format, QuantizedMatrix};
    use candle_core::{DType, Device};
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

    fn bits(outputs: &[Tensor]) -> Vec<(Vec<usize>, DType, Vec<u32>)> {
        let bits = |tensor: &Tensor| {
            let wide = tensor.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert!(wide.iter().any(|value| value.abs() > 1.0));
            (tensor.dims().to_vec(), tensor.dtype(), wide.into_iter().map(f32::to_bits).collect())
        };
        outputs.iter().map(bits).collect()
    }

    /// Quantized weights that are decoded in tiles: the share has fewer rows than the whole layer, and the same order of sums.
    #[test]
    fn shares_of_large_quantized_layers_have_the_bits_of_one_rank() {
        let weight = quantized(1100, 640);
        for rows in [1, 40] {
            let x = numbers(&[rows, 640], DType::F32);
            let alone = weight.linear(&x, None).unwrap();
            let shared = threads::run(2, Options::default(), |comm| -> Done<_> {
                Ok(ReplicatedRows::new(comm.clone(), 1).unwrap().linear(&x, [(&weight, None)]).unwrap())
            });
            for outputs in shared.unwrap() {
                assert_eq!(bits(&outputs), bits(std::slice::from_ref(&alone)), "{rows} rows");
            }
        }
    }

    /// A gated layer sends half of what its two layers would.
    #[test]
    fn ranks_that_share_a_gated_layer_have_the_bits_of_one_rank() {
        for (ranks, rows, dtype) in [(2, 1, DType::F32), (3, 5, DType::F32), (2, 16, DType::BF16)] {
            let [gate, up] = [(133, 0), (133, 1)].map(|(width, odd)| {
                let all = numbers(&[2 * width, 64], dtype);
                Weight::Dense(all.narrow(0, odd * width, width).unwrap())
            });
            let (x, bias) = (numbers(&[rows, 64], dtype), numbers(&[133], dtype));
            let both = || [(&gate, None), (&up, Some(&bias))];
            let [of_gate, of_up] = both().map(|(weight, bias)| weight.linear(&x, bias).unwrap());
            let alone = gated(&of_gate, &of_up, Activation::GeluTanh).unwrap();
            let shared = threads::run(ranks, Options::default(), |comm| -> Done<_> {
                let ranks = ReplicatedRows::new(comm.clone(), 1).unwrap();
                Ok((ranks.gated(&x, both(), Activation::GeluTanh).unwrap(), comm.bytes_sent()))
            });
            for (rank, (output, sent)) in shared.unwrap().into_iter().enumerate() {
                assert_eq!(
                    bits(&[output]),
                    bits(std::slice::from_ref(&alone)),
                    "{ranks} ranks, {rows} rows of {dtype:?}"
                );
                let own = share_of(133, rank, ranks).len();
                assert_eq!(sent, ((ranks - 1) * rows * own * dtype.size_in_bytes()) as u64);
            }
        }
    }

    /// A share has the bits of the same outputs of the whole layer, and bf16 is sent as bf16.
    #[test]
    fn ranks_that_share_layers_have_the_bits_of_one_rank() {
        for (ranks, rows) in [(2, 1), (3, 1), (3, 5), (4, 8), (2, 40)] {
            for dtype in [DType::F32, DType::BF16] {
                // Widths that no number of ranks divides.
                let widths = [75, 133, 65];
                let dense = widths.map(|width| Weight::Dense(numbers(&[width, 64], dtype)));
                let stored = [quantized(75, 64), quantized(133, 64), Weight::Dense(numbers(&[65, 64], dtype))];
                for weights in [dense, stored] {
                    let x = numbers(&[rows, 64], dtype);
                    let bias = numbers(&[133], dtype);
                    let layers = || [(&weights[0], None), (&weights[1], Some(&bias)), (&weights[2], None)];
                    let alone = layers().map(|(weight, bias)| weight.linear(&x, bias).unwrap());
                    let shared = threads::run(ranks, Options::default(), |comm| -> Done<_> {
                        let ranks = ReplicatedRows::new(comm.clone(), 1).unwrap();
                        let outputs = ranks.linear(&x, layers()).unwrap();
                        Ok((outputs, comm.bytes_sent()))
                    });
                    for (rank, (outputs, sent)) in shared.unwrap().iter().enumerate() {
                        assert_eq!(bits(outputs), bits(&alone), "{ranks} ranks, {rows} rows of {dtype:?}");
                        let own: usize = widths.iter().map(|width| share_of(*width, rank, ranks).len()).sum();
                        assert_eq!(*sent, ((ranks - 1) * rows * own * dtype.size_in_bytes()) as u64);
                    }
                }
            }
        }
    }

    #[test]
    fn a_rank_that_does_not_compute_its_share_is_named_to_the_others() {
        let (weight, x) = (quantized(64, 64), numbers(&[1, 64], DType::F32));
        let shared = threads::run(3, Options::default(), |comm| -> Done<_> {
            if comm.rank() == 1 {
                panic!("on purpose");
            }
            let error =
                ReplicatedRows::new(comm.clone(), 1).unwrap().linear(&x, [(&weight, None)]).unwrap_err().to_string();
            assert!(error.contains("rank 1") && error.contains("on purpose"), "{error}");
            Ok(())
        });
        let error = shared.unwrap_err().to_string();
        assert!(error.contains("rank 1") && error.contains("on purpose"), "{error}");
    }

    #[test]
    fn small_layers_are_not_shared() {
        let shared = threads::run(2, Options::default(), |comm| -> Done<_> {
            let of_widths = |widths: &[usize], least_bytes: usize| {
                let weights = widths.iter().map(|width| Weight::Dense(numbers(&[*width, 64], DType::F32)));
                let weights: Vec<Weight> = weights.collect();
                let weights: Vec<&Weight> = weights.iter().collect();
                ReplicatedRows::new(comm.clone(), least_bytes).unwrap().share(&weights)
            };
            // Fewer bytes than an exchange is worth, and fewer outputs than each rank computes at a time.
            let too_small = [of_widths(&[64], 64 * 64 * 4 + 1), of_widths(&[64, 31], 1)];
            Ok((too_small, [of_widths(&[64], 64 * 64 * 4), of_widths(&[32, 32], 64 * 64 * 4)]))
        });
        assert_eq!(shared.unwrap(), [([false; 2], [true; 2]); 2]);
    }
}
