//! Attention over a group of ranks as one candle operation with a backward pass.

pub use crate::attention_inputs::AttentionInputs;

use crate::attention_inputs::with_learned_terms;
use crate::borrowed_tensor::{self, BorrowedTensor};
use crate::cast::cast;
use crate::number::{self, with_number};
use crate::offload::Offload;
use crate::slices;
use crate::stored_activation::{self, Storage as Stored};
use crate::tape::{self, Reads};
use candle_core::{CpuStorage, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, WithDType, bail};
use candle_core::{CudaStorage, backend::BackendStorage};
use ringspan::attention::{Forward, Group, Inputs, on_device};
use ringspan::kernel::{Floats, Statistics};
use ringspan::{Schedule, Score};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention of this rank's queries over the keys of all ranks of `group`, differentiable in all of its inputs. The
/// gradients of sinks and bucket table cover what this rank computes; their sums over the ranks are the whole gradients.
///
/// q `[T, H, D]`, k `[Tk, G, D]` and v `[Tk, G, Dv]` give `[T, H, Dv]`. They are f32 or bf16, the type in which keys and
/// values are also sent; sums are f32 and are rounded once. All ranks must call this in the same order, forward and backward.
///
/// Tensors on the GPU on which the group's kernel computes stay there, and so do the output and all gradients. Where the
/// kernel computes on the CPU, tensors on a GPU are copied to the CPU, and results are copied back.
///
/// # Errors
/// Other types or shapes than these, tensors on another GPU than the kernel's, and failures of other ranks.
pub fn attention(
    group: &Arc<Group>,
    schedule: &Arc<Schedule>,
    inputs: &AttentionInputs,
    score: Score,
) -> Result<Tensor> {
    attention_saving(group, schedule, inputs, score, &mut SavedAttention::default())
}

/// The result of attention that is stored for the backward pass: the softmax's maxima and sums `[H, T]` on the device
/// that computed them, and the output or its delta.
struct StoredAttention {
    out: StoredOutput,
    statistics: SharedStatistics,
    /// The group whose kernel computed it.
    group: Arc<Group>,
}

/// The output of attention, or its delta, which is all that the backward pass reads of it.
enum StoredOutput {
    /// The output `[T, H, Dv]`.
    Values(stored_activation::StoredActivation),
    /// The output was taken out, and its gradient is not known yet.
    Taken,
    /// For each row the dot product of output and gradient, `[H, T]`.
    Delta(Floats),
}

/// The softmax statistics, shared by the forward pass, which sets them, and the backward pass, which takes them out.
type SharedStatistics = Arc<Mutex<Option<Statistics<Tensor>>>>;

/// Holds the output of one layer's attention between its first computation and its recomputation.
#[derive(Default)]
pub struct SavedAttention {
    /// The type in which the output is stored; the statistics, two numbers for each token and head, are never rounded.
    storage: Stored,
    stored: Option<StoredAttention>,
}

impl SavedAttention {
    /// A layer whose attention is not computed yet.
    #[must_use]
    pub fn new(storage: Stored) -> Self {
        Self { storage, stored: None }
    }

    /// Offloads the stored output to CPU memory, as [`stored_activation::StoredActivation::offload`] does. The statistics, two numbers for
    /// each token and head, stay.
    ///
    /// # Errors
    /// As for [`stored_activation::StoredActivation::offload`].
    pub fn offload(&mut self, offload: &Offload) -> Result<()> {
        if let Some(StoredAttention { out, statistics, group }) = self.stored.take() {
            let out = match out {
                StoredOutput::Values(out) => StoredOutput::Values(out.offload(offload)?),
                out => out,
            };
            self.stored = Some(StoredAttention { out, statistics, group });
        }
        Ok(())
    }

    /// Takes the output `[T, H, Dv]` out, if it is stored; [`output_gradient`](Self::output_gradient) must follow.
    ///
    /// # Errors
    /// Failures of a device to which the output was offloaded.
    pub(crate) fn take_output(&mut self) -> Result<Option<Tensor>> {
        let Some(StoredAttention { out, .. }) = &mut self.stored else { return Ok(None) };
        match std::mem::replace(out, StoredOutput::Taken) {
            StoredOutput::Values(out) => out.tensor().map(Some),
            _ => bail!("the output of an attention was taken out before"),
        }
    }

