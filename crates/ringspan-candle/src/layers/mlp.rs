//! The feed-forward layer without a gate.

use super::ForwardPass;
use super::projection::{LinearWithWeights, Projection};
use super::row_linear::reduced;
use super::with_bias;
use crate::activate::activate;
use crate::activation::Activation;
use crate::adapter_rows::AdapterRows;
use crate::gpu;
use crate::parameters::Scope;
use crate::shard::{ShardSpec, Split};
use crate::tiled::{RowFunction, tiled};
use candle_core::{Result, Tensor};
use std::ops::Range;

/// `down(act(up(x)))`, both with biases (Vaswani et al., 2017); with tensor parallelism, its inner width is sharded.
#[derive(Debug, Clone)]
pub struct Mlp {
    name: String,
    up: Projection,
    down: Projection,
    activation: Activation,
}

const SPLIT: Split = Split::Even("ffn_dim");

impl Mlp {
    /// Adds a weight `[width, hidden]` and a bias in the scope `up`, and a weight `[hidden, width]` and a bias in `down`.
    #[must_use]
    pub fn new(up: &Scope, down: &Scope, hidden: usize, width: usize, activation: Activation) -> Self {
        let name = up.name().to_owned();
        let up = Projection::new(up, [width, hidden], true, ShardSpec::Rows(SPLIT));
        let down = Projection::new(down, [hidden, width], true, ShardSpec::Columns(SPLIT));
        Self { name, up, down, activation }
    }

    /// x `[rows, C]` to `[rows, C]`. On the CPU, the inner width is in memory for some rows at a time.
    ///
    /// # Errors
    /// Missing parameters, failures of other ranks.
    pub fn forward(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        if pass.tokens() == 0 {
            return Ok(x.clone());
        }
        let x = pass.gather(x)?;
        let is_shared = Projection::are_shared(&[&self.up], pass)? || Projection::are_shared(&[&self.down], pass)?;
        let is_whole = gpu::holds(&x) || is_shared;
        if is_whole || pass.store().is_some_and(|store| store.stores_products()) {
            return reduced(&self.down, &activate(&self.up.forward(&x, pass)?, self.activation)?, true, pass);
        }
        let mut rows = MlpRows {
            up: self.up.load(pass)?,
            down: self.down.load(pass)?,
            activation: self.activation,
            adapter_rows: pass.adapter_rows(),
        };
        // With tensor parallelism, the bias is added once, after the sum over ranks.
        let is_whole = pass.attend().tensor_parallel().is_single_rank();
        let bias = if is_whole { None } else { rows.down.bias.take() };
        let out = match pass.store() {
            Some(store) => store.tiled(&self.name, &x, rows, true)?,
            None => tiled(&x, rows)?,
        };
        let sum = pass.reduce(&out)?;
        match bias {
            Some(bias) => with_bias(&sum, &bias),
            None => Ok(sum),
        }
    }
}

/// The layer with the values of its parameters, as a row-wise function.
#[derive(Clone)]
struct MlpRows {
    up: LinearWithWeights,
    down: LinearWithWeights,
    activation: Activation,
    adapter_rows: Option<AdapterRows>,
}

impl RowFunction for MlpRows {
    fn parameters(&mut self) -> Vec<&mut Tensor> {
        self.up.parameters().chain(self.down.parameters()).collect()
    }

    fn width(&self) -> Result<usize> {
        Ok(self.down.weight.dims()[0])
    }

    fn forward(&self, x: &Tensor, rows: Range<usize>, needs_values: bool) -> Result<Tensor> {
        let adapter_rows = self.adapter_rows.as_ref().map(|all| all.narrow(rows));
        let inner = activate(&self.up.forward(x, adapter_rows.as_ref(), true)?, self.activation)?;
        self.down.forward(&inner, adapter_rows.as_ref(), needs_values)
    }
}
