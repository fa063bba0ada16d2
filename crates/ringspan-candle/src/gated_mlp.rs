//! A gated feed-forward layer as one operation with a backward, tile by tile over the tokens.
//!
//! Shape letters: T tokens, C hidden size, W intermediate size. No tensor of T x W ever exists: forward and backward
//! hold those of a tile, and the backward computes the tile's gate and up again.

use crate::activation::Activation;
use crate::matmul::{Into, Matrix, product};
use crate::pool;
use crate::slices::{cpu, values};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

/// Tokens of a tile: enough that packing the weights for it costs little (of 512 x 1536, about 3 % of its products).
pub const TILE: usize = 1024;

/// `(act(x gate^T) * (x up^T)) down^T`: x `[T, C]`, gate and up `[W, C]`, down `[C, W]` to `[T, C]`, f32.
///
/// # Errors
/// Other types and shapes.
pub fn gated_mlp(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor, activation: Activation) -> Result<Tensor> {
    let ((_, hidden), (wide, gate_hidden)) = (x.dims2()?, gate.dims2()?);
    if gate_hidden != hidden || up.dims() != gate.dims() || down.dims() != [hidden, wide] {
        let shapes = [gate, up, down].map(|weight| weight.dims().to_vec());
        bail!("a gated layer of {:?} with gate, up and down {shapes:?}: the shapes do not fit", x.shape());
    }
    let [x, gate, up, down] = [x, gate, up, down].map(Tensor::contiguous);
    let (x, gate, up, down) = (x?, gate?, up?, down?);
    let share = Arc::new(Mutex::new(None));
    let inputs = x.apply_op3(&gate, &up, Inputs { share: share.clone() })?;
    // What the layer reads must not refer to the graph: the graph refers to the layer.
    let op = GatedMlp { x: x.detach(), gate: gate.detach(), up: up.detach(), activation, share };
    inputs.apply_op2(&down, op)
}

/// Gradients of x, gate and up, on their way from [`GatedMlp`] to [`Inputs`].
type Share = Arc<Mutex<Option<[Tensor; 3]>>>;

/// The first three of the layer's four inputs: candle gives an operation at most three. Its output is a mark without
/// meaning, which ties them into the graph before [`GatedMlp`].
struct Inputs {
    share: Share,
}

impl CustomOp3 for Inputs {
    fn name(&self) -> &'static str {
        "inputs of a gated layer"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), Shape::from(1)))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        match self.share.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some([dx, d_gate, d_up]) => Ok((Some(dx), Some(d_gate), Some(d_up))),
            None => bail!("the backward of a gated layer ran twice"),
        }
    }
}

/// The layer: of the mark, and of down.
struct GatedMlp {
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    share: Share,
}

/// Slices of what both passes read.
struct Layer<'a> {
    x: Matrix<'a>,
    gate: Matrix<'a>,
    up: Matrix<'a>,
    down: Matrix<'a>,
    tokens: usize,
    hidden: usize,
    wide: usize,
}

impl GatedMlp {
    fn with_layer<T>(&self, down: &[f32], f: impl FnOnce(Layer) -> Result<T>) -> Result<T> {
        let ((tokens, hidden), wide) = (self.x.dims2()?, self.gate.dim(0)?);
        values(&self.x, |x| {
            values(&self.gate, |gate| {
                values(&self.up, |up| {
                    f(Layer {
                        x: Matrix::new(x, tokens, hidden),
                        gate: Matrix::new(gate, wide, hidden),
                        up: Matrix::new(up, wide, hidden),
                        down: Matrix::new(down, hidden, wide),
                        tokens,
                        hidden,
                        wide,
                    })
                })
            })
        })
    }
}

