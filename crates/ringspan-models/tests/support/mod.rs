//! Fixtures of Hugging Face models, and ways to compute them on one device and on meshes.
#![allow(dead_code, unused_imports)] // Each test file uses its part.

mod adapters;

pub(crate) use adapters::adapted;

use candle_core::{D, DType, Device, Tensor};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::experts::Local;
use ringspan_candle::model::stored;
use ringspan_candle::stored_activation::Storage;
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{
    Attend, AttentionInputs, CheckpointPolicy, Context, ExpertParallel, Experts, InputDropout, LoadBalancedExperts,
    ParallelRank, Portion, Recompute, StoredWeights, TensorParallel, Unit, Weights, loss,
};
use ringspan_models::{Decoder, Error, Parameters, folder, gradients};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

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

/// Attention of whole rows in candle's own operations, for a model that is not distributed.
struct Dense<'a> {
    batch: &'a Batch,
    positions: Vec<usize>,
    experts: Shared,
    drops: Option<InputDropout>,
}

impl Attend for Dense<'_> {
    fn layer_attention(
        &self,
        _: usize,
        &AttentionInputs { q, k, v, sinks, .. }: &AttentionInputs,
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
            let mut scores = (q.matmul(&k.transpose(1, 2)?)? * f64::from(score.scale))?;
            if let Some(cap) = score.softcap.map(f64::from) {
                scores = ((scores / cap)?.tanh()? * cap)?;
            }
            let scores = scores.broadcast_add(&bias)?;
            // A sink is one more score of every query, whose weight belongs to no value.
            let scores = match sinks {
                Some(sinks) => {
                    let sinks =
                        sinks.reshape((sinks.elem_count(), 1, 1))?.broadcast_as((sinks.elem_count(), len, 1))?;
                    Tensor::cat(&[scores, sinks.contiguous()?], 2)?
                }
                None => scores,
            };
            let exponentials = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?.detach())?.exp()?;
            let weights = exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)?;
            let mut weights = weights.narrow(2, 0, len)?;
            if let Some(dropout) = score.dropout {
                let factor = |at: usize| {
                    let (head, query, key) = (at / (len * len), row * len + at / len % len, at % len);
                    if dropout.keeps(head, query, key) { 1.0 / (1.0 - dropout.rate) } else { 0.0 }
                };
                let factors = Tensor::from_iter((0..weights.elem_count()).map(factor), &Device::Cpu)?;
                weights = (&weights * factors.reshape(weights.shape())?)?;
            }
            out.push(weights.contiguous()?.matmul(&v)?.transpose(0, 1)?);
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

    fn tensor_parallel(&self) -> &TensorParallel {
        &NO_TENSOR_PARALLEL
    }

    fn input_dropout(&self) -> Option<&InputDropout> {
        self.drops.as_ref()
    }
}

/// Computes on one device, without ranks; also returns the units in the order in which their gradients came.
pub(crate) fn on_one_device(decoder: &Decoder, weights: &Weights, batch: &Batch) -> (Answer, Vec<Unit>) {
    on_one_device_dropping(decoder, weights, batch, None)
}

/// Like [`on_one_device`], for a training whose dropout has this seed.
pub(crate) fn on_one_device_dropping(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    seed: Option<u64>,
) -> (Answer, Vec<Unit>) {
    let positions = (0..batch.tokens.len()).map(|at| at % batch.len).collect();
    let balanced = balanced(decoder, Arc::new(Local), |_| Ok(()));
    let experts = balanced.clone().map_or(Arc::new(Local) as Shared, |balanced| balanced);
    let drops = seed.map(|seed| InputDropout::new(seed, (0..batch.tokens.len()).collect()));
    let dense = Dense { batch, positions, experts, drops };
    let (mut answer, order) =
        local(decoder, weights, &batch.tokens, &batch.targets(), batch.valid(), &dense).expect("computes");
    answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
    (answer, order)
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

/// How a model is distributed over ranks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Spread {
    pub(crate) ring: usize,
    pub(crate) ulysses: usize,
    pub(crate) tp: usize,
    pub(crate) ep: usize,
    pub(crate) moe_tp: usize,
    /// Seed of the dropout, if anything is dropped.
    pub(crate) drops: Option<u64>,
}

