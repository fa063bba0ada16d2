//! Where layers store activations of the forward pass for the backward pass, and what is recomputed instead.

use crate::activation::Activation;
use crate::attend::{Attend, AttentionInputs};
use crate::attention::Memory;
use crate::dropout::Drops;
use crate::experts::{self, Expert, Experts, Load, Pressure, Routing};
use crate::gated_mlp::{Wide, gated_mlp, gated_mlp_again, gated_mlp_keeping};
use crate::kept::{Kept, Storage};
use crate::linear_adapted::Frozen;
use crate::offload::Offload;
use crate::rope::Rotation;
use crate::tensor_parallel::TensorParallel;
use crate::tiled::{RowFunction, tiled, tiled_again};
use crate::weight::Weight;
use candle_core::{Result, Tensor};
use ringspan::{Mask, Score};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::{fmt, str::FromStr};

/// Says which activations are recomputed before a layer's backward. All give the same gradients, to the last bit, unless gated layers have
/// adapters or biases: these layers are computed in tiles but by `Nothing`, which sums their gradients in another order.
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

/// Says which activations are stored for the backward pass, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckpointPolicy<'a> {
    /// Activations that are recomputed, not stored.
    pub recompute: Recompute,
    /// The type in which activations are stored; bf16 makes gradients approximate.
    pub storage: Storage,
    /// Where they wait, if not on the GPU on which they were computed.
    pub offload: Option<&'a Offload>,
}

impl From<Recompute> for CheckpointPolicy<'_> {
    fn from(recompute: Recompute) -> Self {
        Self { recompute, ..Self::default() }
    }
}

impl Recompute {
    /// All of them, those that compute most again first.
    pub const ALL: [Self; 3] = [Self::Full, Self::KeepAttention, Self::Nothing];
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

/// Activations of the layers of a pass: stored when a layer is computed for the first time, and taken out again when it is
/// computed for the second time, for its gradients.
pub struct ActivationStore<'a> {
    attend: &'a dyn Attend,
    policy: CheckpointPolicy<'a>,
    /// Whether layers are computed for the second time.
    again: Cell<bool>,
    attentions: RefCell<BTreeMap<usize, Memory>>,
    /// Results of products, by name.
    products: RefCell<BTreeMap<String, Kept>>,
    wide: RefCell<BTreeMap<String, Wide>>,
    mixtures: RefCell<BTreeMap<usize, experts::Memory>>,
    /// By the number of the model's rotary embedding: layers share them.
    rotations: RefCell<BTreeMap<usize, Rotation>>,
}

impl<'a> ActivationStore<'a> {
    /// An empty store for so many layers, whose attention and experts are those of `attend`.
    pub fn new(attend: &'a dyn Attend, policy: CheckpointPolicy<'a>, layers: usize) -> Self {
        if let Some(offload) = policy.offload {
            offload.begin(layers);
        }
        Self {
            attend,
            policy,
            again: Cell::new(false),
            attentions: RefCell::default(),
            products: RefCell::default(),
            wide: RefCell::default(),
            mixtures: RefCell::default(),
            rotations: RefCell::default(),
        }
    }

    /// From here on this layer is computed for the first time: layers come in their order.
    ///
    /// # Errors
    /// Failures of a device from which activations are offloaded.
    pub fn forward(&self, layer: usize) -> Result<()> {
        self.policy.offload.map_or(Ok(()), |offload| offload.forward(layer))
    }

