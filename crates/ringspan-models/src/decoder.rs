//! A model of a configuration, with the adapters beside its layers.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::lora::{Lora, is_adapter};
use crate::parameters::Parameters;
use crate::registry;
use candle_core::Tensor;
use ringspan::Mask;
use ringspan_candle::layers::{ForwardPass, MixtureOfExperts};
use ringspan_candle::model::{LinearLayer, Parameter, UnitParameters};
use ringspan_candle::shard::{HeadCounts, ShardSpec, replica_groups};
use ringspan_candle::{
    Adapters, Attend, Heads, Model, ParallelRank, Portion, ReplicaGroup, ShardError, StoredWeights, TensorParallel,
    Unit,
};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

pub(crate) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(crate) const HEAD: &str = "lm_head.weight";
pub(crate) const NORM: &str = "model.norm.weight";

/// A model without its weights.
#[derive(Debug, Clone)]
pub struct Decoder {
    config: Config,
    model: Arc<dyn Model>,
    /// Its parameters, those of adapters among them.
    units: Arc<BTreeMap<Unit, UnitParameters>>,
    /// The parameters that no gradient trains.
    buffers: Arc<BTreeSet<String>>,
    pub(crate) lora: Option<Lora>,
    adapters: Arc<Adapters>,
}

impl Decoder {
    /// # Errors
    /// What [`Config::check`] refuses.
    pub fn new(config: Config) -> Result<Self> {
        let (model, units) = registry::model(&config)?;
        let all = units.values().flat_map(|unit| &unit.parameters);
        let buffers = all.filter(|parameter| parameter.is_buffer).map(|buffer| buffer.name.clone()).collect();
        let (units, buffers, adapters) = (Arc::new(units), Arc::new(buffers), Arc::new(Adapters::none()));
        Ok(Self { config, model, units, buffers, lora: None, adapters })
    }

    /// The same with these adapters in place of any other: their matrices stand behind the weights of their layers.
    pub(crate) fn with_adapters(mut self, lora: Lora, adapters: Adapters) -> Self {
        let mut units = (*self.units).clone();
        for UnitParameters { parameters, linear_layers } in units.values_mut() {
            parameters.retain(|parameter| !is_adapter(&parameter.name));
            let adapted = linear_layers.iter().filter_map(|layer| Some((layer, adapters.size(&layer.name)?)));
            for (layer, size) in adapted {
                parameters.extend(crate::lora::parameters(layer, size));
            }
        }
        (self.units, self.lora, self.adapters) = (Arc::new(units), Some(lora), Arc::new(adapters));
        self
    }

    /// Sizes and switches.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The computation, unit by unit.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Whether a parameter is stored with the others and trained by no gradient.
    pub(crate) fn is_buffer(&self, name: &str) -> bool {
        self.buffers.contains(name)
    }

    /// Which layers have adapters beside them.
    pub(crate) fn adapters_beside(&self) -> &Adapters {
        &self.adapters
    }

    /// The experts of the first layer that has any: all such layers have as many.
    pub fn mixture(&self) -> Option<&MixtureOfExperts> {
        self.model.layers().into_iter().find_map(|layer| layer.experts())
    }

    /// Experts E of each sparse layer; 0 if there is none.
    pub fn experts(&self) -> usize {
        self.mixture().map_or(0, |mixture| mixture.router().experts)
    }

    /// Share of a sparse layer's experts that a token goes to; 1 without any.
    pub fn experts_seen(&self) -> f64 {
        self.mixture().map(MixtureOfExperts::router).map_or(1.0, |router| router.top as f64 / router.experts as f64)
    }

    /// Whether the feed-forward part of layer `index` is made of experts.
    pub fn is_sparse(&self, index: usize) -> bool {
        self.model.layer(index).experts().is_some()
    }

    /// Which tokens a token sees in layer `index`.
    pub fn mask(&self, index: usize) -> &Mask {
        self.model.layer(index).attention().mask()
    }

    /// Query heads and key-value heads of each layer.
    pub fn head_counts(&self) -> HeadCounts {
        self.model.layer(0).attention().heads()
    }

    /// Widths of a head: of queries and keys, and of values.
    pub fn head_dims(&self) -> [usize; 2] {
        let of_config = self.config.head_dim();
        self.model.layer(0).attention().head_dims().unwrap_or([of_config, of_config])
    }

    /// The heads of rank `tp.0` of the `tp.1` that share layers.
    ///
    /// # Errors
    /// More ranks than query heads can be dealt to.
    pub fn heads(&self, tp: (usize, usize)) -> Result<Heads> {
        Ok(self.head_counts().of_rank(tp)?)
    }

