//! Attention over a group of ranks as one candle operation with a backward.

use crate::kept::{self, Storage as Stored};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use ringspan::attention::{self, Forward, Group, Inputs};
use ringspan::kernel::{Data, View};
use ringspan::{Schedule, Score};
use std::sync::{Arc, Mutex, PoisonError};

/// Attention of this rank's queries over the keys of all ranks of `group`, differentiable in q, k and v.
///
/// q `[T, H, D]`, k `[Tk, G, D]`, v `[Tk, G, Dv]` to `[T, H, Dv]`, f32. All ranks must call this in the same order,
/// forward and backward. Tensors on a GPU go through the memory of the CPU, where the group's kernel takes them.
///
/// # Errors
/// Other types or shapes than these, and failures of other ranks.
pub fn attention(
    group: &Arc<Group>,
    schedule: &Arc<Schedule>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    score: Score,
) -> Result<Tensor> {
    attention_keeping(group, schedule, q, k, v, score, &mut Memory::default())
}

/// What attention computed: output `[T, H, Dv]` and log-sum-exp `[H, T]`.
#[derive(Debug, Clone)]
pub struct Kept {
    out: kept::Kept,
    lse: Arc<Mutex<Vec<f32>>>,
}

/// Where attention looks for what it computed before, and leaves what it computes.
#[derive(Debug, Default)]
pub struct Memory {
    /// How outputs are stored; log-sum-exps, one number a head, are never rounded.
    storage: Stored,
    kept: Option<Kept>,
}

impl Memory {
    /// An empty one.
    #[must_use]
    pub fn new(storage: Stored) -> Self {
        Self { storage, kept: None }
    }

    /// Whether attention would be computed, and kept.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kept.is_none()
    }
}

/// The same with a memory: what it computes is put into an empty `memory`; what it finds there is taken out and not
/// computed again, so no rank may find it empty if one does not. The inputs must be those of the call that filled it.
///
/// # Errors
/// As for [`attention()`].
pub fn attention_keeping(
    group: &Arc<Group>,
    schedule: &Arc<Schedule>,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    score: Score,
    memory: &mut Memory,
) -> Result<Tensor> {
    let readable = |tensor: &Tensor| match tensor.stride().last() {
        Some(1) if tensor.device().is_cpu() => Ok(tensor.clone()),
        // Moving a tensor moves all that it is a part of.
        _ => tensor.contiguous()?.to_device(&Device::Cpu),
    };
    let before = memory.kept.take();
    let first = before.is_none();
    let (out, lse) = before.map_or((None, Arc::default()), |kept| (Some(kept.out), kept.lse));
    let op =
        Attention { group: group.clone(), schedule: schedule.clone(), score, out: Mutex::new(out), lse: lse.clone() };
    let out = readable(q)?.apply_op3(&readable(k)?, &readable(v)?, op)?;
    if first {
        memory.kept = Some(Kept { out: kept::Kept::new(&out, memory.storage)?, lse });
    }
    out.to_device(q.device())
}

/// One call. Candle gives an operation one output, so the log-sum-exp waits here for the backward pass.
struct Attention {
    group: Arc<Group>,
    schedule: Arc<Schedule>,
    score: Score,
    /// Computed before.
    out: Mutex<Option<kept::Kept>>,
    lse: Arc<Mutex<Vec<f32>>>,
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
        let (q, k, v) = (view(q, q_layout)?, view(k, k_layout)?, view(v, v_layout)?);
        if let Some(out) = self.out.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let shape = [q.tokens, q.heads, v.dim];
            return Ok((CpuStorage::F32(out.values(&shape)?), Shape::from(&shape[..])));
        }
        let Forward { out, lse, .. } =
            attention::forward(&self.group, &self.schedule, &Inputs::new(q, k, v, &self.score))
                .map_err(candle_core::Error::wrap)?;
        *self.lse.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = lse;
        Ok((CpuStorage::F32(out), Shape::from((q.tokens, q.heads, v.dim))))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        d_out: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        // The gradient may be a broadcast view.
        let d_out = d_out.contiguous()?;
        let lse = std::mem::take(&mut *self.lse.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
        let saved = Forward { out: out.flatten_all()?.to_vec1()?, lse, peak_bytes: 0 };
        let gradients = with_view(q, |q| {
            with_view(k, |k| {
                with_view(v, |v| {
                    with_view(&d_out, |d_out| {
                        let inputs = Inputs::new(q, k, v, &self.score);
                        attention::backward(&self.group, &self.schedule, &inputs, &saved, d_out)
                            .map_err(candle_core::Error::wrap)
                    })
                })
            })
        })?;
        let tensor = |values, like: &Tensor| Tensor::from_vec(values, like.shape(), like.device()).map(Some);
        Ok((tensor(gradients.dq, q)?, tensor(gradients.dk, k)?, tensor(gradients.dv, v)?))
    }
}

fn view<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<View<'a>> {
    let (tokens, heads, dim) = layout.shape().dims3()?;
    let CpuStorage::F32(data) = storage else {
        bail!("attention computes in {:?}, given {:?}", DType::F32, storage.dtype());
    };
    let stride = layout.stride();
    Ok(View {
        data: Data::F32(data.get(layout.start_offset()..).unwrap_or_default()),
        tokens,
        heads,
        dim,
        token_stride: stride[0],
        head_stride: stride[1],
    })
}

fn with_view<T>(tensor: &Tensor, f: impl FnOnce(View) -> Result<T>) -> Result<T> {
    let (storage, layout) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(view(storage, layout)?),
        _ => bail!("attention runs on the CPU, given a tensor on {:?}", tensor.device()),
    }
}
