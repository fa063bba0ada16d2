//! The router of a mixture of experts: which of them a token goes to, and how much each of these counts.
//!
//! Shape letters: T tokens at hand, C hidden size, E experts, K experts that a token goes to.

use super::ForwardPass;
use super::projection::Projection;
use crate::cast::cast;
use crate::dropout::Drops;
use crate::experts::{Load, Pressure, pressed};
use crate::linear::linear;
use crate::lora::Adapter;
use crate::model::{Init, Scope};
use candle_core::{D, DType, Result, Tensor};

/// How a token's experts are chosen and weighted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// Experts E.
    pub experts: usize,
    /// Experts K that a token goes to.
    pub top: usize,
    /// What logits become before any is chosen.
    pub scoring: Scoring,
    /// Whether a token's K weights are made to sum to 1.
    pub normalised: bool,
    /// Factor on the weights.
    pub scale: f64,
    /// The groups of which some are chosen first, if experts stand in groups.
    pub groups: Option<ExpertGroups>,
    /// Whether logits have a bias.
    pub bias: bool,
    /// Whether a number of each expert, which no gradient trains, is added to its score while experts are chosen (Wang et al.,
    /// 2024, arXiv:2408.15664).
    pub correction: bool,
    /// Whether an adapter can stand beside it.
    pub adaptable: bool,
}

/// What a router's logits become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// Probabilities over all experts.
    Softmax,
    /// A number in 0..1 for each expert by itself.
    Sigmoid,
}

/// Groups of neighbouring experts: a token's experts are of few groups (DeepSeek-AI, 2024, arXiv:2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Groups, of as many experts each.
    pub count: usize,
    /// Groups that a token's experts are of.
    pub top: usize,
    /// The score of a group is the sum of this many of its best experts'.
    pub best: usize,
}

impl Router {
    /// A token goes to the `top` of `experts` whose probabilities are greatest, and these are its weights.
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

    /// The experts of a token with these scores, largest first; of equal ones the first, so that every mesh chooses the same.
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

/// Places of the `count` largest of a row, largest first.
fn largest(row: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..row.len() as u32).collect();
    places.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    places.truncate(count);
    places
}

/// Where a router sends the tokens at hand.
pub(super) struct Choices {
    /// `[T, K]`
    pub(super) chosen: Vec<u32>,
    /// `[T, K]`, f32, differentiable.
    pub(super) weights: Tensor,
    pub(super) load: Load,
}

/// A router with its parameters.
#[derive(Debug, Clone)]
pub(super) struct RouterLayer {
    pub(super) router: Router,
    gate: Projection,
    correction: Option<String>,
}

impl RouterLayer {
    /// Adds the weight `[E, C]` and what else `router` says.
    pub(super) fn new(scope: &Scope, hidden: usize, router: Router) -> Self {
        let gate = Projection::router(scope, [router.experts, hidden], router.bias, router.adaptable);
        let correction = || scope.buffer("e_score_correction_bias", &[router.experts], Init::Constant(0.0));
        Self { router, gate, correction: router.correction.then(correction) }
    }

    /// The name of the weight.
    pub(super) fn weight_name(&self) -> &str {
        self.gate.weight_name()
    }

    /// Where the tokens x `[T, C]` go, of which at least one is here. `pressures` are further losses of the scores.
    pub(super) fn forward(
        &self,
        x: &Tensor,
        drops: Option<&Drops>,
        pressures: Vec<Pressure>,
        pass: &ForwardPass,
    ) -> Result<Choices> {
        let router = &self.router;
        let logits = self.logits(x, drops, pass)?;
        let mut scores = match router.scoring {
            Scoring::Softmax => softmax(&logits)?,
            // The sigmoid, in a form whose derivative is finite everywhere.
            Scoring::Sigmoid => (((logits * 0.5)?.tanh()? + 1.0)? * 0.5)?,
        };
        for pressure in pressures {
            scores = pressed(&scores, pressure)?;
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

    /// The same without tokens.
    pub(super) fn nothing(&self, x: &Tensor) -> Result<Choices> {
        // Made from x, as others are: the way back visits both on every rank, in one order.
        let weights = cast(&x.reshape((0, self.router.top))?, DType::F32)?;
        Ok(Choices { chosen: Vec::new(), weights, load: load(&[], &[], self.router.experts) })
    }

    /// The logits `[T, E]`, f32 whatever the model computes in: near a tie, what is rounded goes to another expert.
    fn logits(&self, x: &Tensor, drops: Option<&Drops>, pass: &ForwardPass) -> Result<Tensor> {
        let exact = |tensor: &Tensor| cast(tensor, DType::F32);
        let x = &exact(x)?;
        let product = |name: &str, x: &Tensor, weight: Tensor| match pass.store() {
            Some(store) => store.router(name, x, &weight.into()),
            None => linear(x, &weight, None),
        };
        // A weight of 16 bits a number is widened whenever it is used: no number changes.
        let mut logits = product(self.gate.name(), x, exact(&self.gate.weight(pass)?.to_tensor()?)?)?;
        if let Some(bias) = self.gate.bias(pass)? {
            logits = logits.broadcast_add(&exact(bias)?)?;
        }
        match self.gate.adapter(pass)? {
            // Whatever is seen of either is never rounded.
            Some(adapter) => {
                let adapter = Adapter { a: exact(&adapter.a)?, b: exact(&adapter.b)?, ..adapter };
                let name = format!("{}.lora_B", self.gate.name());
                logits + product(&name, &adapter.narrow(x, drops)?, adapter.b.clone())?
            }
            None => Ok(logits),
        }
    }
}

/// Over the last dimension of `[T, E]`.
fn softmax(logits: &Tensor) -> Result<Tensor> {
    // Subtracting a constant of the row changes nothing, so the maximum needs no gradient.
    let exponentials = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

fn load(rows: &[Vec<f32>], chosen: &[u32], experts: usize) -> Load {
    let mut load = Load { chosen: vec![0.0; experts], probability: vec![0.0; experts], tokens: rows.len() as f64 };
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