    /// Stores the delta of the output that was taken out, from its gradient, both `[T, H, Dv]` on the CPU. So neither
    /// the output nor a copy of it is in memory when queries, keys and values are.
    ///
    /// # Errors
    /// Tensors of different shapes or on other devices.
    pub(crate) fn output_gradient(&mut self, output: &Tensor, gradient: &Tensor) -> Result<()> {
        let Some(StoredAttention { out: stored, group, .. }) = &mut self.stored else {
            bail!("the gradient of an attention's output that is not stored");
        };
        let (output, gradient) = (output.contiguous()?, gradient.contiguous()?);
        let guards = [&output, &gradient].map(Tensor::storage_and_layout);
        let [out, d_out] =
            guards.each_ref().map(|(storage, layout)| BorrowedTensor::new(group.kernel(), storage, layout));
        let delta = on_device::delta(group, out?.data()?, d_out?.view()?).map_err(candle_core::Error::wrap)?;
        *stored = StoredOutput::Delta(delta);
        Ok(())
    }

    /// Whether the next call would compute attention and store its output.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stored.is_none()
    }
}

/// Like [`attention()`], for a layer that is recomputed: if `memory` is empty, attention is computed and stored there.
/// Otherwise the stored output is taken out and not computed again, so `memory` must be empty on all ranks or on none.
/// The inputs must equal those of the call that filled it.
///
/// # Errors
/// As for [`attention()`].
pub fn attention_saving(
    group: &Arc<Group>,
    schedule: &Arc<Schedule>,
    inputs: &AttentionInputs,
    score: Score,
    memory: &mut SavedAttention,
) -> Result<Tensor> {
    let &AttentionInputs { q, k, v, sinks, bias, bucket_table } = inputs;
    let before = memory.stored.take();
    let first = before.is_none();
    let (out, delta, statistics) = match before {
        None => (None, None, Arc::default()),
        Some(StoredAttention { out: StoredOutput::Values(out), statistics, .. }) => (Some(out), None, statistics),
        Some(StoredAttention { out: StoredOutput::Delta(delta), statistics, .. }) => (None, Some(delta), statistics),
        Some(_) => bail!("attention is computed again before the gradient of its output is known"),
    };
    let is_differentiated = delta.is_some();
    let readable = |tensor: &Tensor| borrowed_tensor::readable(group.kernel(), tensor);
    let [d_sinks, d_bias, d_table] = [(); 3].map(|()| SharedGradient::default());
    let op = Attention {
        group: group.clone(),
        schedule: schedule.clone(),
        score: with_learned_terms(score, inputs)?,
        bias: bias.map(|bias| readable(&bias.detach())).transpose()?,
        out: Mutex::new(out),
        delta: Mutex::new(delta),
        statistics: statistics.clone(),
        d_sinks: d_sinks.clone(),
        d_bias: d_bias.clone(),
        d_table: d_table.clone(),
    };
    let mut q_passed = q.clone();
    // A rank without queries has no gradient of sinks and bias, but it may compute other ranks' queries, whose terms are in the table.
    let has_queries = q.dim(0)? > 0;
    for (extra, gradient, has_gradient) in
        [(sinks, d_sinks, has_queries), (bias, d_bias, has_queries), (bucket_table, d_table, true)]
    {
        if let Some(extra) = extra.filter(|extra| extra.track_op() && has_gradient) {
            q_passed = tape::apply(
                GradientPassthrough { gradient },
                [&q_passed.contiguous()?, &extra.contiguous()?],
                Reads::Nothing,
            )?;
        }
    }
    let qkv = [&readable(&q_passed)?, &readable(k)?, &readable(v)?];
    if is_differentiated {
        if !tape::is_recording() {
            bail!("the output of this attention was differentiated, so that it has no values");
        }
        let shape = Shape::from(&out_shape(q.layout(), v.layout())?[..]);
        return tape::apply_unused(op, qkv, Reads::Inputs, (shape, q.dtype()));
    }
    let out = tape::apply(op, qkv, Reads::InputsAndOutput)?;
    if first {
        let out = StoredOutput::Values(stored_activation::StoredActivation::new(&out, memory.storage)?);
        memory.stored = Some(StoredAttention { out, statistics, group: group.clone() });
    }
    out.to_device(q.device())
}

