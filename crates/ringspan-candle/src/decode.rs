//! Attention of new tokens over keys and values that ranks keep between calls.

use crate::attend::AttentionInputs;
use crate::attention::with_sinks;
use crate::cast::cast;
use crate::loan::{self, Loan};
use candle_core::{Result, Tensor};
use ringspan::attention::{Group, Inputs, Merge, Tokens, on_device};
use ringspan::{Mask, Score};

/// Attention of q `[Tq, H, D]`, which every rank has, over the keys of all ranks, of which k `[n, G, D]` and v `[n, G, Dv]` are
/// this rank's, to `[Tq, H, Dv]`; if there are sinks, with those of all heads. f32 or bf16; not differentiable. All ranks of the group must call this.
///
/// Tensors on the GPU on which the group's kernel computes stay there. Where the kernel computes on the CPU, those of a GPU are
/// copied there and back.
///
/// # Errors
/// Other types, shapes that do not fit the tokens, tensors on another GPU than the kernel's, failures of other ranks.
pub fn decode(
    group: &Group,
    mask: &Mask,
    tokens: &Tokens,
    &AttentionInputs { q, k, v, sinks }: &AttentionInputs,
    score: &Score,
) -> Result<Tensor> {
    let (kernel, score) = (group.kernel(), &with_sinks(score.clone(), sinks)?);
    let (_, heads, _) = q.dims3()?;
    let (_, _, v_dim) = v.dims3()?;
    let (shape, device, dtype) = ((q.dim(0)?, heads, v_dim), q.device(), q.dtype());
    let (q, k, v) = (loan::readable(kernel, q)?, loan::readable(kernel, k)?, loan::readable(kernel, v)?);
    let guards = [&q, &k, &v].map(Tensor::storage_and_layout);
    let [q, k, v] = guards.each_ref().map(|(storage, layout)| Loan::new(kernel, storage, layout));
    let (q, k, v) = (q?, k?, v?);
    let inputs = Inputs::new(q.view()?, k.view()?, v.view()?, score);
    let (out, _) =
        on_device::decode(group, mask, tokens, &inputs, Merge::AllGather).map_err(candle_core::Error::wrap)?;
    cast(&loan::tensor(kernel, out, shape, device)?, dtype)
}
