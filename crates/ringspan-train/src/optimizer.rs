//! AdamW and SGD on f32 slices, step for step as `torch.optim` computes them, and clipping by the global norm.
//!
//! A rank updates the shards of parameters that it holds. Ranks that hold the same shard hold the same reduced gradients, so they
//! take the same step, bit for bit.

use crate::error::{Error, Result};
use ringspan_candle::pool;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, fmt, str::FromStr, sync::Arc};

/// An optimiser's algorithm, with its constants.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerConfig {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, 2019).
    AdamW {
        /// Decay rate of the running mean of gradients.
        beta1: f64,
        /// Decay rate of the running mean of squared gradients.
        beta2: f64,
        /// Added to the denominator, the root of the mean square.
        eps: f64,
        /// Weight decay per unit of learning rate; applies to matrices only.
        weight_decay: f64,
    },
    /// Gradient descent, with heavy-ball momentum where it is not 0.
    Sgd {
        /// Share of the momentum buffer that is kept in each step.
        momentum: f64,
        /// Added to the gradient as `weight_decay * p`; on matrices only.
        weight_decay: f64,
    },
}

/// The name of an optimiser, as settings spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// [`OptimizerConfig::AdamW`].
    #[default]
    AdamW,
    /// [`OptimizerConfig::Sgd`].
    Sgd,
}

impl FromStr for OptimizerKind {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
        match given {
            "adamw" => Ok(Self::AdamW),
            "sgd" => Ok(Self::Sgd),
            _ => Err(ringspan::Error::Unknown { what: "optimizer", given: given.into(), possible: "adamw, sgd" }),
        }
    }
}

impl fmt::Display for OptimizerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AdamW => "adamw",
            Self::Sgd => "sgd",
        })
    }
}

/// Optimizer state by name: `exp_avg.<parameter>`, `exp_avg_sq.<parameter>` or `momentum_buffer.<parameter>`, flat f32.
///
/// The tensors are shared, so that a checkpoint can be written from them while training goes on: a step copies those in use.
pub type OptimizerState = BTreeMap<String, Arc<Vec<f32>>>;

/// The arguments of a step besides the parameter and its gradient.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct UpdateArguments {
    /// Number of the step, from 0; AdamW's bias correction depends on it.
    pub step: u64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Factor of the gradient, applied before anything else: gradient clipping.
    pub scale: f32,
    /// Whether weight decay applies to the parameter.
    pub has_weight_decay: bool,
}

/// An optimiser and its state.
#[derive(Debug, Clone)]
pub struct Optimizer {
    method: OptimizerConfig,
    state: OptimizerState,
}

impl Optimizer {
    /// An optimiser that has not stepped yet.
    #[must_use]
    pub fn new(method: OptimizerConfig) -> Self {
        Self { method, state: OptimizerState::new() }
    }

    /// An optimiser that goes on from `state`, which must be what [`Self::state`] returned for the same parameters.
    ///
    /// # Errors
    /// [`Error::Settings`] when state is missing, of another optimiser, or of another size.
    pub fn resume<'a>(
        method: OptimizerConfig,
        state: OptimizerState,
        parameters: impl IntoIterator<Item = (&'a str, usize)>,
    ) -> Result<Self> {
        let state_names = state_names(&method);
        let mut expected = 0;
        for (name, size) in parameters {
            for state_name in state_names {
                expected += 1;
                let key = format!("{state_name}.{name}");
                match state.get(&key).map(|values| values.len()) {
                    Some(actual) if actual == size => {}
                    Some(actual) => {
                        return Err(Error::Settings(format!(
                            "optimiser state `{key}` has {actual} elements, expected {size}"
                        )));
                    }
                    None => return Err(Error::Settings(format!("optimiser state has no `{key}`"))),
                }
            }
        }
        if state.len() != expected {
            return Err(Error::Settings(format!(
                "optimiser state has {} tensors, this optimiser and model have {expected}",
                state.len()
            )));
        }
        Ok(Self { method, state })
    }

    /// The state, for a checkpoint.
    #[must_use]
    pub fn state(&self) -> &OptimizerState {
        &self.state
    }

    /// The state of one parameter, with the names it has in a checkpoint.
    pub(crate) fn parameter_state(&self, parameter: &str) -> impl Iterator<Item = (&String, &Arc<Vec<f32>>)> {
        state_names(&self.method)
            .iter()
            .filter_map(move |state_name| self.state.get_key_value(&format!("{state_name}.{parameter}")))
    }

    /// Bytes of optimizer state that a parameter of `size` elements takes.
    #[must_use]
    pub fn state_bytes(method: &OptimizerConfig, size: usize) -> usize {
        state_names(method).len() * size * 4
    }

