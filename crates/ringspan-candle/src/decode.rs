//! Attention of new tokens over a KV cache that is distributed over the ranks.

use crate::attend::AttentionInputs;
use crate::attention_inputs::with_learned_terms;
use crate::borrowed_tensor::{self, BorrowedTensor};
use crate::cast::cast;
use candle_core::{Result, Tensor, bail};
use ringspan::attention::{Group, Inputs, Merge, Tokens, on_device};
use ringspan::{Mask, Score};

/// Attention of q `[Tq, H, D]`, which all ranks have, over the keys of all ranks; k `[n, G, D]` and v `[n, G, Dv]` are this
/// rank's. It returns `[Tq, H, Dv]`; sinks, if there are any, cover all heads. Tensors are f32 or bf16; the result is not
/// differentiable. All ranks of the group must call this.
///
/// Tensors on the GPU on which the group's kernel computes stay there. Where the kernel computes on the CPU, tensors on a GPU
/// are copied to the CPU, and the result is copied back.
///
/// # Errors
/// Tensors of other types, shapes that do not fit the tokens, tensors on another GPU than the kernel's, failures of other
/// ranks.
pub fn decode(group: &Group, mask: &Mask, tokens: &Tokens, inputs: &AttentionInputs, score: &Score) -> Result<Tensor> {
    if inputs.bias.is_some() {
        bail!("decoding over a cache takes no bias: use ALiBi or relative buckets of the score instead");
    }
    let (kernel, score) = (group.kernel(), &with_learned_terms(score.clone(), inputs)?);
    let &AttentionInputs { q, k, v, .. } = inputs;
    let (_, heads, _) = q.dims3()?;
    let (_, _, v_dim) = v.dims3()?;
    let (shape, device, dtype) = ((q.dim(0)?, heads, v_dim), q.device(), q.dtype());
    let (q, k, v) = (
        borrowed_tensor::readable(kernel, q)?,
        borrowed_tensor::readable(kernel, k)?,
        borrowed_tensor::readable(kernel, v)?,
    );
    let guards = [&q, &k, &v].map(Tensor::storage_and_layout);
    let [q, k, v] = guards.each_ref().map(|(storage, layout)| BorrowedTensor::new(kernel, storage, layout));
    let (q, k, v) = (q?, k?, v?);
    let inputs = Inputs::new(q.view()?, k.view()?, v.view()?, score);
    let (out, _) =
        on_device::decode(group, mask, tokens, &inputs, Merge::AllGather).map_err(candle_core::Error::wrap)?;
    cast(&borrowed_tensor::tensor(kernel, out, shape, device)?, dtype)
}
