//! Fixtures of Hugging Face models, and ways to compute the same with ours.
#![allow(dead_code)] // Each test file uses its part.

use candle_core::{D, DType, Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Strategy};
use ringspan_candle::{Attend, Context, loss};
use ringspan_models::{Decoder, Error, Recompute, Weights, folder, gradients};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub(crate) fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Rows of tokens, cut from nothing: their targets are the tokens that follow.
pub(crate) struct Batch {
    pub(crate) tokens: Vec<u32>,
    pub(crate) rows: usize,
    pub(crate) len: usize,
}

impl Batch {
    /// Shifted before anything is dealt to ranks; the last token of a row has no target.
    pub(crate) fn targets(&self) -> Vec<u32> {
        let target = |at: usize| if at % self.len + 1 == self.len { loss::IGNORE } else { self.tokens[at + 1] };
        (0..self.tokens.len()).map(target).collect()
    }

    /// Tokens with a target.
    fn valid(&self) -> usize {
        self.rows * (self.len - 1)
    }
}

/// What is compared: logits `[B * S, V]`, the mean loss of the targets, and its gradients.
pub(crate) struct Answer {
    pub(crate) logits: Vec<f32>,
    pub(crate) loss: f64,
    pub(crate) gradients: BTreeMap<String, Vec<f32>>,
}

/// A fixture: the model, the batch, and what Hugging Face computes.
pub(crate) fn load(name: &str) -> (Decoder, Weights, Batch, Answer) {
    let (config, weights) = folder::load(&fixture(name)).expect("the fixture");
    let path = fixture(name).join("reference.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).expect("the fixture");
    let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    let (rows, len) = tensors["tokens"].dims2().expect("[B, S]");
    let tokens: Vec<i64> = tensors["tokens"].flatten_all().and_then(|t| t.to_vec1()).expect("i64");
    let gradient = |(key, tensor): (&String, &Tensor)| Some((key.strip_prefix("grad.")?.to_owned(), flat(tensor)));
    let answer = Answer {
        logits: flat(&tensors["logits"]),
        loss: f64::from(flat(&tensors["loss"])[0]),
        gradients: tensors.iter().filter_map(gradient).collect(),
    };
    let batch = Batch { tokens: tokens.into_iter().map(|token| token as u32).collect(), rows, len };
    (Decoder::new(config).expect("supported"), weights, batch, answer)
}

/// Attention of whole rows by candle's own operations: what a model is given when nothing is distributed.
struct Dense<'a> {
    batch: &'a Batch,
    positions: Vec<usize>,
}

impl Attend for Dense<'_> {
    fn attention(
        &self,
        _: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Mask,
        scale: f32,
    ) -> candle_core::Result<Tensor> {
        let Batch { rows, len, .. } = *self.batch;
        let groups = q.dim(1)? / k.dim(1)?;
        let bias = |at: usize| if mask.sees(0, at / len, at % len, len, len) { 0.0 } else { f32::NEG_INFINITY };
        let bias = Tensor::from_iter((0..len * len).map(bias), &Device::Cpu)?.reshape((len, len))?;
        let mut out = Vec::new();
        for row in 0..rows {
            let heads = |x: &Tensor, times: usize| -> candle_core::Result<Tensor> {
                let (_, heads, dim) = x.dims3()?;
                let x = x.narrow(0, row * len, len)?.transpose(0, 1)?.unsqueeze(1)?;
                x.broadcast_as((heads, times, len, dim))?.contiguous()?.reshape((heads * times, len, dim))
            };
            let (q, k, v) = (heads(q, 1)?, heads(k, groups)?, heads(v, groups)?);
            let scores = (q.matmul(&k.transpose(1, 2)?)? * f64::from(scale))?.broadcast_add(&bias)?;
            let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let weights = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
            out.push(weights.matmul(&v)?.transpose(0, 1)?);
        }
        Tensor::cat(&out, 0)
    }

    fn positions(&self) -> &[usize] {
        &self.positions
    }
}

