//! The gated layer on a GPU, composed of linear layers over all tokens at once.

use super::Wide;
use crate::activation::Activation;
use crate::kept::Kept;
use crate::linear::{linear, linear_again};
use crate::swiglu::gated;
use candle_core::{Result, Tensor, bail};

/// Returns the output `[T, C]`, and gate and up `[T, W]`.
pub(super) fn forward(x: &Tensor, weights: [&Tensor; 3], activation: Activation) -> Result<(Tensor, [Tensor; 2])> {
    let [gate, up, down] = weights;
    let (gate, up) = (linear(x, gate, None)?, linear(x, up, None)?);
    Ok((linear(&gated(&gate, &up, activation)?, down, None)?, [gate, up]))
}

/// As [`gated_mlp_again`](super::gated_mlp_again), on a GPU.
pub(super) fn again(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    wide: Option<Wide>,
    known: Option<Kept>,
) -> Result<Tensor> {
    let [gate, up, down] = weights;
    let (gate, up) = match wide {
        None => (linear(x, gate, None)?, linear(x, up, None)?),
        Some(Wide::Gpu([g, u])) => (linear_again(x, gate, None, Some(g))?, linear_again(x, up, None, Some(u))?),
        Some(Wide::Cpu(_)) => bail!("a gated layer on a GPU, of which the CPU kept gate and up"),
    };
    linear_again(&gated(&gate, &up, activation)?, down, None, known)
}
