//! What a layer keeps from its forward pass for its backward, and what it computes again.

use crate::decoder::Weights;
use crate::error::Result;
use crate::gradients::Gradients;
use candle_core::{Tensor, Var};
use ringspan::{Mask, Score};
use ringspan_candle::activation::Activation;
use ringspan_candle::attention::Memory;
use ringspan_candle::experts::{self, Load, Pressure};
use ringspan_candle::gated_mlp::{Wide, gated_mlp, gated_mlp_again, gated_mlp_keeping};
use ringspan_candle::kept::{Kept, Storage};
use ringspan_candle::linear::{linear, linear_again};
use ringspan_candle::rope::Rotation;
use ringspan_candle::{Attend, Drops, Expert, Experts, Offload, RankDevice, Routing, TensorParallel, cotangent};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::{fmt, str::FromStr};

/// What is computed again before a layer's backward. All give the same gradients, to the last bit.
///
/// Kept for each token and layer, with C hidden size, I inner width, H query heads of width Dv, G key-value heads:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// The whole layer: C numbers are kept, its input.
    Full,
    /// All but attention: C + H (Dv + 1) numbers. The longer the sequence, the more of a layer is attention.
    #[default]
    KeepAttention,
    /// No product: 2 C + 2 (H + G) Dv + H + 2 I numbers. Norms, rotations and gates are computed again, and where ranks share
    /// experts, tokens travel to them again.
    ///
    /// A layer with E experts keeps I of each of those that a token goes to, and E of the router.
    Nothing,
}

/// What is kept for the backward, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct Keep<'a> {
    /// What is not kept.
    pub recompute: Recompute,
    /// The type of what is kept; bf16 makes gradients approximate.
    pub storage: Storage,
    /// Where it waits, if not on the GPU on which it was computed.
    pub offload: Option<&'a Offload>,
}

impl From<Recompute> for Keep<'_> {
    fn from(recompute: Recompute) -> Self {
        Self { recompute, ..Self::default() }
    }
}

impl FromStr for Recompute {
    type Err = ringspan::Error;

    fn from_str(given: &str) -> std::result::Result<Self, Self::Err> {
        match given {
            "full" => Ok(Self::Full),
            "keep-attention" => Ok(Self::KeepAttention),
            "nothing" => Ok(Self::Nothing),
            _ => Err(ringspan::Error::Unknown {
                what: "recompute",
                given: given.into(),
                possible: "full, keep-attention, nothing",
            }),
        }
    }
}

impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => "full",
            Self::KeepAttention => "keep-attention",
            Self::Nothing => "nothing",
        })
    }
}

/// What the layers of a pass keep, each by its first computation for its second.
pub(crate) struct Keeper<'a> {
    attend: &'a dyn Attend,
    keep: Keep<'a>,
    /// Whether layers are computed for the second time.
    again: Cell<bool>,
    attentions: RefCell<BTreeMap<usize, Memory>>,
    /// Results of products, by name.
    products: RefCell<BTreeMap<String, Kept>>,
    wide: RefCell<BTreeMap<String, Wide>>,
    mixtures: RefCell<BTreeMap<usize, experts::Memory>>,
    /// By the place of the model's rotary embedding: layers share them.
    rotations: RefCell<BTreeMap<usize, Rotation>>,
}

impl<'a> Keeper<'a> {
    /// Keeps nothing yet, of so many layers.
    pub(crate) fn new(attend: &'a dyn Attend, keep: Keep<'a>, layers: usize) -> Self {
        if let Some(offload) = keep.offload {
            offload.begin(layers);
        }
        Self {
            attend,
            keep,
            again: Cell::new(false),
            attentions: RefCell::default(),
            products: RefCell::default(),
            wide: RefCell::default(),
            mixtures: RefCell::default(),
            rotations: RefCell::default(),
        }
    }

    /// From here on this layer is computed: for the first time, in their order.
    pub(crate) fn forward(&self, layer: usize) -> Result<()> {
        Ok(self.keep.offload.map_or(Ok(()), |offload| offload.forward(layer))?)
    }

