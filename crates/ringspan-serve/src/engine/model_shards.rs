//! The shards of a model with which the ranks of this process compute, and the same shards with adapters.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model::Model;
use crate::model_parallel_rank::ModelParallelRank;
use ringspan_candle::{Devices, Weight};
use ringspan_models::adapter;
use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The shards of a model by model-parallel rank. Context-parallel ranks of one process share a shard.
#[derive(Debug)]
pub(super) struct ModelShards(BTreeMap<ModelParallelRank, Arc<Model>>);

impl ModelShards {
    /// The shards for the ranks of this process, of the whole model, or of the shard that this process has read.
    pub(super) fn new(model: Arc<Model>, mesh: &Mesh) -> Result<Self> {
        // Threads together hold all shards, so they may share the rows of the whole model; a process frees what it does not hold,
        // unless it has read no more.
        let (ranks, copy) = match mesh.processes.comm() {
            None => (0..mesh.size(), false),
            Some(comm) => (comm.rank()..comm.rank() + 1, true),
        };
        let mut shards = BTreeMap::new();
        for rank in ranks {
            let model_rank = mesh.model_rank(rank);
            if let Entry::Vacant(missing) = shards.entry(model_rank) {
                missing.insert(if model_rank == model.model_rank() {
                    model.clone()
                } else {
                    Arc::new(model.shard(model_rank, copy)?)
                });
            }
        }
        Ok(Self(shards))
    }

    pub(super) fn get(&self, model_rank: ModelParallelRank) -> Result<Arc<Model>> {
        let missing = || Error::Mesh(format!("no shard of the model was made for {model_rank:?}"));
        self.0.get(&model_rank).cloned().ok_or_else(missing)
    }
}

/// The shards of models with adapters that the ranks of this process share; all have the weights of the base model.
#[derive(Debug, Default)]
pub(super) struct AdaptedModels(Mutex<BTreeMap<(u64, ModelParallelRank), Arc<Model>>>);

impl AdaptedModels {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<(u64, ModelParallelRank), Arc<Model>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads an adapter for a shard of the base model, unless another rank of this process has.
    pub(super) fn load(&self, slot: u64, folder: &Path, base: &Model, devices: &Devices) -> Result<()> {
        let mut models = self.lock();
        let key = (slot, base.model_rank());
        if models.contains_key(&key) {
            return Ok(());
        }
        let (decoder, matrices) = adapter::attach(folder, base.decoder().clone())?;
        let matrices = matrices.into_iter().map(|(name, matrix)| (name, Weight::from(matrix))).collect();
        models.insert(key, Arc::new(base.adapted(decoder, matrices, devices)?));
        Ok(())
    }

    /// The shard of the model with an adapter.
    pub(super) fn get(&self, slot: u64, model_rank: ModelParallelRank) -> Result<Arc<Model>> {
        let missing = || Error::Step(format!("a step computes with adapter {slot}, which is not loaded"));
        self.lock().get(&(slot, model_rank)).cloned().ok_or_else(missing)
    }

    /// A shard of the base model with several adapters.
    pub(super) fn by_slot(&self, slots: &BTreeSet<u64>, base: &Model) -> Result<Model> {
        let each = slots.iter().map(|slot| Ok((*slot, self.get(*slot, base.model_rank())?)));
        Ok(base.with_adapters_by_slot(&each.collect::<Result<Vec<_>>>()?))
    }

    /// Forgets an adapter.
    pub(super) fn unload(&self, slot: u64) {
        self.lock().retain(|(other, _), _| *other != slot);
    }
}
