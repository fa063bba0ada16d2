//! Attaches LoRA adapters to a decoder, and tells which of its parameters are trained.

use crate::decoder::Decoder;
use crate::error::{Error, Result};
use crate::lora::names::{LayerNames, ends_with};
use crate::lora::{Lora, ROUTER, is_adapter};
use candle_core::{Device, Tensor};
use ringspan_candle::{AdapterSize, Adapters, Weights};

impl Decoder {
    /// Attaches adapters to the model; from then on only they are trained. In sparse layers each expert has its own.
    ///
    /// # Errors
    /// A target that is no linear layer here, such as the router of a model without experts; targets that match no layer at
    /// all.
    pub fn with_lora(self, mut lora: Lora) -> Result<Self> {
        let linear: Vec<&str> = self.linear_layers().map(|layer| layer.name.as_str()).collect();
        let is_there = |end: &str| linear.iter().any(|layer| ends_with(layer, end));
        let mut possible: Vec<&str> = Vec::new();
        let mut named = Vec::new();
        for layer in self.linear_layers() {
            let end = layer.name.rsplit('.').next().unwrap_or_default();
            if !possible.contains(&end) {
                possible.push(end);
                named
                    .extend((!layer.is_router || lora.layers.targets == LayerNames::AllLinear).then(|| end.to_owned()));
            }
        }
        if let LayerNames::AllLinear | LayerNames::AllButRouters = &lora.layers.targets {
            // PEFT writes the resolved names, too, for readers that do not know the word `all-linear`.
            lora.layers.targets = LayerNames::Ends(named);
        }
        let refuse = |problem: String| Err(Error::Lora(format!("{problem}: possible are {}", possible.join(", "))));
        if let LayerNames::Ends(ends) = &lora.layers.targets
            && let Some(end) = ends.iter().find(|end| !is_there(end))
        {
            let what = if end == ROUTER { ", the router of experts," } else { "" };
            return refuse(format!("'{end}'{what} is no linear layer of this model's layers"));
        }
        let mut sizes = Vec::new();
        for layer in &linear {
            if lora.layers.has(layer)? {
                sizes.push(((*layer).to_owned(), lora.size(layer)?));
            }
        }
        if sizes.is_empty() {
            return refuse(format!("it is attached to no layer of this model ({})", lora.layers.targets));
        }
        let adapters = Adapters { sizes: sizes.into_iter().collect(), dropout: lora.dropout, ..Adapters::none() };
        Ok(self.with_adapters(Some(lora), adapters))
    }

    /// Attaches the adapters of several decoders of the same model, each under the slot by which rows ask for it
    /// ([`AdapterSelection`](ringspan_candle::AdapterSelection)), so that one pass computes rows of all of them. They are not trained, and
    /// their matrices are not among the model's parameters.
    #[must_use]
    pub fn with_adapters_by_slot<'a>(&self, adapted: impl IntoIterator<Item = (u64, &'a Self)>) -> Self {
        let by_slot = adapted.into_iter().map(|(slot, decoder)| (slot, decoder.adapter_sizes().clone())).collect();
        self.clone().with_adapters(None, Adapters::by_slot(by_slot))
    }

    /// The adapters' settings, if the model has adapters.
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// The layers with an adapter, by their full names, with the adapter's rank and scale.
    pub fn adapters(&self) -> impl Iterator<Item = (&str, AdapterSize)> {
        self.adapter_sizes().sizes.iter().map(|(layer, size)| (layer.as_str(), *size))
    }

    /// The rank and scale of the adapter of the layer with this full name, if it has one.
    pub fn adapter(&self, layer: &str) -> Option<AdapterSize> {
        self.adapter_sizes().size(layer)
    }

    /// Whether a parameter is trained: with adapters only these are, without adapters every parameter that is not a buffer.
    pub fn trains(&self, name: &str) -> bool {
        if self.lora.is_none() { !self.is_buffer(name) } else { is_adapter(name) }
    }

    /// Adds newly initialised adapters to `weights`.
    ///
    /// # Errors
    /// Sizes that do not fit in memory.
    pub fn adapted(&self, mut weights: Weights, seed: u64) -> Result<Weights> {
        let Some(lora) = &self.lora else { return Ok(weights) };
        for (name, shape) in self.shapes().into_iter().filter(|(name, _)| is_adapter(name)) {
            let values = lora.init(&name, &shape, seed);
            weights.insert(name, Tensor::from_vec(values, shape, &Device::Cpu)?);
        }
        Ok(weights)
    }
}