    /// Takes one step on one parameter `p` with its gradient `g`.
    ///
    /// # Errors
    /// [`Error::Settings`] when the sizes of parameter and gradient differ.
    pub fn update(&mut self, name: &str, arguments: UpdateArguments, p: &mut [f32], g: &[f32]) -> Result<()> {
        let UpdateArguments { step, lr, scale, has_weight_decay } = arguments;
        if p.len() != g.len() {
            return Err(Error::Settings(format!(
                "gradient of `{name}` has {} elements, the parameter {}",
                g.len(),
                p.len()
            )));
        }
        match self.method {
            OptimizerConfig::AdamW { beta1, beta2, eps, weight_decay } => {
                let [mut m, mut v] = ["exp_avg", "exp_avg_sq"]
                    .map(|state_name| take_or_zeros(&mut self.state, state_name, name, p.len()));
                let count = (step + 1) as f64;
                let step_size = (lr / (1.0 - beta1.powf(count))) as f32;
                let root_correction = (1.0 - beta2.powf(count)).sqrt() as f32;
                let decay_factor = if has_weight_decay { (1.0 - lr * weight_decay) as f32 } else { 1.0 };
                let (mix, keep, add, eps) = ((1.0 - beta1) as f32, beta2 as f32, (1.0 - beta2) as f32, eps as f32);
                let (m_now, v_now) = (Arc::make_mut(&mut m), Arc::make_mut(&mut v));
                let chunk_len = pool::part(p.len(), 1);
                let slices = p
                    .chunks_mut(chunk_len)
                    .zip(g.chunks(chunk_len))
                    .zip(m_now.chunks_mut(chunk_len))
                    .zip(v_now.chunks_mut(chunk_len));
                pool::map(slices.collect(), |(((p, g), m), v): Slices<'_>| {
                    pool::vectorized(
                        #[inline(always)]
                        || {
                            for (((p, g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
                                let g = g * scale;
                                *m += mix * (g - *m);
                                *v = *v * keep + add * g * g;
                                *p = *p * decay_factor - step_size * (*m / (v.sqrt() / root_correction + eps));
                            }
                        },
                    );
                });
                self.state.insert(format!("exp_avg.{name}"), m);
                self.state.insert(format!("exp_avg_sq.{name}"), v);
            }
            OptimizerConfig::Sgd { momentum, weight_decay } => {
                let decay = if has_weight_decay { weight_decay as f32 } else { 0.0 };
                let (lr, keep) = (lr as f32, momentum as f32);
                if momentum == 0.0 {
                    for (p, g) in p.iter_mut().zip(g) {
                        *p -= lr * (g * scale + decay * *p);
                    }
                } else {
                    // The buffer starts at 0, so the first step takes the gradient whole, as torch does.
                    let mut buffer = take_or_zeros(&mut self.state, "momentum_buffer", name, p.len());
                    for ((p, g), b) in p.iter_mut().zip(g).zip(Arc::make_mut(&mut buffer)) {
                        *b = *b * keep + (g * scale + decay * *p);
                        *p -= lr * *b;
                    }
                    self.state.insert(format!("momentum_buffer.{name}"), buffer);
                }
            }
        }
        Ok(())
    }
}

/// Equal chunks of parameter, gradient, running mean and running mean square.
type Slices<'a> = (((&'a mut [f32], &'a [f32]), &'a mut [f32]), &'a mut [f32]);

/// Names of the state tensors that a parameter has.
pub(crate) fn state_names(method: &OptimizerConfig) -> &'static [&'static str] {
    match method {
        OptimizerConfig::AdamW { .. } => &["exp_avg", "exp_avg_sq"],
        OptimizerConfig::Sgd { momentum, .. } if *momentum != 0.0 => &["momentum_buffer"],
        OptimizerConfig::Sgd { .. } => &[],
    }
}

fn take_or_zeros(state: &mut OptimizerState, state_name: &str, name: &str, size: usize) -> Arc<Vec<f32>> {
    let found = state.remove(&format!("{state_name}.{name}")).filter(|values| values.len() == size);
    found.unwrap_or_else(|| Arc::new(vec![0.0; size]))
}

/// The sum of squares of all gradients together, in f64 in the order given: the square of their L2 norm.
pub fn sum_of_squares<'a>(gradients: impl IntoIterator<Item = &'a [f32]>) -> f64 {
    gradients.into_iter().map(squares).sum()
}

/// The sum of squares, in f64. The size of a block does not depend on the number of threads, so all ranks get the same bits.
fn squares(gradient: &[f32]) -> f64 {
    const BLOCK: usize = 1 << 16;
    const LANES: usize = 8;
    let of_block = |block: &[f32]| {
        pool::vectorized(
            #[inline(always)]
            || {
                let mut sums = [0.0f64; LANES];
                let chunks = block.chunks_exact(LANES);
                let rest: f64 = chunks.remainder().iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                for chunk in chunks {
                    sums.iter_mut().zip(chunk).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x));
                }
                sums.iter().sum::<f64>() + rest
            },
        )
    };
    pool::map(gradient.chunks(BLOCK).collect(), of_block).into_iter().sum()
}

