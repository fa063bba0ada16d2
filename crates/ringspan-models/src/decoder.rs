//! The decoder of the Llama family: Llama 3, Qwen2 (biases), Qwen3 (normed queries and keys), Mistral (window).
//!
//! Shape letters: T tokens at hand, C hidden size, H query heads, G key-value heads, D head width, V vocabulary.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::rope::inverse_frequencies;
use candle_core::{DType, Device, Tensor, Var};
use ringspan_candle::Attend;
use ringspan_candle::activation::Activation;
use ringspan_candle::gated_mlp::gated_mlp;
use ringspan_candle::linear::linear;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::rope::{Rotation, rope};
use ringspan_candle::swiglu::swiglu;
use std::collections::BTreeMap;

/// Parameters by Hugging Face's names, f32.
pub type Weights = BTreeMap<String, Tensor>;

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
const NORM: &str = "model.norm.weight";

/// A model without its weights.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: Config,
    inverse_frequencies: Vec<f64>,
}

impl Decoder {
    /// # Errors
    /// What [`Config::check`] refuses.
    pub fn new(config: Config) -> Result<Self> {
        config.check()?;
        let inverse_frequencies = inverse_frequencies(&config)?;
        Ok(Self { config, inverse_frequencies })
    }

    /// Sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Embeddings `[T, C]` of tokens.
    ///
    /// # Errors
    /// Tokens outside the vocabulary.
    pub fn embed(&self, weights: &Weights, tokens: &[u32]) -> Result<Tensor> {
        let vocabulary = self.config.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        if tokens.is_empty() {
            return Ok(Tensor::zeros((0, self.config.hidden_size), DType::F32, &Device::Cpu)?);
        }
        Ok(self.get(weights, EMBEDDING)?.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?)
    }

    /// Layer `index`: x `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights, failures of attention.
    pub fn layer(&self, weights: &Weights, index: usize, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        if x.dim(0)? == 0 {
            // No token here, but others may wait for this part of attention.
            let [q, k, v] = self.no_tokens()?;
            attend.attention(index, &q, &k, &v, &self.config.mask(index), self.scale())?;
            return Ok(x.clone());
        }
        let part = |name: &str| format!("model.layers.{index}.{name}");
        let h = self.normed(weights, &part("input_layernorm"), x)?;
        let x = (x + self.attention(weights, index, &h, attend)?)?;
        let h = self.normed(weights, &part("post_attention_layernorm"), &x)?;
        Ok((x + self.feed_forward(weights, &part("mlp"), &h)?)?)
    }

    /// The gated layer of `name`: h `[T, C]` to `[T, C]`.
    fn feed_forward(&self, weights: &Weights, name: &str, h: &Tensor) -> Result<Tensor> {
        let part = |which: &str| format!("{name}.{which}_proj");
        if !self.config.mlp_bias() {
            let weight = |which: &str| self.get(weights, &format!("{}.weight", part(which)));
            return Ok(gated_mlp(h, weight("gate")?, weight("up")?, weight("down")?, Activation::Silu)?);
        }
        let (gate, up) = (self.linear(weights, &part("gate"), h, true)?, self.linear(weights, &part("up"), h, true)?);
        self.linear(weights, &part("down"), &swiglu(&gate, &up)?, true)
    }

    fn attention(&self, weights: &Weights, index: usize, h: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        let Config { num_attention_heads: heads, .. } = self.config;
        let (tokens, kv_heads, dim) = (h.dim(0)?, self.config.num_key_value_heads(), self.config.head_dim());
        let part = |name: &str| format!("model.layers.{index}.self_attn.{name}");
        let project = |name: &str, heads: usize| -> Result<Tensor> {
            let flat = self.linear(weights, &part(name), h, self.config.qkv_bias())?;
            Ok(flat.reshape((tokens, heads, dim))?)
        };
        let (mut q, mut k) = (project("q_proj", heads)?, project("k_proj", kv_heads)?);
        let v = project("v_proj", kv_heads)?;
        if self.config.qk_norm() {
            q = self.normed(weights, &part("q_norm"), &q)?;
            k = self.normed(weights, &part("k_norm"), &k)?;
        }
        let rotation = Rotation::new(attend.positions(), &self.inverse_frequencies, 1.0);
        let (q, k) = (rope(&q, &rotation)?, rope(&k, &rotation)?);
        let out = attend.attention(index, &q, &k, &v, &self.config.mask(index), self.scale())?;
        self.linear(weights, &part("o_proj"), &out.reshape((tokens, heads * dim))?, self.config.output_bias())
    }

    /// The norm after the last layer: `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights.
    pub fn norm(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        if x.dim(0)? == 0 {
            return Ok(x.clone());
        }
        Ok(rms_norm(x, self.get(weights, NORM)?, self.config.rms_norm_eps)?)
    }

