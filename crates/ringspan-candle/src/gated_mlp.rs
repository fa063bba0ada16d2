//! A gated feed-forward layer as one operation with a backward, tile by tile over the tokens.
//!
//! Shape letters: T tokens, C hidden size, W intermediate size. No tensor of T x W ever exists: forward and backward
//! hold those of a tile, and the backward computes the tile's gate and up again; unless the forward pass is told to keep
//! them as [`Wide`].

mod on_gpu;
mod wide;

pub use wide::{Tiles, Wide};

use crate::activation::Activation;
use crate::gpu;
use crate::kept::{Kept, Storage};
use crate::matmul::{Into, Matrix, product};
use crate::number::{self, Number, with_number};
use crate::pool;
use crate::slices::{elements, elements_of};
use crate::tape::{self, Reads};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor, WithDType, bail};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Tokens of a tile: enough that packing the weights for it costs little (of 512 x 1536, about 3 % of its products).
pub const TILE: usize = 1024;

/// `(act(x gate^T) * (x up^T)) down^T`: x `[T, C]`, gate and up `[W, C]`, down `[C, W]` to `[T, C]`, f32 or
/// bf16. Of bf16, gate, up and what they become are rounded once each, and sums are f32.
///
/// # Errors
/// Other types and shapes.
pub fn gated_mlp(x: &Tensor, gate: &Tensor, up: &Tensor, down: &Tensor, activation: Activation) -> Result<Tensor> {
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        return on_gpu::forward(x, [gate, up, down], activation).map(|(out, _)| out);
    }
    layer([x, gate, up, down], activation, Pass::Whole)
}

/// The same, and what its backward would compute again.
///
/// # Errors
/// As for [`gated_mlp`].
pub fn gated_mlp_keeping(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    storage: Storage,
) -> Result<(Tensor, Wide)> {
    let [gate, up, down] = weights;
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        let (out, [gate, up]) = on_gpu::forward(x, weights, activation)?;
        return Ok((out, Wide::Gpu([Kept::new(&gate, storage)?, Kept::new(&up, storage)?])));
    }
    let wide = Arc::new(Mutex::new(None));
    let out = layer([x, gate, up, down], activation, Pass::Keep(storage, wide.clone()))?;
    let kept = locked(&wide).take();
    Ok((out, Wide::Cpu(kept.unwrap_or_else(|| Tiles::new(0, storage)))))
}

/// The same for a layer that was computed before, and is now only to be differentiated: its values are `known`, or zeros
/// where nothing looks at them, and cost no product. `wide` is what the first time kept, if it did; x and weights must be
/// those of then.
///
/// # Errors
/// As for [`gated_mlp`]; something kept of other sizes.
pub fn gated_mlp_again(
    x: &Tensor,
    weights: [&Tensor; 3],
    activation: Activation,
    wide: Option<Wide>,
    known: Option<Kept>,
) -> Result<Tensor> {
    let [gate, up, down] = weights;
    let size = x.dim(0)? * gate.dim(0)?;
    if let Some(kept) = wide.as_ref().map(Wide::len).filter(|kept| *kept != size) {
        bail!("a gated layer kept {kept} numbers of {size}");
    }
    if gpu::holds(x) {
        check([x, gate, up, down])?;
        return on_gpu::again(x, weights, activation, wide, known);
    }
    let wide = match wide {
        Some(Wide::Gpu(_)) => bail!("a gated layer on the CPU, of which a GPU kept gate and up"),
        Some(Wide::Cpu(tiles)) => Some(tiles),
        None => None,
    };
    let out = known.map(|known| known.values(x.dims())).transpose()?;
    layer([x, gate, up, down], activation, Pass::Again(Mutex::new((out, wide))))
}

fn locked<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a pass is for.
enum Pass {
    Whole,
    Keep(Storage, Arc<Mutex<Option<Tiles>>>),
    /// With the result, if anything looks at it, and gate and up if they were kept.
    Again(Mutex<(Option<Vec<f32>>, Option<Tiles>)>),
}

fn check([x, gate, up, down]: [&Tensor; 4]) -> Result<()> {
    let ((_, hidden), (wide, gate_hidden)) = (x.dims2()?, gate.dims2()?);
    if gate_hidden != hidden || up.dims() != gate.dims() || down.dims() != [hidden, wide] {
        let shapes = [gate, up, down].map(|weight| weight.dims().to_vec());
        bail!("a gated layer of {:?} with gate, up and down {shapes:?}: the shapes do not fit", x.shape());
    }
    Ok(())
}

fn layer(inputs: [&Tensor; 4], activation: Activation, pass: Pass) -> Result<Tensor> {
    check(inputs)?;
    let [x, gate, up, down] = inputs;
    let [x, gate, up, down] = [x, gate, up, down].map(Tensor::contiguous);
    let (x, gate, up, down) = (x?, gate?, up?, down?);
    let share = Arc::new(Mutex::new(None));
    let trained = [&gate, &up, &down].map(Tensor::track_op);
    let inputs = tape::apply(Inputs { share: share.clone() }, [&x, &gate, &up], Reads::Nothing)?;
    let is_unseen = matches!(&pass, Pass::Again(known) if locked(known).0.is_none());
    // What the layer reads must not refer to the graph: the graph refers to the layer.
    let op = GatedMlp { x: x.detach(), gate: gate.detach(), up: up.detach(), activation, trained, share, pass };
    match is_unseen {
        true => tape::apply_unseen(op, [&inputs, &down], Reads::Inputs, (x.shape(), x.dtype())),
        false => tape::apply(op, [&inputs, &down], Reads::Inputs),
    }
}

