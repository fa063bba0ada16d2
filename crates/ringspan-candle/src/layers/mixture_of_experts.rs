//! A feed-forward part that is a mixture of experts: a router sends each token to a few of them (Shazeer et al., 2017).
//!
//! Shape letters: T tokens at hand, C hidden size, E experts, K experts that a token goes to, I width of an expert.

use super::ForwardPass;
use super::projection::Projection;
use crate::cast::cast;
use crate::dropout::Drops;
use crate::experts::{Expert, Load, Routing, pressed};
use crate::linear::linear;
use crate::lora::Adapter;
use crate::model::Scope;
use crate::residual::residual;
use crate::shard::{ExpertIndex, ShardSpec, Split};
use candle_core::{D, DType, Result, Tensor};
use std::ops::Range;

/// How a token's experts are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Router {
    /// Experts E.
    pub experts: usize,
    /// Experts K that a token goes to.
    pub top: usize,
    /// Whether a token's K weights are made to sum to 1.
    pub normalised: bool,
}

/// Experts, each a gated feed-forward layer without biases, and the router that sends tokens to them. Ranks share experts, the
/// width of each, or both.
#[derive(Debug, Clone)]
pub struct MixtureOfExperts {
    index: usize,
    router: Router,
    width: usize,
    gate: Projection,
    /// Gate, up and down of each.
    experts: Vec<[Projection; 3]>,
}

impl MixtureOfExperts {
    /// Adds the experts of layer `index`, `experts.0.gate_proj` and so on of this width, and the router `gate` below `scope`.
    #[must_use]
    pub fn new(scope: &Scope, index: usize, hidden: usize, width: usize, router: Router) -> Self {
        Self::named(scope, index, hidden, width, router, ["gate_proj", "up_proj", "down_proj"])
    }

    /// The same with these names of an expert's gate, up and down.
    #[must_use]
    pub fn named(
        scope: &Scope,
        index: usize,
        hidden: usize,
        width: usize,
        router: Router,
        [gate, up, down]: [&str; 3],
    ) -> Self {
        let expert = |expert: usize| {
            let split = Split::ExpertWidth(ExpertIndex { index: expert, experts: router.experts });
            let scope = scope.at("experts").at(expert);
            let wide = |name| Projection::new(&scope.at(name), [width, hidden], false, ShardSpec::Rows(split));
            let (gate, up) = (wide(gate), wide(up));
            [gate, up, Projection::new(&scope.at(down), [hidden, width], false, ShardSpec::Columns(split))]
        };
        let experts = (0..router.experts).map(expert).collect();
        let gate = Projection::router(&scope.at("gate"), [router.experts, hidden]);
        Self { index, router, width, gate, experts }
    }

    /// How experts are chosen.
    #[must_use]
    pub fn router(&self) -> Router {
        self.router
    }

    /// Width I of an expert.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The sum of the residual stream and of what the experts make of x, `[rows, C]` each.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn add_to(&self, stream: &Tensor, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        residual(stream, &self.output(x, pass)?)
    }

    fn output(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        if x.dim(0)? == 0 {
            return self.without_tokens(x, pass);
        }
        let attend = pass.attend();
        // A rank has its rows of the tokens that it shares.
        let drops = self.drops(attend.tensor_parallel().part(pass.tokens()), pass);
        let experts = attend.experts();
        let mut probabilities = softmax(&self.logits(x, drops.as_ref(), pass)?)?;
        for pressure in experts.pressures(self.index) {
            probabilities = pressed(&probabilities, pressure)?;
        }
        let rows = probabilities.to_vec2::<f32>()?;
        let chosen: Vec<u32> = rows.iter().flat_map(|row| largest(row, self.router.top)).collect();
        experts.routed(self.index, load(&rows, &chosen, self.router.experts))?;
        let places = Tensor::from_slice(&chosen, (rows.len(), self.router.top), probabilities.device())?;
        let mut weights = probabilities.gather(&places, 1)?;
        if self.router.normalised {
            weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
        }
        self.mix(x, Routing { chosen, weights, drops }, pass)
    }

    /// What a rank without tokens does: it may compute experts of others. x `[0, C]` to `[0, C]`.
    fn without_tokens(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        pass.attend().experts().routed(self.index, load(&[], &[], self.router.experts))?;
        // Made from x, as a router's are: the way back visits both on every rank, in one order.
        let weights = cast(&x.reshape((0, self.router.top))?, DType::F32)?;
        self.mix(x, Routing { chosen: Vec::new(), weights, drops: self.drops(0..0, pass) }, pass)
    }

    /// The numbers that are dropped of these tokens on their way into adapters, if any are.
    fn drops(&self, tokens: Range<usize>, pass: &ForwardPass) -> Option<Drops> {
        let drops = pass.attend().drops().filter(|_| pass.adapters().drop_inputs())?;
        Some(drops.of(drops.tokens()[tokens].to_vec()))
    }

    /// The router's logits `[T, E]`, f32 whatever the model computes in: near a tie, what is rounded goes to another expert.
    fn logits(&self, x: &Tensor, drops: Option<&Drops>, pass: &ForwardPass) -> Result<Tensor> {
        let exact = |tensor: &Tensor| cast(tensor, DType::F32);
        let x = &exact(x)?;
        let product = |name: &str, x: &Tensor, weight: Tensor| match pass.store() {
            Some(store) => store.router(name, x, &weight.into()),
            None => linear(x, &weight, None),
        };
        let logits = product(self.gate.name(), x, exact(self.gate.weight(pass)?.tensor()?)?)?;
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

    fn mix(&self, x: &Tensor, mut routing: Routing, pass: &ForwardPass) -> Result<Tensor> {
        let is_adapted = |linear: &Projection| pass.adapters().beside(linear.name()).is_some();
        routing.drops = routing.drops.filter(|_| self.experts.iter().flatten().any(is_adapted));
        let expert = |index: usize| -> Result<Expert> {
            let [gate, up, down] = &self.experts[index];
            let weight = |linear: &Projection| linear.weight(pass)?.tensor().cloned();
            Ok(Expert {
                adapters: [gate.adapter(pass)?, up.adapter(pass)?, down.adapter(pass)?],
                gate: weight(gate)?,
                up: weight(up)?,
                down: weight(down)?,
            })
        };
        pass.attend().experts().mix(self.index, x, &routing, &expert)
    }
}

/// Over the last dimension of `[T, E]`.
fn softmax(logits: &Tensor) -> Result<Tensor> {
    // Subtracting a constant of the row changes nothing, so the maximum needs no gradient.
    let exponentials = logits.broadcast_sub(&logits.max_keepdim(D::Minus1)?.detach())?.exp()?;
    exponentials.broadcast_div(&exponentials.sum_keepdim(D::Minus1)?)
}

/// Places of the `count` largest of a row, largest first; of equal ones the first, so that every mesh chooses the same.
fn largest(row: &[f32], count: usize) -> Vec<u32> {
    let mut places: Vec<u32> = (0..row.len() as u32).collect();
    places.sort_by(|&a, &b| row[b as usize].total_cmp(&row[a as usize]));
    places.truncate(count);
    places
}

fn load(rows: &[Vec<f32>], chosen: &[u32], experts: usize) -> Load {
    let mut load = Load { chosen: vec![0.0; experts], probability: vec![0.0; experts], tokens: rows.len() as f64 };
    chosen.iter().for_each(|&expert| load.chosen[expert as usize] += 1.0);
    for row in rows {
        load.probability.iter_mut().zip(row).for_each(|(sum, p)| *sum += f64::from(*p));
    }
    load
}
