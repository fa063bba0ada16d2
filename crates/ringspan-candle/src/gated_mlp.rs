//! A gated feed-forward layer. Shape letters: T tokens, C hidden size, W intermediate size.
//!
//! On a CPU it is one operation with a backward pass that goes tile by tile over the tokens: forward and backward hold the
//! intermediate tensors of one tile, and the backward pass recomputes the tile's gate and up. No tensor `[T, W]` is in memory, unless
//! the forward pass is asked to store gate and up of all tokens as [`GateUpActivations`]. On a GPU it is composed of linear layers over all
//! tokens, and holds gate and up `[T, W]`.

mod gate_up;
mod on_gpu;

pub use gate_up::{GateUpActivations, Tiles};

use crate::activation::Activation;
use crate::gpu;
use crate::matmul::{Accumulate, Matrix, product};
use crate::number::{self, Number, with_number};
use crate::pool;
use crate::slices::{elements, elements_of};
use crate::stored_activation::{Storage, StoredActivation};
use crate::tape::{self, Reads};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor, WithDType, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tokens in a tile: enough that packing the weights for each tile costs little (for 512 x 1536, about 3 % of the products).
pub const TILE: usize = 1024;

/// `(act(x gate^T) * (x up^T)) down^T`: x `[T, C]`, gate and up `[W, C]`, down `[C, W]` to `[T, C]`, f32 or bf16. In bf16,
/// gate, up and their gated product are rounded once each, and sums are f32.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use ringspan_candle::activation::Activation;
/// use ringspan_candle::gated_mlp::gated_mlp;
///
/// let one = |number: f32| Tensor::new(&[[number]], &Device::Cpu);
/// let y = gated_mlp(&one(4.0)?, &one(1.0)?, &one(2.0)?, &one(3.0)?, Activation::Silu)?;
/// let silu = 4.0 / (1.0 + (-4f32).exp());
/// assert!((y.to_vec2::<f32>()?[0][0] - silu * 8.0 * 3.0).abs() < 1e-4);
/// # Ok::<_, candle_core::Error>(())
/// ```
///
/// # Errors
/// Other types and shapes.
pub fn gated_mlp(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor, activation: Activation) -> Result<Tensor> {
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        return on_gpu::forward(x, [gate, up, down], activation).map(|(out, _)| out);
    }
    layer([x, gate, up, down], activation, PassKind::Plain)
}

/// Like [`gated_mlp`], and also returns gate and up of all tokens, which the backward pass of a recomputed layer would
/// compute again.
///
/// # Errors
/// As for [`gated_mlp`].
pub fn gated_mlp_saving(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    storage: Storage,
) -> Result<(Tensor, GateUpActivations)> {
    let [gate, up, down] = weights;
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        let (out, [gate, up]) = on_gpu::forward(x, weights, activation)?;
        return Ok((
            out,
            GateUpActivations::Gpu([StoredActivation::new(&gate, storage)?, StoredActivation::new(&up, storage)?]),
        ));
    }
    let gate_up = Arc::new(Mutex::new(None));
    let out = layer([x, gate, up, down], activation, PassKind::Store(storage, gate_up.clone()))?;
    let stored = locked(&gate_up).take();
    Ok((out, GateUpActivations::Cpu(stored.unwrap_or_else(|| Tiles::new(storage)))))
}

/// Like [`gated_mlp`], for the second pass of a recomputed layer: the output is the stored one, `known`, or zeros if nothing
/// reads its values, and no product is computed for it. `gate_up` is what [`gated_mlp_saving`] returned, if it was called; x
/// and weights must equal those of the first pass.
///
/// # Errors
/// As for [`gated_mlp`], and stored tensors of other sizes.
pub fn gated_mlp_recomputed(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    gate_up: Option<GateUpActivations>,
    known: Option<StoredActivation>,
) -> Result<Tensor> {
    let [gate, up, down] = weights;
    let size = x.dim(0)? * gate.dim(0)?;
    if let Some(stored) = gate_up.as_ref().map(GateUpActivations::len).filter(|stored| *stored != size) {
        bail!("the forward pass of a gated MLP stored {stored} values, and its backward pass needs {size}");
    }
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        return on_gpu::recomputed(x, weights, activation, gate_up, known);
    }
    let gate_up = match gate_up {
        Some(GateUpActivations::Gpu(_)) => bail!("the gate and up activations of a gated MLP on the CPU are on a GPU"),
        Some(GateUpActivations::Cpu(tiles)) => Some(tiles),
        None => None,
    };
    let out = known.map(|known| known.values(x.dims())).transpose()?;
    layer([x, gate, up, down], activation, PassKind::Recompute(Mutex::new((out, gate_up))))
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The purpose of a pass through the layer.
enum PassKind {
    /// A pass whose backward pass computes gate and up again.
    Plain,
    /// A pass that stores gate and up for the backward pass.
    Store(Storage, Arc<Mutex<Option<Tiles>>>),
    /// A recomputation, with the stored output, if anything reads it, and with gate and up, if they were stored.
    Recompute(Mutex<(Option<Vec<f32>>, Option<Tiles>)>),
}