impl Layer<'_> {
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> {
        let tokens = self.tokens;
        (0..tokens.div_ceil(TILE)).map(move |tile| tile * TILE..tokens.min((tile + 1) * TILE))
    }

    /// Buffers of a tile, `[TILE, W]` each.
    fn buffers<const N: usize>(&self) -> [Vec<f32>; N] {
        std::array::from_fn(|_| vec![0.0; TILE.min(self.tokens) * self.wide])
    }

    fn gate_and_up(&self, tile: &Range<usize>, gate: &mut [f32], up: &mut [f32]) {
        let x = self.x.rows(tile.clone());
        product(x, self.gate.t(), gate, Into::Fresh);
        product(x, self.up.t(), up, Into::Fresh);
    }

    fn forward(&self, activation: Activation) -> Vec<f32> {
        let mut out = vec![0.0; self.tokens * self.hidden];
        let [mut gate, mut up] = self.buffers();
        for tile in self.tiles() {
            let size = tile.len() * self.wide;
            let (gate, up) = (&mut gate[..size], &mut up[..size]);
            self.gate_and_up(&tile, gate, up);
            let part = pool::part(size, 1);
            let parts = gate.chunks_mut(part).zip(up.chunks(part)).collect();
            pool::map(parts, |(gate, up): (&mut [f32], &[f32])| activation.gate_in_place(gate, up));
            let out = &mut out[tile.start * self.hidden..tile.end * self.hidden];
            product(Matrix::new(gate, tile.len(), self.wide), self.down.t(), out, Into::Fresh);
        }
        out
    }

    /// Gradients of x, gate, up, down for that of the output.
    fn backward(&self, activation: Activation, d_out: Matrix) -> [Vec<f32>; 4] {
        let weights = self.wide * self.hidden;
        let mut dx = vec![0.0; self.tokens * self.hidden];
        let [mut d_gate, mut d_up, mut d_down] = std::array::from_fn(|_| vec![0.0; weights]);
        let [mut gate, mut up, mut product_] = self.buffers();
        for tile in self.tiles() {
            let (rows, size) = (tile.len(), tile.len() * self.wide);
            let (gate, up, d) = (&mut gate[..size], &mut up[..size], &mut product_[..size]);
            self.gate_and_up(&tile, gate, up);
            let dy = d_out.rows(tile.clone());
            product(dy, self.down, d, Into::Fresh);
            // From gate, up and the product's gradient to theirs and the product, each where another was.
            let part = pool::part(size, 1);
            let parts = gate.chunks_mut(part).zip(up.chunks_mut(part)).zip(d.chunks_mut(part)).collect();
            pool::map(parts, |((gate, up), d): ((&mut [f32], &mut [f32]), &mut [f32])| {
                activation.gate_backward_in_place(gate, up, d);
            });
            let of = |values| Matrix::new(values, rows, self.wide);
            let x = self.x.rows(tile.clone());
            product(dy.t(), of(d), &mut d_down, Into::Sum);
            product(of(gate).t(), x, &mut d_gate, Into::Sum);
            product(of(up).t(), x, &mut d_up, Into::Sum);
            let dx = &mut dx[tile.start * self.hidden..tile.end * self.hidden];
            product(of(gate), self.gate, dx, Into::Fresh);
            product(of(up), self.up, dx, Into::Sum);
        }
        [dx, d_gate, d_up, d_down]
    }
}

impl CustomOp2 for GatedMlp {
    fn name(&self) -> &'static str {
        "gated layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, down: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        let out = self.with_layer(cpu(down, at)?, |layer| Ok(layer.forward(self.activation)))?;
        Ok((CpuStorage::F32(out), self.x.shape().clone()))
    }

    fn bwd(
        &self,
        mark: &Tensor,
        down: &Tensor,
        _out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (tokens, hidden) = self.x.dims2()?;
        let d_out = d_out.contiguous()?;
        let [dx, d_gate, d_up, d_down] = values(&d_out, |d_out| {
            values(down, |down| {
                let d_out = Matrix::new(d_out, tokens, hidden);
                self.with_layer(down, |layer| Ok(layer.backward(self.activation, d_out)))
            })
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device());
        let gradients = [tensor(dx, &self.x)?, tensor(d_gate, &self.gate)?, tensor(d_up, &self.up)?];
        *self.share.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradients);
        Ok((Some(mark.zeros_like()?), Some(tensor(d_down, down)?)))
    }
}
