//! A mixture of experts that are all on this rank, as one operation with a backward pass.
//!
//! Shape letters: T tokens on this rank, C hidden size, K experts a token is routed to, I width of an expert, n tokens routed
//! to one expert.

use super::gated::RoutedGatedExpert;
use super::stacked::RoutedStackedExpert;
use super::{Expert, REMOTE_EXPERT, Routing, on_gpu};
use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::extra_parameters::{ExtraGradients, ExtraParameters};
use crate::stored_activation::{Storage, StoredActivation};
use crate::tape::{self, Reads};
use crate::{gpu, number};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

/// Holds the products of one layer's mixture between its first computation and its recomputation.
#[derive(Debug, Default)]
pub struct SavedExperts {
    storage: Storage,
    /// For each expert with tokens, in ascending order, its stored products; empty on a GPU, which stores none.
    stored: Option<Vec<Products>>,
}

impl SavedExperts {
    /// A layer whose mixture is not computed yet.
    #[must_use]
    pub fn new(storage: Storage) -> Self {
        Self { storage, stored: None }
    }

    /// Whether the next call would compute the mixture and store its products.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stored.is_none()
    }
}

/// Like [`Experts::mix`](super::Experts::mix), for experts that are all on this rank.
///
/// In bf16, the outputs of a token's experts are weighted and added in f32, and rounded once.
///
/// Each expert's tokens are gathered once and go through three products. Experts without tokens cost nothing and have no
/// gradient.
///
/// # Errors
/// Shapes that do not fit, and what `expert` returns.
pub fn mixed(x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
    mixed_saving(x, routing, expert, &mut SavedExperts::default())
}

/// Like [`mixed`], for a layer that is recomputed, as [`Experts::mix_saving`](super::Experts::mix_saving) describes: if
/// `memory` is empty, the products with gate and up, 2 I numbers for each chosen expert of a token, are stored there.
/// Otherwise they are taken out, and the result is zeros. On a GPU nothing is stored, and everything is computed twice.
///
/// # Errors
/// As for [`mixed`], and products that were stored with another routing.
pub fn mixed_saving(
    x: &Tensor,
    routing: &Routing,
    expert: &dyn Fn(usize) -> Result<Expert>,
    memory: &mut SavedExperts,
) -> Result<Tensor> {
    let ((tokens, width), (rows, top)) = (x.dims2()?, routing.weights.dims2()?);
    if rows != tokens || routing.chosen.len() != tokens * top {
        bail!("{} choices and weights {:?} do not fit {tokens} tokens", routing.chosen.len(), routing.weights.shape());
    }
    if let Some(numbers) = routing.adapter_rows.as_ref().map(AdapterRows::len).filter(|n| *n != tokens) {
        bail!("what adapters know of {numbers} tokens does not fit {tokens}");
    }
    if gpu::holds(x) {
        // The gradient of a routing weight is computed from the expert's output, which a GPU does not store. The memory is
        // marked as filled all the same: ranks must agree whether this is a recomputation, since outputs are not sent back in
        // that case.
        memory.stored = memory.is_empty().then(Vec::new);
        if routing.chosen.iter().all(|chosen| *chosen == REMOTE_EXPERT) {
            return nothing_mixed(x, routing, expert);
        }
        return on_gpu::mixed(x, routing, expert);
    }
    let (x, weights) = (x.contiguous()?, routing.weights.contiguous()?);
    let (inputs, factors) = (x.detach(), weights.detach().flatten_all()?.to_vec1::<f32>()?);
    let mut slots: HashMap<u32, Vec<u32>> = HashMap::new();
    for (slot, &chosen) in routing.chosen.iter().enumerate() {
        if chosen != REMOTE_EXPERT {
            slots.entry(chosen).or_default().push(slot as u32);
        }
    }
    let mut order: Vec<u32> = slots.keys().copied().collect();
    order.sort_unstable();

    let known = memory.stored.take();
    if let Some(stored) = known.as_ref().map(Vec::len).filter(|stored| *stored != order.len()) {
        bail!(
            "the forward pass stored products of {stored} experts, but the backward pass routes tokens to {}",
            order.len()
        );
    }
    let first = known.is_none();
    let mut known = known.into_iter().flatten();
    let (mut out, mut parts, mut extra) = (vec![0.0f32; tokens * width], Vec::new(), ExtraParameters::default());
    let mut stack_tied = None;
    for index in order {
        let (expert, slots) = (expert(index as usize)?, slots.remove(&index).unwrap_or_default());
        let first_parameter = match (&expert, stack_tied) {
            (Expert::Stacked(_), Some(first_parameter)) => first_parameter,
            _ => extra.len(),
        };
        let part = match &expert {
            Expert::Gated(expert) => {
                expert.parameters().try_for_each(|parameter| extra.tie(parameter))?;
                let part = RoutedGatedExpert::new(expert, routing.adapter_rows.as_ref(), slots, top);
                RoutedExpert::Gated(Box::new(part))
            }
            Expert::Stacked(expert) => {
                // All experts of a stack share the same parameters, which are tied to the graph once.
                if stack_tied.is_none() {
                    stack_tied = Some(first_parameter);
                    for parameter in expert.stack.parameters().into_iter().flatten() {
                        extra.tie(parameter)?;
                    }
                }
                RoutedExpert::Stacked(Box::new(RoutedStackedExpert::new(expert, slots, top)))
            }
        };
        let products = match known.next() {
            Some(products) => products.of(part.gate_up_shape()?)?,
            None => part.compute(&inputs, &factors, &mut out, memory.storage)?,
        };
        parts.push(TiedExpert { part, products, first_parameter });
    }
    if first {
        memory.stored = Some(parts.iter().map(|linked| linked.products.clone()).collect());
    }
    // A rank without tokens needs a backward pass, too, since other ranks wait for it in their collectives.
    let (extra, gradients) = extra.argument()?;
    let op = Mixed { top, parts, gradients, out: Mutex::new(out) };
    tape::apply(op, [&x, &weights, &extra], Reads::Inputs)
}

