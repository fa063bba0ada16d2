//! The initial parameters of a run: of a model, new adapters or a checkpoint. Each rank takes its shards of them.

use crate::{
    checkpoint::Checkpoint,
    data::fingerprint,
    error::{Error, Result, model_error},
    optimizer::{Optimizer, OptimizerConfig, OptimizerState, state_names},
    shards::{PartitionShard, Shards, StoredFormats},
};
use ringspan_candle::quantized::QuantizedMatrix;
use ringspan_candle::{StoredWeights, Weight, Weights};
use ringspan_models::{Decoder, Lora, NewWeights, folder::Folder};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// The source of the initial parameters.
pub(crate) struct InitialParameters {
    /// The model; it is freed when the last rank has taken its shards.
    model: Mutex<ModelWeights>,
    /// The trained parameters and optimizer state of a resumed run; each rank reads only its shards.
    checkpoint: Option<Checkpoint>,
    /// The seed from which new adapters are drawn.
    seed: u64,
    lora: Option<Lora>,
    /// The matrices of an adapter whose training is continued; none where adapters are new.
    adapter: Option<Weights>,
}

#[derive(Clone)]
enum ModelWeights {
    /// The model is loaded as a whole; the number counts the ranks that have not taken their shards.
    Loaded(Arc<StoredWeights>, usize),
    /// The model is on disk.
    Folder(Arc<Folder>),
    /// The model is new, and drawn from a seed when it is read.
    New(Arc<NewWeights>),
    Freed,
}

impl InitialParameters {
    /// Starts from loaded weights, of which `ranks` ranks take their shards.
    pub(crate) fn from_weights(weights: StoredWeights, ranks: usize, seed: u64) -> Self {
        Self {
            model: Mutex::new(ModelWeights::Loaded(Arc::new(weights), ranks)),
            checkpoint: None,
            seed,
            lora: None,
            adapter: None,
        }
    }

    /// Starts from a folder, of which each rank reads its shards.
    pub(crate) fn from_folder(folder: Arc<Folder>, seed: u64) -> Self {
        Self { model: Mutex::new(ModelWeights::Folder(folder)), checkpoint: None, seed, lora: None, adapter: None }
    }

    /// Starts from a new model, of which each rank draws its shards.
    pub(crate) fn from_new_weights(new: NewWeights, seed: u64) -> Self {
        Self { model: Mutex::new(ModelWeights::New(Arc::new(new))), checkpoint: None, seed, lora: None, adapter: None }
    }

    /// Adds adapters: the matrices of `adapter`, or else new ones. A checkpoint replaces either.
    pub(crate) fn with_lora(self, lora: Lora, adapter: Option<Weights>) -> Self {
        Self { lora: Some(lora), adapter, ..self }
    }

    /// Adds the trained parameters of a checkpoint, which must be all that `decoder` trains.
    pub(crate) fn with_checkpoint(self, checkpoint: Checkpoint, decoder: &Decoder) -> Result<Self> {
        for (name, shape) in decoder.shapes().iter().filter(|(name, _)| decoder.trains(name)) {
            let expected: usize = shape.iter().product();
            let actual = checkpoint.tensors.len(name).unwrap_or(0);
            if actual != expected {
                let problem = format!("`{name}` has {actual} elements, the model's {shape:?} {expected}");
                return Err(Error::Checkpoint { path: checkpoint.path, problem });
            }
        }
        Ok(Self { checkpoint: Some(checkpoint), ..self })
    }