/// On one device, without ranks; also the gradients' names in the order they came.
pub(crate) fn on_one_device(decoder: &Decoder, weights: &Weights, batch: &Batch) -> (Answer, Vec<String>) {
    let positions = (0..batch.tokens.len()).map(|at| at % batch.len).collect();
    let dense = Dense { batch, positions };
    local(decoder, weights, &batch.tokens, &batch.targets(), batch.valid(), &dense).expect("computes")
}

/// On `ring x ulysses` ranks, put together: gradients are the sums over the ranks.
pub(crate) fn on_mesh(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    (ring, ulysses): (usize, usize),
) -> Answer {
    let documents = Documents::batch(batch.rows, batch.len);
    let layout = Arc::new(Layout::new(kind, &documents, ring * ulysses).expect("ranks"));
    let vocabulary = decoder.config().vocab_size;
    let answer = Mutex::new(Answer {
        logits: vec![0.0; batch.tokens.len() * vocabulary],
        loss: 0.0,
        gradients: weights.iter().map(|(name, weight)| (name.clone(), vec![0.0; weight.elem_count()])).collect(),
    });
    let orders = threads::run(ring * ulysses, Options::default(), |comm| {
        let rank = comm.rank();
        let run = || -> Result<Vec<String>, Error> {
            let group = Group::new(comm.clone(), (ring, ulysses), Kernel::new(1)).map_err(candle_core::Error::wrap)?;
            let context = Context::new(Arc::new(group), layout.clone(), Strategy::Ring)?;
            let shard = |all: &[u32]| layout.shard(rank, all, 1).map_err(candle_core::Error::wrap);
            let (tokens, targets) = (shard(&batch.tokens)?, shard(&batch.targets())?);
            let (own, order) = local(decoder, weights, &tokens, &targets, batch.valid(), &context)?;
            let mut answer = answer.lock().expect("no panics");
            layout.unshard(rank, &own.logits, vocabulary, &mut answer.logits).map_err(candle_core::Error::wrap)?;
            answer.loss += own.loss;
            assert_eq!(own.gradients.len(), answer.gradients.len(), "every parameter has a gradient");
            for (name, values) in own.gradients {
                let sums = answer.gradients.get_mut(&name).expect("a known name");
                sums.iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
            Ok(order)
        };
        run().map_err(|error| ringspan::Error::Layout(error.to_string()))
    })
    .expect("runs");
    assert!(orders.iter().all(|order| *order == orders[0]), "ranks deliver in one order, or their sums would mix");
    answer.into_inner().expect("no panics")
}

/// Of the tokens at hand, with the loss a mean of `valid` targets.
fn local(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    valid: usize,
    attend: &dyn Attend,
) -> Result<(Answer, Vec<String>), Error> {
    let mut x = decoder.embed(weights, tokens)?;
    for index in 0..decoder.config().num_hidden_layers {
        x = decoder.layer(weights, index, &x, attend)?;
    }
    let logits = loss::logits(&decoder.norm(weights, &x)?, &decoder.head(weights)?)?.flatten_all()?.to_vec1()?;
    let differentiate = |recompute: Recompute| {
        let (mut gradients, mut order) = (BTreeMap::new(), Vec::new());
        let scale = 1.0 / valid as f32;
        let mut keep = |name: &str, gradient: Tensor| {
            assert_eq!((gradient.dtype(), gradient.dims()), (DType::F32, weights[name].dims()), "{name}");
            order.push(name.to_owned());
            let values = gradient.flatten_all()?.to_vec1::<f32>()?;
            assert!(gradients.insert(name.to_owned(), values).is_none(), "{name} came twice");
            Ok(())
        };
        let nll =
            gradients::loss_and_gradients(decoder, weights, tokens, targets, scale, recompute, attend, &mut keep)?;
        Ok::<_, Error>((nll, gradients, order))
    };
    let one = differentiate(Recompute::default())?;
    for recompute in [Recompute::Full, Recompute::Nothing] {
        assert!(differentiate(recompute)? == one, "recompute {recompute} gives other gradients");
    }
    let (nll, gradients, order) = one;
    Ok((Answer { logits, loss: nll / valid as f64, gradients }, order))
}

/// ‖a - b‖ / ‖b‖
pub(crate) fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    (difference / norm).sqrt()
}

/// Everything within f32's rounding in another order: 1e-5 relative (L2), the loss 1e-6.
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
