//! Parameters with their values, by name.

use crate::device::RankDevice;
use crate::precision::Precision;
use crate::quantized::{Format, QuantizedMatrix};
use crate::weight::Weight;
use candle_core::{Result, Tensor};
use std::collections::BTreeMap;

/// Parameters by their names in checkpoints, all dense: f32, or bf16 where models compute in it.
pub type Weights = BTreeMap<String, Tensor>;

/// Parameters by their names in checkpoints, some of which may be quantized. Layers compute with these.
pub type StoredWeights = BTreeMap<String, Weight>;

/// Converts dense parameters to the form that layers take.
#[must_use]
pub fn stored(parameters: Weights) -> StoredWeights {
    parameters.into_iter().map(|(name, tensor)| (name, tensor.into())).collect()
}

/// The same parameters without the graph that computed them, so that none is a variable that needs a gradient.
#[must_use]
pub fn constant(parameters: StoredWeights) -> StoredWeights {
    parameters.into_iter().map(|(name, weight)| (name, weight.detach())).collect()
}

/// The same parameters on a device, in the type in which models compute on it; those that have both already are not copied.
/// Quantized matrices are decoded for a GPU. On a CPU, matrices that are stored in the very type in which models compute are
/// decoded; other quantized matrices, and stacks of experts, are not.
///
/// # Errors
/// A GPU without memory for them.
pub fn on_device(parameters: &StoredWeights, device: &RankDevice) -> Result<StoredWeights> {
    let precision = device.precision();
    let there = |weight: &Weight| match weight {
        Weight::Quantized(matrix) if device.tensors().is_cpu() && !is_stored_in(matrix, precision) => {
            Ok(Weight::from(matrix.clone().computing_in(precision)).rounding_activations(device.activations()))
        }
        Weight::Stack(_) if device.tensors().is_cpu() => Ok(weight.clone().rounding_activations(device.activations())),
        _ => device.parameter(&weight.to_tensor()?).map(Weight::Dense),
    };
    parameters.iter().map(|(name, weight)| Ok((name.clone(), there(weight)?))).collect()
}

fn is_stored_in(matrix: &QuantizedMatrix, precision: Precision) -> bool {
    precision == Precision::Bf16 && matrix.format() == Format::BF16
}