impl Default for Spread {
    fn default() -> Self {
        Self { ring: 1, ulysses: 1, tp: 1, ep: 1, moe_tp: 1, drops: None }
    }
}

impl Spread {
    fn ranks(&self) -> usize {
        self.ring * self.ulysses * self.tp
    }

    fn parallel_rank(&self, rank: usize) -> ParallelRank {
        let Self { tp, ep, moe_tp, .. } = *self;
        ParallelRank { tp: (rank % tp, tp), ep: (rank / moe_tp % ep, ep), moe_tp: (rank % moe_tp, moe_tp) }
    }
}

/// Computes on `ring x ulysses` ranks and puts their results together: gradients are summed over the ranks.
pub(crate) fn on_mesh(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    (ring, ulysses): (usize, usize),
) -> Answer {
    on_ranks(decoder, weights, batch, kind, Spread { ring, ulysses, ..Spread::default() })
}

/// Experts in the form that a context takes.
pub(crate) type Shared = Arc<dyn Experts + Send + Sync>;

/// Like [`on_mesh`], with tensor and expert parallelism.
pub(crate) fn on_ranks(
    decoder: &Decoder,
    weights: &Weights,
    batch: &Batch,
    kind: LayoutKind,
    spread: Spread,
) -> Answer {
    let Spread { ring, ulysses, tp, ep, moe_tp, drops } = spread;
    let documents = Documents::batch(batch.rows, batch.len);
    let layout = Arc::new(Layout::new(kind, &documents, ring * ulysses).expect("ranks"));
    let answer = Mutex::new(Answer {
        logits: vec![0.0; batch.tokens.len() * decoder.config().vocab_size],
        loss: 0.0,
        gradients: weights
            .iter()
            .filter(|(name, _)| decoder.trains(name))
            .map(|(name, weight)| (name.clone(), vec![0.0; weight.elem_count()]))
            .collect(),
    });
    let orders = threads::run(spread.ranks(), Options::default(), |comm| {
        let rank = comm.rank();
        let run = || -> Result<Vec<Unit>, Error> {
            let split = |color: usize| comm.split(color, rank).map_err(candle_core::Error::wrap);
            let (cp, tensor) = (split(rank % tp)?, TensorParallel::new(split(rank / tp)?));
            // The rank's expert group: among its ranks, moe_tp varies fastest, then ep.
            let (width, whole) = (split(rank / moe_tp)?, split(rank / (ep * moe_tp) * moe_tp + rank % moe_tp)?);
            let group = Group::new(cp, (ring, ulysses), Kernel::new(1)).map_err(candle_core::Error::wrap)?;
            let context = Context::new(Arc::new(group), layout.clone(), StrategyKind::Ring)?;
            let inner: Shared = match ep * moe_tp {
                1 => Arc::new(Local),
                _ => Arc::new(ExpertParallel::new(decoder.experts(), whole, width)?),
            };
            let all = comm.clone();
            let balanced = balanced(decoder, inner.clone(), move |sums| {
                // Counts of this size are exact in f32, and probabilities precise enough for the comparison.
                let mut narrow: Vec<f32> = sums.iter().map(|x| *x as f32).collect();
                all.all_reduce(&mut narrow).map_err(candle_core::Error::wrap)?;
                sums.iter_mut().zip(narrow).for_each(|(sum, x)| *sum = f64::from(x));
                Ok(())
            });
            let experts = balanced.clone().map_or(inner, |balanced| balanced);
            let context = context.with_experts(experts).with_tensor_parallel(tensor);
            let numbers: Vec<usize> = (0..batch.tokens.len()).collect();
            let numbers = layout.shard(rank / tp, &numbers, 1).map_err(candle_core::Error::wrap)?;
            let context = match drops {
                Some(seed) => context.with_input_dropout(InputDropout::new(seed, numbers)),
                None => context,
            };
            let place = spread.parallel_rank(rank);
            let own_weights = portions_of(decoder, weights, place)?;
            let shard = |all: &[u32]| layout.shard(rank / tp, all, 1).map_err(candle_core::Error::wrap);
            let (tokens, targets) = (shard(&batch.tokens)?, shard(&batch.targets())?);
            let (own, order) = local(decoder, &own_weights, &tokens, &targets, batch.valid(), &context)?;
            let mut answer = answer.lock().expect("no panics");
            add_logits(decoder, &layout, (rank / tp, &context), &own.logits, &mut answer.logits);
            if rank % tp == 0 {
                // The loss is the same on all ranks of a tensor-parallel group.
                answer.loss += own.loss;
            }
            if rank == 0 {
                answer.loss += balanced.map_or(0.0, |balanced| balanced.loss().expect("a pass is done"));
            }
            add_gradients(decoder, place, own.gradients, &mut answer.gradients)?;
            Ok(order)
        };
        run().map_err(|error| ringspan::Error::Layout(error.to_string()))
    })
    .expect("runs");
    assert!(orders.iter().all(|order| *order == orders[0]), "ranks deliver in one order, or their sums would mix");
    answer.into_inner().expect("no panics")
}