fn check([x, gate, up, down]: [&Tensor; 4]) -> Result<()> {
    let ((_, hidden), (wide, gate_hidden)) = (x.dims2()?, gate.dims2()?);
    if gate_hidden != hidden || up.dims() != gate.dims() || down.dims() != [hidden, wide] {
        let shapes = [gate, up, down].map(|weight| weight.dims().to_vec());
        bail!("a gated layer of {:?} with gate, up and down {shapes:?}: the shapes do not fit", x.shape());
    }
    Ok(())
}

fn layer(inputs: [&Tensor; 4], activation: Activation, pass: PassKind) -> Result<Tensor> {
    check(inputs)?;
    let [x, gate, up, down] = inputs;
    let [x, gate, up, down] = [x, gate, up, down].map(Tensor::contiguous);
    let (x, gate, up, down) = (x?, gate?, up?, down?);
    let share = Arc::new(Mutex::new(None));
    let trained = [&gate, &up, &down].map(Tensor::track_op);
    let inputs = tape::apply(Inputs { share: share.clone() }, [&x, &gate, &up], Reads::Nothing)?;
    let is_unused = matches!(&pass, PassKind::Recompute(known) if locked(known).0.is_none());
    // These tensors are detached, since the graph refers to the layer: a reference back to the graph would be a cycle.
    let op = GatedMlp { x: x.detach(), gate: gate.detach(), up: up.detach(), activation, trained, share, pass };
    match is_unused {
        true => tape::apply_unused(op, [&inputs, &down], Reads::Inputs, (x.shape(), x.dtype())),
        false => tape::apply(op, [&inputs, &down], Reads::Inputs),
    }
}

/// Gradients of x, gate and up, handed from the backward pass of [`GatedMlp`] to that of [`Inputs`].
type SharedGradients = Arc<Mutex<Option<(Tensor, Option<Tensor>, Option<Tensor>)>>>;

/// Connects the first three of the layer's four inputs to the graph, since a candle operation has at most three. Its
/// output is a scalar without meaning, which [`GatedMlp`] takes as an input.
struct Inputs {
    share: SharedGradients,
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
        match locked(&self.share).take() {
            Some((dx, d_gate, d_up)) => Ok((Some(dx), d_gate, d_up)),
            None => bail!("the backward of a gated layer ran twice"),
        }
    }
}

/// The layer as an operation of the scalar of [`Inputs`] and of down.
struct GatedMlp {
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    activation: Activation,
    /// Says which of gate, up and down need gradients.
    trained: [bool; 3],
    share: SharedGradients,
    pass: PassKind,
}

/// The matrices that forward and backward read.
struct Layer<'a, T> {
    x: Matrix<'a, T>,
    gate: Matrix<'a, T>,
    up: Matrix<'a, T>,
    down: Matrix<'a, T>,
    tokens: usize,
    hidden: usize,
    wide: usize,
}

