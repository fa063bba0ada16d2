//! The experts of a sparse layer: who computes them, and how one rank computes all.
//!
//! Shape letters: T tokens at hand, C hidden size, E experts, K experts a token goes to, I width of an expert.

use crate::slices::values;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp3, DType, Device, Layout, Result, Shape, Tensor, bail};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// The parameters of one expert, a gated feed-forward layer without biases.
#[derive(Debug, Clone)]
pub struct Expert {
    /// `[I, C]`.
    pub gate: Tensor,
    /// `[I, C]`.
    pub up: Tensor,
    /// `[C, I]`.
    pub down: Tensor,
}

/// A choice that is not computed here.
pub const NOWHERE: u32 = u32::MAX;

/// Where a router sends T tokens.
#[derive(Debug, Clone)]
pub struct Routing {
    /// The experts of each token `[T, K]`; [`NOWHERE`] for a choice that another rank computes.
    pub chosen: Vec<u32>,
    /// Their weights `[T, K]`, differentiable.
    pub weights: Tensor,
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
}

/// As [`Experts::mix`], of experts that are all here.
///
/// Each expert's tokens are gathered once and go through three products; experts that nobody chose cost nothing, and
/// get no gradient.
///
/// # Errors
/// Shapes that do not fit, and what `expert` returns.
pub fn mixed(x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
    let ((tokens, width), (rows, top)) = (x.dims2()?, routing.weights.dims2()?);
    if rows != tokens || routing.chosen.len() != tokens * top {
        bail!("{} choices and weights {:?} do not fit {tokens} tokens", routing.chosen.len(), routing.weights.shape());
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

    let gradients = Arc::new(Mutex::new(HashMap::new()));
    let (mut out, mut parts, mut links) = (vec![0.0f32; tokens * width], Vec::new(), Vec::new());
    for (n, index) in order.iter().enumerate() {
        let Expert { gate, up, down } = expert(*index as usize)?;
        for (which, parameter) in [&gate, &up, &down].into_iter().enumerate() {
            let op = Link { gradients: gradients.clone(), key: 3 * n + which };
            links.push(parameter.contiguous()?.apply_op1(op)?);
        }
        let slots = slots.remove(index).unwrap_or_default();
        let tokens: Vec<u32> = slots.iter().map(|slot| slot / top as u32).collect();
        let part =
            Part::new(&inputs, Expert { gate: gate.detach(), up: up.detach(), down: down.detach() }, tokens, slots)?;
        part.add(&factors, &mut out)?;
        parts.push(part);
    }
    // Without tokens there is a way back all the same, since other ranks wait at its exchanges.
    let links = if links.is_empty() { Tensor::zeros(1, DType::F32, x.device())? } else { Tensor::cat(&links, 0)? };
    let op = Mixed { top, parts, gradients, out: Mutex::new(out) };
    x.apply_op3(&weights, &links, op)
}

/// One expert with its n tokens, as the backward pass needs it.
struct Part {
    expert: Expert,
    /// The tokens `[n]`, and their places in `[T, K]`.
    tokens: Vec<u32>,
    slots: Vec<u32>,
    /// Products with the gate and with up: `[n, I]`.
    gate: Tensor,
    up: Tensor,
}

impl Part {
    fn new(x: &Tensor, expert: Expert, tokens: Vec<u32>, slots: Vec<u32>) -> Result<Self> {
        let rows = gathered(x, &tokens)?;
        let (gate, up) = (rows.matmul(&expert.gate.t()?)?, rows.matmul(&expert.up.t()?)?);
        Ok(Self { expert, tokens, slots, gate, up })
    }

    /// Adds weight times output to the rows of this expert's tokens.
    fn add(&self, factors: &[f32], out: &mut [f32]) -> Result<()> {
        let hidden = (self.gate.silu()? * &self.up)?;
        let y = hidden.matmul(&self.expert.down.t()?)?;
        let factors: Vec<f32> = self.slots.iter().map(|&slot| factors[slot as usize]).collect();
        scatter(&y, &self.tokens, |n| factors[n], out)
    }

    /// Adds to dx `[T, C]` and to the weights' gradient `[T, K]`; returns the gradients of gate, up and down.
    fn backward(
        &self,
        x: &Tensor,
        factors: &[f32],
        d_out: &Tensor,
        dx: &mut [f32],
        d_factors: &mut [f32],
    ) -> Result<[Tensor; 3]> {
        let (x, d_out) = (gathered(x, &self.tokens)?, gathered(d_out, &self.tokens)?);
        let unscaled = d_out.matmul(&self.expert.down)?;
        let wide = self.gate.dim(1)?;
        let (mut hidden, mut d_gate, mut d_up) = (Vec::new(), Vec::new(), Vec::new());
        values(&self.gate, |gate| {
            values(&self.up, |up| {
                values(&unscaled, |d| {
                    for (n, &slot) in self.slots.iter().enumerate() {
                        let row = n * wide..(n + 1) * wide;
                        let (factor, mut dot) = (factors[slot as usize], 0.0f32);
                        for ((g, u), d) in gate[row.clone()].iter().zip(&up[row.clone()]).zip(&d[row]) {
                            let s = 1.0 / (1.0 + (-g).exp());
                            let h = g * s * u;
                            dot += h * d;
                            // The output is h times the factor, so is what h gets back.
                            hidden.push(h * factor);
                            d_gate.push(d * factor * u * s * (1.0 + g * (1.0 - s)));
                            d_up.push(d * factor * g * s);
                        }
                        d_factors[slot as usize] += dot;
                    }
                    Ok(())
                })
            })
        })?;
        let tensor = |values| Tensor::from_vec(values, (self.slots.len(), wide), &Device::Cpu);
        let (hidden, d_gate, d_up) = (tensor(hidden)?, tensor(d_gate)?, tensor(d_up)?);
        let rows = (d_gate.matmul(&self.expert.gate)? + d_up.matmul(&self.expert.up)?)?;
        scatter(&rows, &self.tokens, |_| 1.0, dx)?;
        Ok([d_gate.t()?.matmul(&x)?, d_up.t()?.matmul(&x)?, d_out.t()?.matmul(&hidden)?])
    }
}

fn gathered(x: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)
}

