//! The parts of a step, each timed by itself on the shapes of one rank.
//!
//! Shape letters: T tokens of a rank, C hidden size, H query heads, G key-value heads, D head width, V vocabulary.

use super::clock::processor_seconds;
use super::{Case, Result};
use candle_core::{DType, Device, Tensor, Var};
use ringspan::attention::Group;
use ringspan::comm::threads::{self, Options};
use ringspan::{Documents, Kernel, Layout, LayoutKind, Mask, Score, Strategy};
use ringspan_candle::activation::Activation;
use ringspan_candle::gated_mlp::gated_mlp;
use ringspan_candle::linear::linear;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{Rotation, rope};
use ringspan_candle::tensor_parallel::WHOLE;
use ringspan_candle::{Attend, Context, cotangent, loss, pool};
use ringspan_models::{Config, Recompute};
use ringspan_train::{Method, Optimizer, Update};
use std::sync::Arc;

/// Least time to measure, against the steps of the clock.
const LEAST: f64 = 0.5;

/// The processor's time in one call of `work`.
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

fn random(shape: &[usize]) -> Result<Var> {
    let mut state = 1u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| next()).collect();
    Ok(Var::from_tensor(&Tensor::from_vec(values, shape, &Device::Cpu)?)?)
}

/// The processor's time in each part of a step, all ranks together.
pub(crate) fn seconds(case: &Case, config: &Config) -> Result<Vec<(&'static str, f64)>> {
    let threads = case.threads;
    let per_rank = pool::run(threads, || of_rank(case, config).map_err(|error| error.to_string()))??;
    Ok(per_rank.into_iter().map(|(name, seconds)| (name, seconds * case.ranks as f64)).collect())
}

fn of_rank(case: &Case, config: &Config) -> Result<Vec<(&'static str, f64)>> {
    let (tokens, hidden, wide) = (case.length.div_ceil(case.ranks), config.hidden_size, config.intermediate_size);
    let (heads, groups, dim) = (config.num_attention_heads, config.num_key_value_heads(), config.head_dim());
    let layers = config.num_hidden_layers as f64;
    let recompute: Recompute = case.recompute.as_deref().map_or(Ok(Recompute::default()), str::parse)?;
    let again = if recompute == Recompute::Nothing { 0.0 } else { 1.0 };
    let attention_again = if recompute == Recompute::Full { 1.0 } else { 0.0 };

    // Forward and backward once a layer, forward `again` times more.
    let of_layer = |again: f64, f: &dyn Fn() -> candle_core::Result<Tensor>| -> Result<f64> {
        let dy = f()?.ones_like()?.detach();
        let both = seconds_of(|| Ok(cotangent::backward(&f()?, &dy).map(drop)?))?;
        let forward = if again > 0.0 { seconds_of(|| Ok(f().map(drop)?))? } else { 0.0 };
        Ok(layers * (both + again * forward))
    };

    let x = random(&[tokens, hidden])?;
    let attended = random(&[tokens, heads * dim])?;
    let [wq, wk, wo] = [[heads * dim, hidden], [groups * dim, hidden], [hidden, heads * dim]].map(|s| random(&s));
    let (wq, wk, wo) = (wq?, wk?, wo?);
    let mut linear_seconds = 0.0;
    for (x, weight, times) in [(&x, &wq, 1.0), (&x, &wk, 2.0), (&attended, &wo, 1.0)] {
        linear_seconds += times * of_layer(again, &|| linear(x, weight, None))?;
    }
    let (gate, down) = (random(&[wide, hidden])?, random(&[hidden, wide])?);
    let mlp = of_layer(again, &|| gated_mlp(&x, &gate, &gate, &down, Activation::Silu))?;
    let scale = random(&[hidden])?;
    let norm = 2.0 * of_layer(again, &|| rms_norm(&x, &scale, 1e-6))?;

    let (q, k) = (random(&[tokens, heads, dim])?, random(&[tokens, groups, dim])?);
    let positions: Vec<usize> = (0..tokens).collect();
    let frequencies = vec![0.1; dim / 2];
    let turned = |x: &Var| {
        let rotation = Rotation::new(&positions, &frequencies, 1.0);
        rope(x, &rotation)
    };
    let rope = of_layer(again, &|| turned(&q))? + of_layer(again, &|| turned(&k))?;

    // A rank's queries meet as many keys as all ranks hold: its own, once for each rank.
    let layout = Arc::new(Layout::new(LayoutKind::Contiguous, &Documents::batch(1, tokens), 1)?);
    let attention = threads::run(1, Options::default(), |comm| {
        let run = || -> Result<f64> {
            let group = Arc::new(Group::new(comm, (1, 1), Kernel::new(case.threads))?);
            let context = Context::new(group, layout.clone(), Strategy::Ring)?;
            let attend = || context.attention(0, &q, &k, &k, &Mask::causal(), &Score::new(0.125));
            of_layer(attention_again, &attend)
        };
        run().map_err(|error| ringspan::Error::Layout(error.to_string()))
    })?;

    let (vocabulary, head) = (config.vocab_size, random(&[config.vocab_size, hidden])?);
    let targets: Vec<u32> = (0..tokens).map(|token| (token % vocabulary) as u32).collect();
    let loss = seconds_of(|| Ok(loss::head_loss(&x, &head, &targets, 1.0, &WHOLE).map(drop)?))?;

    let method = Method::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
    let mut optimizer = Optimizer::new(method);
    let mut weights = vec![0.5f32; head.elem_count()];
    let gradient = Tensor::ones(weights.len(), DType::F32, &Device::Cpu)?.to_vec1::<f32>()?;
    let at = Update { step: 0, lr: 1e-4, scale: 1.0, decays: true };
    let one = seconds_of(|| Ok(optimizer.update("w", at, &mut weights, &gradient)?))?;
    let parameters: usize = super::parameters(config)?;
    let optimizer = one * parameters as f64 / weights.len() as f64;

    Ok(vec![
        ("linear", linear_seconds),
        ("mlp", mlp),
        ("attention", attention.into_iter().sum::<f64>() * case.ranks as f64),
        ("norm", norm),
        ("rope", rope),
        ("loss", loss),
        ("optimiser", optimizer),
    ])
}