impl GatedMlp {
    fn with_layer<T: Number, R>(&self, down: &[T], f: impl FnOnce(Layer<T>) -> Result<R>) -> Result<R> {
        let ((tokens, hidden), wide) = (self.x.dims2()?, self.gate.dim(0)?);
        elements_of(&self.x, |x| {
            elements_of(&self.gate, |gate| {
                elements_of(&self.up, |up| {
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

impl<T: Number> Layer<'_, T> {
    fn tiles(&self) -> impl Iterator<Item = Range<usize>> {
        let tokens = self.tokens;
        (0..tokens.div_ceil(TILE)).map(move |tile| tile * TILE..tokens.min((tile + 1) * TILE))
    }

    /// Gate and up of a tile, `[rows, W]` each.
    fn gate_and_up(&self, tile: &Range<usize>) -> [Vec<T>; 2] {
        let x = self.x.rows(tile.clone());
        [self.gate, self.up].map(|weight| T::product_new(x, weight.t(), None))
    }

    /// Returns the output, and gate and up of all tokens if `keep` says so.
    fn forward(&self, activation: Activation, keep: Option<Storage>) -> (Vec<T>, Option<Tiles>) {
        let mut out = vec![T::ZERO; self.tokens * self.hidden];
        let mut kept = keep.map(Tiles::new);
        for tile in self.tiles() {
            let [gate, up] = self.gate_and_up(&tile);
            let (mut gated, kept_gate) = if kept.is_some() { (gate.clone(), Some(gate)) } else { (gate, None) };
            let part = pool::part(gated.len(), 1);
            let parts = gated.chunks_mut(part).zip(up.chunks(part)).collect();
            pool::map(parts, |(gate, up): (&mut [T], &[T])| activation.gate_in_place(gate, up));
            if let (Some(kept), Some(gate)) = (&mut kept, kept_gate) {
                kept.push(gate, up);
            }
            let out = &mut out[tile.start * self.hidden..tile.end * self.hidden];
            T::product(Matrix::new(&gated, tile.len(), self.wide), self.down.t(), out);
        }
        (out, kept)
    }

    /// Gradients of x and, in f32, of those of gate, up and down that are trained, from the gradient of the output.
    fn backward(
        &self,
        activation: Activation,
        trained: [bool; 3],
        d_out: Matrix<T>,
        mut kept: Option<Tiles>,
    ) -> (Vec<T>, [Option<Vec<f32>>; 3]) {
        let mut dx = vec![T::ZERO; self.tokens * self.hidden];
        let [mut d_gate, mut d_up, mut d_down] =
            trained.map(|trained| trained.then(|| vec![0.0; self.wide * self.hidden]));
        for tile in self.tiles() {
            let rows = tile.len();
            let kept = kept.as_mut().and_then(Tiles::pop);
            let [mut gate, mut up] = kept.unwrap_or_else(|| self.gate_and_up(&tile));
            let dy = d_out.rows(tile.clone());
            let mut d = T::product_new(dy, self.down, None);
            // Gate, up and the gradient of their product are overwritten with the gradient of gate, the gradient of up, and
            // the product.
            let part = pool::part(d.len(), 1);
            let parts = gate.chunks_mut(part).zip(up.chunks_mut(part)).zip(d.chunks_mut(part)).collect();
            pool::map(parts, |((gate, up), d): ((&mut [T], &mut [T]), &mut [T])| {
                activation.gate_backward_in_place(gate, up, d);
            });
            let [gate, up, d] = [&gate, &up, &d].map(|values| Matrix::new(values, rows, self.wide));
            let x = self.x.rows(tile.clone());
            for (sum, left, right) in [(&mut d_down, dy, d), (&mut d_gate, gate, x), (&mut d_up, up, x)] {
                if let Some(sum) = sum {
                    product(left.t(), right, sum, Accumulate::Add);
                }
            }
            let dx = &mut dx[tile.start * self.hidden..tile.end * self.hidden];
            T::products(&[(gate, self.gate), (up, self.up)], dx);
        }
        (dx, [d_gate, d_up, d_down])
    }
}

impl CustomOp2 for GatedMlp {
    fn name(&self) -> &'static str {
        "gated layer"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout, down: &CpuStorage, at: &Layout) -> Result<(CpuStorage, Shape)> {
        let keep = match &self.pass {
            PassKind::Plain => None,
            PassKind::Store(storage, _) => Some(*storage),
            PassKind::Recompute(known) => {
                let out = locked(known).0.take();
                let out = out.unwrap_or_else(|| pool::zeros(self.x.elem_count()));
                return Ok((number::storage(out, self.x.dtype())?, self.x.shape().clone()));
            }
        };
        let (out, kept) = with_number!(self.x.dtype(), T => {
            let (out, kept) =
                self.with_layer::<T, _>(elements(down, at)?, |layer| Ok(layer.forward(self.activation, keep)))?;
            (T::to_cpu_storage_owned(out), kept)
        });
        if let PassKind::Store(_, gate_up) = &self.pass {
            *locked(gate_up) = kept;
        }
        Ok((out, self.x.shape().clone()))
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
        let kept = match &self.pass {
            PassKind::Recompute(known) => locked(known).1.take(),
            PassKind::Plain | PassKind::Store(..) => None,
        };
        let (dx, [d_gate, d_up, d_down]) = with_number!(self.x.dtype(), T => elements_of(&d_out, |d_out| {
            elements_of::<T, _>(down, |down| {
                let d_out = Matrix::new(d_out, tokens, hidden);
                let (dx, of_weights) = self
                    .with_layer(down, |layer| Ok(layer.backward(self.activation, self.trained, d_out, kept)))?;
                Ok((Tensor::from_vec(dx, self.x.shape(), self.x.device())?, of_weights))
            })
        })?);
        let weight = |values: Option<Vec<f32>>, like: &Tensor| {
            values.map(|values| number::tensor(values, like.dtype(), like)).transpose()
        };
        let gradients = (dx, weight(d_gate, &self.gate)?, weight(d_up, &self.up)?);
        *locked(&self.share) = Some(gradients);
        Ok((Some(mark.zeros_like()?), weight(d_down, down)?))
    }
}