    /// Embeddings `[T, C]` of tokens; where ranks share layers, this rank's rows of them.
    ///
    /// # Errors
    /// Tokens outside the vocabulary.
    pub fn embed(&self, weights: &StoredWeights, tokens: &[u32], tp: &TensorParallel) -> Result<Tensor> {
        let embedding = self.model.embedding();
        let vocabulary = embedding.vocabulary();
        if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::Token { token, vocabulary });
        }
        Ok(embedding.forward(tokens, weights, tp)?)
    }

    /// Layer `index`: x `[T, C]` to `[T, C]`; where ranks share layers, this rank's rows of them.
    ///
    /// # Errors
    /// Missing weights, failures of attention.
    pub fn layer(&self, weights: &StoredWeights, index: usize, x: &Tensor, attend: &dyn Attend) -> Result<Tensor> {
        Ok(self.model.layer(index).forward(x, &ForwardPass::new(weights, attend, &self.adapters))?)
    }

    /// The norm after the last layer: `[T, C]` to `[T, C]`.
    ///
    /// # Errors
    /// Missing weights.
    pub fn norm(&self, weights: &StoredWeights, x: &Tensor) -> Result<Tensor> {
        Ok(self.model.norm().forward_with(x, weights)?)
    }

    /// The parameter that is the output head.
    pub fn head_name(&self) -> &str {
        self.model.head().weight_name()
    }

    /// The parameter that is the embedding.
    pub fn embedding_name(&self) -> &str {
        self.model.embedding().weight_name()
    }

    /// The parameter of the norm after the last layer.
    pub fn norm_name(&self) -> &str {
        self.model.norm().weight_name()
    }

    /// The parameters that norm and head need: with tied weights those of two units.
    ///
    /// # Errors
    /// What `parameters` returns.
    pub fn head_parameters(&self, parameters: &dyn Parameters) -> Result<StoredWeights> {
        let mut head = parameters.unit(self, Unit::Head)?;
        if self.model.head().is_tied() {
            head.extend(parameters.unit(self, Unit::Embedding)?);
        }
        Ok(head)
    }

    /// The units, in the order in which a forward pass needs them.
    pub fn units(&self) -> impl DoubleEndedIterator<Item = Unit> + use<> {
        let layers = (0..self.config.num_hidden_layers).map(Unit::Layer);
        [Unit::Embedding].into_iter().chain(layers).chain([Unit::Head])
    }

    /// The parameters of a unit.
    pub fn parameters(&self, unit: Unit) -> &[Parameter] {
        self.units.get(&unit).map_or(&[], |unit| &unit.parameters)
    }

    /// The parameters of a unit with their shapes.
    pub fn unit_shapes(&self, unit: Unit) -> Vec<(String, Vec<usize>)> {
        self.parameters(unit).iter().map(|parameter| (parameter.name.clone(), parameter.shape.clone())).collect()
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.units().flat_map(|unit| self.unit_shapes(unit)).collect()
    }

    /// The linear layers of a unit, beside which adapters can stand.
    pub fn linear_layers_of(&self, unit: Unit) -> &[LinearLayer] {
        self.units.get(&unit).map_or(&[], |unit| &unit.linear_layers)
    }

    /// The linear layers inside layers, beside which adapters can stand.
    pub fn linear_layers(&self) -> impl Iterator<Item = &LinearLayer> {
        self.units.values().flat_map(|unit| &unit.linear_layers)
    }

    /// The parameters that layers compute with as a file stores them: the matrices of linear layers, of experts and their routers,
    /// of the embedding and of the output head.
    pub fn stored_matrices(&self) -> BTreeSet<String> {
        let of_layers = self.linear_layers().map(|layer| format!("{}.weight", layer.name));
        let all = self.units.values().flat_map(|unit| &unit.parameters);
        let stacks = all.filter(|parameter| is_stack(parameter)).map(|parameter| parameter.name.clone());
        let mixtures = self.model.layers().into_iter().filter_map(|layer| layer.experts());
        // Some routers are no linear layers, beside which adapters could stand.
        let routers = mixtures.map(|mixture| mixture.router_weight().to_owned());
        let outside = [self.embedding_name().to_owned(), self.head_name().to_owned()];
        of_layers.chain(stacks).chain(routers).chain(outside).collect()
    }

    /// The portions of a unit's parameters that a rank computes with.
    ///
    /// # Errors
    /// More ranks than heads can be dealt to.
    pub fn portions(&self, unit: Unit, rank: ParallelRank) -> Result<Vec<Portion>> {
        let mut all = Vec::new();
        for Parameter { name, shape, shard, .. } in self.parameters(unit) {
            all.extend(shard.portions(name, shape, rank)?);
        }
        Ok(all)
    }

    /// The replica groups that a rank belongs to, in an order that is the same for all ranks.
    ///
    /// # Errors
    /// As [`Self::portions`].
    pub fn replica_groups(&self, rank: ParallelRank) -> Result<Vec<ReplicaGroup>> {
        let specs = self.units.values().flat_map(|unit| &unit.parameters).map(|parameter| &parameter.shard);
        Ok(replica_groups(specs, rank)?)
    }

    /// Refuses more ranks than the model can be sharded over: of a tensor-parallel group, sharing experts, and sharing the
    /// width of an expert.
    ///
    /// # Errors
    /// A dimension that is too small, with the numbers.
    pub fn check_shares(&self, tp: usize, ep: usize, moe_tp: usize) -> Result<()> {
        let rank = ParallelRank { tp: (0, tp), ep: (0, ep), moe_tp: (0, moe_tp) };
        if ep * moe_tp > 1 && self.mixture().is_none() {
            let problem = format!("ep {ep} x moe_tp {moe_tp} share experts, and {} has none", self.config.model_type);
            return Err(ShardError::Expert(problem).into());
        }
        let all = self.units.values().flat_map(|unit| &unit.parameters);
        Ok(all.filter(|parameter| !is_adapter(&parameter.name)).try_for_each(|p| p.shard.check(&p.shape, rank))?)
    }

    /// A parameter by name.
    ///
    /// # Errors
    /// A parameter that is missing.
    pub fn parameter<'a, W>(&self, weights: &'a BTreeMap<String, W>, name: &str) -> Result<&'a W> {
        let missing =
            || Error::Missing { name: name.to_owned(), shape: self.shapes().remove(name).unwrap_or_default() };
        weights.get(name).ok_or_else(missing)
    }
}