/// Gradients of x, gate and up, on their way from [`GatedMlp`] to [`Inputs`].
type Share = Arc<Mutex<Option<(Tensor, Option<Tensor>, Option<Tensor>)>>>;

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
        match locked(&self.share).take() {
            Some((dx, d_gate, d_up)) => Ok((Some(dx), d_gate, d_up)),
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
    /// Of gate, up and down: who needs gradients.
    trained: [bool; 3],
    share: Share,
    pass: Pass,
}

/// Slices of what both passes read.
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

    /// Buffers of a tile, `[TILE, W]` each.
    fn buffers<const N: usize>(&self) -> [Vec<T>; N] {
        std::array::from_fn(|_| vec![T::ZERO; TILE.min(self.tokens) * self.wide])
    }

    fn gate_and_up(&self, tile: &Range<usize>, gate: &mut [T], up: &mut [T]) {
        let x = self.x.rows(tile.clone());
        T::product(x, self.gate.t(), gate);
        T::product(x, self.up.t(), up);
    }

    /// With gate and up of all tokens, if they are to be kept.
    fn forward(&self, activation: Activation, keep: Option<Storage>) -> (Vec<T>, Option<Tiles>) {
        let mut out = vec![T::ZERO; self.tokens * self.hidden];
        // Numbers in bf16 are kept as they are.
        let keep = keep.map(|storage| if T::DTYPE == DType::BF16 { Storage::Bf16 } else { storage });
        let mut kept = keep.map(|storage| Tiles::new(self.tokens * self.wide, storage));
        let [mut gate, mut up] = self.buffers();
        for tile in self.tiles() {
            let size = tile.len() * self.wide;
            let (gate, up) = (&mut gate[..size], &mut up[..size]);
            self.gate_and_up(&tile, gate, up);
            if let Some(kept) = &mut kept {
                kept.write(tile.start * self.wide, gate, up);
            }
            let part = pool::part(size, 1);
            let parts = gate.chunks_mut(part).zip(up.chunks(part)).collect();
            pool::map(parts, |(gate, up): (&mut [T], &[T])| activation.gate_in_place(gate, up));
            let out = &mut out[tile.start * self.hidden..tile.end * self.hidden];
            T::product(Matrix::new(gate, tile.len(), self.wide), self.down.t(), out);
        }
        (out, kept)
    }

    /// Gradients of x, and in f32 of those of gate, up, down that are trained, for that of the output.
    fn backward(
        &self,
        activation: Activation,
        trained: [bool; 3],
        d_out: Matrix<T>,
        kept: Option<Tiles>,
    ) -> (Vec<T>, [Option<Vec<f32>>; 3]) {
        let mut dx = vec![T::ZERO; self.tokens * self.hidden];
        let [mut d_gate, mut d_up, mut d_down] =
            trained.map(|trained| trained.then(|| vec![0.0; self.wide * self.hidden]));
        let [mut gate, mut up, mut product_] = self.buffers();
        for tile in self.tiles() {
            let (rows, size) = (tile.len(), tile.len() * self.wide);
            let (gate, up, d) = (&mut gate[..size], &mut up[..size], &mut product_[..size]);
            match &kept {
                Some(kept) => kept.read(tile.start * self.wide, gate, up),
                None => self.gate_and_up(&tile, gate, up),
            }
            let dy = d_out.rows(tile.clone());
            T::product(dy, self.down, d);
            // From gate, up and the product's gradient to theirs and the product, each where another was.
            let part = pool::part(size, 1);
            let parts = gate.chunks_mut(part).zip(up.chunks_mut(part)).zip(d.chunks_mut(part)).collect();
            pool::map(parts, |((gate, up), d): ((&mut [T], &mut [T]), &mut [T])| {
                activation.gate_backward_in_place(gate, up, d);
            });
            let of = |values| Matrix::<T>::new(values, rows, self.wide);
            let x = self.x.rows(tile.clone());
            for (sum, left, right) in [(&mut d_down, dy, of(d)), (&mut d_gate, of(gate), x), (&mut d_up, of(up), x)] {
                if let Some(sum) = sum {
                    product(left.t(), right, sum, Into::Sum);
                }
            }
            let dx = &mut dx[tile.start * self.hidden..tile.end * self.hidden];
            T::products(&[(of(gate), self.gate), (of(up), self.up)], dx);
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
            Pass::Whole => None,
            Pass::Keep(storage, _) => Some(*storage),
            Pass::Again(known) => {
                let out = locked(known).0.take();
                let out = out.unwrap_or_else(|| vec![0.0; self.x.elem_count()]);
                return Ok((number::storage(out, self.x.dtype())?, self.x.shape().clone()));
            }
        };
        let (out, kept) = with_number!(self.x.dtype(), T => {
            let (out, kept) =
                self.with_layer::<T, _>(elements(down, at)?, |layer| Ok(layer.forward(self.activation, keep)))?;
            (T::to_cpu_storage_owned(out), kept)
        });
        if let Pass::Keep(_, wide) = &self.pass {
            *locked(wide) = kept;
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
            Pass::Again(known) => locked(known).1.take(),
            Pass::Whole | Pass::Keep(..) => None,
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
