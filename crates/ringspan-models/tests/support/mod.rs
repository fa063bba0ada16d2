//! Fixtures of Hugging Face models, and ways to compute them on one device and on meshes.
#![allow(dead_code, unused_imports)] // Each test file uses its part.

mod adapters;
mod mesh;
mod one_device;
mod one_rank;

pub(crate) use adapters::adapted;
pub(crate) use mesh::{TestMesh, on_mesh, on_ranks};
pub(crate) use one_device::{on_one_device, on_one_device_dropping};

use candle_core::{Device, Tensor};
use ringspan_candle::{Experts, LoadBalancedExperts, Weights, loss};
use ringspan_models::{Decoder, folder};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Rows of tokens, before they are sharded; each token's target is the next token of its row.
pub(crate) struct Batch {
    pub(crate) tokens: Vec<u32>,
    pub(crate) rows: usize,
    pub(crate) len: usize,
}

impl Batch {
    /// Targets, shifted before anything is sharded; the last token of a row has no target.
    pub(crate) fn targets(&self) -> Vec<u32> {
        let target = |at: usize| if at % self.len + 1 == self.len { loss::IGNORE } else { self.tokens[at + 1] };
        (0..self.tokens.len()).map(target).collect()
    }

    /// Number of tokens with a target.
    fn valid(&self) -> usize {
        self.rows * (self.len - 1)
    }
}

/// The results that are compared: logits `[B * S, V]`, the mean loss over the targets, and its gradients.
pub(crate) struct Answer {
    pub(crate) logits: Vec<f32>,
    pub(crate) loss: f64,
    pub(crate) gradients: BTreeMap<String, Vec<f32>>,
}

/// A fixture: the model, the batch, and the values that Hugging Face computes.
pub(crate) fn load(name: &str) -> (Decoder, Weights, Batch, Answer) {
    let (config, weights) = folder::load(&fixture(name)).expect("the fixture");
    let path = fixture(name).join("reference.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).expect("the fixture");
    let (rows, len) = tensors["tokens"].dims2().expect("[B, S]");
    let tokens: Vec<i64> = tensors["tokens"].flatten_all().and_then(|t| t.to_vec1()).expect("i64");
    let batch = Batch { tokens: tokens.into_iter().map(|token| token as u32).collect(), rows, len };
    (Decoder::new(config).expect("supported"), weights, batch, answer(&tensors))
}

/// The values in a reference file.
pub(crate) fn answer(tensors: &HashMap<String, Tensor>) -> Answer {
    let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    let gradient = |(key, tensor): (&String, &Tensor)| Some((key.strip_prefix("grad.")?.to_owned(), flat(tensor)));
    Answer {
        logits: flat(&tensors["logits"]),
        loss: f64::from(flat(&tensors["loss"])[0]),
        gradients: tensors.iter().filter_map(gradient).collect(),
    }
}

/// Experts with the load-balancing loss that `config.json` asks for.
fn balanced(
    decoder: &Decoder,
    inner: Shared,
    sum: impl Fn(&mut [f64]) -> candle_core::Result<()> + Send + Sync + 'static,
) -> Option<Arc<LoadBalancedExperts>> {
    let coefficient = decoder.config().router_aux_loss()?;
    Some(Arc::new(LoadBalancedExperts::new(inner, coefficient, sum)))
}

/// Experts in the form that a context takes.
pub(crate) type Shared = Arc<dyn Experts + Send + Sync>;

/// ‖a - b‖ / ‖b‖; 0 for equal zeros, since an expert that no token chose has no gradient.
pub(crate) fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
}

/// Checks that all values agree up to f32's rounding in another order: 1e-5 relative (L2), for the loss 1e-6.
pub(crate) fn assert_equal(what: &str, got: &Answer, wanted: &Answer) {
    let error = relative_l2(&got.logits, &wanted.logits);
    assert!(error <= 1e-5, "{what}: logits differ by {error:e}");
    let error = (got.loss / wanted.loss - 1.0).abs();
    assert!(error <= 1e-6, "{what}: loss differs by {error:e}");
    assert!(got.gradients.keys().eq(wanted.gradients.keys()), "{what}: gradients of other parameters");
    for (parameter, gradient) in &wanted.gradients {
        let error = relative_l2(&got.gradients[parameter], gradient);
        assert!(error <= 1e-5, "{what}: gradient of {parameter} differs by {error:e}");
    }
}
