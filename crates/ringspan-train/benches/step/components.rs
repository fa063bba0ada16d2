//! Times the components of a step, each by itself on the shapes of one rank, and counts the operations of its products.
//!
//! Shape letters: T tokens of a rank, C hidden size, H query heads, G key-value heads, D head width, V vocabulary.

use super::clock::processor_seconds;
use super::{Case, Result};
use candle_core::{DType, Device, Tensor, Var};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Layout, LayoutKind, Mask, Score, StrategyKind};
use ringspan_candle::activation::Activation;
use ringspan_candle::gated_mlp::{gated_mlp, gated_mlp_recomputed, gated_mlp_saving};
use ringspan_candle::linear::{linear, linear_recomputed};
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{RotaryTable, rope};
use ringspan_candle::stored_activation::{Storage, StoredActivation};
use ringspan_candle::tensor_parallel::NO_TENSOR_PARALLEL;
use ringspan_candle::{Attend, AttentionInputs, Context, RankDevice, Recompute, backward_from, loss, pool};
use ringspan_models::Config;
use ringspan_train::{Optimizer, OptimizerConfig, UpdateArguments};
use std::sync::Arc;

/// Least seconds of a measurement, large against the clock's resolution.
const LEAST: f64 = 0.5;
/// Rows and columns of the large products that components are compared with.
const LARGE: usize = 2048;

/// A component of a step, summed over all ranks.
pub(crate) struct Component {
    pub(crate) name: &'static str,
    /// Seconds of processor time.
    pub(crate) seconds: f64,
    /// Floating-point operations of its products; those of recomputed products count twice.
    pub(crate) flops: f64,
    /// Seconds of processor time that a large product of as many operations took, just before and after.
    pub(crate) peak_seconds: f64,
}

/// Times components between large products.
struct Clock {
    components: Vec<Component>,
    /// The square matrix of the large product.
    large: Tensor,
    ranks: f64,
}

impl Clock {
    /// Seconds of processor time in one call of `work`.
    fn seconds_of(mut work: impl FnMut() -> Result<()>) -> Result<f64> {
        work()?;
        let start = processor_seconds()?;
        for calls in 1.. {
            work()?;
            let passed = processor_seconds()? - start;
            if passed > LEAST {
                return Ok(passed / f64::from(calls));
            }
        }
        Ok(0.0)
    }

    /// Seconds of processor time per operation of the large product.
    fn peak(&self) -> Result<f64> {
        let seconds = Self::seconds_of(|| Ok(linear(&self.large, &self.large, None).map(drop)?))?;
        Ok(seconds / (2.0 * (LARGE as f64).powi(3)))
    }

    /// Times `times` calls of `work`, of `flops` operations each, and adds them to the component called `name`.
    fn component(
        &mut self,
        name: &'static str,
        times: f64,
        flops: f64,
        work: impl FnMut() -> Result<()>,
    ) -> Result<()> {
        let before = self.peak()?;
        let seconds = Self::seconds_of(work)?;
        let peak = (before + self.peak()?) / 2.0;
        let times = times * self.ranks;
        let flops = times * flops;
        let component = match self.components.iter_mut().find(|component| component.name == name) {
            Some(component) => component,
            None => {
                self.components.push(Component { name, seconds: 0.0, flops: 0.0, peak_seconds: 0.0 });
                let last = self.components.len() - 1;
                &mut self.components[last]
            }
        };
        component.seconds += times * seconds;
        component.flops += flops;
        component.peak_seconds += flops * peak;
        Ok(())
    }
}

fn random(shape: &[usize]) -> Result<Var> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Ok(Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)?)
}

/// Times all components of a step.
pub(crate) fn all(case: &Case, config: &Config) -> Result<Vec<Component>> {
    Ok(pool::run_with_isa(case.threads, case.isa, || of_rank(case, config).map_err(|error| error.to_string()))??)
}