/// Returns zeros, on a GPU of a rank without any chosen expert. There is nothing to compute, but x and the weights need
/// a backward pass: other ranks may wait for this one in its collectives. The CPU's operation has one.
fn nothing_mixed(x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
    let host = |tensor: &Tensor| cast(tensor, DType::F32)?.to_device(&Device::Cpu);
    let on_cpu = Routing { weights: host(&routing.weights)?, ..routing.clone() };
    cast(&mixed(&host(x)?, &on_cpu, expert)?.to_device(x.device())?, x.dtype())
}

/// The mixture as one operation of x `[T, C]`, the weights `[T, K]` and the extra tensor that ties all parameters to the graph.
struct Mixed {
    top: usize,
    parts: Vec<TiedExpert>,
    gradients: ExtraGradients,
    out: Mutex<Vec<f32>>,
}

/// An expert with its tokens, the stored products that its backward pass reads, and the number of its first parameter among
/// those that the extra tensor ties.
struct TiedExpert {
    part: RoutedExpert,
    products: Products,
    first_parameter: usize,
}

/// An expert with the tokens that were routed to it.
enum RoutedExpert {
    Gated(Box<RoutedGatedExpert>),
    Stacked(Box<RoutedStackedExpert>),
}

/// The products of one expert's tokens with its gate and up, `[n, I]` each, or with both in one matrix, `[n, 2 I]`, stored
/// for the backward pass.
#[derive(Debug, Clone)]
struct Products(Vec<StoredActivation>);

impl Products {
    /// Returns `self`, or an error if a product has another shape.
    fn of(self, shape: [usize; 2]) -> Result<Self> {
        match self.0.iter().find(|product| product.dims() != shape) {
            Some(other) => {
                bail!(
                    "the forward pass stored products {:?} of an expert, but in the backward pass they have the shape {shape:?}",
                    other.dims()
                )
            }
            None => Ok(self),
        }
    }
}

impl RoutedExpert {
    /// The shape of each of the expert's products.
    fn gate_up_shape(&self) -> Result<[usize; 2]> {
        match self {
            Self::Gated(part) => part.gate_up_shape(),
            Self::Stacked(part) => part.gate_up_shape(),
        }
    }

    /// Adds the expert's output for its tokens among x `[T, C]`, multiplied by the routing weights `factors` `[T, K]`, to
    /// `out` `[T, C]`.
    fn compute(&self, x: &Tensor, factors: &[f32], out: &mut [f32], storage: Storage) -> Result<Products> {
        let products = match self {
            Self::Gated(part) => {
                let [gate, up] = part.products(x)?;
                part.add_output([&gate, &up], factors, out)?;
                vec![gate, up]
            }
            Self::Stacked(part) => {
                let both = part.product(x)?;
                part.add_output(&both, factors, out)?;
                vec![both]
            }
        };
        Ok(Products(products.iter().map(|product| StoredActivation::new(product, storage)).collect::<Result<_>>()?))
    }
}

impl CustomOp3 for Mixed {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_at: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((
            number::storage(std::mem::take(&mut self.out.lock().unwrap_or_else(PoisonError::into_inner)), x.dtype())?,
            x_at.shape().clone(),
        ))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        extra: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Detached, since gradients and their sums would otherwise keep the graphs of x and weights alive.
        let (x, weights) = (&x.detach(), &weights.detach());
        let (tokens, width) = x.dims2()?;
        let factors = weights.flatten_all()?.to_vec1::<f32>()?;
        let d_out = d_out.contiguous()?;
        let (mut dx, mut d_factors) = (vec![0.0; tokens * width], vec![0.0; tokens * self.top]);
        let leave = |first_parameter: usize, gradients: Vec<Option<Tensor>>| {
            let known = (first_parameter..).zip(gradients).filter_map(|(number, gradient)| Some((number, gradient?)));
            known.for_each(|(number, gradient)| self.gradients.leave(number, gradient));
        };
        let mut of_stack = None;
        for TiedExpert { part, products, first_parameter } in &self.parts {
            match (part, &products.0[..]) {
                (RoutedExpert::Gated(part), [gate, up]) => {
                    let of_part = part.backward([gate, up], x, &factors, &d_out, &mut dx, &mut d_factors)?;
                    leave(*first_parameter, of_part);
                }
                (RoutedExpert::Stacked(part), [both]) => {
                    let (_, gradients) = of_stack.get_or_insert_with(|| (*first_parameter, part.gradients()));
                    part.backward(both, x, &factors, &d_out, (&mut dx, &mut d_factors), gradients)?;
                }
                (_, products) => bail!("an expert has {} products that wait for its backward", products.len()),
            }
        }
        if let Some((first_parameter, gradients)) = of_stack {
            leave(first_parameter, gradients.tensors()?);
        }
        let tensor = |values, like: &Tensor| number::tensor(values, like.dtype(), like).map(Some);
        Ok((tensor(dx, x)?, tensor(d_factors, weights)?, Some(extra.zeros_like()?)))
    }
}