/// The portions of whole weights that the rank at `place` computes with.
fn portions_of(decoder: &Decoder, weights: &Weights, place: ParallelRank) -> Result<Weights, Error> {
    let mut own = Weights::new();
    for unit in decoder.units() {
        for portion in decoder.all_parameters().portions(unit, place)? {
            let Portion { name, rows, columns, stacked_at, .. } = &portion;
            let matrix = weights[name].reshape(((), portion.width()))?;
            let part = matrix.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len())?;
            let part = part.contiguous()?.reshape(portion.shape())?;
            let part = match stacked_at.filter(|row| *row > 0) {
                Some(_) => Tensor::cat(&[&own[name], &part], 0)?,
                None => part,
            };
            own.insert(name.clone(), part);
        }
    }
    Ok(own)
}

/// Adds the logits `[T, V of rank]` of a rank to those of all, `[B * S, V]`.
fn add_logits(decoder: &Decoder, layout: &Layout, (rank, of): (usize, &Context), own: &[f32], all: &mut [f32]) {
    let (vocabulary, known) =
        (decoder.config().vocab_size, of.tensor_parallel().shard_range(decoder.config().vocab_size));
    let mut wide = vec![0.0; own.len() / known.len() * vocabulary];
    for (row, own) in wide.chunks_exact_mut(vocabulary).zip(own.chunks_exact(known.len())) {
        row[known.clone()].copy_from_slice(own);
    }
    let mut of_rank = vec![0.0; all.len()];
    layout.unshard(rank, &wide, vocabulary, &mut of_rank).expect("its tokens");
    all.iter_mut().zip(of_rank).for_each(|(sum, x)| *sum += x);
}

/// Adds a rank's gradients to the gradients of the whole parameters.
fn add_gradients(
    decoder: &Decoder,
    place: ParallelRank,
    mut own: BTreeMap<String, Vec<f32>>,
    sums: &mut BTreeMap<String, Vec<f32>>,
) -> Result<(), Error> {
    let mut taken = BTreeSet::new();
    for unit in decoder.units() {
        for portion in
            decoder.all_parameters().portions(unit, place)?.iter().filter(|portion| decoder.trains(&portion.name))
        {
            let (values, width) =
                (own.get(&portion.name).expect("every parameter has a gradient"), portion.columns.len());
            taken.insert(portion.name.clone());
            let sum = sums.get_mut(&portion.name).expect("a known name");
            let values = values.chunks_exact(width).skip(portion.stacked_at.unwrap_or(0));
            for (row, values) in portion.rows.clone().zip(values) {
                let at = row * portion.width() + portion.columns.start;
                sum[at..at + width].iter_mut().zip(values).for_each(|(sum, x)| *sum += x);
            }
        }
    }
    own.retain(|name, _| !taken.contains(name));
    assert!(own.is_empty(), "gradients of nothing: {:?}", own.keys());
    Ok(())
}