    /// From here on this layer is computed for the second time, for its gradients: layers come in the opposite order.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn backward(&self, layer: usize) -> Result<()> {
        self.again.set(true);
        self.policy.offload.map_or(Ok(()), |offload| offload.backward(layer))
    }

    /// Whether layers are computed for the second time.
    pub(crate) fn is_recomputing(&self) -> bool {
        self.again.get()
    }

    /// Stores the input of a layer, a contiguous tensor.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn input(&self, tensor: &Tensor) -> Result<Kept> {
        self.kept(tensor, self.policy.storage)
    }

    /// A contiguous tensor that waits for the second time.
    fn kept(&self, tensor: &Tensor, storage: Storage) -> Result<Kept> {
        let kept = Kept::new(tensor, storage)?;
        match self.policy.offload {
            Some(offload) => kept.away(offload),
            None => Ok(kept),
        }
    }

    /// Whether results of products are stored, so that none is computed twice.
    pub(crate) fn keeps_products(&self) -> bool {
        self.policy.recompute == Recompute::Nothing
    }

    /// A linear layer, called `name`. `seen` says whether anything looks at its values when it is computed again.
    pub(crate) fn linear(
        &self,
        name: &str,
        x: &Tensor,
        weight: &Weight,
        bias: Option<&Tensor>,
        seen: bool,
    ) -> Result<Tensor> {
        self.product(
            name,
            seen,
            self.keep(seen),
            || weight.linear(x, bias),
            |known| weight.linear_again(x, bias, known),
        )
    }

    /// A linear layer with an adapter beside it, called `name`: x, and B of the adapter with what it is multiplied with; `seen`
    /// as for [`linear`](Self::linear).
    pub(crate) fn adapted(
        &self,
        name: &str,
        x: &Tensor,
        frozen: Frozen,
        [narrow, b]: [&Tensor; 2],
        seen: bool,
    ) -> Result<Tensor> {
        let again = |known| frozen.with_adapter_again(x, narrow, b, known);
        self.product(name, seen, self.keep(seen), || frozen.with_adapter(x, narrow, b), again)
    }

    /// How the result of a product is stored, if it is.
    fn keep(&self, seen: bool) -> Option<Storage> {
        (self.keeps_products() && seen).then_some(self.policy.storage)
    }

    /// A router's logits, called `name`. They are never rounded, and kept wherever anything else is: near a tie, what was
    /// rounded would send a token to other experts than before.
    pub(crate) fn router(&self, name: &str, x: &Tensor, weight: &Weight) -> Result<Tensor> {
        let keep = (self.keeps_products() || self.policy.storage != Storage::F32).then_some(Storage::F32);
        self.product(name, true, keep, || weight.linear(x, None), |known| weight.linear_again(x, None, known))
    }

    /// What `compute` makes, kept as `keep` says; the second time what `again` makes of what was kept, or of nothing where
    /// nothing looks at the values.
    fn product(
        &self,
        name: &str,
        seen: bool,
        keep: Option<Storage>,
        compute: impl FnOnce() -> Result<Tensor>,
        again: impl FnOnce(Option<Kept>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if self.again.get() {
            let known = self.products.borrow_mut().remove(name);
            return if known.is_some() || !seen { again(known) } else { compute() };
        }
        let out = compute()?;
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
            return match known.is_some() || !seen {
                true => gated_mlp_again(x, weights, activation, wide, known),
                false => gated_mlp(x, gate, up, down, activation),
            };
        }
        if !self.keeps_products() {
            return gated_mlp(x, gate, up, down, activation);
        }
        let (out, mut wide) = gated_mlp_keeping(x, weights, activation, self.policy.storage)?;
        if let Some(offload) = self.policy.offload {
            wide = wide.away(offload)?;
        }
        self.wide.borrow_mut().insert(name.to_owned(), wide);
        if seen {
            self.products.borrow_mut().insert(name.to_owned(), self.kept(&out, self.policy.storage)?);
        }
        Ok(out)
    }

    /// A function of rows, called `name`, computed tile by tile; `seen` as for [`linear`](Self::linear).
    pub(crate) fn tiled(&self, name: &str, x: &Tensor, function: impl RowFunction, seen: bool) -> Result<Tensor> {
        let again = |known| tiled_again(x, function.clone(), known);
        self.product(name, seen, self.keep(seen), || tiled(x, function.clone()), again)
    }

    /// The angles of the model's rotary embedding `id`, made by `make` once.
    pub(crate) fn rotation(&self, id: usize, make: impl FnOnce() -> Rotation) -> Rotation {
        self.rotations.borrow_mut().entry(id).or_insert_with(make).clone()
    }
}

impl Attend for ActivationStore<'_> {
    fn attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        if self.policy.recompute == Recompute::Full {
            return self.attend.attention(layer, inputs, mask, score);
        }
        let mut layers = self.attentions.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| Memory::new(self.policy.storage));
        let out = self.attend.attention_keeping(memory, layer, inputs, mask, score)?;
        if let Some(offload) = self.policy.offload {
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

impl Experts for ActivationStore<'_> {
    fn mix(
        &self,
        layer: usize,
        x: &Tensor,
        routing: &Routing,
        expert: &dyn Fn(usize) -> Result<Expert>,
    ) -> Result<Tensor> {
        if !self.keeps_products() {
            return self.attend.experts().mix(layer, x, routing, expert);
        }
        let mut layers = self.mixtures.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| experts::Memory::new(self.policy.storage));
        self.attend.experts().mix_keeping(memory, layer, x, routing, expert)
    }

    fn part(&self, whole: usize) -> Range<usize> {
        self.attend.experts().part(whole)
    }

    fn held(&self, experts: usize) -> Range<usize> {
        self.attend.experts().held(experts)
    }

    fn routed(&self, layer: usize, load: Load) -> Result<()> {
        self.attend.experts().routed(layer, load)
    }

    fn forward_ended(&self, experts: usize) -> Result<()> {
        self.attend.experts().forward_ended(experts)
    }

    fn pressures(&self, layer: usize) -> Vec<Pressure> {
        self.attend.experts().pressures(layer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_are_read_as_they_are_written_and_others_refused() {
        for policy in Recompute::ALL {
            assert_eq!(policy.to_string().parse::<Recompute>().expect("its own name"), policy);
        }
        let refused = "none".parse::<Recompute>().err().map(|error| error.to_string()).unwrap_or_default();
        assert!(refused.contains("none") && refused.contains("full, keep-attention, nothing"), "{refused}");
    }
}
