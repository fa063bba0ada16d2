//! A model in memory.

use crate::error::{Error, Result};
use crate::mesh::Mesh;
use crate::model_parallel_rank::ModelParallelRank;
use candle_core::{DType, Tensor};
use ringspan_candle::lora::{weight_names, weight_names_by_slot};
use ringspan_candle::quantized::Format;
use ringspan_candle::{Attend, Devices, StoredWeights, Unit, Weight, model::on_device};
use ringspan_models::{Decoder, StoredModel};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A decoder and its weights, or the shard of them with which some ranks compute. Ranks of one process share the weights; on GPUs,
/// the ranks of each device share theirs.
#[derive(Debug)]
pub struct Model {
    decoder: Decoder,
    /// The weights on each device.
    weights: Vec<StoredWeights>,
    /// Bytes of the weights by the format in which files stored them.
    stored: BTreeMap<String, usize>,
    vocabulary: usize,
    /// Which shard of the model this is; by default all of it.
    model_rank: ModelParallelRank,
    key_value_heads: usize,
    /// The rows of the output head that a pipeline stage has; `None` if there is one stage, which has them among its weights.
    head: Option<Weight>,
}

impl Model {
    /// Makes a model of a decoder and its weights, dense or as they are stored.
    ///
    /// # Errors
    /// Weights without an embedding.
    pub fn new<W: Into<Weight>>(decoder: Decoder, weights: BTreeMap<String, W>) -> Result<Self> {
        let weights: StoredWeights = weights.into_iter().map(|(name, weight)| (name, weight.into())).collect();
        let vocabulary = decoder.parameter(&weights, decoder.head_name())?.dims().first().copied().unwrap_or(0);
        let stored = bytes_by_format(weights.values());
        let (model_rank, key_value_heads) = (ModelParallelRank::default(), decoder.head_counts().key_values);
        Ok(Self { decoder, weights: vec![weights], stored, vocabulary, model_rank, key_value_heads, head: None })
    }

    /// Puts the weights on the devices of the ranks that will compute with them, in the type in which these compute;
    /// activations and the KV cache have the same type.
    ///
    /// # Errors
    /// A GPU without enough memory for the weights.
    pub fn on(self, devices: &Devices) -> Result<Self> {
        let weights =
            devices.iter().map(|device| on_device(&self.weights[0], device)).collect::<candle_core::Result<_>>()?;
        let head = self.head.map(|head| head.rounding_activations(devices.of(0).activations()));
        Ok(Self { weights, head, ..self })
    }

    /// Whether there are weights that are multiplied in integers on CPUs if activations are rounded.
    pub fn has_codes(&self) -> bool {
        let weights = self.weights.iter().flat_map(BTreeMap::values);
        weights.chain(&self.head).any(|weight| weight.format().is_some_and(Format::has_codes))
    }

    /// Reads a model with which the ranks of this process compute. Where ranks are processes, each reads the parameters of its layers
    /// and experts one after another, and keeps its shard of each; ranks that are threads together hold the whole model.
    ///
    /// # Errors
    /// Sizes that the ranks cannot share, and files that cannot be read.
    pub fn read(decoder: Decoder, stored: &StoredModel, mesh: &Mesh) -> Result<Self> {
        let model_rank =
            mesh.processes.comm().map_or_else(ModelParallelRank::default, |comm| mesh.model_rank(comm.rank()));
        if model_rank.is_whole() {
            return Self::new(decoder, stored.read_all()?);
        }
        mesh.check(&decoder)?;
        Self::read_at(decoder, &|name| Ok(stored.read(name)?), model_rank)
    }

    /// The shard of a model-parallel rank, of a model whose parameters `read` reads.
    fn read_at(decoder: Decoder, read: &dyn Fn(&str) -> Result<Weight>, model_rank: ModelParallelRank) -> Result<Self> {
        let head_shape = decoder.shapes().remove(decoder.head_name()).unwrap_or_default();
        let vocabulary = head_shape.first().copied().unwrap_or(0);
        let weights = partitions(&decoder, &|name| read(name).map(Some), model_rank, true)?;
        let head = match model_rank.stage.1 {
            1 => None,
            _ => Some(rows(&read(decoder.head_name())?, model_rank.vocabulary(vocabulary), true)?),
        };
        let stored = bytes_by_format(weights.values().chain(&head));
        let key_value_heads = key_value_heads(&decoder, model_rank)?;
        Ok(Self { decoder, weights: vec![weights], stored, vocabulary, model_rank, key_value_heads, head })
    }

