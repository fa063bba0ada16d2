//! The parameters of experts: each with matrices of its own, or all in one tensor.

use crate::activation::ClampedSwiglu;
use crate::lora::Adapter;
use candle_core::Tensor;
use std::sync::Arc;

/// The parameters of one expert; where ranks share its width, a rank's part.
#[derive(Debug, Clone)]
pub enum Expert {
    /// Matrices of its own.
    Gated(GatedExpert),
    /// A part of tensors of all experts.
    Stacked(StackedExpert),
}

/// The parameters of an expert that is a gated feed-forward layer without biases.
#[derive(Debug, Clone)]
pub struct GatedExpert {
    /// `[I, C]`.
    pub gate: Tensor,
    /// `[I, C]`.
    pub up: Tensor,
    /// `[C, I]`.
    pub down: Tensor,
    /// What stands beside gate, up and down.
    pub adapters: [Option<Adapter>; 3],
}

impl From<GatedExpert> for Expert {
    fn from(expert: GatedExpert) -> Self {
        Self::Gated(expert)
    }
}

impl GatedExpert {
    /// One without adapters.
    #[must_use]
    pub fn plain(gate: Tensor, up: Tensor, down: Tensor) -> Self {
        Self { gate, up, down, adapters: Default::default() }
    }

    /// Gate, up and down, and behind them the two matrices of each adapter there is.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        let adapters = self.adapters.iter().flatten().flat_map(|adapter| [&adapter.a, &adapter.b]);
        [&self.gate, &self.up, &self.down].into_iter().chain(adapters)
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
    pub gate_up: Tensor,
    /// `[e, 2 I]`.
    pub gate_up_bias: Tensor,
    /// `[e, I, C]`.
    pub down: Tensor,
    /// `[e, C]`.
    pub down_bias: Tensor,
    /// What becomes of gate and up.
    pub activation: ClampedSwiglu,
    /// Whether down's bias is added here: where ranks share the width of experts, one of them adds it.
    pub adds_down_bias: bool,
}

impl ExpertStack {
    /// The tensors in the order of the fields.
    pub(crate) fn parameters(&self) -> [&Tensor; 4] {
        [&self.gate_up, &self.gate_up_bias, &self.down, &self.down_bias]
    }

    /// The same without a graph.
    pub(crate) fn detach(&self) -> Self {
        let [gate_up, gate_up_bias, down, down_bias] = self.parameters().map(Tensor::detach);
        Self { gate_up, gate_up_bias, down, down_bias, ..*self }
    }
}
