//! Experts whose parameters are stored in one tensor each, for all experts together.
//!
//! Shape letters: E experts, e of them on this rank, C hidden size, I width of an expert.

use super::ForwardPass;
use crate::activation::ClampedSwiglu;
use crate::experts::{Expert, ExpertStack, StackedExpert};
use crate::parameters::{Init, Scope};
use crate::shard::{ShardSpec, WidthDim};
use candle_core::{Result, bail};
use std::sync::Arc;

/// The tensors `gate_up_proj`, `gate_up_proj_bias`, `down_proj` and `down_proj_bias` of all experts.
#[derive(Debug, Clone)]
pub(super) struct StackedExperts {
    /// The names of the weight and the bias of gate and up, and of down.
    gate_up: [String; 2],
    down: [String; 2],
    experts: usize,
    width: usize,
    activation: ClampedSwiglu,
}

/// The experts of a layer on this rank, with the values of their parameters.
pub(super) struct LocalExperts {
    stack: Arc<ExpertStack>,
    /// The number of the first of them among all experts.
    first: usize,
}

impl StackedExperts {
    /// Adds `gate_up_proj` `[E, C, 2 I]` and `down_proj` `[E, I, C]` with their biases in `scope`; the sizes are E, C and I.
    pub(super) fn new(scope: &Scope, [experts, hidden, width]: [usize; 3], activation: ClampedSwiglu) -> Self {
        let parameter = |name: &str, shape: &[usize], dim: Option<(usize, usize)>, init| {
            let shard = ShardSpec::Experts(dim.map(|(dim, each)| WidthDim { dim, each }));
            scope.parameter(name, shape, shard, init)
        };
        let zeros = Init::Constant(0.0);
        let gate_up = [
            parameter("gate_up_proj", &[experts, hidden, 2 * width], Some((2, 2)), Init::Normal),
            parameter("gate_up_proj_bias", &[experts, 2 * width], Some((1, 2)), zeros),
        ];
        let down = [
            parameter("down_proj", &[experts, width, hidden], Some((1, 1)), Init::Normal),
            parameter("down_proj_bias", &[experts, hidden], None, zeros),
        ];
        Self { gate_up, down, experts, width, activation }
    }

    /// The experts on this rank, with the values of their parameters.
    pub(super) fn here(&self, pass: &ForwardPass) -> Result<LocalExperts> {
        let bias = |name: &String| pass.tensor(name).cloned();
        let ([gate_up, gate_up_bias], [down, down_bias]) = (&self.gate_up, &self.down);
        let experts = pass.attend().experts();
        let stack = ExpertStack {
            gate_up: pass.weight(gate_up)?.clone(),
            gate_up_bias: bias(gate_up_bias)?,
            down: pass.weight(down)?.clone(),
            down_bias: bias(down_bias)?,
            activation: self.activation,
            // Where ranks sum over shards of the width, only the first adds the bias.
            adds_down_bias: experts.local_width(self.width).start == 0,
        };
        Ok(LocalExperts { stack: Arc::new(stack), first: experts.local_experts(self.experts).start })
    }
}

impl LocalExperts {
    /// The expert with this number among all experts.
    pub(super) fn expert(&self, index: usize) -> Result<Expert> {
        match index.checked_sub(self.first) {
            Some(here) => Ok(Expert::Stacked(StackedExpert { stack: self.stack.clone(), index: here })),
            None => bail!("expert {index} is asked for, and the first that is here is {}", self.first),
        }
    }
}
