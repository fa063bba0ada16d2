//! Stores activations of the forward pass for the backward pass, and says which are recomputed instead (activation
//! checkpointing).

use crate::activation::Activation;
use crate::adapter_rows::AdapterSelection;
use crate::attend::{Attend, AttentionInputs};
use crate::attention::SavedAttention;
use crate::dropout::InputDropout;
use crate::experts::{self, Expert, ExpertLoad, Experts, RouterGradient, Routing};
use crate::gated_mlp::{GateUpActivations, gated_mlp, gated_mlp_recomputed, gated_mlp_saving};
use crate::linear_adapted::FrozenLinear;
use crate::offload::Offload;
use crate::rope::Rotations;
use crate::stored_activation::{Storage, StoredActivation};
use crate::tensor_parallel::TensorParallel;
use crate::tiled::{RowFunction, tiled, tiled_recomputed};
use crate::weight::Weight;
use candle_core::{Result, Tensor, bail};
use ringspan::{Mask, Score};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::Range;
use std::{fmt, str::FromStr};

/// Says which activations are recomputed before a layer's backward pass. All choices give the same gradients, to the
/// last bit, with one exception: on a CPU, feed-forward layers with biases or adapters are computed in tiles unless nothing is
/// recomputed, and `Nothing` sums their gradients in another order.
///
/// The numbers stored for each token and layer, with C hidden size, I inner width, H query heads of width Dv, G key-value
/// heads, are:
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Recompute {
    /// Recomputes the whole layer: only its input is stored, C numbers. On a CPU, the backward pass computes attention's
    /// inputs twice.
    Full,
    /// Recomputes all but attention: C + H (Dv + 2) numbers are stored. The longer the sequence, the more of a layer is
    /// attention.
    #[default]
    KeepAttention,
    /// Recomputes no matrix product: 2 C + 2 (H + G) Dv + 2 H + 2 I numbers are stored. Norms, rotary embeddings and gates
    /// are computed again, and where ranks share experts, tokens are sent to them again.
    ///
    /// A sparse layer with E experts stores 2 I numbers for each expert that a token is routed to, and E router logits.
    Nothing,
}

/// Says which activations are stored for the backward pass, and how.
#[derive(Debug, Clone, Copy, Default)]
pub struct CheckpointPolicy<'a> {
    /// Activations that are recomputed, not stored.
    pub recompute: Recompute,
    /// The type in which activations are stored; bf16 makes gradients approximate.
    pub storage: Storage,
    /// Moves stored activations to CPU memory until they are needed; without it they stay on the GPU that computed them.
    pub offload: Option<&'a Offload>,
}

impl From<Recompute> for CheckpointPolicy<'_> {
    fn from(recompute: Recompute) -> Self {
        Self { recompute, ..Self::default() }
    }
}

impl Recompute {
    /// All choices, beginning with the one that recomputes most.
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

/// The stored activations of one forward pass: layers put them in when they are computed for the first time, and take them
/// out when they are recomputed for their gradients.
pub struct ActivationStore<'a> {
    attend: &'a dyn Attend,
    policy: CheckpointPolicy<'a>,
    /// Whether the backward pass has begun, so that layers are recomputed.
    is_recomputing: Cell<bool>,
    attentions: RefCell<BTreeMap<usize, SavedAttention>>,
    /// Outputs of matrix products, by the name of their layer.
    products: RefCell<BTreeMap<String, StoredActivation>>,
    gate_ups: RefCell<BTreeMap<String, GateUpActivations>>,
    mixtures: RefCell<BTreeMap<usize, experts::SavedExperts>>,
    rotations: Rotations,
}

impl<'a> ActivationStore<'a> {
    /// An empty store for a model of `layers` layers, which attend and mix experts through `attend`.
    pub fn new(attend: &'a dyn Attend, policy: CheckpointPolicy<'a>, layers: usize) -> Self {
        if let Some(offload) = policy.offload {
            offload.begin(layers);
        }
        Self {
            attend,
            policy,
            is_recomputing: Cell::new(false),
            attentions: RefCell::default(),
            products: RefCell::default(),
            gate_ups: RefCell::default(),
            mixtures: RefCell::default(),
            rotations: Rotations::default(),
        }
    }

    /// Announces that layer `layer` is computed for the first time from here on; layers are announced in ascending order.
    ///
    /// # Errors
    /// Failures of a device from which activations are offloaded.
    pub fn forward(&self, layer: usize) -> Result<()> {
        self.policy.offload.map_or(Ok(()), |offload| offload.forward(layer))
    }

