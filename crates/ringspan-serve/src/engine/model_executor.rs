//! Steps over the paged cache of a model, with any of its adapters.

use super::adapter_sets::AdapterSets;
use super::executor::{Executor, KvRowLayout};
use super::model_shards::AdaptedModels;
use super::request::Limits;
use super::row_parts::{RowPart, row_parts};
use super::step::{CachePage, Step};
use crate::error::{Error, Result};
use crate::groups::Groups;
use crate::model::Model;
use crate::model_parallel_rank::within;
use crate::paged::{KvDtype, PagedCache, PerKind, execute, to_first_stage};
use candle_core::{DType, Tensor};
use ringspan::comm::Buffer;
use ringspan_candle::cast::cast;
use ringspan_candle::tensor_parallel::part;
use ringspan_candle::{Devices, StoredWeights, Weight};
use std::collections::BTreeSet;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// Computes steps on one rank over its pages.
///
/// Shape letters: n rows, C width of a hidden state, V vocabulary, P ranks.
pub(super) struct ModelExecutor<'a> {
    groups: &'a Groups,
    /// This rank's shard of the model.
    model: Arc<Model>,
    adapted: Arc<AdaptedModels>,
    adapter_sets: AdapterSets<Model>,
    devices: Devices,
    cache: PagedCache,
    /// The output head's rows for this rank's share of the vocabulary, under the head's name.
    head: StoredWeights,
    vocabulary: usize,
    /// Which keys and values of a token are on the ranks that share heads and layers.
    row_parts: Vec<RowPart>,
}

impl<'a> ModelExecutor<'a> {
    /// An executor with an empty cache, for this rank's shard of a model.
    pub(super) fn new(
        groups: &'a Groups,
        model: Arc<Model>,
        adapted: Arc<AdaptedModels>,
        devices: Devices,
        limits: &Limits,
        kv_dtype: Option<KvDtype>,
    ) -> Result<Self> {
        let pages = PerKind { full: limits.pages_per_rank, window: limits.window_pages_per_rank };
        let cache = PagedCache::with_dtype(&model, pages, limits.page, kv_dtype)?;
        let cache = cache.with_max_length(limits.max_model_len);
        let own = share(limits.vocabulary, groups, groups.rank());
        let head = model.head_rows(groups.rank(), own)?;
        let head = StoredWeights::from([(model.decoder().head_name().to_owned(), head)]);
        let row_parts = row_parts(&model, groups.model_rank().stage.1, groups.model_rank().shard.tp.1)?;
        let adapter_sets = AdapterSets::default();
        Ok(Self {
            groups,
            adapted,
            adapter_sets,
            devices,
            cache,
            head,
            vocabulary: limits.vocabulary,
            model,
            row_parts,
        })
    }

    /// The model with the adapters that the sequences of a step ask for.
    fn model_for(&mut self, step: &Step) -> Result<Arc<Model>> {
        let asked: BTreeSet<u64> = step.sequences.iter().filter_map(|sequence| sequence.adapter).collect();
        let all_have_one = step.sequences.iter().all(|sequence| sequence.adapter.is_some());
        match (asked.first(), asked.len()) {
            (None, _) => Ok(self.model.clone()),
            (Some(slot), 1) if all_have_one => self.adapted.get(*slot, self.groups.model_rank()),
            _ => self.adapter_sets.get(&asked, || self.adapted.by_slot(&asked, &self.model)),
        }
    }

    /// Brings the hidden states `[n, C]` of rank 0 to this rank.
    fn broadcast(&self, rows: usize, hidden: Option<&Tensor>) -> Result<Tensor> {
        let dtype = self.head.values().next().map_or(DType::F32, Weight::computed_in);
        if self.groups.size() == 1
            && let Some(hidden) = hidden
        {
            return Ok(hidden.clone());
        }
        let own = |hidden: &Tensor| cast(hidden, DType::F32)?.flatten_all()?.to_vec1();
        let own = hidden.map(own).transpose()?.map(Buffer::F32);
        let states = self.groups.broadcast(own)?;
        let states = states.f32()?;
        let shape = (rows, states.len() / rows.max(1));
        // Casting back loses nothing: the states had this type before they were widened to f32 for the broadcast.
        Ok(cast(&Tensor::from_slice(states, shape, self.devices.of(self.groups.rank()).tensors())?, dtype)?)
    }
}

