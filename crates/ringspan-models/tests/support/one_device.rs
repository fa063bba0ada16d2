//! A model computed on one device, with attention in candle's own operations.

use super::one_rank::loss_and_gradients_of_rank;
use super::{Answer, Batch, Shared, balanced};
use candle_core::{D, DType, Device, Tensor};
use ringspan::{Mask, Score};
use ringspan_candle::experts::Local;
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{Attend, AttentionInputs, Experts, InputDropout, TensorParallel, Unit, Weights};
use ringspan_models::Decoder;
use std::sync::Arc;

/// Attention of whole rows in candle's own operations, for a model that is not distributed.
struct Dense<'a> {
    batch: &'a Batch,
    positions: Vec<usize>,
    experts: Shared,
    dropout: Option<InputDropout>,
}

impl Attend for Dense<'_> {
    fn layer_attention(
        &self,
        _: usize,
        &AttentionInputs { q, k, v, sinks, .. }: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> candle_core::Result<Tensor> {
        let Batch { rows, len, .. } = *self.batch;
        let groups = q.dim(1)? / k.dim(1)?;
        let bias = |at: usize| if mask.sees(0, at / len, at % len, len, len) { 0.0 } else { f32::NEG_INFINITY };
        let bias = Tensor::from_iter((0..len * len).map(bias), &Device::Cpu)?.reshape((len, len))?;
        let mut out = Vec::new();
        for row in 0..rows {
            let heads = |x: &Tensor, times: usize| -> candle_core::Result<Tensor> {
                let (_, heads, dim) = x.dims3()?;
                let x = x.narrow(0, row * len, len)?.transpose(0, 1)?.unsqueeze(1)?;
                x.broadcast_as((heads, times, len, dim))?.contiguous()?.reshape((heads * times, len, dim))
            };
            let (q, k, v) = (heads(q, 1)?, heads(k, groups)?, heads(v, groups)?);
            let mut scores = (q.matmul(&k.transpose(1, 2)?)? * f64::from(score.scale))?;
            if let Some(cap) = score.softcap.map(f64::from) {
                scores = ((scores / cap)?.tanh()? * cap)?;
            }
            let scores = scores.broadcast_add(&bias)?;
            // A sink is one more score of every query, whose weight belongs to no value.
            let scores = match sinks {
                Some(sinks) => {
                    let sinks =
                        sinks.reshape((sinks.elem_count(), 1, 1))?.broadcast_as((sinks.elem_count(), len, 1))?;
                    Tensor::cat(&[scores, sinks.contiguous()?], 2)?
                }
                None => scores,
            };
            let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let weights = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
            let mut weights = weights.narrow(2, 0, len)?;
            if let Some(dropout) = score.dropout {
                let factor = |at: usize| {
                    let (head, query, key) = (at / (len * len), row * len + at / len % len, at % len);
                    if dropout.keeps(head, query, key) { 1.0 / (1.0 - dropout.rate) } else { 0.0 }
                };
                let factors = Tensor::from_iter((0..weights.elem_count()).map(factor), &Device::Cpu)?;
                weights = (&weights * factors.reshape(weights.shape())?)?;
            }
            out.push(weights.contiguous()?.matmul(&v)?.transpose(0, 1)?);
        }
        Tensor::cat(&out, 0)
    }

    fn positions(&self) -> &[usize] {
        &self.positions
    }

    fn length(&self) -> usize {
        self.batch.len
    }

    fn experts(&self) -> &dyn Experts {
        &*self.experts
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        &NO_TENSOR_PARALLEL
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        self.dropout.as_ref()
    }
}

/// Computes on one device, without ranks; also returns the units in the order in which their gradients came.
pub(crate) fn on_one_device(decoder: &Decoder, weights: &Weights, batch: &Batch) -> (Answer, Vec<Unit>) {
    on_one_device_dropping(decoder, weights, batch, None)
}

/// Like [`on_one_device`], for a training whose dropout has this seed.
pub(crate) fn on_one_device_dropping(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    seed: Option<u64>,
) -> (Answer, Vec<Unit>) {
    let positions = (0..batch.tokens.len()).map(|at| at % batch.len).collect();
    let balanced = balanced(decoder, Arc::new(Local), |_| Ok(()));
    let experts = balanced.clone().map_or(Arc::new(Local) as Shared, |balanced| balanced);
    let dropout = seed.map(|seed| InputDropout::new(seed, (0..batch.tokens.len()).collect()));
    let dense = Dense { batch, positions, experts, dropout };
    let (mut answer, order) =
        loss_and_gradients_of_rank(decoder, weights, &batch.tokens, &batch.targets(), batch.valid(), &dense)
            .expect("computes");
    answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
    (answer, order)
}
