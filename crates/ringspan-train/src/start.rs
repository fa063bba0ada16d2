//! What a run starts from: a model, new adapters, a checkpoint. Each rank takes its pieces of them.

use crate::{
    checkpoint::Checkpoint,
    data::fingerprint,
    error::{Error, Result},
    optimizer::{Method, Optimizer, State, kinds},
    setup::model_error,
    shards::{Formats, Piece, Shards},
};
use ringspan_candle::quantized::QuantizedMatrix;
use ringspan_candle::{StoredWeights, Weight, Weights};
use ringspan_models::{Decoder, Lora, NewWeights, folder::Folder};
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};

/// Where the first parameters come from.
pub(crate) struct Start {
    /// The model; the last rank that has taken its pieces lets it go.
    model: Mutex<Model>,
    /// What was trained before: each rank reads no more than its pieces.
    checkpoint: Option<Checkpoint>,
    /// New adapters are drawn from this.
    seed: u64,
    lora: Option<Lora>,
    /// The matrices of adapters that are trained on; none of new ones.
    adapter: Option<Weights>,
}

#[derive(Clone)]
enum Model {
    /// It is here as a whole, and so many ranks have not taken their pieces.
    Whole(Arc<StoredWeights>, usize),
    /// It is still on disk.
    Folder(Arc<Folder>),
    /// It is drawn.
    New(Arc<NewWeights>),
    Taken,
}

impl Start {
    /// From weights that `ranks` ranks take their pieces of.
    pub(crate) fn weights(weights: StoredWeights, ranks: usize, seed: u64) -> Self {
        Self {
            model: Mutex::new(Model::Whole(Arc::new(weights), ranks)),
            checkpoint: None,
            seed,
            lora: None,
            adapter: None,
        }
    }

    /// From a folder, of which each rank reads what it needs.
    pub(crate) fn folder(folder: Arc<Folder>, seed: u64) -> Self {
        Self { model: Mutex::new(Model::Folder(folder)), checkpoint: None, seed, lora: None, adapter: None }
    }

    /// From a new model, of which each rank draws what it needs.
    pub(crate) fn new_weights(new: NewWeights, seed: u64) -> Self {
        Self { model: Mutex::new(Model::New(Arc::new(new))), checkpoint: None, seed, lora: None, adapter: None }
    }

    /// With adapters: these, or new ones; unless a checkpoint has them.
    pub(crate) fn with_lora(self, lora: Lora, adapter: Option<Weights>) -> Self {
        Self { lora: Some(lora), adapter, ..self }
    }

    /// With what was trained before, which must be all that `decoder` trains.
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

