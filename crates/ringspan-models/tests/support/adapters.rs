//! Fixtures with adapters whose outputs are not zero.

use super::{Batch, load};
use candle_core::Tensor;
use ringspan_candle::Weights;
use ringspan_models::{Decoder, Lora};

/// The model of a fixture with random adapters for the layers that match `targets`, with dropout if given.
pub(crate) fn adapted(name: &str, targets: &[&str], dropout: f64) -> (Decoder, Weights, Batch) {
    let (decoder, weights, batch, _) = load(name);
    let lora = Lora::new(3, 5.0, targets.iter().map(|t| (*t).to_owned()).collect()).expect("possible");
    let decoder = decoder.with_lora(lora.with_dropout(dropout).expect("possible")).expect("possible");
    let mut weights = decoder.adapted(weights, 7).expect("fits");
    for (at, (_, weight)) in weights.iter_mut().filter(|(name, _)| name.ends_with("lora_B.weight")).enumerate() {
        let pace = 0.37 + at as f32 * 0.01;
        let values = (0..weight.elem_count()).map(|i| (i as f32 * pace).sin() * 0.1).collect::<Vec<_>>();
        *weight = Tensor::from_vec(values, weight.shape(), weight.device()).expect("its size");
    }
    (decoder, weights, batch)
}
