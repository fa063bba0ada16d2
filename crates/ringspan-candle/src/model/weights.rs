//! Parameters with their values.

use crate::device::RankDevice;
use candle_core::{Result, Tensor};
use std::collections::BTreeMap;

/// Parameters by their names in checkpoints: f32, or bf16 on a GPU that computes in it.
pub type Weights = BTreeMap<String, Tensor>;

/// The same parameters, without a graph of what is computed from them: where they come from, they may be variables.
#[must_use]
pub fn constant(parameters: Weights) -> Weights {
    parameters.into_iter().map(|(name, tensor)| (name, tensor.detach())).collect()
}

/// The same parameters on a device, in the type in which it computes; those that are there already are not copied.
///
/// # Errors
/// A GPU without memory for them.
pub fn on_device(parameters: &Weights, device: &RankDevice) -> Result<Weights> {
    parameters.iter().map(|(name, tensor)| Ok((name.clone(), device.parameter(tensor)?))).collect()
}