    /// The part of the model with which a model-parallel rank computes. Rows of matrices share their memory with those of
    /// the whole model, unless `copy` asks for memory of their own, so that the rest can be freed.
    ///
    /// # Errors
    /// Sizes that the ranks cannot share, and quantized matrices that would be cut inside a block.
    pub(crate) fn shard(&self, model_rank: ModelParallelRank, copy: bool) -> Result<Self> {
        let own = |weights: &StoredWeights| {
            partitions(&self.decoder, &|name| Ok(weights.get(name).cloned()), model_rank, copy)
        };
        let weights = self.weights.iter().map(own).collect::<Result<_>>()?;
        let whole_head = || self.decoder.parameter(self.weights(0), self.decoder.head_name());
        let head = match model_rank.stage.1 {
            1 => None,
            _ => Some(rows(whole_head()?, model_rank.vocabulary(self.vocabulary), copy)?),
        };
        let key_value_heads = key_value_heads(&self.decoder, model_rank)?;
        let (decoder, stored) = (self.decoder.clone(), self.stored.clone());
        Ok(Self { decoder, weights, stored, vocabulary: self.vocabulary, model_rank, key_value_heads, head })
    }

    /// The same shard of the model with the adapters that are attached to `decoder`, whose whole matrices are `matrices`.
    ///
    /// # Errors
    /// Matrices that the ranks cannot share.
    pub(crate) fn adapted(&self, decoder: Decoder, matrices: StoredWeights, devices: &Devices) -> Result<Self> {
        let matrices = partitions(&decoder, &|name| Ok(matrices.get(name).cloned()), self.model_rank, true)?;
        let with_base = |(device, base): (_, &StoredWeights)| {
            let mut weights = base.clone();
            weights.extend(on_device(&matrices, device)?);
            Ok(weights)
        };
        let weights = devices.iter().zip(&self.weights).map(with_base).collect::<Result<_>>()?;
        Ok(self.with_decoder(decoder, weights))
    }

    /// This shard with several adapters at once, for steps whose rows use different adapters. The matrices of each model in `adapted`
    /// are added under its slot; they are shared, not copied.
    pub(crate) fn with_adapters_by_slot(&self, adapted: &[(u64, Arc<Self>)]) -> Self {
        let decoder = self.decoder.with_adapters_by_slot(adapted.iter().map(|(slot, model)| (*slot, model.decoder())));
        let mut weights = self.weights.clone();
        for (device, weights) in weights.iter_mut().enumerate() {
            for (slot, model) in adapted {
                for (layer, _) in model.decoder.adapters() {
                    let names = weight_names(layer).into_iter().zip(weight_names_by_slot(layer, *slot));
                    // This shard may lack the layer.
                    let matrices = names
                        .filter_map(|(alone, by_slot)| Some((by_slot, model.weights[device].get(&alone)?.clone())));
                    weights.extend(matrices);
                }
            }
        }
        self.with_decoder(decoder, weights)
    }

    /// The same shard with another decoder, to which adapters are attached, and their weights on each device.
    fn with_decoder(&self, decoder: Decoder, weights: Vec<StoredWeights>) -> Self {
        let Self { vocabulary, model_rank, key_value_heads, .. } = *self;
        let (stored, head) = (self.stored.clone(), self.head.clone());
        Self { decoder, weights, stored, vocabulary, model_rank, key_value_heads, head }
    }

    /// Which part of the model this is.
    pub(crate) fn model_rank(&self) -> ModelParallelRank {
        self.model_rank
    }

    /// Some rows of the output head's matrix, which this part of the model must have.
    ///
    /// # Errors
    /// A model without an output head, and rows that are elsewhere.
    pub(crate) fn head_rows(&self, rank: usize, of_vocabulary: Range<usize>) -> Result<Weight> {
        let whole = || self.decoder.parameter(self.weights(rank), self.decoder.head_name());
        let own = self.model_rank.vocabulary(self.vocabulary);
        let here = of_vocabulary.start - own.start..of_vocabulary.end - own.start;
        rows(self.head.as_ref().map_or_else(whole, Ok)?, here, false)
    }