    /// From here on this layer is computed for the second time, for its gradients only, in the opposite order.
    pub(crate) fn backward(&self, layer: usize) -> Result<()> {
        self.again.set(true);
        Ok(self.keep.offload.map_or(Ok(()), |offload| offload.backward(layer))?)
    }

    /// A contiguous tensor that waits for the second time.
    pub(crate) fn kept(&self, tensor: &Tensor, storage: Storage) -> candle_core::Result<Kept> {
        let kept = Kept::new(tensor, storage)?;
        match self.keep.offload {
            Some(offload) => kept.away(offload),
            None => Ok(kept),
        }
    }

    fn keeps_products(&self) -> bool {
        self.keep.recompute == Recompute::Nothing
    }

    /// A linear layer, called `name`. `seen` says whether anything looks at its values when it is computed again.
    pub(crate) fn linear(
        &self,
        name: &str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        seen: bool,
    ) -> Result<Tensor> {
        let keep = (self.keeps_products() && seen).then_some(self.keep.storage);
        self.product(name, x, weight, bias, seen, keep)
    }

    /// A router's logits, called `name`. They are never rounded, and kept wherever anything else is: near a tie, what was
    /// rounded would send a token to other experts than before.
    pub(crate) fn router(&self, name: &str, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let keep = (self.keeps_products() || self.keep.storage != Storage::F32).then_some(Storage::F32);
        self.product(name, x, weight, None, true, keep)
    }

    /// A linear layer, kept as `keep` says.
    fn product(
        &self,
        name: &str,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        seen: bool,
        keep: Option<Storage>,
    ) -> Result<Tensor> {
        if self.again.get() {
            let known = self.products.borrow_mut().remove(name);
            return Ok(match known.is_some() || !seen {
                true => linear_again(x, weight, bias, known)?,
                false => linear(x, weight, bias)?,
            });
        }
        let out = linear(x, weight, bias)?;
        if let Some(storage) = keep {
            self.products.borrow_mut().insert(name.to_owned(), self.kept(&out, storage)?);
        }
        Ok(out)
    }

    /// A gated layer, called `name`; `seen` as for [`linear`](Self::linear).
    pub(crate) fn gated(
        &self,
        name: &str,
        x: &Tensor,
        weights: [&Tensor; 3],
        activation: Activation,
        seen: bool,
    ) -> Result<Tensor> {
        let [gate, up, down] = weights;
        if self.again.get() {
            let (known, wide) = (self.products.borrow_mut().remove(name), self.wide.borrow_mut().remove(name));
            return Ok(match known.is_some() || !seen {
                true => gated_mlp_again(x, weights, activation, wide, known)?,
                false => gated_mlp(x, gate, up, down, activation)?,
            });
        }
        if !self.keeps_products() {
            return Ok(gated_mlp(x, gate, up, down, activation)?);
        }
        let (out, mut wide) = gated_mlp_keeping(x, weights, activation, self.keep.storage)?;
        if let Some(offload) = self.keep.offload {
            wide = wide.away(offload)?;
        }
        self.wide.borrow_mut().insert(name.to_owned(), wide);
        if seen {
            self.products.borrow_mut().insert(name.to_owned(), self.kept(&out, self.keep.storage)?);
        }
        Ok(out)
    }

    /// The rotation at this place, made by `make` once.
    pub(crate) fn rotation(&self, place: usize, make: impl FnOnce() -> Rotation) -> Rotation {
        self.rotations.borrow_mut().entry(place).or_insert_with(make).clone()
    }
}

impl Attend for Keeper<'_> {
    fn attention(
        &self,
        layer: usize,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        mask: &Mask,
        score: &Score,
    ) -> candle_core::Result<Tensor> {
        if self.keep.recompute == Recompute::Full {
            return self.attend.attention(layer, q, k, v, mask, score);
        }
        let mut layers = self.attentions.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| Memory::new(self.keep.storage));
        let out = self.attend.attention_keeping(memory, layer, q, k, v, mask, score)?;
        if let Some(offload) = self.keep.offload {
            memory.away(offload)?;
        }
        Ok(out)
    }

    fn positions(&self) -> &[usize] {
        self.attend.positions()
    }

    fn length(&self) -> usize {
        self.attend.length()
    }

    fn experts(&self) -> &dyn Experts {
        self
    }

    fn tensor_parallel(&self) -> &TensorParallel {
        self.attend.tensor_parallel()
    }

    fn drops(&self) -> Option<&Drops> {
        self.attend.drops()
    }
}