/// The part of a vocabulary whose logits a rank computes: of the rows of the output head that tensor and pipeline parallelism give it,
/// the share that context-parallel ranks leave to it.
fn share(vocabulary: usize, groups: &Groups, rank: usize) -> Range<usize> {
    let (tp, pp) = (groups.model_rank().shard.tp.1, groups.model_rank().stage.1);
    // Context-parallel ranks of all attention replicas.
    let cp = groups.size() / (tp * pp);
    let of_tp = part(vocabulary, rank % tp, tp);
    within(within(of_tp, (rank / (tp * cp), pp)), (rank / tp % cp, cp))
}

impl Executor for ModelExecutor<'_> {
    fn execute(&mut self, step: &Step) -> Result<Option<Tensor>> {
        let model = &self.model_for(step)?;
        let hidden = execute(self.groups, model, &mut self.cache, step)?;
        let normed = |hidden| Ok::<_, Error>(model.decoder().norm(model.weights(self.groups.rank()), &hidden)?);
        let hidden = hidden.map(normed).transpose()?;
        match self.groups.stages() {
            Some(stages) if self.groups.leads_stage() => to_first_stage(&**stages, step, hidden, model, &self.cache),
            _ => Ok(hidden),
        }
    }

    /// Each rank computes the logits of its share of the vocabulary: the head's matrix is often as large as many layers, and
    /// would else be read by one rank while the others wait.
    fn logits(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<f32>>> {
        let hidden = self.broadcast(rows, hidden)?;
        let (rank, ranks) = (self.groups.rank(), self.groups.size());
        let own = match share(self.vocabulary, self.groups, rank).is_empty() {
            true => Vec::new(),
            false => {
                let logits = self.model.decoder().model().head().logits(&hidden, &self.head)?;
                logits.flatten_all()?.to_vec1()?
            }
        };
        if ranks == 1 {
            return Ok(Some(own));
        }
        let mut parts = vec![Buffer::F32(Vec::new()); ranks];
        parts[0] = Buffer::F32(own);
        let parts = self.groups.world().all_to_all(parts)?;
        if rank != 0 {
            return Ok(None);
        }
        let mut all = vec![0.0; rows * self.vocabulary];
        for (from, sent) in parts.iter().enumerate() {
            let (sent, share) = (sent.f32()?, share(self.vocabulary, self.groups, from));
            if sent.len() != rows * share.len() {
                let problem = format!("rank {from} sent {} logits for {rows} rows of {}", sent.len(), share.len());
                return Err(Error::Logits { vocabulary: self.vocabulary, problem });
            }
            if share.is_empty() {
                continue;
            }
            for (row, logits) in all.chunks_exact_mut(self.vocabulary).zip(sent.chunks_exact(share.len())) {
                row[share.clone()].copy_from_slice(logits);
            }
        }
        Ok(Some(all))
    }

    fn load_adapter(&mut self, slot: u64, folder: &Path) -> Result<()> {
        self.adapted.load(slot, folder, &self.model, &self.devices)
    }

    fn unload_adapter(&mut self, slot: u64) {
        self.adapter_sets.forget(slot);
        self.adapted.unload(slot);
    }

    fn row_layout(&self) -> Option<KvRowLayout> {
        let decoder = self.model.decoder();
        let [dim, v_dim] = decoder.head_dims();
        let of_layer = decoder.head_counts().key_values * (dim + v_dim);
        let layers = 0..decoder.config().num_hidden_layers;
        let full = layers.clone().filter(|layer| decoder.mask(*layer).lookback().is_none());
        Some(KvRowLayout {
            dtype: self.cache.row_format().0,
            width: layers.len() * of_layer,
            full: RowPart::new(full.map(|layer| layer * of_layer..(layer + 1) * of_layer)),
            parts: self.row_parts.clone(),
        })
    }

    fn read_page(&self, page: CachePage, rows: usize) -> Result<Buffer> {
        self.cache.read_page(page, rows)
    }

    fn write_page(&mut self, page: CachePage, rows: &Buffer) -> Result<()> {
        self.cache.write_page(page, rows)
    }
}