    /// A handle on the model that does not hold the lock, so that ranks read at the same time.
    fn model(&self) -> ModelWeights {
        self.model.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The values of a shard.
    pub(crate) fn read(&self, decoder: &Decoder, shard: &PartitionShard<'_>) -> Result<Vec<f32>> {
        let (name, shape) = (&shard.partition.name, &shard.partition.whole);
        if let Some(checkpoint) = self.checkpoint.as_ref().filter(|_| decoder.trains(name)) {
            return checkpoint.tensors.read(name, &shard.region());
        }
        if let Some(lora) = self.lora.as_ref().filter(|_| decoder.trains(name)) {
            let whole = match self.adapter.as_ref().and_then(|matrices| matrices.get(name)) {
                Some(matrix) => matrix.flatten_all()?.to_vec1()?,
                None => lora.init(name, shape, self.seed),
            };
            return Ok(shard.gather_from(0, &whole));
        }
        let missing = || Error::Model(format!("the model has no parameter `{name}` {shape:?}"));
        // Sources are read by whole rows, even where the shard has only some of the columns.
        let rows = shard.row_range();
        let (first, count) = (rows.start, rows.len());
        let values = match self.model() {
            ModelWeights::Loaded(weights, _) => {
                let weight = weights.get(name).filter(|weight| weight.dims() == *shape);
                weight.ok_or_else(missing)?.rows(first..first + count)?
            }
            ModelWeights::Folder(folder) => folder.read(name, rows).map_err(model_error)?,
            ModelWeights::New(new) => new.read(name, rows).map_err(model_error)?,
            ModelWeights::Freed => return Err(missing()),
        };
        Ok(shard.gather_from(first, &values.flatten_all()?.to_vec1::<f32>()?))
    }

    /// The formats of the matrices that can stay as they are stored (quantized): the frozen ones.
    pub(crate) fn stored_formats(&self, decoder: &Decoder) -> StoredFormats {
        let model = self.model();
        let format_of = |name: &String| match &model {
            ModelWeights::Loaded(weights, _) => weights.get(name)?.format(),
            ModelWeights::Folder(folder) => folder.format(name),
            ModelWeights::New(_) | ModelWeights::Freed => None,
        };
        let frozen = decoder.stored_matrices().into_iter().filter(|name| !decoder.trains(name));
        frozen.filter_map(|name| format_of(&name).map(|format| (name, format))).collect()
    }

    /// Some rows and columns of a matrix that stays as it is stored. The matrices of experts in one parameter count as one
    /// matrix, one below the other.
    pub(crate) fn read_stored_matrix(
        &self,
        name: &str,
        rows: Range<usize>,
        columns: Range<usize>,
    ) -> Result<QuantizedMatrix> {
        let missing = || Error::Model(format!("the model stores no matrix `{name}`"));
        let matrix = match self.model() {
            ModelWeights::Loaded(weights, _) => match weights.get(name) {
                Some(Weight::Quantized(matrix)) => matrix.rows(rows)?,
                Some(Weight::Stack(stack)) => stack.matrix().rows(rows)?,
                _ => return Err(missing()),
            },
            ModelWeights::Folder(folder) => folder.read_matrix(name, rows).map_err(model_error)?,
            ModelWeights::New(_) | ModelWeights::Freed => return Err(missing()),
        };
        Ok(matrix.columns(columns)?)
    }

    /// A fingerprint of the model, from the first and the last row of each parameter. Ranks on other machines read their own copy
    /// of the model, and their fingerprints must agree.
    pub(crate) fn fingerprint(&self, shapes: &BTreeMap<String, Vec<usize>>) -> Result<u64> {
        let model = self.model();
        let mut all = Vec::new();
        for (name, shape) in shapes {
            let last = shape.first().map_or(0, |rows| rows.saturating_sub(1));
            for row in [0, last] {
                let values = match (&model, self.adapter.as_ref().and_then(|matrices| matrices.get(name))) {
                    (_, Some(matrix)) => matrix.narrow(0, row, 1)?,
                    (ModelWeights::Loaded(weights, _), _) => match weights.get(name) {
                        Some(weight) => weight.rows(row..row + 1)?,
                        None => continue,
                    },
                    (ModelWeights::Folder(folder), _) if folder.shapes().contains_key(name) => {
                        folder.read(name, row..row + 1).map_err(model_error)?
                    }
                    (ModelWeights::New(new), _) if new.has(name) => {
                        new.read(name, row..row + 1).map_err(model_error)?
                    }
                    _ => continue,
                };
                let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
                all.push(fingerprint(values.iter().map(|value| u64::from(value.to_bits()))));
            }
        }
        Ok(fingerprint(all))
    }

    /// The optimiser of a rank with these shards, with its state from the checkpoint, if there is one.
    pub(crate) fn optimizer(&self, method: OptimizerConfig, shards: &Shards) -> Result<Optimizer> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(Optimizer::new(method)) };
        let mut state = OptimizerState::new();
        for shard in shards.partition_shards() {
            for state_name in state_names(&method) {
                let values =
                    checkpoint.tensors.read(&format!("{state_name}.{}", shard.partition.name), &shard.region())?;
                state.insert(format!("{state_name}.{}", shard.partition.key()), Arc::new(values));
            }
        }
        let sizes: Vec<_> =
            shards.partition_shards().map(|shard| (shard.partition.key(), shard.in_shard.len())).collect();
        Optimizer::resume(method, state, sizes.iter().map(|(key, size)| (&**key, *size)))
    }

    /// Notes that a rank has taken its shards.
    pub(crate) fn release(&self) {
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        if let ModelWeights::Loaded(_, ranks_left) = &mut *model {
            *ranks_left = ranks_left.saturating_sub(1);
            if *ranks_left == 0 {
                *model = ModelWeights::Freed;
            }
        }
    }
}