fn of_rank(case: &Case, config: &Config) -> Result<Vec<Component>> {
    let (tokens, hidden, wide) = (case.length.div_ceil(case.ranks), config.hidden_size, config.intermediate_size);
    let (heads, groups, dim) = (config.num_attention_heads, config.num_key_value_heads(), config.head_dim());
    let layers = config.num_hidden_layers as f64;
    let recompute: Recompute = case.recompute.as_deref().map_or(Ok(Recompute::default()), str::parse)?;
    let storage: Storage = case.activations.as_deref().map_or(Ok(Storage::default()), str::parse)?;
    let keeps_products = recompute == Recompute::Nothing;
    let large = random(&[LARGE, LARGE])?.as_tensor().detach();
    let mut clock = Clock { components: Vec::new(), large, ranks: case.ranks as f64 };
    let product = |outs: usize, ins: usize| 2.0 * (tokens * outs * ins) as f64;
    let ones_like = |tensor: &Tensor| Ok::<_, candle_core::Error>(tensor.ones_like()?.detach());

    let x = random(&[tokens, hidden])?;
    let attended = random(&[tokens, heads * dim])?;
    let shapes = [[heads * dim, hidden], [groups * dim, hidden], [hidden, heads * dim]];
    for (x, shape, times) in [(&x, shapes[0], 1.0), (&x, shapes[1], 2.0), (&attended, shapes[2], 1.0)] {
        let weight = random(&shape)?;
        let dy = ones_like(&linear(x, &weight, None)?)?;
        let products = if keeps_products { 3.0 } else { 4.0 };
        clock.component("linear", layers * times, products * product(shape[0], shape[1]), || {
            let first = linear(&x.detach(), &weight.detach(), None)?;
            let again = match keeps_products {
                true => linear_recomputed(x, &weight, None, Some(StoredActivation::new(&first, storage)?))?,
                false => linear(x, &weight, None)?,
            };
            Ok(backward_from::backward(&again, &dy).map(drop)?)
        })?;
    }

    let (gate, down) = (random(&[wide, hidden])?, random(&[hidden, wide])?);
    let (weights, act) = ([gate.as_tensor(), gate.as_tensor(), down.as_tensor()], Activation::Silu);
    let dy = ones_like(&x)?;
    let products = if keeps_products { 9.0 } else { 11.0 };
    clock.component("mlp", layers, products * product(wide, hidden), || {
        let constant = weights.map(Tensor::detach);
        let (x_first, [g, u, d]) = (x.detach(), [&constant[0], &constant[1], &constant[2]]);
        let kept = match keeps_products {
            true => Some(gated_mlp_saving(&x_first, [g, u, d], act, storage)?.1),
            false => gated_mlp(&x_first, g, u, d, act).map(|_| None)?,
        };
        let again = gated_mlp_recomputed(&x, weights, act, kept, None)?;
        Ok(backward_from::backward(&again, &dy).map(drop)?)
    })?;

    // A rank's queries meet as many keys as all ranks hold, so its own keys are attended to once for each rank.
    let (q, k) = (random(&[tokens, heads, dim])?, random(&[tokens, groups, dim])?);
    let layout = Arc::new(Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens), 1)?);
    // Half of the pairs are visible; attention has two products forward and five backward.
    let products = if recompute == Recompute::Full { 9.0 } else { 7.0 };
    let flops = products * (tokens * tokens * heads * dim) as f64;
    let attention = std::sync::Mutex::new(&mut clock);
    threads::run(1, Options::default(), |comm| {
        let run = || -> Result<()> {
            let group = Arc::new(Group::new(comm, (1, 1), RankDevice::CPU.kernel(case.threads)?)?);
            let context = Context::new(group, layout.clone(), StrategyKind::Ring)?;
            let attend =
                || context.layer_attention(0, &AttentionInputs::new(&q, &k, &k), &Mask::causal(), &Score::new(0.125));
            let dy = ones_like(&attend()?)?;
            let mut clock = attention.lock().map_err(|error| error.to_string())?;
            clock.component("attention", layers * case.ranks as f64, flops, || {
                if recompute == Recompute::Full {
                    attend()?;
                }
                Ok(backward_from::backward(&attend()?, &dy).map(drop)?)
            })
        };
        let done = pool::run_with_isa(case.threads, case.isa, || run().map_err(|error| error.to_string()));
        done.map_err(|error| error.to_string()).flatten().map_err(ringspan::Error::Layout)
    })?;

    let (vocabulary, head) = (config.vocab_size, random(&[config.vocab_size, hidden])?);
    let targets: Vec<u32> = (0..tokens).map(|token| (token % vocabulary) as u32).collect();
    clock.component("loss", 1.0, 3.0 * product(vocabulary, hidden), || {
        Ok(loss::head_loss(&x, head.as_tensor(), &targets, 1.0, true, &NO_TENSOR_PARALLEL).map(drop)?)
    })?;

    let scale = random(&[hidden])?;
    clock.component("norm", 2.0 * layers, 0.0, || {
        rms_norm(&x.detach(), &scale, 1e-6)?;
        Ok(backward_from::backward(&rms_norm(&x, &scale, 1e-6)?, &dy).map(drop)?)
    })?;
    let positions: Vec<usize> = (0..tokens).collect();
    let rotation = RotaryTable::new(&positions, &vec![0.1; dim / 2], 1.0);
    for heads in [&q, &k] {
        let dy = ones_like(heads)?;
        clock.component("rope", layers, 0.0, || {
            rope(&heads.detach(), &rotation)?;
            Ok(backward_from::backward(&rope(heads, &rotation)?, &dy).map(drop)?)
        })?;
    }

    let method = OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(method);
    let mut weights = vec![0.5f32; head.elem_count()];
    let gradient = Tensor::ones(weights.len(), DType::F32, &Device::Cpu)?.to_vec1::<f32>()?;
    let at = UpdateArguments { step: 0, lr: 1e-4, scale: 1.0, has_weight_decay: true };
    // Ranks share the parameters.
    let times = super::parameters(config)? as f64 / weights.len() as f64 / case.ranks as f64;
    clock.component("optimiser", times, 0.0, || Ok(optimizer.update("w", at, &mut weights, &gradient)?))?;
    Ok(clock.components)
}