/// Adds the rows `[n, C]`, each times its factor, to those of their tokens.
fn scatter(rows: &Tensor, tokens: &[u32], factor: impl Fn(usize) -> f32, sums: &mut [f32]) -> Result<()> {
    let width = rows.dim(1)?;
    values(&rows.contiguous()?, |rows| {
        for (n, (row, &token)) in rows.chunks_exact(width.max(1)).zip(tokens).enumerate() {
            let (factor, at) = (factor(n), token as usize * width);
            sums[at..at + width].iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
        }
        Ok(())
    })
}

/// The mixture as one operation of x `[T, C]`, the weights `[T, K]` and the links of all parameters.
///
/// A candle operation has three arguments, and a layer has hundreds of matrices. Each of them is linked by one element:
/// the backward pass of this operation comes first and leaves the gradients in `gradients`, where the links find them.
struct Mixed {
    top: usize,
    parts: Vec<Part>,
    gradients: Gradients,
    out: Mutex<Vec<f32>>,
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
        for (n, part) in self.parts.iter().enumerate() {
            let of_part = part.backward(x, &factors, &d_out, &mut dx, &mut d_factors)?;
            locked(&self.gradients).extend(of_part.into_iter().enumerate().map(|(which, d)| (3 * n + which, d)));
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

/// Gradient of a loss in each expert's probability, the same for every token: `[E]`. The loss may be of sums over all
/// layers and ranks, so it is set when the forward pass has ended, and looked at when the backward comes by.
pub type Pressure = Arc<OnceLock<Vec<f32>>>;

/// Probabilities as they are, whose backward adds the pressure to each token's gradient: p `[T, E]`.
///
/// # Errors
/// Other types. The backward fails if the pressure was not set, or is of another number of experts.
pub fn pressed(p: &Tensor, pressure: Pressure) -> Result<Tensor> {
    p.contiguous()?.apply_op1(Pressed { pressure })
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

    fn bwd(&self, p: &Tensor, _: &Tensor, d: &Tensor) -> Result<Option<Tensor>> {
        let experts = p.dims2()?.1;
        match self.pressure.get() {
            None => {
                bail!("the gradient of a router's loss is asked for before the forward pass of all layers has ended")
            }
            Some(pressure) if pressure.len() != experts => {
                bail!("a pressure on {} experts does not fit a router of {experts}", pressure.len())
            }
            Some(pressure) => d.broadcast_add(&Tensor::new(pressure.as_slice(), &Device::Cpu)?).map(Some),
        }
    }
}