/// The gradient of sinks, bias or bucket table, handed from the backward pass of attention to that of its [`GradientPassthrough`].
type SharedGradient = Arc<Mutex<Option<Tensor>>>;

/// Returns q unchanged and connects sinks, bias or bucket table to the graph. A candle operation has at most three arguments,
/// which are q, k and v for attention, so attention's backward pass, which runs first, stores the gradient of each
/// here, and the backward pass of this operation returns it.
struct GradientPassthrough {
    gradient: SharedGradient,
}

impl CustomOp2 for GradientPassthrough {
    fn name(&self) -> &'static str {
        "gradient-passthrough"
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let q = with_number!(q.dtype(), T => T::to_cpu_storage(slices::elements::<T>(q, layout)?));
        Ok((q, layout.shape().clone()))
    }

    fn cuda_fwd(&self, q: &CudaStorage, layout: &Layout, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((q.affine(layout, 1.0, 0.0)?, layout.shape().clone()))
    }

    fn bwd(&self, _q: &Tensor, extra: &Tensor, _out: &Tensor, dq: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Some(gradient) = self.gradient.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            bail!("the gradient of attention's sinks, bias or bucket table is gone: it was differentiated before");
        };
        let gradient = gradient.to_device(extra.device())?.reshape(extra.shape())?;
        Ok((Some(dq.clone()), Some(cast(&gradient, extra.dtype())?)))
    }
}

/// One call of attention. Candle gives an operation one output, so the statistics wait here for the backward pass.
struct Attention {
    group: Arc<Group>,
    schedule: Arc<Schedule>,
    score: Score,
    /// `[T, H, Sk]` or `[T, 1, Sk]`.
    bias: Option<Tensor>,
    /// The stored output, if this call is a recomputation.
    out: Mutex<Option<stored_activation::StoredActivation>>,
    /// The dot products of output and gradient, if they are known already; then the output has no values.
    delta: Mutex<Option<Floats>>,
    statistics: SharedStatistics,
    d_sinks: SharedGradient,
    d_bias: SharedGradient,
    d_table: SharedGradient,
}

impl Attention {
    /// Takes the stored output, if there is one; it must have this shape.
    fn known(&self, shape: &[usize]) -> Result<Option<stored_activation::StoredActivation>> {
        let known = self.out.lock().unwrap_or_else(PoisonError::into_inner).take();
        known.map(|stored| stored.of(shape)).transpose()
    }

    /// Returns the output where the kernel computes, and stores the statistics as tensors on `device`.
    fn forward(&self, [q, k, v]: [&BorrowedTensor; 3], device: &Device) -> Result<Floats> {
        let (q, k, v) = (q.view()?, k.view()?, v.view()?);
        let guard = self.bias.as_ref().map(Tensor::storage_and_layout);
        let bias = guard
            .as_ref()
            .map(|(storage, layout)| BorrowedTensor::new(self.group.kernel(), storage, layout))
            .transpose()?;
        let inputs =
            Inputs { bias: bias.as_ref().map(BorrowedTensor::view).transpose()?, ..Inputs::new(q, k, v, &self.score) };
        let Forward { out, statistics: Statistics { max, sum }, .. } =
            on_device::forward(&self.group, &self.schedule, &inputs).map_err(candle_core::Error::wrap)?;
        let tensor = |values| borrowed_tensor::tensor(self.group.kernel(), values, (q.heads, q.tokens), device);
        let statistics = Statistics { max: tensor(max)?, sum: tensor(sum)? };
        *self.statistics.lock().unwrap_or_else(PoisonError::into_inner) = Some(statistics);
        Ok(out)
    }
}

/// The shape of the output, `[T, H, Dv]`, from those of q and v.
fn out_shape(q: &Layout, v: &Layout) -> Result<[usize; 3]> {
    let ((tokens, heads, _), (_, _, v_dim)) = (q.shape().dims3()?, v.shape().dims3()?);
    Ok([tokens, heads, v_dim])
}

