//! Puts the results of all ranks together.

use super::compute::{RankResult, RankWork};
use super::input::InputSizes;
use crate::files::OutputTensor;
use anyhow::Result;
use ringspan::Layout;
use ringspan::kernel::RelativeBias;
use safetensors::Dtype;

/// The output tensors. Tokens that no rank holds are padding: out 0, lse -inf, gradients 0.
pub(super) fn join(work: &RankWork<'_>, parts: &[RankResult]) -> Result<Vec<OutputTensor>> {
    let input = work.input;
    let InputSizes { batch, queries, keys, heads, kv_heads, dim, v_dim } = input.sizes;
    let (query, key) = (work.schedule.query(), work.schedule.key());
    let mut out = vec![0.0; batch * queries * heads * v_dim];
    let mut lse = vec![f32::NEG_INFINITY; batch * heads * queries];
    for (rank, part) in parts.iter().enumerate() {
        query.unshard(rank, &part.forward.out, heads * v_dim, &mut out)?;
        scatter_lse(&part.forward.lse(), query, rank, queries, heads, &mut lse);
    }
    let mut tensors = vec![
        OutputTensor::new("out", input.q.dtype, vec![batch, queries, heads, v_dim], out),
        OutputTensor::new("lse", Dtype::F32, vec![batch, heads, queries], lse),
    ];
    let gradients: Vec<_> = parts.iter().filter_map(|part| part.gradients.as_ref()).collect();
    if input.d_out.is_none() {
        return Ok(tensors);
    }
    let mut dq = vec![0.0; batch * queries * heads * dim];
    let mut dk = vec![0.0; batch * keys * kv_heads * dim];
    let mut dv = vec![0.0; batch * keys * kv_heads * v_dim];
    for (rank, part) in gradients.iter().enumerate() {
        query.unshard(rank, &part.dq, heads * dim, &mut dq)?;
        key.unshard(rank, &part.dk, kv_heads * dim, &mut dk)?;
        key.unshard(rank, &part.dv, kv_heads * v_dim, &mut dv)?;
    }
    tensors.push(OutputTensor::new("dq", input.q.dtype, input.q.shape.to_vec(), dq));
    tensors.push(OutputTensor::new("dk", input.k.dtype, input.k.shape.to_vec(), dk));
    tensors.push(OutputTensor::new("dv", input.v.dtype, input.v.shape.to_vec(), dv));
    let sum = |of: fn(&ringspan::attention::Gradients) -> &Vec<f32>, len: usize| {
        let mut sum = vec![0.0; len];
        for part in &gradients {
            sum.iter_mut().zip(of(part)).for_each(|(sum, x)| *sum += x);
        }
        sum
    };
    if let Some(sinks) = work.terms.score.sinks.as_ref().filter(|_| work.terms.gives_sinks) {
        tensors.push(OutputTensor::new("d_sinks", Dtype::F32, vec![heads], sum(|part| &part.d_sinks, sinks.len())));
    }
    if let Some(RelativeBias::Buckets(buckets)) = &work.terms.score.relative {
        let by_head = sum(|part| &part.d_table, buckets.table.len());
        let count = buckets.count;
        let by_bucket = (0..count).flat_map(|bucket| by_head.iter().copied().skip(bucket).step_by(count)).collect();
        tensors.push(OutputTensor::new("d_relative_bias", Dtype::F32, vec![count, heads], by_bucket));
    }
    if let Some(bias) = &work.terms.bias {
        let [rows, bias_heads, ..] = bias.shape;
        let mut d_bias = vec![0.0; rows * bias_heads * queries * keys];
        for (rank, part) in gradients.iter().enumerate() {
            for (token, row) in query.rows(rank).into_iter().enumerate() {
                let (b, s) = ((row / queries).min(rows - 1), row % queries);
                for head in 0..bias_heads {
                    let from = &part.d_bias[(token * bias_heads + head) * keys..][..keys];
                    let to = &mut d_bias[((b * bias_heads + head) * queries + s) * keys..][..keys];
                    to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
                }
            }
        }
        tensors.push(OutputTensor::new("d_bias", Dtype::F32, bias.shape.to_vec(), d_bias));
    }
    Ok(tensors)
}

/// Copies a rank's LSE `[H, T]` to its tokens in `[B, H, Sq]`.
fn scatter_lse(local: &[f32], layout: &Layout, rank: usize, queries: usize, heads: usize, lse: &mut [f32]) {
    let rows = layout.rows(rank);
    for (head, values) in local.chunks_exact(rows.len().max(1)).enumerate() {
        for (&row, &value) in rows.iter().zip(values) {
            let (b, s) = (row / queries, row % queries);
            lse[(b * heads + head) * queries + s] = value;
        }
    }
}
