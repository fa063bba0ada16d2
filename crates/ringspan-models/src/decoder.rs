//! A decoder: embedding, layers, norm, head.
//!
//! Shape letters: T tokens at hand, C hidden size, H query heads, G key-value heads, D head width, V vocabulary.

use crate::architecture::Architecture;
use crate::block::Block;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::lora::{Lora, Size, stream};
use crate::parameters::{Parameters, Unit};
use crate::portion::Heads;
use crate::recompute::Keeper;
use candle_core::{DType, Tensor, Var};
use ringspan::Score;
use ringspan_candle::cast::cast;
use ringspan_candle::norm::rms_norm;
use ringspan_candle::residual::{residual, residual_norm};
use ringspan_candle::{Attend, TensorParallel};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Parameters by Hugging Face's names: f32, or bf16 on a GPU that computes in it.
pub type Weights = BTreeMap<String, Tensor>;

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";

/// A model without its weights.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: Config,
    pub(crate) model: Architecture,
    pub(crate) lora: Option<Lora>,
    /// The layers that have adapters, by their whole names.
    pub(crate) adapters: Arc<BTreeMap<String, Size>>,
}

impl Decoder {
    /// # Errors
    /// What [`Config::check`] refuses.
    pub fn new(config: Config) -> Result<Self> {
        let model = config.architecture()?;
        Ok(Self { config, model, lora: None, adapters: Arc::default() })
    }

    /// Sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Experts E of each sparse layer; 0 if there is none.
    pub fn experts(&self) -> usize {
        self.model.sparse.map_or(0, |sparse| sparse.experts)
    }

    /// Share of a sparse layer's experts that a token goes to; 1 without any.
    pub fn experts_seen(&self) -> f64 {
        self.model.sparse.map_or(1.0, |sparse| sparse.top as f64 / sparse.experts as f64)
    }

    /// Whether the feed-forward part of layer `index` is made of experts.
    pub fn is_sparse(&self, index: usize) -> bool {
        self.model.sparse.is_some() && self.model.layers[index].sparse
    }

    /// Embeddings `[T, C]` of tokens; where ranks share layers, this rank's rows of them.
    ///
    /// # Errors
    /// Tokens outside the vocabulary.
    pub fn embed(&self, weights: &Weights, tokens: &[u32], shared: &TensorParallel) -> Result<Tensor> {
        let vocabulary = self.config.vocab_size;
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        let embedding = self.get(weights, EMBEDDING)?;
        let device = embedding.device();
        if tokens.is_empty() {
            return Ok(Tensor::zeros((0, self.config.hidden_size), embedding.dtype(), device)?);
        }
        if shared.is_whole() {
            return self.embedding_scaled(embedding.index_select(&Tensor::new(tokens, device)?, 0)?);
        }
        // Each rank knows part of the vocabulary, and has zeros for other tokens.
        let (width, known) = (self.config.hidden_size, shared.part(vocabulary));
        let place = |token: u32| (token as usize).checked_sub(known.start).filter(|place| *place < known.len());
        let places: Vec<u32> = tokens.iter().filter_map(|token| Some(place(*token)? as u32)).collect();
        let mut rows = vec![0.0f32; tokens.len() * width];
        if !places.is_empty() {
            let own = embedding.index_select(&Tensor::new(places, device)?, 0)?.flatten_all()?;
            let own = cast(&own, DType::F32)?.to_vec1::<f32>()?;
            let here = rows.chunks_exact_mut(width).zip(tokens).filter(|(_, token)| place(**token).is_some());
            here.zip(own.chunks_exact(width)).for_each(|((row, _), own)| row.copy_from_slice(own));
        }
        let rows = cast(&Tensor::from_vec(rows, (tokens.len(), width), device)?, embedding.dtype())?;
        self.embedding_scaled(shared.reduce(&rows)?)
    }

    /// Rows of the embedding `[T, C]` as the first layer gets them, and gradients of these as the embedding gets them.
    pub(crate) fn embedding_scaled(&self, rows: Tensor) -> Result<Tensor> {
        match self.model.embedding_scale {
            1.0 => Ok(rows),
            scale => Ok(cast(&(cast(&rows, DType::F32)? * scale)?, rows.dtype())?),
        }
    }

    /// Layer `index`: x `[T, C]` to `[T, C]`; where ranks share layers, this rank's rows of them.
    ///
    /// # Errors
    /// Missing weights, failures of attention.
    pub fn layer(&self, weights: &Weights, index: usize, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        self.layer_keeping(weights, index, x, attend, None)
    }