/// Computes loss, logits and gradients of this rank's tokens; the loss is divided by all `valid` targets.
fn local(
    decoder: &Decoder,
    weights: &Weights,
    tokens: &[u32],
    targets: &[u32],
    valid: usize,
    attend: &dyn Attend,
) -> Result<(Answer, Vec<Unit>), Error> {
    let shared = attend.tensor_parallel();
    let whole = stored(weights.clone());
    let mut x = decoder.embed(&whole, tokens, attend)?;
    for index in 0..decoder.config().num_hidden_layers {
        x = decoder.layer(&whole, index, &x, attend)?;
    }
    let hidden = shared.gather(&decoder.norm(&whole, &x)?, tokens.len())?;
    let logits = decoder.model().head().logits(&hidden, &whole)?.flatten_all()?.to_vec1()?;
    let differentiate = |keep: CheckpointPolicy| {
        let (mut gradients, mut order) = (BTreeMap::new(), Vec::new());
        let scale = 1.0 / valid as f32;
        let mut take = |unit, of_unit: gradients::Gradients| {
            order.push(unit);
            let names = decoder.unit_shapes(unit).into_iter().map(|(name, _)| name);
            // Experts on other ranks have no gradient here.
            let names = names.filter(|name| decoder.trains(name) && weights.contains_key(name));
            assert_eq!(of_unit.keys().cloned().collect::<BTreeSet<_>>(), names.collect(), "{unit:?}");
            for (name, gradient) in of_unit {
                assert_eq!((gradient.dtype(), gradient.dims()), (DType::F32, weights[&name].dims()), "{name}");
                gradients.insert(name, gradient.flatten_all()?.to_vec1::<f32>()?);
            }
            Ok(())
        };
        let own = Own(weights);
        let nll = gradients::loss_and_gradients(decoder, &own, tokens, targets, scale, keep, attend, &mut take)?;
        Ok::<_, Error>((nll, gradients, order))
    };
    let one = differentiate(CheckpointPolicy::default())?;
    // A load-balancing loss can be used for one pass only.
    if decoder.config().router_aux_loss().is_none() {
        // Parameters are compared all together, since a norm's gradient from a rank's few tokens may nearly cancel out.
        let all = |gradients: &BTreeMap<String, Vec<f32>>| gradients.values().flatten().copied().collect::<Vec<_>>();
        // Gated layers with adapters are computed in tiles, unless they store their products: then gradients are summed in
        // another order.
        let in_tiles = decoder.lora().is_some();
        for recompute in [Recompute::Full, Recompute::Nothing] {
            let (nll, gradients, order) = differentiate(recompute.into())?;
            let is_equal = match in_tiles && recompute == Recompute::Nothing {
                true => relative_l2(&all(&gradients), &all(&one.1)) < 1e-6,
                false => gradients == one.1,
            };
            let differs = |name: &&String| gradients[*name] != one.1[*name];
            let other: Vec<&String> = gradients.keys().filter(differs).collect();
            assert!(
                is_equal && (nll, &order) == (one.0, &one.2),
                "recompute {recompute}: other gradients of {other:?}"
            );
        }
        for recompute in Recompute::ALL {
            let (nll, rounded, _) =
                differentiate(CheckpointPolicy { recompute, storage: Storage::Bf16, offload: None })?;
            assert_eq!(nll, one.0, "recompute {recompute}: the loss knows no rounding");
            let off = relative_l2(&all(&rounded), &all(&one.1));
            // Elements near the bound of a clamped gate gain or lose their gradient by rounding: with a bound out of reach,
            // gradients of gpt-oss are 2e-3 apart.
            let most = if decoder.config().model_type == "gpt_oss" { 5e-2 } else { 1e-2 };
            assert!(off < most, "recompute {recompute}: gradients are off by {off:e} in bf16");
        }
    }
    let (nll, gradients, order) = one;
    Ok((Answer { logits, loss: nll / valid as f64, gradients }, order))
}

/// The weights of a rank, which may lack experts.
struct Own<'a>(&'a Weights);

impl Parameters for Own<'_> {
    fn prefetch(&self, _: Unit) -> Result<(), Error> {
        Ok(())
    }

    fn unit(&self, decoder: &Decoder, unit: Unit) -> Result<StoredWeights, Error> {
        let of = |(name, _): (String, _)| self.0.get(&name).map(|tensor| (name, tensor.clone().into()));
        Ok(decoder.unit_shapes(unit).into_iter().filter_map(of).collect())
    }
}

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