    /// The output head `[V, C]`: the embedding, if they are tied.
    ///
    /// # Errors
    /// Missing weights.
    pub fn head(&self, weights: &Weights) -> Result<Tensor> {
        self.get(weights, self.head_name()).cloned()
    }

    /// The parameter that is the output head.
    pub fn head_name(&self) -> &'static str {
        if self.config.tie_word_embeddings { EMBEDDING } else { HEAD }
    }

    /// The parameter that is the embedding.
    pub fn embedding_name(&self) -> &'static str {
        EMBEDDING
    }

    /// The parameter of the norm after the last layer.
    pub fn norm_name(&self) -> &'static str {
        NORM
    }

    /// The parameters of layer `index`.
    pub fn layer_names(&self, index: usize) -> Vec<String> {
        self.layer_shapes(index).into_iter().map(|(name, _)| name).collect()
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let Config { vocab_size, hidden_size, num_hidden_layers, .. } = self.config;
        let mut shapes: BTreeMap<String, Vec<usize>> =
            (0..num_hidden_layers).flat_map(|index| self.layer_shapes(index)).collect();
        shapes.insert(NORM.into(), vec![hidden_size]);
        shapes.insert(EMBEDDING.into(), vec![vocab_size, hidden_size]);
        shapes.insert(self.head_name().into(), vec![vocab_size, hidden_size]);
        shapes
    }

    fn layer_shapes(&self, index: usize) -> Vec<(String, Vec<usize>)> {
        let Config { hidden_size: hidden, intermediate_size: wide, num_attention_heads, .. } = self.config;
        let dim = self.config.head_dim();
        let (q, kv) = (num_attention_heads * dim, self.config.num_key_value_heads() * dim);
        let mut shapes = Vec::new();
        let mut add = |name: &str, shape: Vec<usize>| shapes.push((format!("model.layers.{index}.{name}"), shape));
        add("input_layernorm.weight", vec![hidden]);
        add("post_attention_layernorm.weight", vec![hidden]);
        for (name, to, from, bias) in [
            ("self_attn.q_proj", q, hidden, self.config.qkv_bias()),
            ("self_attn.k_proj", kv, hidden, self.config.qkv_bias()),
            ("self_attn.v_proj", kv, hidden, self.config.qkv_bias()),
            ("self_attn.o_proj", hidden, q, self.config.output_bias()),
            ("mlp.gate_proj", wide, hidden, self.config.mlp_bias()),
            ("mlp.up_proj", wide, hidden, self.config.mlp_bias()),
            ("mlp.down_proj", hidden, wide, self.config.mlp_bias()),
        ] {
            add(&format!("{name}.weight"), vec![to, from]);
            if bias {
                add(&format!("{name}.bias"), vec![to]);
            }
        }
        if self.config.qk_norm() {
            add("self_attn.q_norm.weight", vec![dim]);
            add("self_attn.k_norm.weight", vec![dim]);
        }
        shapes
    }

    /// Queries, keys and values of no token, as leaves of a graph of their own.
    pub(crate) fn no_tokens(&self) -> Result<[Tensor; 3]> {
        let (heads, kv_heads) = (self.config.num_attention_heads, self.config.num_key_value_heads());
        let empty = |heads: usize| -> Result<Tensor> {
            Ok(Var::zeros((0, heads, self.config.head_dim()), DType::F32, &Device::Cpu)?.into_inner())
        };
        Ok([empty(heads)?, empty(kv_heads)?, empty(kv_heads)?])
    }

    pub(crate) fn scale(&self) -> f32 {
        1.0 / (self.config.head_dim() as f32).sqrt()
    }

    fn normed(&self, weights: &Weights, name: &str, x: &Tensor) -> Result<Tensor> {
        Ok(rms_norm(x, self.get(weights, &format!("{name}.weight"))?, self.config.rms_norm_eps)?)
    }

    /// `x weight^T + bias`: x `[T, in]`, weight `[out, in]`, bias `[out]`.
    fn linear(&self, weights: &Weights, name: &str, x: &Tensor, bias: bool) -> Result<Tensor> {
        let bias = if bias { Some(self.get(weights, &format!("{name}.bias"))?) } else { None };
        Ok(linear(x, self.get(weights, &format!("{name}.weight"))?, bias)?)
    }

    /// A parameter by name.
    pub(crate) fn get<'a>(&self, weights: &'a Weights, name: &str) -> Result<&'a Tensor> {
        let missing =
            || Error::Missing { name: name.to_owned(), shape: self.shapes().remove(name).unwrap_or_default() };
        weights.get(name).ok_or_else(missing)
    }
}
