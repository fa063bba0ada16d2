//! The router of a mixture of experts, which decides to which experts a token is routed, and with which weights.
//!
//! Shape letters: T tokens on this rank, C hidden size, E experts, K experts a token is routed to.

use super::ForwardPass;
use super::projection::Projection;
use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::experts::{ExpertLoad, RouterGradient, with_router_gradient};
use crate::layer_adapter::LayerAdapter;
use crate::linear::linear;
use crate::lora::Adapter;
use crate::parameters::{Init, Scope};
use candle_core::{D, DType, Result, Tensor};

/// The settings by which a token's experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// Number E of experts.
    pub experts: usize,
    /// Number K of experts that a token is routed to.
    pub top: usize,
    /// The function that turns logits into scores.
    pub scoring: Scoring,
    /// Whether a token's K weights are normalised to sum to 1.
    pub normalised: bool,
    /// Factor of the weights.
    pub scale: f64,
    /// Groups of experts of which the best are chosen first; `None` without such groups.
    pub groups: Option<ExpertGroups>,
    /// Whether the logits have a bias.
    pub bias: bool,
    /// Whether a correction bias for each expert, which is not trained by gradients, is added to its score while experts are
    /// chosen, but not to its weight (Wang et al., 2024, arXiv:2408.15664).
    pub correction: bool,
    /// Whether the router can have an adapter: PEFT attaches none where transformers' router is no linear layer.
    pub adaptable: bool,
}

/// The function by which a router turns logits into scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax: probabilities over all experts.
    Softmax,
    /// Sigmoid: a number in 0..1 for each expert, independent of the others.
    Sigmoid,
}

/// Groups of neighbouring experts: a token's experts are chosen from few groups (DeepSeek-AI, 2024, arXiv:2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, all of equal size.
    pub count: usize,
    /// Number of groups from which a token's experts are chosen.
    pub top: usize,
    /// The score of a group is the sum of the scores of this many of its best experts.
    pub best: usize,
}

impl Router {
    /// A router that sends a token to the `top` of `experts` with the greatest probabilities, which are also its weights.
    #[must_use]
    pub fn new(experts: usize, top: usize) -> Self {
        Self {
            experts,
            top,
            scoring: Scoring::Softmax,
            normalised: false,
            scale: 1.0,
            groups: None,
            bias: false,
            correction: false,
            adaptable: true,
        }
    }

    /// The experts of a token with these scores, best first; among equal scores the first, so that every mesh chooses the
    /// same.
    fn choose(&self, scores: &[f32], correction: &[f32]) -> Vec<u32> {
        let corrected = |(expert, score): (usize, &f32)| score + correction.get(expert).copied().unwrap_or(0.0);
        let mut scores: Vec<f32> = scores.iter().enumerate().map(corrected).collect();
        if let Some(ExpertGroups { count, top, best }) = self.groups {
            let size = (scores.len() / count.max(1)).max(1);
            let score = |group: &[f32]| largest(group, best).iter().map(|&expert| group[expert as usize]).sum();
            let chosen = largest(&scores.chunks(size).map(score).collect::<Vec<f32>>(), top);
            for (group, scores) in scores.chunks_mut(size).enumerate() {
                if !chosen.contains(&(group as u32)) {
                    scores.fill(f32::NEG_INFINITY);
                }
            }
        }
        largest(&scores, self.top)
    }
}

/// Indices of the `count` largest numbers in a row, largest first.
fn largest(row: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..row.len() as u32).collect();
    places.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    places.truncate(count);
    places
}

/// The routing of this rank's tokens.
pub(super) struct Choices {
    /// The chosen experts `[T, K]`, row by row.
    pub(super) chosen: Vec<u32>,
    /// Their weights `[T, K]`, f32, differentiable.
    pub(super) weights: Tensor,
    pub(super) load: ExpertLoad,
}

/// A router with the names of its parameters.
#[derive(Debug, Clone)]
pub(super) struct RouterLayer {
    pub(super) router: Router,
    gate: Projection,
    correction: Option<String>,
}

impl RouterLayer {
    /// Adds the weight `[E, C]`, and the biases that `router` asks for.
    pub(super) fn new(scope: &Scope, hidden: usize, router: Router) -> Self {
        let gate = Projection::router(scope, [router.experts, hidden], router.bias, router.adaptable);
        let correction = || scope.buffer("e_score_correction_bias", &[router.experts], Init::Constant(0.0));
        Self { router, gate, correction: router.correction.then(correction) }
    }

    /// The name of the weight.
    pub(super) fn weight_name(&self) -> &str {
        self.gate.weight_name()
    }

