//! The parameters of a model: their names, shapes, shards and initial values, by unit, and their weights in memory.

mod builder;
mod model_parameters;
mod parameter;
mod weights;

pub use builder::{ModelBuilder, Scope};
pub use model_parameters::ModelParameters;
pub use parameter::{Init, LinearLayer, Parameter, UnitParameters};
pub use weights::{StoredWeights, Weights, constant, on_device, stored};

/// A group of parameters that are gathered together where ranks shard them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unit {
    /// The embedding; with tied weights also the output head.
    Embedding,
    /// A layer, counted from 0.
    Layer(usize),
    /// The norm after the last layer and, unless it is tied, the output head.
    Head,
}
