//! The gated layer on a GPU, composed of linear layers over all tokens at once.

use super::GateUpActivations;
use crate::activation::Activation;
use crate::linear::{linear, linear_recomputed};
use crate::stored_activation::StoredActivation;
use crate::swiglu::gated;
use candle_core::{Result, Tensor, bail};

/// Returns the output `[T, C]`, and gate and up `[T, W]`.
pub(super) fn forward(x: &Tensor, weights: [&Tensor; 3], activation: Activation) -> Result<(Tensor, [Tensor; 2])> {
    let [gate, up, down] = weights;
    let (gate, up) = (linear(x, gate, None)?, linear(x, up, None)?);
    Ok((linear(&gated(&gate, &up, activation)?, down, None)?, [gate, up]))
}

/// As [`gated_mlp_recomputed`](super::gated_mlp_recomputed), on a GPU.
pub(super) fn recomputed(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    gate_up: Option<GateUpActivations>,
    known: Option<StoredActivation>,
) -> Result<Tensor> {
    let [gate, up, down] = weights;
    let (gate, up) = match gate_up {
        None => (linear(x, gate, None)?, linear(x, up, None)?),
        Some(GateUpActivations::Gpu([g, u])) => {
            (linear_recomputed(x, gate, None, Some(g))?, linear_recomputed(x, up, None, Some(u))?)
        }
        Some(GateUpActivations::Cpu(_)) => bail!("a gated layer on a GPU whose gate and up were stored by the CPU"),
    };
    linear_recomputed(&gated(&gate, &up, activation)?, down, None, known)
}
