//! Computes one expert of a stack for the tokens that are routed to it: its products, and the gradients of its inputs
//! and parameters.
//!
//! Shape letters: T tokens on this rank, C hidden size, K experts a token is routed to, I width of an expert, n tokens of the
//! expert, e experts of the stack.

use super::gated::{gathered, scatter};
use super::product::{back_through_one, through_one};
use super::{ExpertStack, StackedExpert};
use crate::cast::cast;
use crate::slices::values;
use crate::stored_activation::StoredActivation;
use crate::tensor_product::product_of;
use candle_core::{DType, Device, Result, Tensor};

/// One expert with its tokens, without graphs.
pub(super) struct RoutedStackedExpert {
    stack: ExpertStack,
    index: usize,
    /// Which of the stack's tensors need gradients.
    trained: [bool; 4],
    /// The rows of the tokens `[n]`, and the indices of their routing weights in `[T, K]`.
    tokens: Vec<u32>,
    slots: Vec<u32>,
}

/// Gradients of the trained tensors of a stack, in f32 until those of all experts are known.
pub(super) struct StackGradients {
    sums: [Option<Vec<f32>>; 4],
    /// Shape and type of each dense tensor of the stack.
    dense: [Option<(Vec<usize>, DType)>; 4],
}

impl StackGradients {
    /// Sets the gradient of one expert's slice of a tensor.
    fn set(&mut self, which: usize, expert: usize, gradient: &Tensor) -> Result<()> {
        let Some(sum) = &mut self.sums[which] else { return Ok(()) };
        let len = gradient.elem_count();
        values(&gradient.contiguous()?, |gradient| {
            sum[expert * len..(expert + 1) * len].copy_from_slice(gradient);
            Ok(())
        })
    }

    /// The gradients of the dense tensors, in the order of [`ExpertStack::parameters`].
    pub(super) fn tensors(self) -> Result<Vec<Option<Tensor>>> {
        let dense = self.sums.into_iter().zip(self.dense).filter_map(|(sum, dense)| Some((sum, dense?)));
        let tensor = |(sum, (shape, dtype)): (Option<Vec<f32>>, (Vec<usize>, DType))| {
            sum.map(|sum| cast(&Tensor::from_vec(sum, shape, &Device::Cpu)?, dtype)).transpose()
        };
        dense.map(tensor).collect()
    }
}

impl RoutedStackedExpert {
    /// The expert with the tokens of these `slots`, which are indices in `[T, K]`; each token has `top` of them.
    pub(super) fn new(expert: &StackedExpert, slots: Vec<u32>, top: usize) -> Self {
        Self {
            stack: expert.stack.detach(),
            index: expert.index,
            trained: expert.stack.parameters().map(|tensor| tensor.is_some_and(Tensor::track_op)),
            tokens: slots.iter().map(|slot| slot / top as u32).collect(),
            slots,
        }
    }

    /// Zeros for the gradients of the whole stack.
    pub(super) fn gradients(&self) -> StackGradients {
        let parameters = self.stack.parameters();
        let mut trained = self.trained.into_iter();
        let zeros = |tensor: Option<&Tensor>| {
            let trains = trained.next().unwrap_or(false);
            tensor.filter(|_| trains).map(|tensor| vec![0.0; tensor.elem_count()])
        };
        let dense = parameters.map(|tensor| tensor.map(|tensor| (tensor.dims().to_vec(), tensor.dtype())));
        StackGradients { sums: parameters.map(zeros), dense }
    }

    /// The shape of its product with gate and up.
    pub(super) fn gate_up_shape(&self) -> Result<[usize; 2]> {
        Ok([self.tokens.len(), self.stack.gate_up_bias.dim(1)?])
    }

    /// The product of its tokens' rows of x `[T, C]` with gate and up: `[n, 2 I]`.
    pub(super) fn product(&self, x: &Tensor) -> Result<Tensor> {
        let ExpertStack { gate_up, gate_up_bias, .. } = &self.stack;
        let product = through_one(&gathered(x, &self.tokens)?, gate_up, self.index)?;
        cast(&product.broadcast_add(&to_f32(&gate_up_bias.get(self.index)?)?)?, x.dtype())
    }

    /// Adds the expert's output, computed from [`Self::product`] and multiplied by the routing weights `factors` `[T, K]`, to
    /// `out` `[T, C]`.
    pub(super) fn add_output(&self, gate_up: &Tensor, factors: &[f32], out: &mut [f32]) -> Result<()> {
        let ExpertStack { down, down_bias, activation, adds_down_bias, .. } = &self.stack;
        let (rows, width) = gate_up.dims2()?;
        let hidden =
            values(&to_f32(gate_up)?, |all| Ok(pairs(all).map(|(gate, up)| activation.value(gate, up)).collect()))?;
        let hidden: Tensor = Tensor::from_vec::<_, f32>(hidden, (rows, width / 2), &Device::Cpu)?;
        let mut y = through_one(&hidden, down, self.index)?;
        if *adds_down_bias {
            y = y.broadcast_add(&to_f32(&down_bias.get(self.index)?)?)?;
        }
        scatter(&y, &self.tokens, |n| factors[self.slots[n] as usize], out)
    }

