//! Steps over the paged cache of a model, with any of its adapters.

use super::executor::Executor;
use super::request::Limits;
use super::step::Step;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::paged::{KvDtype, PagedCache, execute};
use candle_core::{DType, Tensor};
use ringspan::attention::Group;
use ringspan::comm::Buffer;
use ringspan_candle::cast::cast;
use ringspan_candle::{Devices, StoredWeights, Weight};
use ringspan_models::adapter;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The models with adapters that the ranks of this process share; all have the weights of the base model.
#[derive(Debug, Default)]
pub(super) struct AdaptedModels(Mutex<BTreeMap<u64, Arc<Model>>>);

impl AdaptedModels {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Model>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an adapter, unless another rank of this process has.
    fn load(&self, slot: u64, folder: &Path, base: &Model, devices: &Devices) -> Result<()> {
        let mut models = self.lock();
        if models.contains_key(&slot) {
            return Ok(());
        }
        let (decoder, matrices) = adapter::attach(folder, base.decoder().clone())?;
        let mut weights = base.weights(0).clone();
        weights.extend(matrices.into_iter().map(|(name, matrix)| (name, Weight::from(matrix))));
        models.insert(slot, Arc::new(Model::new(decoder, weights)?.on(devices)?));
        Ok(())
    }

    fn get(&self, slot: u64) -> Result<Arc<Model>> {
        let missing = || Error::Step(format!("a step computes with adapter {slot}, which is not loaded"));
        self.lock().get(&slot).cloned().ok_or_else(missing)
    }
}

/// Computes steps on one rank over its pages.
///
/// Shape letters: n rows, C width of a hidden state, V vocabulary, P ranks.
pub(super) struct ModelExecutor<'a> {
    group: &'a Arc<Group>,
    model: Arc<Model>,
    adapted: Arc<AdaptedModels>,
    devices: Devices,
    cache: PagedCache,
    /// The output head's rows for this rank's share of the vocabulary, under the head's name.
    head: StoredWeights,
    vocabulary: usize,
}

impl<'a> ModelExecutor<'a> {
    /// An executor with an empty cache.
    pub(super) fn new(
        group: &'a Arc<Group>,
        model: Arc<Model>,
        adapted: Arc<AdaptedModels>,
        devices: Devices,
        limits: &Limits,
        kv_dtype: Option<KvDtype>,
    ) -> Result<Self> {
        let cache = PagedCache::with_dtype(&model, limits.pages_per_rank, limits.page, kv_dtype)?;
        let cache = cache.with_max_length(limits.max_model_len);
        let name = model.decoder().head_name().to_owned();
        let own = share(limits.vocabulary, group.rank(), group.size());
        let head = match model.decoder().parameter(model.weights(group.rank()), &name)? {
            Weight::Dense(matrix) => Weight::Dense(matrix.narrow(0, own.start, own.len())?),
            Weight::Quantized(matrix) => Weight::Quantized(matrix.rows(own)?),
            Weight::Stack(_) => return Err(Error::Step("the output head is a stack of experts".to_owned())),
        };
        let head = StoredWeights::from([(name, head)]);
        Ok(Self { group, adapted, devices, cache, head, vocabulary: limits.vocabulary, model })
    }

    /// Brings the hidden states `[n, C]` of rank 0 to this rank.
    fn broadcast(&self, rows: usize, hidden: Option<&Tensor>) -> Result<Tensor> {
        let dtype = self.head.values().next().map_or(DType::F32, Weight::computed_in);
        if self.group.size() == 1
            && let Some(hidden) = hidden
        {
            return Ok(hidden.clone());
        }
        let own = |hidden: &Tensor| cast(hidden, DType::F32)?.flatten_all()?.to_vec1();
        let own = hidden.map(own).transpose()?.map(Buffer::F32);
        let states = self.group.cp().broadcast(0, own)?;
        let states = states.f32()?;
        let shape = (rows, states.len() / rows.max(1));
        // Casting back loses nothing: the states had this type before they were widened to f32 for the broadcast.
        Ok(cast(&Tensor::from_slice(states, shape, self.devices.of(self.group.rank()).tensors())?, dtype)?)
    }
}

/// The part of a vocabulary whose logits a rank computes.
fn share(vocabulary: usize, rank: usize, ranks: usize) -> Range<usize> {
    vocabulary * rank / ranks..vocabulary * (rank + 1) / ranks
}

impl Executor for ModelExecutor<'_> {
    fn execute(&mut self, adapter: Option<u64>, step: &Step) -> Result<Option<Tensor>> {
        let adapted = adapter.map(|slot| self.adapted.get(slot)).transpose()?;
        let model = adapted.as_ref().unwrap_or(&self.model);
        let hidden = execute(self.group, model, &mut self.cache, step)?;
        hidden.map(|hidden| Ok(model.decoder().norm(model.weights(self.group.rank()), &hidden)?)).transpose()
    }

    /// Each rank computes the logits of its share of the vocabulary: the head's matrix is often as large as many layers, and
    /// would else be read by one rank while the others wait.
    fn logits(&mut self, rows: usize, hidden: Option<&Tensor>) -> Result<Option<Vec<f32>>> {
        let hidden = self.broadcast(rows, hidden)?;
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let own = match share(self.vocabulary, rank, ranks).is_empty() {
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
        let parts = self.group.cp().all_to_all(parts)?;
        if rank != 0 {
            return Ok(None);
        }
        let mut all = vec![0.0; rows * self.vocabulary];
        for (from, part) in parts.iter().enumerate() {
            let (part, share) = (part.f32()?, share(self.vocabulary, from, ranks));
            if part.len() != rows * share.len() {
                let problem = format!("rank {from} sent {} logits for {rows} rows of {}", part.len(), share.len());
                return Err(Error::Logits { vocabulary: self.vocabulary, problem });
            }
            if share.is_empty() {
                continue;
            }
            for (row, logits) in all.chunks_exact_mut(self.vocabulary).zip(part.chunks_exact(share.len())) {
                row[share.clone()].copy_from_slice(logits);
            }
        }
        Ok(Some(all))
    }

    fn load_adapter(&mut self, slot: u64, folder: &Path) -> Result<()> {
        self.adapted.load(slot, folder, &self.model, &self.devices)
    }

    fn unload_adapter(&mut self, slot: u64) {
        self.adapted.lock().remove(&slot);
    }
}