    /// The type in which the model computes.
    pub(crate) fn computed_in(&self) -> DType {
        let embedding = || self.weights[0].get(self.decoder.embedding_name());
        self.head.as_ref().or_else(embedding).map_or(DType::F32, Weight::computed_in)
    }

    /// Number of key-value heads that this shard of the model has.
    pub fn key_value_heads(&self) -> usize {
        self.key_value_heads
    }

    /// Describes in which formats, and in how many bytes, the weights are stored and held on the devices, or the shard of a process of
    /// them; `None` if files store f32 alone.
    pub fn weight_formats(&self, devices: &Devices) -> Option<String> {
        if self.stored.keys().all(|format| format == "F32") {
            return None;
        }
        let each = self.stored.iter().map(|(format, bytes)| format!("{:.1} MB in {format}", *bytes as f64 / 1e6));
        let each = each.collect::<Vec<_>>().join(", ");
        let what = if self.model_rank.is_whole() { "weights" } else { "weights of rank 0" };
        Some(match devices.are_gpus() {
            true => format!("{what}: {each} in the file; expanded to {} on the GPU", devices.of(0).precision()),
            false => format!("{what}: {each}, held as they are stored"),
        })
    }

    /// The model's structure and its forward functions.
    pub fn decoder(&self) -> &Decoder {
        &self.decoder
    }

    /// The weights on the device of a rank.
    pub fn weights(&self, rank: usize) -> &StoredWeights {
        &self.weights[rank % self.weights.len()]
    }

    /// Number of tokens V in the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Number of layers that this shard has.
    pub fn layers(&self) -> usize {
        self.layer_range().len()
    }

    /// The layers that this part of the model has.
    pub(crate) fn layer_range(&self) -> Range<usize> {
        self.model_rank.layers(self.decoder.config().num_hidden_layers)
    }

    /// Computes the hidden states `[T, C]` of this rank's `tokens`, before the last norm.
    ///
    /// # Errors
    /// Tokens outside the vocabulary, failures of other ranks.
    pub fn hidden(&self, rank: usize, tokens: &[u32], attend: &dyn Attend) -> Result<Tensor> {
        self.through_layers(rank, self.decoder.embed(self.weights(rank), tokens, attend)?, attend)
    }

    /// Passes hidden states `[T, C]` through the layers that this part of the model has.
    ///
    /// # Errors
    /// Failures of other ranks.
    pub(crate) fn through_layers(&self, rank: usize, mut hidden: Tensor, attend: &dyn Attend) -> Result<Tensor> {
        for layer in self.layer_range() {
            hidden = self.decoder.layer(self.weights(rank), layer, &hidden, attend)?;
        }
        Ok(hidden)
    }

    /// Checks that all tokens are in the vocabulary.
    ///
    /// # Errors
    /// The first token outside the vocabulary.
    pub(crate) fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().position(|token| *token as usize >= self.vocabulary) {
            None => Ok(()),
            Some(position) => Err(Error::Vocabulary { token: tokens[position], position, vocabulary: self.vocabulary }),
        }
    }
}

/// The partitions that a model-parallel rank computes with, of whole parameters that `whole` returns; those for which it
/// returns `None` are left out.
fn partitions(
    decoder: &Decoder,
    whole: &dyn Fn(&str) -> Result<Option<Weight>>,
    model_rank: ModelParallelRank,
    copy: bool,
) -> Result<StoredWeights> {
    let (mut own, layers) = (StoredWeights::new(), model_rank.layers(decoder.config().num_hidden_layers));
    let is_here = |unit: &Unit| match unit {
        Unit::Embedding => model_rank.is_first(),
        Unit::Layer(layer) => layers.contains(layer),
        Unit::Head => model_rank.is_last(),
    };
    for unit in decoder.units().filter(is_here) {
        let partitions = decoder
            .all_parameters()
            .partitions(unit, model_rank.shard)
            .map_err(|error| Error::Mesh(error.to_string()))?;
        // Partitions of one parameter follow each other: it is read once.
        let mut last: Option<(String, Option<Weight>)> = None;
        for partition in partitions {
            // Stages hold rows of the head apart, since all of them compute logits.
            if unit == Unit::Head && partition.name == decoder.head_name() && model_rank.stage.1 > 1 {
                continue;
            }
            if last.as_ref().is_none_or(|(name, _)| *name != partition.name) {
                last = Some((partition.name.clone(), whole(&partition.name)?));
            }
            let Some((_, Some(whole))) = &last else { continue };
            let part = whole.partition(&partition, copy)?;
            let part = match own.remove(&partition.name) {
                Some(above) => above.above(&part)?,
                None => part,
            };
            own.insert(partition.name, part);
        }
    }
    Ok(own)
}

