//! A mixture of experts that are all on this rank, as one operation with a backward.
//!
//! Shape letters: T tokens at hand, C hidden size, K experts a token goes to, I width of an expert, n tokens of one expert.

use super::part::{Part, Wide};
use super::{Expert, NOWHERE, Routing, on_gpu};
use crate::gpu;
use crate::kept::{Kept, Storage};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a mixture looks for what it computed before, and leaves what it computes.
#[derive(Debug, Default)]
pub struct Memory {
    storage: Storage,
    /// Of each expert with tokens, in their order; none of a GPU.
    kept: Option<Vec<Wide>>,
}

impl Memory {
    /// An empty one.
    #[must_use]
    pub fn new(storage: Storage) -> Self {
        Self { storage, kept: None }
    }

    /// Whether the mixture would be computed, and kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_none()
    }
}

/// As [`Experts::mix`](super::Experts::mix), of experts that are all here.
///
/// Each expert's tokens are gathered once and go through three products; experts that nobody chose cost nothing, and
/// get no gradient.
///
/// # Errors
/// Shapes that do not fit, and what `expert` returns.
pub fn mixed(x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
    mixed_keeping(x, routing, expert, &mut Memory::default())
}

/// The same with a memory, as [`Experts::mix_keeping`](super::Experts::mix_keeping): products with gate and up, 2 I
/// numbers for each choice, are put into an empty `memory`; those found there are taken out, and the result is zeros. On a
/// GPU none are put there, and all is computed twice.
///
/// # Errors
/// As for [`mixed`]; a memory of other choices.
pub fn mixed_keeping(
    x: &Tensor,
    routing: &Routing,
    expert: &dyn Fn(usize) -> Result<Expert>,
    memory: &mut Memory,
) -> Result<Tensor> {
    let ((tokens, width), (rows, top)) = (x.dims2()?, routing.weights.dims2()?);
    if rows != tokens || routing.chosen.len() != tokens * top {
        bail!("{} choices and weights {:?} do not fit {tokens} tokens", routing.chosen.len(), routing.weights.shape());
    }
    if let Some(numbers) = routing.drops.as_ref().map(|drops| drops.tokens().len()).filter(|n| *n != tokens) {
        bail!("what is dropped of {numbers} tokens does not fit {tokens}");
    }
    if gpu::holds(x) {
        // The gradient of a choice's weight is made there of the expert's output, which is not kept. That there was a first
        // time is remembered all the same, or ranks would not agree whether results travel back.
        memory.kept = memory.is_empty().then(Vec::new);
        return on_gpu::mixed(x, routing, expert);
    }
    let (x, weights) = (x.contiguous()?, routing.weights.contiguous()?);
    let (inputs, factors) = (x.detach(), weights.detach().flatten_all()?.to_vec1::<f32>()?);
    let mut slots: HashMap<u32, Vec<u32>> = HashMap::new();
    for (slot, &chosen) in routing.chosen.iter().enumerate() {
        if chosen != NOWHERE {
            slots.entry(chosen).or_default().push(slot as u32);
        }
    }
    let mut order: Vec<u32> = slots.keys().copied().collect();
    order.sort_unstable();

    let known = memory.kept.take();
    if let Some(kept) = known.as_ref().map(Vec::len).filter(|kept| *kept != order.len()) {
        bail!("a mixture kept products of {kept} experts, and now tokens go to {}", order.len());
    }
    let first = known.is_none();
    let mut known = known.into_iter().flatten();
    let gradients = Arc::new(Mutex::new(HashMap::new()));
    let (mut out, mut parts, mut links) = (vec![0.0f32; tokens * width], Vec::new(), Vec::new());
    for index in order {
        let expert = expert(index as usize)?;
        let first_link = links.len();
        for parameter in expert.parameters() {
            let op = Link { gradients: gradients.clone(), key: links.len() };
            links.push(parameter.contiguous()?.apply_op1(op)?);
        }
        let slots = slots.remove(&index).unwrap_or_default();
        let part = Part::new(&expert, routing.drops.as_ref(), slots, top);
        let wide = match known.next() {
            Some(wide) => wide.of(part.wide()?)?,
            None => {
                let [gate, up] = part.products(&inputs)?;
                part.add_output([&gate, &up], &factors, &mut out)?;
                Wide { gate: Kept::new(&gate, memory.storage)?, up: Kept::new(&up, memory.storage)? }
            }
        };
        parts.push(Linked { part, wide, first_link });
    }
    if first {
        memory.kept = Some(parts.iter().map(|linked| linked.wide.clone()).collect());
    }
    // Without tokens there is a way back all the same, since other ranks wait at its exchanges.
    let links = if links.is_empty() { Tensor::zeros(1, DType::F32, x.device())? } else { Tensor::cat(&links, 0)? };
    let op = Mixed { top, parts, gradients, out: Mutex::new(out) };
    x.apply_op3(&weights, &links, op)
}

/// The mixture as one operation of x `[T, C]`, the weights `[T, K]` and the links of all parameters.
///
/// A candle operation has three arguments, and a layer has hundreds of matrices. Each of them is linked by one element:
/// the backward pass of this operation comes first and leaves the gradients in `gradients`, where the links find them.
struct Mixed {
    top: usize,
    parts: Vec<Linked>,
    gradients: Gradients,
    out: Mutex<Vec<f32>>,
}

/// An expert with tokens, what its backward needs, and the number of its first parameter among the links.
struct Linked {
    part: Part,
    wide: Wide,
    first_link: usize,
}

/// Of the parameters that were linked, by number.
type Gradients = Arc<Mutex<HashMap<usize, Tensor>>>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CustomOp3 for Mixed {
    fn name(&self) -> &'static str {
        "experts"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        x_at: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(std::mem::take(&mut locked(&self.out))), x_at.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weights: &Tensor,
        links: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // Of a tensor with a graph, every gradient would hold what it was made of, and so would each sum with it.
        let (x, weights) = (&x.detach(), &weights.detach());
        let (tokens, width) = x.dims2()?;
        let factors = weights.flatten_all()?.to_vec1::<f32>()?;
        let d_out = d_out.contiguous()?;
        let (mut dx, mut d_factors) = (vec![0.0; tokens * width], vec![0.0; tokens * self.top]);
        for Linked { part, wide, first_link } in &self.parts {
            let of_part = part.backward(wide, x, &factors, &d_out, &mut dx, &mut d_factors)?;
            locked(&self.gradients).extend((*first_link..).zip(of_part).filter_map(|(key, d)| Some((key, d?))));
        }
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(dx, x)?, tensor(d_factors, weights)?, Some(links.zeros_like()?)))
    }
}

/// Takes a parameter into the graph as one element, and gives it its gradient.
struct Link {
    gradients: Gradients,
    key: usize,
}

impl CustomOp1 for Link {
    fn name(&self) -> &'static str {
        "expert-link"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        if storage.dtype() != DType::F32 {
            bail!("experts compute in {:?}, given {:?}", DType::F32, storage.dtype());
        }
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(locked(&self.gradients).remove(&self.key))
    }
}