    /// Routes the tokens x `[T, C]`, at least one. `router_gradients` are gradients of further losses with respect to the scores.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        adapter_rows: Option<&AdapterRows>,
        router_gradients: Vec<RouterGradient>,
        pass: &ForwardPass,
    ) -> Result<Choices> {
        let router = &self.router;
        let logits = self.logits(x, adapter_rows, pass)?;
        let mut scores = match router.scoring {
            Scoring::Softmax => softmax(&logits)?,
            // This is the sigmoid, in a form whose derivative is finite everywhere.
            Scoring::Sigmoid => (((logits * 0.5)?.tanh()? + 1.0)? * 0.5)?,
        };
        for router_gradient in router_gradients {
            scores = with_router_gradient(&scores, router_gradient)?;
        }
        let correction = match &self.correction {
            Some(name) => cast(pass.tensor(name)?, DType::F32)?.to_vec1()?,
            None => Vec::new(),
        };
        let rows = scores.to_vec2::<f32>()?;
        let chosen: Vec<u32> = rows.iter().flat_map(|row| router.choose(row, &correction)).collect();
        let load = load(&rows, &chosen, router.experts);
        let places = Tensor::from_slice(&chosen, (rows.len(), router.top), scores.device())?;
        let mut weights = scores.gather(&places, 1)?;
        if router.normalised {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        if router.scale != 1.0 {
            weights = (weights * router.scale)?;
        }
        Ok(Choices { chosen, weights, load })
    }

    /// The routing of no tokens, for a rank without rows.
    pub(super) fn nothing(&self, x: &Tensor) -> Result<Choices> {
        // The weights are computed from x, as on ranks with tokens, so that the backward pass visits the weights and x on
        // every rank, in the same order.
        let weights = cast(&x.reshape((0, self.router.top))?, DType::F32)?;
        Ok(Choices { chosen: Vec::new(), weights, load: load(&[], &[], self.router.experts) })
    }

    /// The logits `[T, E]`, f32 whatever type the model computes in: near a tie, rounding would route a token to another
    /// expert.
    fn logits(&self, x: &Tensor, adapter_rows: Option<&AdapterRows>, pass: &ForwardPass) -> Result<Tensor> {
        let exact = |tensor: &Tensor| cast(tensor, DType::F32);
        let x = &exact(x)?;
        let product = |name: &str, x: &Tensor, weight: Tensor| match pass.store() {
            Some(store) => store.router(name, x, &weight.into()),
            None => linear(x, &weight, None),
        };
        // A bf16 or f16 weight is widened on each use, which changes no number.
        let mut logits = product(self.gate.name(), x, exact(&self.gate.weight(pass)?.to_tensor()?)?)?;
        if let Some(bias) = self.gate.bias(pass)? {
            logits = logits.broadcast_add(&exact(bias)?)?;
        }
        let wide = |adapter: Adapter| {
            Ok::<_, candle_core::Error>(Adapter { a: exact(&adapter.a)?, b: exact(&adapter.b)?, ..adapter })
        };
        match self.gate.adapter(pass)? {
            Some(LayerAdapter::BySlot(adapters)) => {
                let adapters = adapters.into_iter().map(|(slot, adapter)| Ok((slot, wide(adapter)?)));
                logits + LayerAdapter::BySlot(adapters.collect::<Result<_>>()?).delta(x, adapter_rows)?
            }
            // The products of the weight and of the adapter are stored separately, and neither is rounded.
            Some(LayerAdapter::One(adapter)) => {
                let adapter = wide(adapter)?;
                let name = format!("{}.lora_B", self.gate.name());
                logits + product(&name, &adapter.down(x, adapter_rows)?, adapter.b.clone())?
            }
            None => Ok(logits),
        }
    }
}

/// Softmax over the last dim of `[T, E]`.
fn softmax(logits: &Tensor) -> Result<Tensor> {
    // Subtracting a constant from a row changes nothing, so the maximum needs no gradient.
    let exponentials = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

fn load(rows: &[Vec<f32>], chosen: &[u32], experts: usize) -> ExpertLoad {
    let mut load =
        ExpertLoad { chosen: vec![0.0; experts], probability: vec![0.0; experts], tokens: rows.len() as f64 };
    chosen.iter().for_each(|&expert| load.chosen[expert as usize] += 1.0);
    for row in rows {
        load.probability.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
    }
    load
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_are_of_the_best_groups() {
        let groups = |top, best| Some(ExpertGroups { count: 3, top, best });
        let router = |groups| Router { groups, ..Router::new(6, 2) };
        let scores = [0.9, 0.1, 0.6, 0.5, 0.7, 0.2];
        assert_eq!(router(None).choose(&scores, &[]), [0, 4]);
        assert_eq!(router(groups(1, 1)).choose(&scores, &[]), [0, 1], "the group of the best expert");
        assert_eq!(router(groups(1, 2)).choose(&scores, &[]), [2, 3], "the group of the best two");
        assert_eq!(router(groups(2, 2)).choose(&scores, &[]), [0, 2]);
        let correction = [0.0, 0.0, 0.0, 0.0, 0.0, 0.5];
        assert_eq!(router(groups(1, 2)).choose(&scores, &correction), [4, 5]);
    }
}
