//! A feed-forward layer that is a mixture of experts: a router sends each token to a few of them (Shazeer et al., 2017).
//!
//! Shape letters: T tokens on this rank, C hidden size, E experts, K experts a token is routed to, I width of an expert.

use super::ForwardPass;
use super::projection::Projection;
use super::router::{Router, RouterLayer};
use super::stacked_experts::StackedExperts;
use crate::activation::ClampedSwiglu;
use crate::adapter_rows::AdapterRows;
use crate::experts::{Expert, GatedExpert, Routing};
use crate::parameters::Scope;
use crate::residual::{residual, residual_unused};
use crate::shard::{ExpertIndex, ShardSpec, Split};
use candle_core::{Result, Tensor};
use std::ops::Range;

/// Experts, each a gated feed-forward layer, and the router that sends tokens to them. Ranks may share whole experts, the
/// width of each expert, or both.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan::World;
/// use ringspan_candle::layers::{ForwardPass, MixtureOfExperts, Router};
/// use ringspan_candle::model::{ModelBuilder, StoredWeights, Unit};
/// use ringspan_candle::{Adapters, Context};
/// # type Error = Box<dyn std::error::Error + Send + Sync>;
///
/// let builder = ModelBuilder::new();
/// // Two experts, which differ in their last matrix; a token goes to the one, and its weight is the router's probability.
/// let moe = MixtureOfExperts::new(&builder.unit(Unit::Layer(0), "mlp"), 0, 1, 1, Router::new(2, 1));
/// let matrix = |name: &str, numbers: &[f32]| {
///     let matrix = Tensor::from_slice(numbers, (numbers.len(), 1), &Device::Cpu)?;
///     Ok::<_, Error>((format!("mlp.{name}.weight"), matrix.into()))
/// };
/// let mut weights = StoredWeights::from([matrix("gate", &[1.0, -1.0])?]);
/// for (expert, down) in [(0, 1.0), (1, 10.0)] {
///     for (name, number) in [("gate_proj", 1.0), ("up_proj", 1.0), ("down_proj", down)] {
///         weights.extend([matrix(&format!("experts.{expert}.{name}"), &[number])?]);
///     }
/// }
/// let y = World::threads(1)?.run(|rank| {
///     let (context, adapters) = (Context::builder(rank).batch(1, 2).build()?, Adapters::none());
///     let x = Tensor::new(&[[2f32], [-2.0]], &Device::Cpu)?;
///     let pass = ForwardPass::new(&weights, &context, &adapters);
///     let y = moe.add_to(&x.zeros_like()?, &x, &pass)?;
///     Ok::<_, Error>(y.to_vec2::<f32>()?)
/// })?;
/// let expert = |x: f32, down: f32| x / (1.0 + (-x).exp()) * x * down / (1.0 + (-4f32).exp());
/// assert!((y[0][0][0] - expert(2.0, 1.0)).abs() < 1e-4 && (y[0][1][0] - expert(-2.0, 10.0)).abs() < 1e-4);
/// # Ok::<_, Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct MixtureOfExperts {
    index: usize,
    width: usize,
    router: RouterLayer,
    experts: Experts,
}

#[derive(Debug, Clone)]
enum Experts {
    /// Each expert has matrices gate, up and down of its own, whose names begin with this one.
    Separate(String, Vec<[Projection; 3]>),
    /// One tensor for each parameter holds all experts.
    Stacked(StackedExperts),
}

impl MixtureOfExperts {
    /// Adds the experts of layer `index`, `experts.0.gate_proj` and so on of this width, and the router `gate` in `scope`.
    #[must_use]
    pub fn new(scope: &Scope, index: usize, hidden: usize, width: usize, router: Router) -> Self {
        Self::named(scope, index, hidden, width, router, ["gate_proj", "up_proj", "down_proj"])
    }

    /// Like [`new`](Self::new), with these names of an expert's gate, up and down matrices.
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
        let prefix = format!("{}.", scope.at("experts").name());
        let experts = Experts::Separate(prefix, (0..router.experts).map(expert).collect());
        Self { index, width, router: RouterLayer::new(&scope.at("gate"), hidden, router), experts }
    }

    /// Adds the experts of layer `index`, stacked in tensors of all experts, `experts.gate_up_proj` and so on of this
    /// width, and the router `router` in `scope`.
    #[must_use]
    pub fn stacked(
        scope: &Scope,
        index: usize,
        hidden: usize,
        width: usize,
        router: Router,
        activation: ClampedSwiglu,
    ) -> Self {
        let experts = StackedExperts::new(&scope.at("experts"), [router.experts, hidden, width], activation);
        let router = RouterLayer::new(&scope.at("router"), hidden, router);
        Self { index, width, router, experts: Experts::Stacked(experts) }
    }

    /// The settings of the router.
    #[must_use]
    pub fn router(&self) -> Router {
        self.router.router
    }

    /// The name of the router's weight.
    #[must_use]
    pub fn router_weight(&self) -> &str {
        self.router.weight_name()
    }

    /// The width I of an expert.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// Adds the output of the experts for x to the residual stream, `[rows, C]` each. When the layer is recomputed for its
    /// gradients, nothing may read the sum.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn add_to(&self, stream: &Tensor, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let out = self.output(x, pass)?;
        if pass.is_recomputed() { residual_unused(stream, &out) } else { residual(stream, &out) }
    }

    fn output(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let (attend, experts) = (pass.attend(), pass.attend().experts());
        // With tensor parallelism, this rank routes its own rows of the shared tokens. A rank without rows still takes part,
        // since it may compute experts for other ranks.
        let rows = if x.dim(0)? == 0 { 0..0 } else { attend.tensor_parallel().shard_range(pass.tokens()) };
        let adapter_rows = self.adapter_rows(rows, pass);
        let choices = match x.dim(0)? {
            0 => self.router.nothing(x)?,
            _ => self.router.forward(x, adapter_rows.as_ref(), experts.router_gradients(self.index), pass)?,
        };
        experts.routed(self.index, choices.load)?;
        let adapter_rows = adapter_rows.filter(|_| self.has_adapters(pass));
        let routing = Routing { chosen: choices.chosen, weights: choices.weights, adapter_rows };
        match &self.experts {
            Experts::Separate(_, all) => {
                experts.mix(self.index, x, &routing, &|index| separate_experts(&all[index], pass))
            }
            Experts::Stacked(all) => {
                let stack = all.here(pass)?;
                experts.mix(self.index, x, &routing, &|index| stack.expert(index))
            }
        }
    }

    /// What adapters need to know of these tokens; `None` if they treat all tokens alike.
    fn adapter_rows(&self, tokens: Range<usize>, pass: &ForwardPass) -> Option<AdapterRows> {
        pass.adapter_rows().filter(|_| pass.adapters().depend_on_rows()).map(|rows| rows.narrow(tokens))
    }

    /// Whether any expert has an adapter.
    fn has_adapters(&self, pass: &ForwardPass) -> bool {
        match &self.experts {
            Experts::Separate(prefix, _) => pass.adapters().adapt_below(prefix),
            Experts::Stacked(_) => false,
        }
    }
}

/// The parameters of an expert with matrices of its own.
fn separate_experts([gate, up, down]: &[Projection; 3], pass: &ForwardPass) -> Result<Expert> {
    let weight = |linear: &Projection| linear.weight(pass).cloned();
    let expert = GatedExpert {
        adapters: [gate.adapter(pass)?, up.adapter(pass)?, down.adapter(pass)?],
        gate: weight(gate)?,
        up: weight(up)?,
        down: weight(down)?,
    };
    Ok(expert.into())
}
