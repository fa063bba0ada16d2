//! Descriptions of a model's parameters, made before any values exist.

use crate::lora::weight_names;
use crate::shard::{ParallelRank, ShardError, ShardSpec};

/// A parameter of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// The name in checkpoints.
    pub name: String,
    /// The shape of the whole parameter.
    pub shape: Vec<usize>,
    /// How ranks shard the parameter.
    pub shard: ShardSpec,
    /// The initial values in a new model.
    pub init: Init,
    /// Whether the parameter is part of checkpoints but not trained by gradients.
    pub is_buffer: bool,
}

/// The initial values of a parameter in a new model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// Normally distributed, with the standard deviation in the model's configuration.
    Normal,
    /// Equal to this number everywhere.
    Constant(f32),
}

/// A linear layer that can have an adapter.
#[derive(Debug, Clone, PartialEq)]
pub struct LinearLayer {
    /// The name in checkpoints, without `.weight`.
    pub name: String,
    /// Number of outputs.
    pub outputs: usize,
    /// Number of inputs.
    pub inputs: usize,
    /// How ranks shard the weight `[outputs, inputs]`.
    pub shard: ShardSpec,
    /// Whether the layer is a router, which chooses the experts of tokens.
    pub is_router: bool,
}

impl LinearLayer {
    /// Whether the layer is a router or belongs to an expert.
    #[must_use]
    pub fn is_of_experts(&self) -> bool {
        self.is_router || self.shard.is_of_experts()
    }

    /// The two matrices of its adapter of inner width `r`: A `[r, inputs]` and B `[outputs, r]`.
    #[must_use]
    pub fn adapter_parameters(&self, r: usize) -> [Parameter; 2] {
        let [a, b] = weight_names(&self.name);
        let [of_a, of_b] = self.shard.of_adapter();
        let parameter = |name, shape: [usize; 2], shard| Parameter {
            name,
            shape: shape.to_vec(),
            shard,
            init: Init::Normal,
            is_buffer: false,
        };
        [parameter(a, [r, self.inputs], of_a), parameter(b, [self.outputs, r], of_b)]
    }

    /// The numbers of outputs and inputs that this rank holds.
    ///
    /// # Errors
    /// Heads that cannot be distributed over so many ranks.
    pub fn sizes_on(&self, rank: ParallelRank) -> Result<[usize; 2], ShardError> {
        let partitions = self.shard.partitions(&self.name, &[self.outputs, self.inputs], rank)?;
        let inputs = partitions.first().map_or(0, |partition| partition.columns.len());
        Ok([partitions.iter().map(|partition| partition.rows.len()).sum(), inputs])
    }
}

/// The parameters of a unit and the linear layers among them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UnitParameters {
    /// Parameters, in the order in which the model adds them.
    pub parameters: Vec<Parameter>,
    /// The linear layers of a transformer layer; the embedding and the output head are not listed.
    pub linear_layers: Vec<LinearLayer>,
}
