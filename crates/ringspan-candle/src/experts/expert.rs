//! The parameters of experts: each with matrices of its own, or all in one tensor.

use crate::activation::ClampedSwiglu;
use crate::lora::Adapter;
use crate::weight::Weight;
use candle_core::Tensor;
use std::sync::Arc;

/// The parameters of one expert; where ranks share its width, a rank's part.
#[derive(Debug, Clone)]
pub enum Expert {
    /// Matrices of its own.
    Gated(Box<GatedExpert>),
    /// A part of tensors of all experts.
    Stacked(StackedExpert),
}

/// The parameters of an expert that is a gated feed-forward layer without biases.
#[derive(Debug, Clone)]
pub struct GatedExpert {
    /// `[I, C]`.
    pub gate: Weight,
    /// `[I, C]`.
    pub up: Weight,
    /// `[C, I]`.
    pub down: Weight,
    /// What stands beside gate, up and down.
    pub adapters: [Option<Adapter>; 3],
}

impl From<GatedExpert> for Expert {
    fn from(expert: GatedExpert) -> Self {
        Self::Gated(Box::new(expert))
    }
}

impl GatedExpert {
    /// One without adapters.
    #[must_use]
    pub fn plain(gate: impl Into<Weight>, up: impl Into<Weight>, down: impl Into<Weight>) -> Self {
        Self { gate: gate.into(), up: up.into(), down: down.into(), adapters: Default::default() }
    }

    /// Gate, up and down.
    pub(crate) fn weights(&self) -> [&Weight; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// Gate, up and down as far as they are tensors, and behind them the two matrices of each adapter there is: all that can be
    /// trained.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        let adapters = self.adapters.iter().flatten().flat_map(|adapter| [&adapter.a, &adapter.b]);
        self.weights().into_iter().filter_map(Weight::dense).chain(adapters)
    }

    /// The same without a graph.
    pub(crate) fn detach(&self) -> Self {
        let adapters = self.adapters.each_ref().map(|adapter| adapter.as_ref().map(Adapter::detach));
        Self { gate: self.gate.detach(), up: self.up.detach(), down: self.down.detach(), adapters }
    }
}

/// One of the experts of a stack.
#[derive(Debug, Clone)]
pub struct StackedExpert {
    /// All experts that are here.
    pub stack: Arc<ExpertStack>,
    /// Which of them.
    pub index: usize,
}

/// The experts that are here in one tensor for each parameter, e of them: gate and up alternate in columns, and have biases, as
/// down has (gpt-oss; OpenAI, 2025, arXiv:2508.10925).
#[derive(Debug, Clone)]
pub struct ExpertStack {
    /// `[e, C, 2 I]`.
    pub gate_up: Weight,
    /// `[e, 2 I]`.
    pub gate_up_bias: Tensor,
    /// `[e, I, C]`.
    pub down: Weight,
    /// `[e, C]`.
    pub down_bias: Tensor,
    /// What becomes of gate and up.
    pub activation: ClampedSwiglu,
    /// Whether down's bias is added here: where ranks share the width of experts, one of them adds it.
    pub adds_down_bias: bool,
}

impl ExpertStack {
    /// The dense tensors, in the order of the fields: a matrix that stays as it is stored has no gradient.
    pub(crate) fn parameters(&self) -> [Option<&Tensor>; 4] {
        [self.gate_up.dense(), Some(&self.gate_up_bias), self.down.dense(), Some(&self.down_bias)]
    }

    /// The same without a graph.
    pub(crate) fn detach(&self) -> Self {
        Self {
            gate_up: self.gate_up.detach(),
            gate_up_bias: self.gate_up_bias.detach(),
            down: self.down.detach(),
            down_bias: self.down_bias.detach(),
            ..*self
        }
    }
}