impl Experts for Keeper<'_> {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> candle_core::Result<Expert>,
    ) -> candle_core::Result<Tensor> {
        if !self.keeps_products() {
            return self.attend.experts().mix(layer, x, routing, expert);
        }
        let mut layers = self.mixtures.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| experts::Memory::new(self.keep.storage));
        self.attend.experts().mix_keeping(memory, layer, x, routing, expert)
    }

    fn part(&self, whole: usize) -> Range<usize> {
        self.attend.experts().part(whole)
    }

    fn routed(&self, layer: usize, load: Load) -> candle_core::Result<()> {
        self.attend.experts().routed(layer, load)
    }

    fn forward_ended(&self, experts: usize) -> candle_core::Result<()> {
        self.attend.experts().forward_ended(experts)
    }

    fn pressures(&self, layer: usize) -> Vec<Pressure> {
        self.attend.experts().pressures(layer)
    }
}

/// The same parameters, without a graph of what is computed from them: where they come from, they may be variables.
pub fn constant(parameters: Weights) -> Weights {
    parameters.into_iter().map(|(name, tensor)| (name, tensor.detach())).collect()
}

/// The same parameters on a device, in the type in which it computes; those that are there already are not copied.
///
/// # Errors
/// A GPU without memory for them.
pub fn on_device(parameters: &Weights, device: &RankDevice) -> Result<Weights> {
    parameters.iter().map(|(name, tensor)| Ok((name.clone(), device.parameter(tensor)?))).collect()
}

/// A computed function of an input and parameters that can still be differentiated.
pub(crate) struct Graph {
    input: Var,
    /// Those that are trained.
    parameters: Weights,
    output: Tensor,
}

impl Graph {
    /// Computes `f` of parameters and input, to be differentiated in the input and in the parameters that are trained.
    pub(crate) fn new(
        x: &Tensor,
        parameters: Weights,
        trains: impl Fn(&str) -> bool,
        f: impl FnOnce(&Weights, &Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let input = Var::from_tensor(x)?;
        // A variable is taken as it is. Others are copied one by one, so that no more than a parameter is there twice.
        let variable = |(name, tensor): (String, Tensor)| match trains(&name) {
            true => Ok((name, Var::from_tensor(&tensor)?.into_inner())),
            false => Ok((name, tensor.detach())),
        };
        let mut parameters: Weights = parameters.into_iter().map(variable).collect::<Result<_>>()?;
        let output = f(&parameters, input.as_tensor())?;
        parameters.retain(|name, _| trains(name));
        Ok(Self { input, parameters, output })
    }

    /// Gradients of `sum(dy * output)`: of the input, and of each parameter that is trained.
    pub(crate) fn backward(self, dy: &Tensor) -> Result<(Tensor, Gradients)> {
        let mut store = cotangent::backward(&self.output, dy)?;
        // Zeros of what took no part.
        let mut gradient = |tensor: &Tensor| match store.remove(tensor) {
            Some(gradient) => Ok(gradient.detach()),
            None => tensor.zeros_like(),
        };
        let dx = gradient(self.input.as_tensor())?;
        let of = |(name, tensor): (String, Tensor)| Ok((name, gradient(&tensor)?));
        Ok((dx, self.parameters.into_iter().map(of).collect::<Result<_>>()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_are_written_and_others_refused() {
        for policy in [Recompute::Full, Recompute::KeepAttention, Recompute::Nothing] {
            assert_eq!(policy.to_string().parse::<Recompute>().expect("its own name"), policy);
        }
        let refused = "none".parse::<Recompute>().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("none") && refused.contains("full, keep-attention, nothing"), "{refused}");
    }
}
