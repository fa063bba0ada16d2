//! The experts of a sparse layer: who computes them, and how one rank computes all.
//!
//! Shape letters: T tokens at hand, C hidden size, E experts, K experts a token goes to, I width of an expert.

mod expert;
mod mixture;
mod on_gpu;
mod part;
mod product;
mod stacked;

pub use expert::{Expert, ExpertStack, GatedExpert, StackedExpert};
pub use mixture::{Memory, mixed, mixed_keeping};

use crate::dropout::Drops;
use crate::tape::{self, Reads};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// A choice that is not computed here.
pub const NOWHERE: u32 = u32::MAX;

/// Where a router sends T tokens.
#[derive(Debug, Clone)]
pub struct Routing {
    /// The experts of each token `[T, K]`; [`NOWHERE`] for a choice that another rank computes.
    pub chosen: Vec<u32>,
    /// Their weights `[T, K]`, differentiable.
    pub weights: Tensor,
    /// What is dropped of the T tokens on their way into adapters of experts, if anything is: on all ranks, or on none.
    pub drops: Option<Drops>,
}

/// What a router did with the tokens at hand, as sums: those of several ranks, or layers, may be added.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Load {
    /// Tokens that went to each expert `[E]`.
    pub chosen: Vec<f64>,
    /// The router's probability of each expert, summed over tokens `[E]`.
    pub probability: Vec<f64>,
    /// Tokens.
    pub tokens: f64,
}

impl Load {
    /// Adds that of other tokens, ranks or layers; to an empty one, of any number of experts.
    pub fn add(&mut self, other: &Self) {
        let sums = [(&mut self.chosen, &other.chosen), (&mut self.probability, &other.probability)];
        for (sum, more) in sums {
            sum.resize(sum.len().max(more.len()), 0.0);
            sum.iter_mut().zip(more).for_each(|(sum, x)| *sum += x);
        }
        self.tokens += other.tokens;
    }
}

/// The experts as a model sees them. Which rank holds which of them is the implementation's business.
///
/// All ranks call these in the same order, also those without tokens.
pub trait Experts {
    /// The sum over each token's experts of weight times output: x `[T, C]` to `[T, C]`, differentiable in x, in the
    /// weights and in the parameters. `expert` gives the parameters of an expert; it need not be asked for those that
    /// another rank computes.
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

    /// The same for a layer that is computed twice: the first call fills `memory`, the second empties it and computes nothing
    /// but the backward. Nothing may look at the values of the second: they may be zeros. It must have the routing of the
    /// first. Without this method, and on a GPU, all is computed twice.
    ///
    /// # Errors
    /// As for [`mix`](Self::mix); another routing than that of the first call.
    fn mix_keeping(
        &self,
        _memory: &mut Memory,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        self.mix(layer, x, routing, expert)
    }

    /// The part of an expert's width that is here, of `whole`. Who wraps another hands on its own.
    fn part(&self, whole: usize) -> Range<usize>;

    /// Which of a layer's `experts` are here. Who wraps another hands on its own.
    fn held(&self, experts: usize) -> Range<usize>;

    /// What the router of `layer` did with this rank's tokens; called once in a forward pass, and again where a layer
    /// is recomputed.
    ///
    /// # Errors
    /// What the implementation finds wrong.
    fn routed(&self, _layer: usize, _load: Load) -> Result<()> {
        Ok(())
    }

    /// The forward pass of all layers is done, the backward pass begins: the place to sum loads over ranks. The model
    /// has this many experts in each sparse layer; 0 if it has none.
    ///
    /// # Errors
    /// Failures of other ranks.
    fn forward_ended(&self, _experts: usize) -> Result<()> {
        Ok(())
    }

    /// Further losses of the probabilities of the router of `layer`.
    fn pressures(&self, _layer: usize) -> Vec<Pressure> {
        Vec::new()
    }
}

/// All experts on this rank, one after the other, each with the tokens that chose it.
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

    fn mix_keeping(
        &self,
        memory: &mut Memory,
        _layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        mixed_keeping(x, routing, expert, memory)
    }

    fn part(&self, whole: usize) -> Range<usize> {
        0..whole
    }

    fn held(&self, experts: usize) -> Range<usize> {
        0..experts
    }
}

/// Gradient of a loss in each expert's probability, the same for every token: `[E]`. The loss may be of sums over all
/// layers and ranks, so it is set when the forward pass has ended, and looked at when the backward comes by.
pub type Pressure = Arc<OnceLock<Vec<f32>>>;

/// Probabilities as they are, whose backward adds the pressure to each token's gradient: p `[T, E]`.
///
/// # Errors
/// Other types. The backward fails if the pressure was not set, or is of another number of experts.
pub fn pressed(p: &Tensor, pressure: Pressure) -> Result<Tensor> {
    tape::apply(Pressed { pressure }, [&p.contiguous()?], Reads::Nothing)
}

struct Pressed {
    pressure: Pressure,
}

impl CustomOp1 for Pressed {
    fn name(&self) -> &'static str {
        "pressed"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(crate::slices::cpu(storage, layout)?.to_vec()), layout.shape().clone()))
    }

    fn cuda_fwd(&self, storage: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((storage.affine(layout, 1.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, p: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        let experts = p.dims2()?.1;
        match self.pressure.get() {
            None => {
                bail!("the gradient of a router's loss is asked for before the forward pass of all layers has ended")
            }
            Some(pressure) if pressure.len() != experts => {
                bail!("a pressure on {} experts does not fit a router of {experts}", pressure.len())
            }
            Some(pressure) => d.broadcast_add(&Tensor::new(pressure.as_slice(), d.device())?).map(Some),
        }
    }
}
