//! Fixtures of Hugging Face models, and ways to compute the same with ours.
#![allow(dead_code)] // Each test file uses its part.

use candle_core::{D, DType, Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::Communicator;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Score, Strategy};
use ringspan_candle::experts::Local;
use ringspan_candle::{Attend, Context, Experts, loss};
use ringspan_models::{Balanced, Decoder, Error, Recompute, Unit, Weights, folder, gradients};
use std::collections::{BTreeMap, BTreeSet, HashMap};
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
    let (rows, len) = tensors["tokens"].dims2().expect("[B, S]");
    let tokens: Vec<i64> = tensors["tokens"].flatten_all().and_then(|t| t.to_vec1()).expect("i64");
    let batch = Batch { tokens: tokens.into_iter().map(|token| token as u32).collect(), rows, len };
    (Decoder::new(config).expect("supported"), weights, batch, answer(&tensors))
}

/// What a reference file holds.
pub(crate) fn answer(tensors: &HashMap<String, Tensor>) -> Answer {
    let flat = |tensor: &Tensor| tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("f32");
    let gradient = |(key, tensor): (&String, &Tensor)| Some((key.strip_prefix("grad.")?.to_owned(), flat(tensor)));
    Answer {
        logits: flat(&tensors["logits"]),
        loss: f64::from(flat(&tensors["loss"])[0]),
        gradients: tensors.iter().filter_map(gradient).collect(),
    }
}

/// Attention of whole rows by candle's own operations: what a model is given when nothing is distributed.
struct Dense<'a> {
    batch: &'a Batch,
    positions: Vec<usize>,
    experts: Shared,
}

impl Attend for Dense<'_> {
    fn attention(
        &self,
        _: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Mask,
        score: &Score,
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
            let scores = (q.matmul(&k.transpose(1, 2)?)? * f64::from(score.scale))?.broadcast_add(&bias)?;
            let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let weights = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
            out.push(weights.matmul(&v)?.transpose(0, 1)?);
        }
        Tensor::cat(&out, 0)
    }

    fn positions(&self) -> &[usize] {
        &self.positions
    }

    fn length(&self) -> usize {
        self.batch.len
    }

    fn experts(&self) -> &dyn Experts {
        &*self.experts
    }
}

/// On one device, without ranks; also the units in the order their gradients came.
pub(crate) fn on_one_device(decoder: &Decoder, weights: &Weights, batch: &Batch) -> (Answer, Vec<Unit>) {
    let positions = (0..batch.tokens.len()).map(|at| at % batch.len).collect();
    let balanced = balanced(decoder, Arc::new(Local), |_| Ok(()));
    let experts = balanced.clone().map_or(Arc::new(Local) as Shared, |balanced| balanced);
    let dense = Dense { batch, positions, experts };
    let (mut answer, order) =
        local(decoder, weights, &batch.tokens, &batch.targets(), batch.valid(), &dense).expect("computes");
    answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
    (answer, order)
}

/// The experts of a model that is trained with an even load, as `config.json` says.
fn balanced(
    decoder: &Decoder,
    inner: Shared,
    sum: impl Fn(&mut [f64]) -> candle_core::Result<()> + Send + Sync + 'static,
) -> Option<Arc<Balanced>> {
    let coefficient = decoder.config().router_aux_loss()?;
    Some(Arc::new(Balanced::new(inner, coefficient, sum)))
}

/// On `ring x ulysses` ranks, put together: gradients are the sums over the ranks.
pub(crate) fn on_mesh(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    mesh: (usize, usize),
) -> Answer {
    on_mesh_with(decoder, weights, batch, kind, mesh, &|_| Arc::new(Local))
}

/// Experts, as a context takes them.
pub(crate) type Shared = Arc<dyn Experts + Send + Sync>;