/// The factor that scales gradients of this norm down to `limit`, as `clip_grad_norm_` computes it; 1 where the norm is smaller.
#[must_use]
pub fn clip_scale(norm: f64, limit: Option<f64>) -> f32 {
    limit.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0) as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRADIENTS: [[f32; 3]; 3] = [[0.1, -0.2, 3.0], [0.3, 0.0, -1.0], [-0.5, 0.25, 0.125]];

    fn arguments(step: u64, lr: f64, scale: f32, has_weight_decay: bool) -> UpdateArguments {
        UpdateArguments { step, lr, scale, has_weight_decay }
    }

    fn run(method: OptimizerConfig, has_weight_decay: bool) -> Vec<f32> {
        let mut optimizer = Optimizer::new(method);
        let mut p = vec![1.0f32, -2.0, 0.5];
        for (t, g) in GRADIENTS.iter().enumerate() {
            optimizer.update("w", arguments(t as u64, 0.1, 1.0, has_weight_decay), &mut p, g).unwrap();
        }
        p
    }

    #[track_caller]
    fn close(actual: &[f32], expected: &[f32]) {
        for (a, e) in actual.iter().zip(expected) {
            assert!((a - e).abs() <= 2e-6 * e.abs().max(0.1), "{actual:?} is not {expected:?}");
        }
    }

    #[test]
    fn three_steps_equal_pytorch() {
        // torch.optim of PyTorch 2.15 with these constants, parameter and gradients.
        let adamw = |beta2, eps, weight_decay| OptimizerConfig::AdamW { beta1: 0.9, beta2, eps, weight_decay };
        let sgd = |momentum, weight_decay| OptimizerConfig::Sgd { momentum, weight_decay };
        close(&run(adamw(0.95, 1e-8, 0.1), true), &[0.798_148_9, -1.792_867_5, 0.312_899_1]);
        close(&run(adamw(0.999, 1e-3, 0.0), true), &[0.825_665_06, -1.851_433_5, 0.326_609_25]);
        close(&run(sgd(0.0, 0.1), true), &[0.980_798, -1.945_996, 0.277_619_48]);
        close(&run(sgd(0.9, 0.1), true), &[0.910_958, -1.860_316, -0.152_940_5]);
    }

    #[test]
    fn a_parameter_that_does_not_decay_steps_as_without_decay() {
        let adamw = |weight_decay| OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-3, weight_decay };
        assert_eq!(run(adamw(0.5), false), run(adamw(0.0), true));
        assert_ne!(run(adamw(0.5), true), run(adamw(0.0), true));
        let sgd = |weight_decay| OptimizerConfig::Sgd { momentum: 0.9, weight_decay };
        assert_eq!(run(sgd(0.5), false), run(sgd(0.0), true));
    }

    #[test]
    fn a_frozen_scale_clips_the_gradient_before_anything_else() {
        let method = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };
        let mut p = vec![1.0];
        Optimizer::new(method).update("w", arguments(0, 0.5, 0.25, true), &mut p, &[2.0]).unwrap();
        assert_eq!(p, [0.75]);
    }

    #[test]
    fn the_norm_is_over_all_gradients_and_clipping_never_enlarges() {
        let norm = sum_of_squares([&[3.0f32][..], &[4.0, 12.0][..]]).sqrt();
        assert!((norm - 13.0).abs() < 1e-12);
        assert!((clip_scale(norm, Some(1.3)) - 0.1).abs() < 1e-6);
        assert_eq!(clip_scale(0.5, Some(1.0)), 1.0);
        assert_eq!(clip_scale(norm, None), 1.0);
    }

    #[test]
    fn an_optimiser_resumes_only_from_its_own_state() {
        let adamw = OptimizerConfig::AdamW { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 };
        let mut optimizer = Optimizer::new(adamw);
        let mut p = vec![1.0, 2.0];
        optimizer.update("w", arguments(0, 0.1, 1.0, true), &mut p, &[1.0, 1.0]).unwrap();
        let state = optimizer.state().clone();
        let mut again = Optimizer::resume(adamw, state.clone(), [("w", 2)]).unwrap();
        let mut q = p.clone();
        optimizer.update("w", arguments(1, 0.1, 1.0, true), &mut p, &[1.0, -1.0]).unwrap();
        again.update("w", arguments(1, 0.1, 1.0, true), &mut q, &[1.0, -1.0]).unwrap();
        assert_eq!(p, q);
        let message = |m, s: &OptimizerState, n: &str, size| {
            Optimizer::resume(m, s.clone(), [(n, size)]).unwrap_err().to_string()
        };
        assert!(message(adamw, &state, "w", 3).contains("has 2 elements, expected 3"));
        assert!(message(adamw, &state, "u", 2).contains("no `exp_avg.u`"));
        let sgd = OptimizerConfig::Sgd { momentum: 0.0, weight_decay: 0.0 };
        assert!(message(sgd, &state, "w", 2).contains("has 2 tensors"));
        assert!(optimizer.update("w", arguments(2, 0.1, 1.0, true), &mut p, &[1.0]).is_err());
    }
}
