//! A decoder-only model with its configuration and the adapters attached to its layers.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::lora::Lora;
use crate::registry;
use candle_core::Tensor;
use ringspan::Mask;
use ringspan_candle::layers::{ForwardPass, MixtureOfExperts};
use ringspan_candle::model::{LinearLayer, ModelParameters, Parameter};
use ringspan_candle::shard::HeadCounts;
use ringspan_candle::{Adapters, Attend, LanguageModel, StoredWeights, Unit};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";

/// A model's structure, without its weights.
///
/// ```
/// use ringspan_models::{Config, Decoder};
///
/// let config: Config = serde_json::from_str(
///     r#"{
///         "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
///         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5
///     }"#,
/// )?;
/// let decoder = Decoder::new(config)?;
/// let weights = decoder.init(0)?;
/// assert_eq!(weights[decoder.embedding_name()].dims(), [32, 8]);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Decoder {
    config: Config,
    model: Arc<dyn LanguageModel>,
    /// The parameters of each unit, the adapters' matrices included.
    parameters: Arc<ModelParameters>,
    /// The names of parameters that receive no gradient.
    buffers: Arc<BTreeSet<String>>,
    pub(crate) lora: Option<Lora>,
    adapters: Arc<Adapters>,
}

impl Decoder {
    /// A decoder without adapters.
    ///
    /// # Errors
    /// As for [`Config::check`].
    pub fn new(config: Config) -> Result<Self> {
        let (model, parameters) = registry::model(&config)?;
        let buffers = parameters.iter().filter(|parameter| parameter.is_buffer).map(|buffer| buffer.name.clone());
        let (buffers, adapters) = (Arc::new(buffers.collect()), Arc::new(Adapters::none()));
        Ok(Self { config, model, parameters: Arc::new(parameters), buffers, lora: None, adapters })
    }

    /// Attaches these adapters in place of any others; their matrices follow the other parameters of their unit.
    pub(crate) fn with_adapters(mut self, lora: Option<Lora>, adapters: Adapters) -> Self {
        let all = self.parameters.with_adapters(&adapters);
        (self.parameters, self.lora, self.adapters) = (Arc::new(all), lora, Arc::new(adapters));
        self
    }

    /// The model's sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The parts of the model: embedding, layers, norm and output head.
    pub fn model(&self) -> &dyn LanguageModel {
        &*self.model
    }