    /// Adds to dx `[T, C]` and to the gradient of the routing weights `[T, K]`, and sets the expert's slice of the stack's
    /// gradients.
    pub(super) fn backward(
        &self,
        gate_up: &StoredActivation,
        x: &Tensor,
        factors: &[f32],
        d_out: &Tensor,
        (dx, d_factors): (&mut [f32], &mut [f32]),
        gradients: &mut StackGradients,
    ) -> Result<()> {
        let ExpertStack { gate_up: of_gate_up, down, down_bias, adds_down_bias, .. } = &self.stack;
        let (x, d_out) = (gathered(x, &self.tokens)?, gathered(d_out, &self.tokens)?);
        // The routing weights are not included yet, so that the gradient of these weights can be computed from this product.
        let unscaled = back_through_one(&d_out, down, self.index)?;
        let [hidden, d_gate_up] = self.activated(&to_f32(&gate_up.tensor()?)?, &unscaled, factors, d_factors)?;
        scatter(&back_through_one(&d_gate_up, of_gate_up, self.index)?, &self.tokens, |_| 1.0, dx)?;
        // Products for the gradients of frozen tensors are skipped.
        let [trains_gate_up, trains_bias, trains_down, _] = self.trained;
        if trains_gate_up {
            gradients.set(0, self.index, &product_of(&x.t()?, &d_gate_up)?)?;
        }
        if trains_bias {
            gradients.set(1, self.index, &d_gate_up.sum(0)?)?;
        }
        if trains_down {
            gradients.set(2, self.index, &product_of(&hidden.t()?, &d_out)?)?;
        }
        if *adds_down_bias {
            let own: Vec<f32> = self.slots.iter().map(|slot| factors[*slot as usize]).collect();
            let own = Tensor::from_vec(own, (1, self.slots.len()), &Device::Cpu)?;
            // These small products are computed in f32.
            let d_out = to_f32(&d_out)?;
            gradients.set(3, self.index, &own.matmul(&d_out)?)?;
            let bias = to_f32(&down_bias.get(self.index)?)?.unsqueeze(1)?;
            let of_bias = d_out.matmul(&bias)?.flatten_all()?.to_vec1::<f32>()?;
            self.slots.iter().zip(of_bias).for_each(|(slot, d)| d_factors[*slot as usize] += d);
        }
        Ok(())
    }

    /// Returns the input of down `[n, I]`, multiplied by the routing weights, and the gradient of gate and up, `[n, 2 I]`.
    /// `unscaled` is the gradient of the input of down without the routing weights.
    fn activated(
        &self,
        gate_up: &Tensor,
        unscaled: &Tensor,
        factors: &[f32],
        d_factors: &mut [f32],
    ) -> Result<[Tensor; 2]> {
        let (activation, wide) = (self.stack.activation, unscaled.dim(1)?.max(1));
        let (mut hidden, mut d_gate_up) = (Vec::new(), Vec::new());
        values(gate_up, |gate_up| {
            values(unscaled, |d| {
                let rows = gate_up.chunks_exact(2 * wide).zip(d.chunks_exact(wide));
                for ((gate_up, d), &slot) in rows.zip(&self.slots) {
                    let (factor, mut dot) = (factors[slot as usize], 0.0f32);
                    for ((gate, up), d) in pairs(gate_up).zip(d) {
                        let (h, d_gate, d_up) = activation.with_slopes(gate, up);
                        dot += h * d;
                        hidden.push(h * factor);
                        d_gate_up.extend([d * factor * d_gate, d * factor * d_up]);
                    }
                    d_factors[slot as usize] += dot;
                }
                Ok(())
            })
        })?;
        let tensor = |values, wide| Tensor::from_vec(values, (self.slots.len(), wide), &Device::Cpu);
        Ok([tensor(hidden, wide)?, tensor(d_gate_up, 2 * wide)?])
    }
}

fn to_f32(tensor: &Tensor) -> Result<Tensor> {
    cast(tensor, DType::F32)
}

/// Pairs of gate and up, which alternate in memory.
fn pairs(gate_up: &[f32]) -> impl Iterator<Item = (f32, f32)> {
    let (pairs, _) = gate_up.as_chunks::<2>();
    pairs.iter().map(|&[gate, up]| (gate, up))
}
