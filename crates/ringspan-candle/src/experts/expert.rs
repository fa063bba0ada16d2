//! The parameters of experts: with matrices for each expert, or with all experts stacked in one tensor.

use crate::activation::ClampedSwiglu;
use crate::layer_adapter::LayerAdapter;
use crate::weight::Weight;
use candle_core::Tensor;
use std::sync::Arc;

/// The parameters of one expert; where ranks share its width, this rank's shard of them.
#[derive(Debug, Clone)]
pub enum Expert {
    /// The expert has matrices of its own.
    Gated(Box<GatedExpert>),
    /// The expert is one of a stack: its parameters are slices of tensors of all experts.
    Stacked(StackedExpert),
}

/// The parameters of an expert that is a gated feed-forward layer without biases.
#[derive(Debug, Clone)]
pub struct GatedExpert {
    /// The gate matrix `[I, C]`.
    pub gate: Weight,
    /// The up matrix `[I, C]`.
    pub up: Weight,
    /// The down matrix `[C, I]`.
    pub down: Weight,
    /// The adapters of gate, up and down.
    pub adapters: [Option<LayerAdapter>; 3],
}

impl From<GatedExpert> for Expert {
    fn from(expert: GatedExpert) -> Self {
        Self::Gated(Box::new(expert))
    }
}

impl GatedExpert {
    /// An expert without adapters.
    #[must_use]
    pub fn plain(gate: impl Into<Weight>, up: impl Into<Weight>, down: impl Into<Weight>) -> Self {
        Self { gate: gate.into(), up: up.into(), down: down.into(), adapters: Default::default() }
    }

    /// The matrices gate, up and down.
    pub(crate) fn weights(&self) -> [&Weight; 3] {
        [&self.gate, &self.up, &self.down]
    }

    /// All trainable tensors: gate, up and down if they are dense, followed by the two matrices of each adapter.
    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        let adapters = self.adapters.iter().flatten().filter_map(LayerAdapter::matrices).flatten();
        self.weights().into_iter().filter_map(Weight::dense).chain(adapters)
    }

    /// The same parameters without the graphs that computed them.
    pub(crate) fn detach(&self) -> Self {
        let adapters = self.adapters.each_ref().map(|adapter| adapter.as_ref().map(LayerAdapter::detach));
        Self { gate: self.gate.detach(), up: self.up.detach(), down: self.down.detach(), adapters }
    }
}

/// One of the experts of a stack.
#[derive(Debug, Clone)]
pub struct StackedExpert {
    /// The stack of all experts on this rank.
    pub stack: Arc<ExpertStack>,
    /// The index of this expert in the stack.
    pub index: usize,
}

/// The parameters of the e experts on this rank, one tensor for each parameter. Gate and up alternate in the columns of one
/// matrix, and all matrices have biases (gpt-oss; OpenAI, 2025, arXiv:2508.10925).
#[derive(Debug, Clone)]
pub struct ExpertStack {
    /// Gate and up matrices `[e, C, 2 I]`.
    pub gate_up: Weight,
    /// Biases of gate and up `[e, 2 I]`.
    pub gate_up_bias: Tensor,
    /// Down matrices `[e, I, C]`.
    pub down: Weight,
    /// Biases of down `[e, C]`.
    pub down_bias: Tensor,
    /// The activation function of gate and up.
    pub activation: ClampedSwiglu,
    /// Whether this rank adds down's bias: of the ranks that share the width of experts, exactly one does.
    pub adds_down_bias: bool,
}

impl ExpertStack {
    /// The dense tensors in the order of the fields; `None` for a quantized matrix, which has no gradient.
    pub(crate) fn parameters(&self) -> [Option<&Tensor>; 4] {
        [self.gate_up.dense(), Some(&self.gate_up_bias), self.down.dense(), Some(&self.down_bias)]
    }

    /// The same parameters without the graphs that computed them.
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
