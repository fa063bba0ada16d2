//! What a run starts from: a model that is here, or a checkpoint, of which each rank takes its pieces.

use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
    optimizer::{Method, Optimizer, State, kinds},
    shards::{Piece, Shards},
};
use ringspan_models::Weights;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Where the first parameters come from.
pub(crate) enum Start {
    /// A model that is here as a whole; the last rank that has taken its pieces lets it go.
    Model(Mutex<Whole>),
    /// A checkpoint, of which each rank reads no more than its pieces.
    Checkpoint(Checkpoint),
}

pub(crate) struct Whole {
    weights: Weights,
    /// Ranks that have not taken their pieces.
    waiting: usize,
}

impl Start {
    /// From weights that `ranks` ranks take their pieces of.
    pub(crate) fn model(weights: Weights, ranks: usize) -> Self {
        Self::Model(Mutex::new(Whole { weights, waiting: ranks }))
    }

    /// From a checkpoint, which must hold the parameters of `shapes` and no others.
    pub(crate) fn checkpoint(checkpoint: Checkpoint, shapes: &BTreeMap<String, Vec<usize>>) -> Result<Self> {
        for (name, shape) in shapes {
            let expected: usize = shape.iter().product();
            let actual = checkpoint.tensors.len(name).unwrap_or(0);
            if actual != expected {
                let problem = format!("`{name}` has {actual} elements, the model's {shape:?} {expected}");
                return Err(Error::Checkpoint { path: checkpoint.path, problem });
            }
        }
        Ok(Self::Checkpoint(checkpoint))
    }

    /// The values of a piece.
    pub(crate) fn read(&self, piece: &Piece<'_>) -> Result<Vec<f32>> {
        match self {
            Self::Checkpoint(checkpoint) => checkpoint.tensors.read(piece.name, piece.of_parameter.clone()),
            Self::Model(whole) => {
                let whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
                let tensor = whole.weights.get(piece.name).filter(|tensor| tensor.dims() == piece.shape);
                let tensor = tensor.ok_or_else(|| {
                    Error::Model(format!("the model has no parameter `{}` {:?}", piece.name, piece.shape))
                })?;
                let part = &piece.of_parameter;
                Ok(tensor.flatten_all()?.narrow(0, part.start, part.len())?.to_vec1()?)
            }
        }
    }

    /// The optimiser of a rank with these shards.
    pub(crate) fn optimizer(&self, method: Method, shards: &Shards) -> Result<Optimizer> {
        let Self::Checkpoint(checkpoint) = self else { return Ok(Optimizer::new(method)) };
        let mut state = State::new();
        for (piece, _) in shards.pieces() {
            for kind in kinds(&method) {
                let name = format!("{kind}.{}", piece.name);
                let values = checkpoint.tensors.read(&name, piece.of_parameter.clone())?;
                state.insert(name, Arc::new(values));
            }
        }
        Optimizer::resume(method, state, shards.pieces().map(|(piece, values)| (piece.name, values.len())))
    }

    /// A rank has taken its pieces.
    pub(crate) fn done(&self) {
        if let Self::Model(whole) = self {
            let mut whole = whole.lock().unwrap_or_else(PoisonError::into_inner);
            whole.waiting = whole.waiting.saturating_sub(1);
            if whole.waiting == 0 {
                whole.weights.clear();
            }
        }
    }
}
