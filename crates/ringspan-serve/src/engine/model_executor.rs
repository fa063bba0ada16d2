//! Steps over the paged cache of a model, with any of its adapters.

use super::adapter_sets::AdapterSets;
use super::executor::{Executor, KvRowLayout};
use super::model_shards::AdaptedModels;
use super::request::Limits;
use super::row_parts::{RowPart, row_parts};
use super::step::{CachePage, Step};
use crate::error::{Error, Result};
use crate::greatest_logit::GreatestLogit;
use crate::groups::Groups;
use crate::model::Model;
use crate::model_parallel_rank::within;
use crate::paged::{KvDtype, PagedCache, PerKind, execute, to_first_stage};
use candle_core::{CpuStorage, DType, Storage, Tensor};
use ringspan::comm::Buffer;
use ringspan_candle::cast::cast;
use ringspan_candle::pool;
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
        let cache = PagedCache::with_dtype(&model, pages, limits.page_size, kv_dtype)?;
        let mut cache = cache.with_max_length(limits.max_model_len);
        cache.prefault_first();
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

    /// The logits `[n, v]` of this rank's share of the vocabulary, for `rows` hidden states of rank 0; `None` for an empty share.
    ///
    /// Each rank has a share, since the head's matrix is often as large as many layers, and would else be read by one rank while the
    /// others wait.
    fn own_logits(&self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Tensor>> {
        let hidden = self.broadcast(rows, hidden)?;
        if share(self.vocabulary, self.groups, self.groups.rank()).is_empty() {
            return Ok(None);
        }
        Ok(Some(self.model.decoder().model().head().logits(&hidden, &self.head)?))
    }

    /// Sends a buffer to rank 0, which gets those of all ranks.
    fn to_rank_0(&self, own: Buffer) -> Result<Option<Vec<Arc<Buffer>>>> {
        let mut buffers = vec![Buffer::F32(Vec::new()); self.groups.size()];
        buffers[0] = own;
        let buffers = self.groups.world().all_to_all(buffers)?;
        Ok((self.groups.rank() == 0).then_some(buffers))
    }
}

/// The greatest logit of each row of logits `[n, v]`, whose columns are the tokens from `first` on.
fn greatest_of_rows(logits: &Tensor, first: usize) -> Result<Vec<GreatestLogit>> {
    let width = logits.dim(1)?;
    let of_rows = |all: &[f32]| {
        let rows = all.chunks_exact(width).collect();
        pool::map(rows, |row| GreatestLogit::new(row, first)).into_iter().flatten().collect()
    };
    // On a CPU they are read where they are.
    let (storage, layout) = logits.storage_and_layout();
    if let (Storage::Cpu(CpuStorage::F32(all)), Some((start, end))) = (&*storage, layout.contiguous_offsets()) {
        return Ok(of_rows(&all[start..end]));
    }
    drop(storage);
    Ok(of_rows(&logits.flatten_all()?.to_vec1::<f32>()?))
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
        self.cache.prefault();
        let normed = |hidden| Ok::<_, Error>(model.decoder().norm(model.weights(self.groups.rank()), &hidden)?);
        let hidden = hidden.map(normed).transpose()?;
        match self.groups.stages() {
            Some(stages) if self.groups.leads_stage() => to_first_stage(&**stages, step, hidden, model, &self.cache),
            _ => Ok(hidden),
        }
    }

    fn logits(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<f32>>> {
        let own = match self.own_logits(rows, hidden)? {
            Some(logits) => logits.flatten_all()?.to_vec1()?,
            None => Vec::new(),
        };
        if self.groups.size() == 1 {
            return Ok(Some(own));
        }
        let Some(parts) = self.to_rank_0(Buffer::F32(own))? else { return Ok(None) };
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

    fn most_likely(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<Result<u32>>>> {
        let first = share(self.vocabulary, self.groups, self.groups.rank()).start;
        let own = match self.own_logits(rows, hidden)? {
            Some(logits) => greatest_of_rows(&logits, first)?,
            None => Vec::new(),
        };
        let words = own.into_iter().flat_map(GreatestLogit::to_words).collect();
        let Some(parts) = self.to_rank_0(Buffer::U64(words))? else { return Ok(None) };
        let mut greatest: Vec<Option<GreatestLogit>> = vec![None; rows];
        for (from, sent) in parts.iter().enumerate() {
            let expected = if share(self.vocabulary, self.groups, from).is_empty() { 0 } else { rows };
            let wrong = || {
                let problem = format!(
                    "rank {from} sent {} words, not a token and its logit for each of {expected} rows",
                    sent.len()
                );
                Error::Logits { vocabulary: self.vocabulary, problem }
            };
            let Buffer::U64(words) = &**sent else { return Err(wrong()) };
            let (words, []) = words.as_chunks() else { return Err(wrong()) };
            if words.len() != expected {
                return Err(wrong());
            }
            for (greatest, words) in greatest.iter_mut().zip(words) {
                let found = GreatestLogit::from_words(*words).ok_or_else(wrong)?;
                *greatest = Some(greatest.map_or(found, |other| other.or(found)));
            }
        }
        let empty = || Error::Logits { vocabulary: self.vocabulary, problem: "the vocabulary is empty".into() };
        let token = |greatest: Option<GreatestLogit>| greatest.ok_or_else(empty)?.token(self.vocabulary);
        Ok(Some(greatest.into_iter().map(|greatest| token(greatest).map(|token| token as u32)).collect()))
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
