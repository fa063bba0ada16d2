//! Computes one expert for the tokens that are routed to it: its products, and the gradients of its inputs and
//! parameters.
//!
//! Shape letters: T tokens on this rank, C hidden size, K experts a token is routed to, I width of an expert, n tokens of the
//! expert.

use super::GatedExpert;
use super::product::{back_through, through};
use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::layer_adapter::LayerAdapter;
use crate::slices::values;
use crate::stored_activation::StoredActivation;
use crate::tensor_product::product_of;
use crate::weight::Weight;
use candle_core::{DType, Device, Result, Tensor};

/// One expert with its tokens, without graphs.
pub(super) struct RoutedGatedExpert {
    expert: GatedExpert,
    /// Which of gate, up and down need gradients; the matrices of adapters always do.
    trained: [bool; 3],
    /// What adapters need to know of the expert's tokens.
    adapter_rows: Option<AdapterRows>,
    /// The rows of the tokens `[n]`, and the indices of their routing weights in `[T, K]`.
    tokens: Vec<u32>,
    slots: Vec<u32>,
}

impl RoutedGatedExpert {
    /// The expert with the tokens of these `slots`, which are indices in `[T, K]`; each token has `top` of them.
    pub(super) fn new(expert: &GatedExpert, adapter_rows: Option<&AdapterRows>, slots: Vec<u32>, top: usize) -> Self {
        let tokens: Vec<u32> = slots.iter().map(|slot| slot / top as u32).collect();
        Self {
            trained: expert.weights().map(|weight| weight.dense().is_some_and(Tensor::track_op)),
            adapter_rows: adapter_rows.map(|rows| rows.of_rows(&tokens)),
            expert: expert.detach(),
            tokens,
            slots,
        }
    }

    /// The shape of its products with gate and up.
    pub(super) fn gate_up_shape(&self) -> Result<[usize; 2]> {
        Ok([self.tokens.len(), self.expert.gate.dims().first().copied().unwrap_or(0)])
    }

    /// The products of its tokens' rows of x `[T, C]` with gate and with up: `[n, I]` each.
    pub(super) fn products(&self, x: &Tensor) -> Result<[Tensor; 2]> {
        let (rows, [gate, up, _]) = (gathered(x, &self.tokens)?, self.adapters());
        let rounded = |product: Tensor| cast(&product, x.dtype());
        let (gate, up) = (self.adapted(&rows, &self.expert.gate, gate)?, self.adapted(&rows, &self.expert.up, up)?);
        Ok([rounded(gate)?, rounded(up)?])
    }

    /// Adds the expert's output, computed from [`Self::products`] and multiplied by the routing weights `factors` `[T, K]`,
    /// to `out` `[T, C]`.
    pub(super) fn add_output(&self, [gate, up]: [&Tensor; 2], factors: &[f32], out: &mut [f32]) -> Result<()> {
        let (dtype, gate, up) = (gate.dtype(), cast(gate, DType::F32)?, cast(up, DType::F32)?);
        let hidden = cast(&(gate.silu()? * up)?, dtype)?;
        let y = self.adapted(&hidden, &self.expert.down, self.adapters()[2])?;
        scatter(&y, &self.tokens, |n| factors[self.slots[n] as usize], out)
    }

    /// `x weight^T` and the contribution of the adapter, in f32.
    fn adapted(&self, x: &Tensor, weight: &Weight, adapter: Option<&LayerAdapter>) -> Result<Tensor> {
        let y = through(x, weight)?;
        match adapter {
            Some(adapter) => y + adapter.delta(x, self.adapter_rows.as_ref())?,
            None => Ok(y),
        }
    }

    fn adapters(&self) -> [Option<&LayerAdapter>; 3] {
        self.expert.adapters.each_ref().map(Option::as_ref)
    }