    /// The same for a layer that is computed twice.
    pub(crate) fn layer_keeping(
        &self,
        weights: &Weights,
        index: usize,
        x: &Tensor,
        attend: &dyn Attend,
        keeper: Option<&Keeper>,
    ) -> Result<Tensor> {
        if attend.positions().is_empty() {
            // No token here, but others may wait for this part of attention, and of the experts.
            self.take_part(weights, index, attend)?;
            return Ok(x.clone());
        }
        Block { decoder: self, weights, index, keeper }.forward(x, attend)
    }

    /// What a rank without tokens does in layer `index`, `[0, C]`: attention, and then experts, whose input comes from
    /// attention, so that the way back meets them in the order of the other ranks.
    ///
    /// # Errors
    /// Failures of other ranks, and missing weights.
    pub(crate) fn take_part(&self, weights: &Weights, index: usize, attend: &dyn Attend) -> Result<Tensor> {
        let dim = self.config.head_dim();
        // As many heads as the weights at hand have, so that all ranks of an attention agree.
        let empty = |name: &str| -> Result<Tensor> {
            let weight = self.get(weights, &format!("model.layers.{index}.self_attn.{name}.weight"))?;
            Ok(Var::zeros((0, weight.dim(0)? / dim, dim), weight.dtype(), weight.device())?.into_inner())
        };
        let (q, k, v) = (empty("q_proj")?, empty("k_proj")?, empty("v_proj")?);
        let out = attend.attention(index, &q, &k, &v, &self.model.mask(index), &self.score(index, attend)?)?;
        let out = out.reshape((0, self.config.hidden_size))?;
        Block { decoder: self, weights, index, keeper: None }.take_part(&out, attend)
    }

    /// From products to attention's weights in layer `index`. In training some of these may be dropped: by the heads and tokens
    /// of the whole step, so that all meshes drop the same.
    pub(crate) fn score(&self, index: usize, attend: &dyn Attend) -> Result<Score> {
        let score = self.model.score.clone();
        let rate = self.config.attention_dropout();
        let Some(drops) = attend.drops().filter(|_| rate > 0.0) else { return Ok(score) };
        let first_head = Heads::new(&self.config, attend.tensor_parallel().place())?.queries.start;
        let layer = stream(&format!("model.layers.{index}.self_attn"));
        Ok(Score { dropout: Some(drops.of_attention(rate, layer, first_head)), ..score })
    }

    /// The norm after the last layer: `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights.
    pub fn norm(&self, weights: &Weights, x: &Tensor) -> Result<Tensor> {
        self.normed(weights, NORM, x)
    }

    /// The output head `[V, C]`: the embedding, if they are tied. Of a rank that shares layers, its part of the vocabulary.
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

    /// The parameters that norm and head need: with tied weights those of two units.
    ///
    /// # Errors
    /// What `parameters` returns.
    pub fn head_parameters(&self, parameters: &dyn Parameters) -> Result<Weights> {
        let mut head = parameters.unit(self, Unit::Head)?;
        if self.config.tie_word_embeddings {
            head.extend(parameters.unit(self, Unit::Embedding)?);
        }
        Ok(head)
    }

    /// x normed over its last dimension, times the parameter `name`.
    pub(crate) fn normed(&self, weights: &Weights, name: &str, x: &Tensor) -> Result<Tensor> {
        if x.dim(0)? == 0 {
            return Ok(x.clone());
        }
        Ok(rms_norm(x, &self.norm_weight(weights, name)?, self.config.rms_norm_eps)?)
    }

    /// The sum of x and y, and that normed as by [`normed`](Self::normed).
    pub(crate) fn sum_and_norm(
        &self,
        weights: &Weights,
        name: &str,
        x: &Tensor,
        y: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        if x.dim(0)? == 0 {
            let sum = residual(x, y)?;
            return Ok((sum.clone(), sum));
        }
        Ok(residual_norm(x, y, &self.norm_weight(weights, name)?, self.config.rms_norm_eps)?)
    }

    /// What a norm multiplies with.
    fn norm_weight(&self, weights: &Weights, name: &str) -> Result<Tensor> {
        let weight = self.get(weights, name)?;
        match self.model.norm_offset {
            0.0 => Ok(weight.clone()),
            offset => Ok((cast(weight, DType::F32)? + offset)?),
        }
    }

    /// A parameter by name.
    pub(crate) fn get<'a>(&self, weights: &'a Weights, name: &str) -> Result<&'a Tensor> {
        let missing =
            || Error::Missing { name: name.to_owned(), shape: self.shapes().remove(name).unwrap_or_default() };
        weights.get(name).ok_or_else(missing)
    }
}