/// Bytes of weights by the format in which files store them.
fn bytes_by_format<'a>(weights: impl Iterator<Item = &'a Weight>) -> BTreeMap<String, usize> {
    let mut stored: BTreeMap<String, usize> = BTreeMap::new();
    for weight in weights {
        let dense = || weight.computed_in().as_str().to_uppercase();
        let format = weight.format().map_or_else(dense, |format| format.to_string());
        *stored.entry(format).or_default() += weight.bytes();
    }
    stored
}

/// Number of key-value heads of the ranks at a model_rank.
fn key_value_heads(decoder: &Decoder, model_rank: ModelParallelRank) -> Result<usize> {
    let heads = decoder.head_counts().of_rank(model_rank.shard.tp).map_err(|error| Error::Mesh(error.to_string()))?;
    Ok(heads.key_values.len())
}

/// Some rows of a matrix, which share its memory unless `copy` asks for memory of their own.
fn rows(matrix: &Weight, range: Range<usize>, copy: bool) -> Result<Weight> {
    Ok(match matrix {
        Weight::Dense(tensor) => {
            let rows = tensor.narrow(0, range.start, range.len())?;
            Weight::Dense(if copy { rows.copy()? } else { rows })
        }
        Weight::Quantized(matrix) => {
            let rows = matrix.rows(range)?;
            Weight::Quantized(if copy { rows.copied() } else { rows })
        }
        Weight::Stack(_) => return Err(Error::Step("the output head is a stack of experts".to_owned())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    /// The bytes of each weight of a part, the rows of the head last.
    fn bytes_of(part: &Model) -> Vec<(Option<&String>, usize)> {
        let weights = part.weights(0).iter().map(|(name, weight)| (Some(name), weight.bytes()));
        weights.chain(part.head.iter().map(|rows| (None, rows.bytes()))).collect()
    }

    /// Ranks hold each matrix once, in parts; only norms and routers are on all ranks of a stage.
    #[test]
    fn ranks_hold_the_weights_together_and_none_twice() {
        let config = serde_json::json!({
            "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "max_position_embeddings": 4096, "tie_word_embeddings": false, "hidden_act": "silu", "num_experts": 6,
            "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": true, "mlp_only_layers": [0]
        });
        let decoder = Decoder::new(serde_json::from_value(config).expect("a known model")).expect("sizes that fit");
        let weights = decoder.init(5).expect("weights");
        let model = Model::new(decoder, weights).expect("a whole model");
        let head = model.decoder().head_name().to_owned();
        let mesh = Mesh { pp: 2, tp: 2, ep: 2, ..Mesh::single() };
        let mut held: BTreeMap<String, usize> = BTreeMap::new();
        for rank in 0..mesh.size() {
            let part = model.shard(mesh.model_rank(rank), rank % 2 == 0).expect("a part");
            let asked = RefCell::new(BTreeMap::new());
            let read = |name: &str| {
                let whole = model.weights(0)[name].clone();
                asked.borrow_mut().insert(name.to_owned(), whole.bytes());
                Ok(whole)
            };
            let own = Model::read_at(model.decoder().clone(), &read, mesh.model_rank(rank)).expect("a part");
            assert_eq!(bytes_of(&own), bytes_of(&part), "what is read is what is cut");
            // A process reads whole matrices, but none of other stages' layers, or of other ranks' experts.
            let read: usize = asked.borrow().values().sum();
            assert!(
                3 * read < 2 * model.weights(0).values().map(Weight::bytes).sum::<usize>(),
                "rank {rank}: {read} bytes"
            );
            let own = part.weights(0).iter();
            for (name, weight) in own.chain(part.head.iter().map(|rows| (&head, rows))) {
                *held.entry(name.clone()).or_default() += weight.bytes();
            }
        }
        assert!(held.keys().eq(model.weights(0).keys()));
        for (name, whole) in model.weights(0) {
            let is_on_all = name.contains("norm") || name.ends_with("mlp.gate.weight");
            let copies = if is_on_all { mesh.stage_size() } else { 1 };
            assert_eq!(held[name], copies * whole.bytes(), "{name}");
        }
    }
}