/// Whether a parameter is the matrices of all experts of a layer.
fn is_stack(parameter: &Parameter) -> bool {
    matches!(parameter.shard, ShardSpec::Experts(_)) && parameter.shape.len() == 3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decoder(heads: usize, kv_heads: usize) -> Decoder {
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 10,
            "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 4,
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 6, "norm_topk_prob": true,
            "decoder_sparse_step": 2, "rope_theta": 1e4, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
    }

    /// Experts in one tensor for each parameter, and heads with sinks.
    fn stacked() -> Decoder {
        let config = serde_json::json!({
            "model_type": "gpt_oss", "vocab_size": 61, "hidden_size": 12, "intermediate_size": 6,
            "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4,
            "num_local_experts": 5, "num_experts_per_tok": 2,
        });
        Decoder::new(serde_json::from_value(config).expect("a config")).expect("supported")
    }

    /// Every element of every parameter is held by one replica group, and by all of its ranks.
    #[test]
    fn the_portions_of_all_ranks_are_the_model() {
        for (heads, kv_heads, tp, ep, moe_tp) in
            [(6, 3, 1, 1, 1), (6, 3, 2, 3, 1), (6, 2, 3, 1, 3), (6, 2, 5, 5, 2), (4, 1, 4, 2, 2), (6, 3, 3, 1, 1)]
        {
            let targets = crate::TARGETS.map(str::to_owned).to_vec();
            let lora = Lora::new(3, 1.0, targets).expect("possible");
            let adapted = decoder(heads, kv_heads).with_lora(lora).expect("possible");
            for (decoder, unit) in [adapted, stacked()].iter().flat_map(|it| it.units().map(move |unit| (it, unit))) {
                decoder.check_shares(tp, ep, moe_tp).expect("possible");
                for (name, shape) in decoder.unit_shapes(unit) {
                    let mut held = vec![None; shape.iter().product()];
                    for at in 0..tp * ep * moe_tp {
                        let (t, e, m) = (at / (ep * moe_tp), at / moe_tp % ep, at % moe_tp);
                        let rank = ParallelRank { tp: (t, tp), ep: (e, ep), moe_tp: (m, moe_tp) };
                        let portions = decoder.portions(unit, rank).expect("possible");
                        for portion in portions.iter().filter(|portion| portion.name == name) {
                            let groups = decoder.replica_groups(rank).expect("possible");
                            assert!(groups.contains(&portion.replicas), "{name}");
                            assert!(!portion.is_empty(), "{name} at {rank:?}");
                            for row in portion.rows.clone() {
                                for column in portion.columns.clone() {
                                    let before = held[row * portion.width() + column].replace(portion.replicas);
                                    assert!(before.is_none_or(|before| before == portion.replicas), "{name}");
                                }
                            }
                        }
                    }
                    assert!(held.iter().all(Option::is_some), "{name} of {tp} x {ep} x {moe_tp}");
                }
            }
        }
    }

    #[test]
    fn more_ranks_than_parts_are_refused_with_the_numbers() {
        let message = |tp, ep, moe_tp| decoder(6, 2).check_shares(tp, ep, moe_tp).expect_err("too many").to_string();
        assert!(message(7, 1, 1).contains("7 ranks cannot share 6 query heads over 2"), "{}", message(7, 1, 1));
        assert!(message(1, 6, 1).contains("ep 6 leaves ranks without one of the 5 experts"));
        assert!(message(1, 1, 7).contains("width 6 of an expert"));
    }
}