    /// Announces that layer `layer` is recomputed for its gradients from here on; layers are announced in descending order.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn backward(&self, layer: usize) -> Result<()> {
        self.is_recomputing.set(true);
        self.policy.offload.map_or(Ok(()), |offload| offload.backward(layer))
    }

    /// Whether the backward pass has begun, so that layers are recomputed.
    pub(crate) fn is_recomputing(&self) -> bool {
        self.is_recomputing.get()
    }

    /// Stores the input of a layer, a contiguous tensor.
    ///
    /// # Errors
    /// As for [`forward`](Self::forward).
    pub fn input(&self, tensor: &Tensor) -> Result<StoredActivation> {
        self.store(tensor, self.policy.storage)
    }

    /// Stores a contiguous tensor for the backward pass, and offloads it if the policy says so.
    fn store(&self, tensor: &Tensor, storage: Storage) -> Result<StoredActivation> {
        let stored = StoredActivation::new(tensor, storage)?;
        match self.policy.offload {
            Some(offload) => stored.offload(offload),
            None => Ok(stored),
        }
    }

    /// Whether outputs of matrix products are stored, so that none is computed twice.
    pub(crate) fn stores_products(&self) -> bool {
        self.policy.recompute == Recompute::Nothing
    }

    /// The linear layer `name`. `needs_values` says whether anything reads its output values when it is recomputed, not only its
    /// gradients.
    pub(crate) fn linear(
        &self,
        name: &str,
        x: &Tensor,
        weight: &Weight,
        bias: Option<&Tensor>,
        needs_values: bool,
    ) -> Result<Tensor> {
        self.product(
            name,
            needs_values,
            self.product_storage(needs_values),
            || weight.linear(x, bias),
            |known| weight.linear_recomputed(x, bias, known),
        )
    }

    /// The linear layer `name` with a LoRA adapter: x `[T, in]`, `narrow` = scale x A^T `[T, R]` and B `[out, R]`; `needs_values` is
    /// as for [`linear`](Self::linear).
    pub(crate) fn adapted(
        &self,
        name: &str,
        x: &Tensor,
        frozen: FrozenLinear,
        [narrow, b]: [&Tensor; 2],
        needs_values: bool,
    ) -> Result<Tensor> {
        let recomputed = |known| frozen.with_adapter_recomputed(x, narrow, b, known);
        self.product(
            name,
            needs_values,
            self.product_storage(needs_values),
            || frozen.with_adapter(x, narrow, b),
            recomputed,
        )
    }

    /// The type in which the output of a product is stored; `None` if it is not stored.
    fn product_storage(&self, needs_values: bool) -> Option<Storage> {
        (self.stores_products() && needs_values).then_some(self.policy.storage)
    }

    /// The logits of the router `name`. They are stored unrounded wherever other activations are stored rounded: near a tie,
    /// a rounded activation would send a token to other experts in the recomputation than in the forward pass.
    pub(crate) fn router(&self, name: &str, x: &Tensor, weight: &Weight) -> Result<Tensor> {
        let storage = (self.stores_products() || self.policy.storage != Storage::F32).then_some(Storage::F32);
        self.product(name, true, storage, || weight.linear(x, None), |known| weight.linear_recomputed(x, None, known))
    }

    /// Returns the output of `compute` and stores it in the type `storage`, if there is one. When the layer is
    /// recomputed, returns the result of `recomputed` for the stored output, or for `None` if nothing reads the values.
    fn product(
        &self,
        name: &str,
        needs_values: bool,
        storage: Option<Storage>,
        compute: impl FnOnce() -> Result<Tensor>,
        recomputed: impl FnOnce(Option<StoredActivation>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if self.is_recomputing.get() {
            let known = self.products.borrow_mut().remove(name);
            return if known.is_some() || !needs_values { recomputed(known) } else { compute() };
        }
        let out = compute()?;
        if let Some(storage) = storage {
            self.products.borrow_mut().insert(name.to_owned(), self.store(&out, storage)?);
        }
        Ok(out)
    }

    /// The gated feed-forward layer `name`; `needs_values` is as for [`linear`](Self::linear).
    pub(crate) fn gated(
        &self,
        name: &str,
        x: &Tensor,
        weights: [&Tensor; 3],
        activation: Activation,
        needs_values: bool,
    ) -> Result<Tensor> {
        let [gate, up, down] = weights;
        if self.is_recomputing.get() {
            let (known, wide) = (self.products.borrow_mut().remove(name), self.gate_ups.borrow_mut().remove(name));
            return match known.is_some() || !needs_values {
                true => gated_mlp_recomputed(x, weights, activation, wide, known),
                false => gated_mlp(x, gate, up, down, activation),
            };
        }
        if !self.stores_products() {
            return gated_mlp(x, gate, up, down, activation);
        }
        let (out, mut wide) = gated_mlp_saving(x, weights, activation, self.policy.storage)?;
        if let Some(offload) = self.policy.offload {
            wide = wide.offload(offload)?;
        }
        self.gate_ups.borrow_mut().insert(name.to_owned(), wide);
        if needs_values {
            self.products.borrow_mut().insert(name.to_owned(), self.store(&out, self.policy.storage)?);
        }
        Ok(out)
    }

    /// The row-wise function `name`, computed tile by tile; `needs_values` is as for [`linear`](Self::linear).
    pub(crate) fn tiled(
        &self,
        name: &str,
        x: &Tensor,
        function: impl RowFunction,
        needs_values: bool,
    ) -> Result<Tensor> {
        let recomputed = |known| tiled_recomputed(x, function.clone(), known);
        self.product(name, needs_values, self.product_storage(needs_values), || tiled(x, function.clone()), recomputed)
    }

    /// Takes out the output of a layer's attention, `[T, H, Dv]`, if it is stored;
    /// [`attention_gradient`](Self::attention_gradient) must follow.
    ///
    /// # Errors
    /// An output that was taken out before.
    pub fn take_attention(&self, layer: usize) -> Result<Option<Tensor>> {
        self.attentions.borrow_mut().get_mut(&layer).map_or(Ok(None), SavedAttention::take_output)
    }

    /// Announces the gradient of the output that was taken out, both `[T, H, Dv]` on the CPU. After it attention can be
    /// recorded for its gradients, once, without the output.
    ///
    /// # Errors
    /// An output that is not stored, tensors of different shapes.
    pub fn attention_gradient(&self, layer: usize, output: &Tensor, gradient: &Tensor) -> Result<()> {
        match self.attentions.borrow_mut().get_mut(&layer) {
            Some(memory) => memory.output_gradient(output, gradient),
            None => bail!("the gradient of the attention of layer {layer}, whose output is not stored"),
        }
    }
}