/// As [`on_mesh`], with the experts that `experts` makes of a rank's communicator.
pub(crate) fn on_mesh_with(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    (ring, ulysses): (usize, usize),
    experts: &(dyn Fn(&Arc<dyn Communicator>) -> Shared + Sync),
) -> Answer {
    let documents = Documents::batch(batch.rows, batch.len);
    let layout = Arc::new(Layout::new(kind, &documents, ring * ulysses).expect("ranks"));
    let vocabulary = decoder.config().vocab_size;
    let answer = Mutex::new(Answer {
        logits: vec![0.0; batch.tokens.len() * vocabulary],
        loss: 0.0,
        gradients: weights
            .iter()
            .filter(|(name, _)| decoder.trains(name))
            .map(|(name, weight)| (name.clone(), vec![0.0; weight.elem_count()]))
            .collect(),
    });
    let orders = threads::run(ring * ulysses, Options::default(), |comm| {
        let rank = comm.rank();
        let run = || -> Result<Vec<Unit>, Error> {
            let group = Group::new(comm.clone(), (ring, ulysses), Kernel::new(1)).map_err(candle_core::Error::wrap)?;
            let mut context = Context::new(Arc::new(group), layout.clone(), Strategy::Ring)?;
            let all = comm.clone();
            let experts = experts(&comm);
            let balanced = balanced(decoder, experts.clone(), move |sums| {
                // Counts of this size are exact in f32, and probabilities as good as the comparison needs.
                let mut narrow: Vec<f32> = sums.iter().map(|x| *x as f32).collect();
                all.all_reduce(&mut narrow).map_err(candle_core::Error::wrap)?;
                sums.iter_mut().zip(narrow).for_each(|(sum, x)| *sum = f64::from(x));
                Ok(())
            });
            context = context.with_experts(balanced.clone().map_or(experts, |balanced| balanced));
            let shard = |all: &[u32]| layout.shard(rank, all, 1).map_err(candle_core::Error::wrap);
            let (tokens, targets) = (shard(&batch.tokens)?, shard(&batch.targets())?);
            let (own, order) = local(decoder, weights, &tokens, &targets, batch.valid(), &context)?;
            let mut answer = answer.lock().expect("no panics");
            layout.unshard(rank, &own.logits, vocabulary, &mut answer.logits).map_err(candle_core::Error::wrap)?;
            answer.loss += own.loss;
            if rank == 0 {
                answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
            }
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
) -> Result<(Answer, Vec<Unit>), Error> {
    let mut x = decoder.embed(weights, tokens)?;
    for index in 0..decoder.config().num_hidden_layers {
        x = decoder.layer(weights, index, &x, attend)?;
    }
    let logits = loss::logits(&decoder.norm(weights, &x)?, &decoder.head(weights)?)?.flatten_all()?.to_vec1()?;
    let differentiate = |recompute: Recompute| {
        let (mut gradients, mut order) = (BTreeMap::new(), Vec::new());
        let scale = 1.0 / valid as f32;
        let mut keep = |unit, of_unit: gradients::Gradients| {
            order.push(unit);
            let names = decoder.unit_shapes(unit).into_iter().map(|(name, _)| name).filter(|name| decoder.trains(name));
            assert_eq!(of_unit.keys().cloned().collect::<BTreeSet<_>>(), names.collect(), "{unit:?}");
            for (name, gradient) in of_unit {
                assert_eq!((gradient.dtype(), gradient.dims()), (DType::F32, weights[&name].dims()), "{name}");
                gradients.insert(name, gradient.flatten_all()?.to_vec1::<f32>()?);
            }
            Ok(())
        };
        let nll =
            gradients::loss_and_gradients(decoder, weights, tokens, targets, scale, recompute, attend, &mut keep)?;
        Ok::<_, Error>((nll, gradients, order))
    };
    let one = differentiate(Recompute::default())?;
    // Routers that are kept even serve one pass.
    if decoder.config().router_aux_loss().is_none() {
        for recompute in [Recompute::Full, Recompute::Nothing] {
            assert!(differentiate(recompute)? == one, "recompute {recompute} gives other gradients");
        }
    }
    let (nll, gradients, order) = one;
    Ok((Answer { logits, loss: nll / valid as f64, gradients }, order))
}

/// ‖a - b‖ / ‖b‖; 0 of zeros that are equal: an expert that nobody chose has no gradient.
pub(crate) fn relative_l2(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let difference: f64 = a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    let norm: f64 = b.iter().map(|b| f64::from(*b).powi(2)).sum();
    if difference == 0.0 { 0.0 } else { (difference / norm).sqrt() }
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