    /// Adds to dx `[T, C]` and to the gradient of the routing weights `[T, K]`; returns the gradients of
    /// [`GatedExpert::parameters`], in their order, with `None` for matrices that are not trained.
    pub(super) fn backward(
        &self,
        [gate, up]: [&StoredActivation; 2],
        x: &Tensor,
        factors: &[f32],
        d_out: &Tensor,
        dx: &mut [f32],
        d_factors: &mut [f32],
    ) -> Result<Vec<Option<Tensor>>> {
        let ([of_gate, of_up, of_down], adapter_rows) = (self.adapters(), self.adapter_rows.as_ref());
        let (x, d_out) = (gathered(x, &self.tokens)?, gathered(d_out, &self.tokens)?);
        let back = |adapter: Option<&LayerAdapter>, dy: &Tensor| {
            adapter.map(|it| it.trained()?.backward(dy, adapter_rows)).transpose()
        };
        // The routing weights are not included yet, so that the gradient of these weights can be computed from this product.
        let mut unscaled = back_through(&d_out, &self.expert.down)?;
        let down_back = back(of_down, &d_out)?;
        if let Some([d_hidden, _]) = &down_back {
            unscaled = (unscaled + d_hidden)?;
        }
        let (gate, up) = (cast(&gate.tensor()?, DType::F32)?, cast(&up.tensor()?, DType::F32)?);
        let [hidden, d_gate, d_up] = self.gated(&gate, &up, &unscaled, factors, d_factors)?;
        let rounded = |tensor: Tensor| cast(&tensor, x.dtype());
        let (hidden, d_gate, d_up) = (rounded(hidden)?, rounded(d_gate)?, rounded(d_up)?);
        let mut rows = (back_through(&d_gate, &self.expert.gate)? + back_through(&d_up, &self.expert.up)?)?;
        let (gate_back, up_back) = (back(of_gate, &d_gate)?, back(of_up, &d_up)?);
        for [d_rows, _] in [&gate_back, &up_back].into_iter().flatten() {
            rows = (rows + d_rows)?;
        }
        scatter(&rows, &self.tokens, |_| 1.0, dx)?;

        let pairs = [(&d_gate, &x), (&d_up, &x), (&d_out, &hidden)];
        let mut gradients = Vec::new();
        for (((dy, x), trained), weight) in pairs.iter().zip(self.trained).zip(self.expert.weights()) {
            if weight.dense().is_some() {
                gradients.push(if trained { Some(rounded(product_of(&dy.t()?, x)?)?) } else { None });
            }
        }
        for ((adapter, back), (dy, x)) in self.adapters().into_iter().zip([gate_back, up_back, down_back]).zip(pairs) {
            if let (Some(adapter), Some([_, d_narrow])) = (adapter, back) {
                gradients.extend(adapter.trained()?.d_matrices(x, dy, &d_narrow, adapter_rows)?.map(Some));
            }
        }
        Ok(gradients)
    }

    /// Returns the input of down multiplied by the routing weights, and the gradients of gate and up, `[n, I]` each.
    /// `unscaled` is the gradient of the input of down without the routing weights.
    fn gated(
        &self,
        gate: &Tensor,
        up: &Tensor,
        unscaled: &Tensor,
        factors: &[f32],
        d_factors: &mut [f32],
    ) -> Result<[Tensor; 3]> {
        let wide = gate.dim(1)?;
        let (mut hidden, mut d_gate, mut d_up) = (Vec::new(), Vec::new(), Vec::new());
        values(gate, |gate| {
            values(up, |up| {
                values(unscaled, |d| {
                    for (n, &slot) in self.slots.iter().enumerate() {
                        let row = n * wide..(n + 1) * wide;
                        let (factor, mut dot) = (factors[slot as usize], 0.0f32);
                        for ((g, u), d) in gate[row.clone()].iter().zip(&up[row.clone()]).zip(&d[row]) {
                            let s = 1.0 / (1.0 + (-g).exp());
                            let h = g * s * u;
                            dot += h * d;
                            // The output is linear in the routing weight, so the gradient of h is multiplied by it, too.
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
        Ok([tensor(hidden)?, tensor(d_gate)?, tensor(d_up)?])
    }
}

pub(super) fn gathered(x: &Tensor, tokens: &[u32]) -> Result<Tensor> {
    x.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)
}

/// Adds the rows `[n, C]`, each multiplied by its factor, to the rows of their tokens.
pub(super) fn scatter(rows: &Tensor, tokens: &[u32], factor: impl Fn(usize) -> f32, sums: &mut [f32]) -> Result<()> {
    let width = rows.dim(1)?;
    values(&rows.contiguous()?, |rows| {
        for (n, (row, &token)) in rows.chunks_exact(width.max(1)).zip(tokens).enumerate() {
            let (factor, at) = (factor(n), token as usize * width);
            sums[at..at + width].iter_mut().zip(row).for_each(|(sum, x)| *sum += factor * x);
        }
        Ok(())
    })
}