impl Attend for ActivationStore<'_> {
    fn layer_attention(&self, layer: usize, inputs: &AttentionInputs, mask: &Mask, score: &Score) -> Result<Tensor> {
        // On a CPU, the backward pass of a layer first needs attention's output, and later differentiates attention from its inputs, so
        // the recomputed output is stored between the two.
        if self.policy.recompute == Recompute::Full && !(self.is_recomputing.get() && inputs.q.device().is_cpu()) {
            return self.attend.layer_attention(layer, inputs, mask, score);
        }
        // An output that was not stored over the forward pass is exact, like everything that is recomputed.
        let storage = if self.policy.recompute == Recompute::Full { Storage::default() } else { self.policy.storage };
        let mut layers = self.attentions.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| SavedAttention::new(storage));
        let out = self.attend.attention_saving(memory, layer, inputs, mask, score)?;
        if let Some(offload) = self.policy.offload {
            memory.offload(offload)?;
        }
        Ok(out)
    }

    fn positions(&self) -> &[usize] {
        self.attend.positions()
    }

    fn rotations(&self) -> Option<&Rotations> {
        Some(&self.rotations)
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

    fn input_dropout(&self) -> Option<&InputDropout> {
        self.attend.input_dropout()
    }

    fn adapter_selection(&self) -> Option<&AdapterSelection> {
        self.attend.adapter_selection()
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
        if !self.stores_products() {
            return self.attend.experts().mix(layer, x, routing, expert);
        }
        let mut layers = self.mixtures.borrow_mut();
        let memory = layers.entry(layer).or_insert_with(|| experts::SavedExperts::new(self.policy.storage));
        self.attend.experts().mix_saving(memory, layer, x, routing, expert)
    }

    fn local_width(&self, whole: usize) -> Range<usize> {
        self.attend.experts().local_width(whole)
    }

    fn local_experts(&self, experts: usize) -> Range<usize> {
        self.attend.experts().local_experts(experts)
    }

    fn routed(&self, layer: usize, load: ExpertLoad) -> Result<()> {
        self.attend.experts().routed(layer, load)
    }

    fn forward_ended(&self, experts: usize) -> Result<()> {
        self.attend.experts().forward_ended(experts)
    }

    fn router_gradients(&self, layer: usize) -> Vec<RouterGradient> {
        self.attend.experts().router_gradients(layer)
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