    /// Whether a parameter is a buffer: stored with the others, but never trained.
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        self.buffers.contains(name)
    }

    /// The sizes of all adapters, by layer, and their dropout.
    pub fn adapter_sizes(&self) -> &Adapters {
        &self.adapters
    }

    /// The mixture of experts of the first sparse layer, if there is one; all sparse layers have as many experts.
    pub fn mixture(&self) -> Option<&MixtureOfExperts> {
        self.model.layers().into_iter().find_map(|layer| layer.experts())
    }

    /// Number of experts E of each sparse layer; 0 if there is none.
    pub fn experts(&self) -> usize {
        self.mixture().map_or(0, |mixture| mixture.router().experts)
    }

    /// Share of a sparse layer's experts that a token is routed to; 1 if no layer is sparse.
    pub fn expert_share_per_token(&self) -> f64 {
        self.mixture().map(MixtureOfExperts::router).map_or(1.0, |router| router.top as f64 / router.experts as f64)
    }

    /// Whether the feed-forward part of layer `index` is a mixture of experts.
    pub fn is_sparse(&self, index: usize) -> bool {
        self.model.layer(index).experts().is_some()
    }

    /// The attention mask of layer `index`.
    pub fn mask(&self, index: usize) -> &Mask {
        self.model.layer(index).attention().mask()
    }

    /// The numbers of query heads and key-value heads, the same in each layer.
    pub fn head_counts(&self) -> HeadCounts {
        self.model.layer(0).attention().heads()
    }

    /// Widths of a head: that of queries and keys, and that of values.
    pub fn head_dims(&self) -> [usize; 2] {
        let of_config = self.config.head_dim();
        self.model.layer(0).attention().head_dims().unwrap_or([of_config, of_config])
    }

    /// Computes embeddings `[T, C]` of tokens.
    ///
    /// # Errors
    /// Tokens outside the vocabulary.
    pub fn embed(&self, weights: &StoredWeights, tokens: &[u32], attend: &dyn Attend) -> Result<Tensor> {
        let embedding = self.model.embedding();
        let vocabulary = embedding.vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        Ok(embedding.forward(tokens, weights, attend.tensor_parallel())?)
    }

    /// Computes layer `index`: x `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights, failures of attention.
    pub fn layer(&self, weights: &StoredWeights, index: usize, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        Ok(self.model.layer(index).forward(x, &ForwardPass::new(weights, attend, &self.adapters))?)
    }

    /// Applies the norm after the last layer: `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights.
    pub fn norm(&self, weights: &StoredWeights, x: &Tensor) -> Result<Tensor> {
        Ok(self.model.norm().forward_with(x, weights)?)
    }

    /// The name of the output head's weight.
    pub fn head_name(&self) -> &str {
        self.model.head().weight_name()
    }

    /// The name of the embedding's weight.
    pub fn embedding_name(&self) -> &str {
        self.model.embedding().weight_name()
    }

    /// The name of the weight of the norm after the last layer.
    pub fn norm_name(&self) -> &str {
        self.model.norm().weight_name()
    }

    /// All units, in the order of the forward pass.
    pub fn units(&self) -> impl DoubleEndedIterator<Item = Unit> + use<> {
        let layers = (0..self.config.num_hidden_layers).map(Unit::Layer);
        [Unit::Embedding].into_iter().chain(layers).chain([Unit::Head])
    }

    /// The parameters of a unit.
    pub fn parameters(&self, unit: Unit) -> &[Parameter] {
        self.parameters.of_unit(unit)
    }

    /// The parameters of all units, and how they are sharded.
    pub fn all_parameters(&self) -> &ModelParameters {
        &self.parameters
    }

    /// The parameters of a unit with their shapes.
    pub fn unit_shapes(&self, unit: Unit) -> Vec<(String, Vec<usize>)> {
        self.parameters(unit).iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect()
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.units().flat_map(|unit| self.unit_shapes(unit)).collect()
    }

    /// The linear layers of a unit, each of which can have an adapter.
    pub fn linear_layers_of(&self, unit: Unit) -> &[LinearLayer] {
        self.parameters.linear_layers_of(unit)
    }

    /// The linear layers of all units, each of which can have an adapter; the output head is not among them.
    pub fn linear_layers(&self) -> impl Iterator<Item = &LinearLayer> {
        self.parameters.linear_layers()
    }

    /// The parameters that may stay in the type that a file stores, bf16 or quantized, while layers compute with them: the matrices
    /// of linear layers, experts, routers, the embedding and the output head.
    pub fn stored_matrices(&self) -> BTreeSet<String> {
        let of_layers = self.linear_layers().map(|layer| format!("{}.weight", layer.name));
        let stacks = self.parameters.iter().filter(|parameter| parameter.is_expert_stack());
        let stacks = stacks.map(|stack| stack.name.clone());
        let mixtures = self.model.layers().into_iter().filter_map(|layer| layer.experts());
        // Some routers are not among the linear layers, since adapters cannot be attached to them.
        let routers = mixtures.map(|mixture| mixture.router_weight().to_owned());
        let outside = [self.embedding_name().to_owned(), self.head_name().to_owned()];
        of_layers.chain(stacks).chain(routers).chain(outside).collect()
    }

    /// A parameter by name.
    ///
    /// # Errors
    /// A parameter that `weights` lacks, with its shape.
    pub fn parameter<'a, W>(&self, weights: &'a BTreeMap<String, W>, name: &str) -> Result<&'a W> {
        let missing =
            || Error::Missing { name: name.to_owned(), shape: self.shapes().remove(name).unwrap_or_default() };
        weights.get(name).ok_or_else(missing)
    }
}