impl CustomOp3 for Attention {
    fn name(&self) -> &'static str {
        "ringspan-attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (shape, dtype) = (out_shape(q_layout, v_layout)?, q.dtype());
        let out = match self.known(&shape)? {
            Some(stored) => stored.values(&shape)?,
            None => {
                let (q, k, v) = (
                    BorrowedTensor::cpu(q, q_layout)?,
                    BorrowedTensor::cpu(k, k_layout)?,
                    BorrowedTensor::cpu(v, v_layout)?,
                );
                let out = self.forward([&q, &k, &v], &Device::Cpu)?;
                self.group.kernel().to_host(out).map_err(candle_core::Error::wrap)?
            }
        };
        Ok((number::storage(out, dtype)?, Shape::from(&shape[..])))
    }

    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_layout: &Layout,
        k: &CudaStorage,
        k_layout: &Layout,
        v: &CudaStorage,
        v_layout: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let shape = out_shape(q_layout, v_layout)?;
        if let Some(stored) = self.known(&shape)? {
            return crate::gpu::copied(&stored.tensor()?);
        }
        let (kernel, device, dtype) = (self.group.kernel(), q.device().clone(), q.dtype());
        let borrow = |storage, layout| BorrowedTensor::cuda(kernel, storage, layout);
        let (q, k, v) = (borrow(q, q_layout)?, borrow(k, k_layout)?, borrow(v, v_layout)?);
        let out = self.forward([&q, &k, &v], &Device::Cuda(device.clone()))?;
        let shape = Shape::from(&shape[..]);
        Ok((crate::gpu::converted_if(borrowed_tensor::on_gpu(out, &device)?, &shape, dtype)?, shape))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // The gradient may be a broadcast view, which cannot be lent.
        let d_out = d_out.contiguous()?;
        let Some(Statistics { max, sum }) = self.statistics.lock().unwrap_or_else(PoisonError::into_inner).take()
        else {
            bail!("the backward pass of an attention whose statistics are gone: it was differentiated before");
        };
        let (kernel, group) = (self.group.kernel(), &*self.group);
        let guards = [q, k, v, &d_out, &max, &sum].map(Tensor::storage_and_layout);
        let borrowed = guards.each_ref().map(|(storage, layout)| BorrowedTensor::new(kernel, storage, layout));
        let [borrowed_q, borrowed_k, borrowed_v, d_out, max, sum] = borrowed;
        let (borrowed_q, borrowed_k, borrowed_v) = (borrowed_q?, borrowed_k?, borrowed_v?);
        let (d_out, max, sum) = (d_out?, max?, sum?);
        let bias_guard = self.bias.as_ref().map(Tensor::storage_and_layout);
        let bias =
            bias_guard.as_ref().map(|(storage, layout)| BorrowedTensor::new(kernel, storage, layout)).transpose()?;
        let inputs = Inputs::new(borrowed_q.view()?, borrowed_k.view()?, borrowed_v.view()?, &self.score);
        let inputs = Inputs { bias: bias.as_ref().map(BorrowedTensor::view).transpose()?, ..inputs };
        let (statistics, d_out) = (Statistics { max: max.data()?, sum: sum.data()? }, d_out.view()?);
        let delta = match self.delta.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(delta) => Ok(delta),
            None => {
                let (storage, layout) = out.storage_and_layout();
                on_device::delta(group, BorrowedTensor::new(kernel, &storage, layout)?.data()?, d_out)
            }
        };
        let delta = delta.map_err(candle_core::Error::wrap)?;
        let gradients = on_device::backward_with_delta(group, &self.schedule, &inputs, statistics, delta.data(), d_out)
            .map_err(candle_core::Error::wrap)?;
        let store = |shared: &SharedGradient, gradient| {
            *shared.lock().unwrap_or_else(PoisonError::into_inner) = Some(gradient);
        };
        if !gradients.d_sinks.is_empty() {
            let heads = gradients.d_sinks.len();
            store(&self.d_sinks, Tensor::from_vec(gradients.d_sinks, heads, &Device::Cpu)?);
        }
        if !gradients.d_table.is_empty() {
            let count = gradients.d_table.len();
            store(&self.d_table, Tensor::from_vec(gradients.d_table, count, &Device::Cpu)?);
        }
        if let Some(bias) = &self.bias {
            store(&self.d_bias, borrowed_tensor::tensor(kernel, gradients.d_bias, bias.shape(), bias.device())?);
        }
        let tensor = |values, like: &Tensor| {
            cast(&borrowed_tensor::tensor(kernel, values, like.shape(), like.device())?, like.dtype()).map(Some)
        };
        Ok((tensor(gradients.dq, q)?, tensor(gradients.dk, k)?, tensor(gradients.dv, v)?))
    }
}