    /// Shared, so that ranks read at the same time.
    fn model(&self) -> Model {
        self.model.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The values of a piece.
    pub(crate) fn read(&self, decoder: &Decoder, piece: &Piece<'_>) -> Result<Vec<f32>> {
        let (name, shape) = (&piece.portion.name, &piece.portion.whole);
        if let Some(checkpoint) = self.checkpoint.as_ref().filter(|_| decoder.trains(name)) {
            return checkpoint.tensors.read(name, &piece.region());
        }
        if let Some(lora) = self.lora.as_ref().filter(|_| decoder.trains(name)) {
            let whole = match self.adapter.as_ref().and_then(|matrices| matrices.get(name)) {
                Some(matrix) => matrix.flatten_all()?.to_vec1()?,
                None => lora.init(name, shape, self.seed),
            };
            return Ok(piece.pick(0, &whole));
        }
        let missing = || Error::Model(format!("the model has no parameter `{name}` {shape:?}"));
        // Whole rows, of which the piece may want some columns only.
        let rows = piece.of_rows();
        let (first, count) = (rows.start, rows.len());
        let values = match self.model() {
            Model::Whole(weights, _) => {
                let weight = weights.get(name).filter(|weight| weight.dims() == *shape);
                weight.ok_or_else(missing)?.rows(first..first + count)?
            }
            Model::Folder(folder) => folder.read(name, rows).map_err(model_error)?,
            Model::New(new) => new.read(name, rows).map_err(model_error)?,
            Model::Taken => return Err(missing()),
        };
        Ok(piece.pick(first, &values.flatten_all()?.to_vec1::<f32>()?))
    }

    /// The formats of the matrices that can stay as they are stored: those that nobody trains.
    pub(crate) fn formats(&self, decoder: &Decoder) -> Formats {
        let model = self.model();
        let of = |name: &String| match &model {
            Model::Whole(weights, _) => weights.get(name)?.format(),
            Model::Folder(folder) => folder.format(name),
            Model::New(_) | Model::Taken => None,
        };
        let frozen = decoder.stored_matrices().into_iter().filter(|name| !decoder.trains(name));
        frozen.filter_map(|name| of(&name).map(|format| (name, format))).collect()
    }

    /// Some rows and columns of a matrix that stays as it is stored; of experts in one parameter, of their matrices one behind the
    /// other.
    pub(crate) fn read_stored(&self, name: &str, rows: Range<usize>, columns: Range<usize>) -> Result<QuantizedMatrix> {
        let missing = || Error::Model(format!("the model stores no matrix `{name}`"));
        let matrix = match self.model() {
            Model::Whole(weights, _) => match weights.get(name) {
                Some(Weight::Quantized(matrix)) => matrix.rows(rows)?,
                Some(Weight::Stack(stack)) => stack.matrix().rows(rows)?,
                _ => return Err(missing()),
            },
            Model::Folder(folder) => folder.read_matrix(name, rows).map_err(model_error)?,
            Model::New(_) | Model::Taken => return Err(missing()),
        };
        Ok(matrix.columns(columns)?)
    }

    /// A number that differs where the model does, by the first and the last row of each parameter: ranks on other machines
    /// read their own copy of it.
    pub(crate) fn fingerprint(&self, shapes: &BTreeMap<String, Vec<usize>>) -> Result<u64> {
        let model = self.model();
        let mut all = Vec::new();
        for (name, shape) in shapes {
            let last = shape.first().map_or(0, |rows| rows.saturating_sub(1));
            for row in [0, last] {
                let values = match (&model, self.adapter.as_ref().and_then(|matrices| matrices.get(name))) {
                    (_, Some(matrix)) => matrix.narrow(0, row, 1)?,
                    (Model::Whole(weights, _), _) => match weights.get(name) {
                        Some(weight) => weight.rows(row..row + 1)?,
                        None => continue,
                    },
                    (Model::Folder(folder), _) if folder.shapes().contains_key(name) => {
                        folder.read(name, row..row + 1).map_err(model_error)?
                    }
                    (Model::New(new), _) if new.has(name) => new.read(name, row..row + 1).map_err(model_error)?,
                    _ => continue,
                };
                let values: Vec<f32> = values.flatten_all()?.to_vec1()?;
                all.push(fingerprint(values.iter().map(|value| u64::from(value.to_bits()))));
            }
        }
        Ok(fingerprint(all))
    }

    /// The optimiser of a rank with these shards.
    pub(crate) fn optimizer(&self, method: Method, shards: &Shards) -> Result<Optimizer> {
        let Some(checkpoint) = &self.checkpoint else { return Ok(Optimizer::new(method)) };
        let mut state = State::new();
        for piece in shards.pieces() {
            for kind in kinds(&method) {
                let values = checkpoint.tensors.read(&format!("{kind}.{}", piece.portion.name), &piece.region())?;
                state.insert(format!("{kind}.{}", piece.portion.key()), Arc::new(values));
            }
        }
        let sizes: Vec<_> = shards.pieces().map(|piece| (piece.portion.key(), piece.of_shard.len())).collect();
        Optimizer::resume(method, state, sizes.iter().map(|(key, size)| (&**key, *size)))
    }

    /// A rank has taken its pieces.
    pub(crate) fn done(&self) {
        let mut model = self.model.lock().unwrap_or_else(PoisonError::into_inner);
        if let Model::Whole(_, waiting) = &mut *model {
            *waiting = waiting.saturating_sub(1);
            if *waiting == 0 {
                *model = Model::Taken;
            }
        }
    }
}
