//! What a model says of its parameters before it has any.

use crate::shard::{ParallelRank, ShardError, ShardSpec, Split};

/// A parameter of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name in checkpoints.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// How ranks shard it.
    pub shard: ShardSpec,
    /// What it is in a new model.
    pub init: Init,
    /// Whether it is stored with the others and trained by no gradient.
    pub is_buffer: bool,
}

/// What a parameter is in a new model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normal, with the deviation that the model's configuration says.
    Normal,
    /// This number everywhere.
    Constant(f32),
}

/// A linear layer, beside which an adapter can stand.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearLayer {
    /// Its name in checkpoints, without `.weight`.
    pub name: String,
    /// Outputs.
    pub outputs: usize,
    /// Inputs.
    pub inputs: usize,
    /// How ranks shard its weight `[outputs, inputs]`.
    pub shard: ShardSpec,
    /// Whether it chooses the experts of tokens.
    pub is_router: bool,
}

impl LinearLayer {
    /// Whether it chooses the experts of tokens, or belongs to one.
    #[must_use]
    pub fn is_of_experts(&self) -> bool {
        let split = match &self.shard {
            ShardSpec::Rows(split) | ShardSpec::Columns(split) => Some(split),
            _ => None,
        };
        self.is_router || matches!(split, Some(Split::ExpertWidth(_)))
    }

    /// Its outputs and inputs on a rank.
    ///
    /// # Errors
    /// More ranks than heads can be dealt to.
    pub fn sizes_on(&self, rank: ParallelRank) -> Result<[usize; 2], ShardError> {
        let portions = self.shard.portions(&self.name, &[self.outputs, self.inputs], rank)?;
        let inputs = portions.first().map_or(0, |portion| portion.columns.len());
        Ok([portions.iter().map(|portion| portion.rows.len()).sum(), inputs])
    }
}

/// The parameters of a unit, and which linear layers are among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UnitParameters {
    /// In the order in which the model names them.
    pub parameters: Vec<Parameter>,
    /// The linear layers of a layer; the embedding and the output head are not among them.
    pub linear_layers: Vec<LinearLayer>,
}
