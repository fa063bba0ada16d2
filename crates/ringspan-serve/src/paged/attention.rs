//! Attention of a step's tokens over the paged cache.

use super::cache::PagedCache;
use super::elements::of_tensor;
use super::step_plan::StepPlan;
use crate::error::Result;
use crate::groups::Groups;
use candle_core::{Error, Tensor, bail};
use ringspan::attention::Group;
use ringspan::kernel::{Data, View};
use ringspan::{Mask, Score};
use ringspan_candle::cast::cast;
use ringspan_candle::rope::Rotations;
use ringspan_candle::{
    AdapterSelection, Attend, AttentionInputs, Experts, InputDropout, ReplicatedRows, TensorParallel,
};
use std::cell::RefCell;

/// Attention of a step: new keys and values go to the ranks that have their pages, then chunks attend over all ranks by a
/// schedule, and decoding sequences on every rank to its own pages.
pub(super) struct PagedAttention<'a> {
    group: &'a Group,
    tensor: &'a TensorParallel,
    experts: &'a dyn Experts,
    cache: RefCell<&'a mut PagedCache>,
    plan: &'a StepPlan,
    /// The most tokens that a sequence may have.
    length: usize,
    rotations: Rotations,
    /// The context-parallel ranks, if they share linear layers in this step.
    replicated: Option<ReplicatedRows>,
}

/// Ranks share linear layers whose weights take at least this many bytes: an exchange takes about as long as reading them. Threads of one
/// process wake each other sooner than a message passes between processes.
const LEAST_BYTES_BETWEEN_THREADS: usize = 256 << 10;
const LEAST_BYTES_BETWEEN_PROCESSES: usize = 2 << 20;

impl<'a> PagedAttention<'a> {
    pub(super) fn new(
        groups: &'a Groups,
        experts: &'a dyn Experts,
        cache: &'a mut PagedCache,
        plan: &'a StepPlan,
    ) -> Self {
        let (group, tensor, length) = (&**groups.cp(), groups.tensor(), cache.max_length().unwrap_or(0));
        // Ranks pass each other memory, instead of bytes, if they are threads of one process.
        let least_bytes = match group.cp().passes_device_memory() {
            true => LEAST_BYTES_BETWEEN_THREADS,
            false => LEAST_BYTES_BETWEEN_PROCESSES,
        };
        let replicated = plan.shares_layers.then(|| ReplicatedRows::new(group.cp().clone(), least_bytes)).flatten();
        let rotations = Rotations::default();
        Self { group, tensor, experts, cache: RefCell::new(cache), plan, length, rotations, replicated }
    }

    /// Writes the new keys and values to the ranks' pages.
    fn store(&self, layer: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        let mut cache = self.cache.borrow_mut();
        let attention = self.plan.attention(cache.kind(layer)?)?;
        of_tensor(k, |keys| {
            of_tensor(v, |values| {
                let (rows, after) = (self.plan.tokens.len(), self.plan.chunk_rows);
                let decoded = |all: Data<'_>| after * (all.len() / rows.max(1));
                if let Some(prefills) = &attention.prefill_batch {
                    prefills.store(self.group, &mut cache, layer, keys, values)?;
                }
                if let Some(decodes) = &attention.decode_batch {
                    let (k, v) = (keys.slice(decoded(keys)..keys.len()), values.slice(decoded(values)..values.len()));
                    decodes.store(&mut cache, layer, k, v)?;
                }
                Ok(())
            })
        })
    }

    /// Attention `[T, H, Dv]` of queries `[T, H, D]`.
    fn attend(&self, layer: usize, q: &Tensor, mask: &Mask, score: &Score) -> Result<Vec<f32>> {
        let (cache, plan) = (self.cache.borrow(), self.plan);
        let attention = plan.attention(cache.kind(layer)?)?;
        let (rows, heads, dim) = q.dims3()?;
        of_tensor(q, |q| {
            let view = |from: usize, to: usize| {
                View::stored(q.slice(from * heads * dim..to * heads * dim), to - from, heads, dim)
                    .ok_or_else(|| crate::Error::Step(format!("queries {from} to {to} of {rows} rows")))
            };
            let mut out = match &attention.prefill_batch {
                Some(prefills) => prefills.attend(self.group, &cache, layer, view(0, plan.chunk_rows)?, mask, score)?,
                None => Vec::new(),
            };
            if let Some(decodes) = &attention.decode_batch {
                let of_decodes =
                    decodes.attend(self.group, &cache, layer, view(plan.chunk_rows, rows)?, mask, score)?;
                if out.is_empty() { out = of_decodes } else { out.extend(of_decodes) }
            }
            Ok(out)
        })
    }
}

impl Attend for PagedAttention<'_> {
    fn layer_attention(
        &self,
        layer: usize,
        inputs: &AttentionInputs,
        mask: &Mask,
        score: &Score,
    ) -> candle_core::Result<Tensor> {
        let AttentionInputs { q, k, v, sinks, bias, bucket_table } = *inputs;
        if bias.is_some() || bucket_table.is_some() {
            bail!(
                "the paged cache takes no bias and no bucket table: use ALiBi or relative buckets of the score instead"
            );
        }
        let ((rows, heads, _), (_, _, v_dim)) = (q.dims3()?, v.dims3()?);
        if rows != self.plan.tokens.len() {
            bail!("{rows} queries of a step with {} rows on this rank", self.plan.tokens.len());
        }
        let sinks = sinks.map(|sinks| cast(sinks, candle_core::DType::F32)?.to_vec1()).transpose()?;
        let score = Score { sinks, ..score.clone() };
        self.store(layer, &k.contiguous()?, &v.contiguous()?).map_err(Error::wrap)?;
        let out = self.attend(layer, &q.contiguous()?, mask, &score).map_err(Error::wrap)?;
        cast(&Tensor::from_vec(out, (rows, heads, v_dim), q.device())?, q.dtype())
    }

    fn positions(&self) -> &[usize] {
        &self.plan.positions
    }

    fn rotations(&self) -> Option<&Rotations> {
        Some(&self.rotations)
    }

    fn length(&self) -> usize {
        self.length
    }

    fn experts(&self) -> &dyn Experts {
        self.experts
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        self.tensor
    }

    fn replicated_rows(&self) -> Option<&ReplicatedRows> {
        self.replicated.as_ref()
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        None
    }

    fn adapter_selection(&self) -> Option<&AdapterSelection> {
        Some(&self.plan.adapters)
    }
}
