//! The experts of a sparse layer: the trait that computes them, and its implementation for a rank that holds all of them.
//!
//! Shape letters: T tokens on this rank, C hidden size, E experts, K experts a token is routed to, I width of an expert.

mod expert;
mod gated;
mod mixture;
mod on_gpu;
mod product;
mod stacked;

pub use expert::{Expert, ExpertStack, GatedExpert, StackedExpert};
pub use mixture::{SavedExperts, mixed, mixed_saving};

use crate::adapter_rows::AdapterRows;
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// Marks an expert in a routing that another rank computes.
pub const REMOTE_EXPERT: u32 = u32::MAX;

/// The result of a router: the experts of T tokens.
#[derive(Debug, Clone)]
pub struct Routing {
    /// The experts of each token `[T, K]`, row by row; [`REMOTE_EXPERT`] for an expert that another rank computes.
    pub chosen: Vec<u32>,
    /// The weights of these experts `[T, K]`, differentiable.
    pub weights: Tensor,
    /// What adapters of experts need to know of the T tokens; it is set on all ranks or on none.
    pub adapter_rows: Option<AdapterRows>,
}

/// Sums over the routed tokens, from which a load-balancing loss is computed. Those of several ranks or layers may be added.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertLoad {
    /// Number of tokens that were routed to each expert `[E]`.
    pub chosen: Vec<f64>,
    /// The router's probability of each expert, summed over tokens `[E]`.
    pub probability: Vec<f64>,
    /// Number of tokens.
    pub tokens: f64,
}

impl ExpertLoad {
    /// Adds the load of other tokens, ranks or layers; both must have equally many experts, unless `self` is empty.
    pub fn add(&mut self, other: &Self) {
        let sums = [(&mut self.chosen, &other.chosen), (&mut self.probability, &other.probability)];
        for (sum, more) in sums {
            sum.resize(sum.len().max(more.len()), 0.0);
            sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        }
        self.tokens += other.tokens;
    }
}

/// The experts, as a model calls them. The implementation decides which rank holds which experts.
///
/// All ranks call these methods in the same order, also ranks without tokens.
pub trait Experts {
    /// The weighted sum of the outputs of each token's experts: x `[T, C]` to `[T, C]`, differentiable in x, in the weights
    /// and in the parameters. `expert` returns the parameters of an expert; it need not be called for experts that another
    /// rank computes.
    ///
    /// # Errors
    /// Shapes that do not fit, what `expert` returns, and failures of other ranks.
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor>;

    /// Like [`mix`](Self::mix), for a layer that is recomputed: the first call stores products in `memory`; the second takes
    /// them out and only provides the backward pass. Nothing may read the values that the second call returns: they may be
    /// zeros. Its routing must equal that of the first. An implementation without this method, and one on a GPU, computes
    /// everything twice.
    ///
    /// # Errors
    /// As for [`mix`](Self::mix), and a routing that differs from that of the first call.
    fn mix_saving(
        &self,
        _memory: &mut SavedExperts,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.mix(layer, x, routing, expert)
    }

    /// The range of an expert's width, out of `whole`, that this rank holds. A wrapper returns the range of the experts it
    /// wraps.
    fn local_width(&self, whole: usize) -> Range<usize>;

    /// The range of a layer's `experts` that this rank holds. A wrapper returns the range of the experts it wraps.
    fn local_experts(&self, experts: usize) -> Range<usize>;

    /// Reports what the router of `layer` did with this rank's tokens. It is called once in a forward pass, and again when a
    /// layer is recomputed.
    ///
    /// # Errors
    /// Errors that the implementation detects.
    fn routed(&self, _layer: usize, _load: ExpertLoad) -> Result<()> {
        Ok(())
    }

    /// Announces that the forward pass of all layers is done and the backward pass begins, so that loads can be summed over
    /// ranks. The model has `experts` experts in each sparse layer, or 0 if it has no sparse layer.
    ///
    /// # Errors
    /// Failures of other ranks.
    fn forward_ended(&self, _experts: usize) -> Result<()> {
        Ok(())
    }

    /// Gradients of further losses, such as a load-balancing loss, with respect to the probabilities of the router of
    /// `layer`.
    fn router_gradients(&self, _layer: usize) -> Vec<RouterGradient> {
        Vec::new()
    }
}

/// All experts are computed on this rank, one after the other, each for the tokens that are routed to it.
#[derive(Debug, Clone, Copy)]
pub struct Local;

impl Experts for Local {
    fn mix(
        &self,
        _layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        mixed(x, routing, expert)
    }

    fn mix_saving(
        &self,
        memory: &mut SavedExperts,
        _layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        mixed_saving(x, routing, expert, memory)
    }

    fn local_width(&self, whole: usize) -> Range<usize> {
        0..whole
    }

    fn local_experts(&self, experts: usize) -> Range<usize> {
        0..experts
    }
}

/// Gradient of a loss with respect to each expert's probability `[E]`, equal for every token. The loss may depend on sums
/// over all layers and ranks, so it is set when the forward pass has ended, and read by the backward pass of the router.
pub type RouterGradient = Arc<OnceLock<Vec<f32>>>;

/// Returns the router's probabilities p `[T, E]` unchanged; the backward pass adds the router gradient to each token's gradient.
///
/// # Errors
/// Other types. The backward pass fails if the router gradient is not set, or has another number of experts.
pub fn with_router_gradient(p: &Tensor, router_gradient: RouterGradient) -> Result<Tensor> {
    tape::apply(AddRouterGradient { router_gradient }, [&p.contiguous()?], Reads::Nothing)
}

struct AddRouterGradient {
    router_gradient: RouterGradient,
}

impl CustomOp1 for AddRouterGradient {
    fn name(&self) -> &'static str {
        "with_router_gradient"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(crate::slices::cpu(storage, layout)?.to_vec()), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.affine(layout, 1.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, p: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        let experts = p.dims2()?.1;
        match self.router_gradient.get() {
            None => {
                bail!("the gradient of a router's loss is asked for before the forward pass of all layers has ended")
            }
            Some(router_gradient) if router_gradient.len() != experts => {
                bail!("a router gradient of {} experts does not fit a router of {experts}", router_gradient.len())
            }
            Some(router_gradient) => d.broadcast_add(&Tensor::new(router_gradient.as_slice(), d.device())?).map(Some),
        }
    }
}
