//! A mixture of experts on a GPU, composed of candle's operations: the tokens of all experts are gathered once, and their
//! outputs added once.

use super::{Expert, ExpertStack, GatedExpert, REMOTE_EXPERT, Routing, StackedExpert};
use crate::activation::Activation;
use crate::adapter_rows::AdapterRows;
use crate::cast::cast;
use crate::device_ops;
use crate::gated_mlp::gated_mlp;
use crate::layer_adapter::LayerAdapter;
use crate::linear::{linear, linear_wide};
use crate::swiglu::swiglu;
use candle_core::{DType, Result, Tensor};
use std::collections::BTreeMap;

/// Like [`mixed`](super::mixed), on a GPU: x `[T, C]`, f32 or bf16, weights `[T, K]`, f32. Outputs are weighted and added in
/// f32. At least one expert is on this rank.
pub(super) fn mixed(x: &Tensor, routing: &Routing, expert: &dyn Fn(usize) -> Result<Expert>) -> Result<Tensor> {
    let (top, device) = (routing.weights.dim(1)?, x.device());
    let mut slots: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for (slot, &chosen) in routing.chosen.iter().enumerate().filter(|(_, chosen)| **chosen != REMOTE_EXPERT) {
        slots.entry(chosen).or_default().push(slot as u32);
    }
    let all: Vec<u32> = slots.values().flatten().copied().collect();
    let tokens: Vec<u32> = all.iter().map(|slot| slot / top as u32).collect();
    let rows = device_ops::gather_rows(x, &tokens)?;
    let (count, tokens) = (all.len(), Tensor::from_vec(tokens, all.len(), device)?);
    let factors = routing.weights.contiguous()?.flatten_all()?.index_select(&Tensor::new(all, device)?, 0)?;
    let (mut outputs, mut first) = (Vec::new(), 0);
    for (index, slots) in &slots {
        let tokens: Vec<u32> = slots.iter().map(|slot| slot / top as u32).collect();
        let adapter_rows = routing.adapter_rows.as_ref().map(|rows| rows.of_rows(&tokens));
        let rows = rows.narrow(0, first, slots.len())?;
        outputs.push(match expert(*index as usize)? {
            Expert::Gated(expert) => output(&rows, &expert, adapter_rows.as_ref())?,
            Expert::Stacked(expert) => stacked(&rows, &expert)?,
        });
        first += slots.len();
    }
    let weighted = cast(&Tensor::cat(&outputs, 0)?, DType::F32)?.broadcast_mul(&factors.reshape((count, 1))?)?;
    cast(&Tensor::zeros(x.shape(), DType::F32, device)?.index_add(&tokens, &weighted, 0)?, x.dtype())
}

/// One expert's output: x `[n, C]` to `[n, C]`. `rows` is what adapters need to know of the tokens.
fn output(x: &Tensor, expert: &GatedExpert, rows: Option<&AdapterRows>) -> Result<Tensor> {
    let GatedExpert { gate, up, down, adapters } = expert;
    let (gate, up, down) = (gate.tensor()?, up.tensor()?, down.tensor()?);
    if adapters.iter().all(Option::is_none) {
        return gated_mlp(x, gate, up, down, Activation::Silu);
    }
    let through = |x: &Tensor, weight: &Tensor, adapter: &Option<LayerAdapter>| match adapter {
        Some(adapter) => cast(&(linear_wide(x, weight)? + adapter.delta(x, rows)?)?, x.dtype()),
        None => linear(x, weight, None),
    };
    let [of_gate, of_up, of_down] = adapters;
    through(&swiglu(&through(x, gate, of_gate)?, &through(x, up, of_up)?)?, down, of_down)
}

/// The output of one expert of a stack: x `[n, C]` to `[n, C]`.
fn stacked(x: &Tensor, StackedExpert { stack, index }: &StackedExpert) -> Result<Tensor> {
    let ExpertStack { gate_up, gate_up_bias, down, down_bias, activation, adds_down_bias } = &**stack;
    let (gate_up, down) = (gate_up.tensor()?, down.tensor()?);
    let product = x.matmul(&gate_up.get(*index)?)?.broadcast_add(&gate_up_bias.get(*index)?)?;
    let (rows, wide) = product.dims2()?;
    let pairs = product.reshape((rows, wide / 2, 2))?;
    let (alpha, limit) = (f64::from(activation.alpha), f64::from(activation.limit));
    let gate = pairs.narrow(2, 0, 1)?.squeeze(2)?.contiguous()?.minimum(limit)?;
    let up = pairs.narrow(2, 1, 1)?.squeeze(2)?.contiguous()?.clamp(-limit, limit)?;
    // This is x times the sigmoid of alpha x, expressed by silu.
    let opened = ((gate * alpha)?.silu()? * (1.0 / alpha))?;
    let out = ((up + 1.0)? * opened)?.matmul(&down.get(*index)?)?;
    match adds_down_bias {
        true => out.broadcast_add(&down_bias.get(*index)?),
        false => Ok(out),
    }
}
