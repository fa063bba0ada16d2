//! The parameters of a model: their names, by Hugging Face's, and their shapes.

use crate::architecture::Sparse;
use crate::config::Config;
use crate::decoder::{Decoder, EMBEDDING, HEAD, NORM};
use crate::parameters::Unit;
use std::collections::BTreeMap;

impl Decoder {
    /// The units, in the order in which a forward pass needs them.
    pub fn units(&self) -> impl DoubleEndedIterator<Item = Unit> + use<> {
        let layers = (0..self.config().num_hidden_layers).map(Unit::Layer);
        [Unit::Embedding].into_iter().chain(layers).chain([Unit::Head])
    }

    /// The parameters of a unit with their shapes.
    pub fn unit_shapes(&self, unit: Unit) -> Vec<(String, Vec<usize>)> {
        let Config { vocab_size, hidden_size, tie_word_embeddings, .. } = *self.config();
        let norm = (NORM.to_owned(), vec![hidden_size]);
        match unit {
            Unit::Embedding => vec![(EMBEDDING.to_owned(), vec![vocab_size, hidden_size])],
            Unit::Layer(index) => self.layer_shapes(index),
            Unit::Head if tie_word_embeddings => vec![norm],
            Unit::Head => vec![norm, (HEAD.to_owned(), vec![vocab_size, hidden_size])],
        }
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.units().flat_map(|unit| self.unit_shapes(unit)).collect()
    }

    fn layer_shapes(&self, index: usize) -> Vec<(String, Vec<usize>)> {
        let Config { hidden_size: hidden, intermediate_size: wide, num_attention_heads, .. } = *self.config();
        let model = &self.model;
        let dim = self.config().head_dim();
        let (q, kv) = (num_attention_heads * dim, self.config().num_key_value_heads() * dim);
        let mut shapes = Vec::new();
        let mut add = |name: &str, shape: Vec<usize>| shapes.push((format!("model.layers.{index}.{name}"), shape));
        add("input_layernorm.weight", vec![hidden]);
        add("post_attention_layernorm.weight", vec![hidden]);
        if model.post_norms {
            add("pre_feedforward_layernorm.weight", vec![hidden]);
            add("post_feedforward_layernorm.weight", vec![hidden]);
        }
        let mut linear = vec![
            ("self_attn.q_proj".to_owned(), q, hidden, model.qkv_bias),
            ("self_attn.k_proj".to_owned(), kv, hidden, model.qkv_bias),
            ("self_attn.v_proj".to_owned(), kv, hidden, model.qkv_bias),
            ("self_attn.o_proj".to_owned(), hidden, q, model.output_bias),
        ];
        let mut gated = |prefix: &str, wide: usize, bias: bool| {
            linear.push((format!("{prefix}.gate_proj"), wide, hidden, bias));
            linear.push((format!("{prefix}.up_proj"), wide, hidden, bias));
            linear.push((format!("{prefix}.down_proj"), hidden, wide, bias));
        };
        match model.sparse.filter(|_| model.layers[index].sparse) {
            Some(Sparse { experts, wide, .. }) => {
                (0..experts).for_each(|expert| gated(&format!("mlp.experts.{expert}"), wide, false));
                linear.push(("mlp.gate".into(), experts, hidden, false));
            }
            None => gated("mlp", wide, model.mlp_bias),
        }
        for (name, to, from, bias) in linear {
            add(&format!("{name}.weight"), vec![to, from]);
            if bias {
                add(&format!("{name}.bias"), vec![to]);
            }
            if let Some(lora) = self.lora().filter(|lora| lora.is_beside(&name)) {
                lora.shapes(&name, to, from).into_iter().for_each(|(name, shape)| add(&name, shape));
            }
        }
        if model.qk_norm {
            add("self_attn.q_norm.weight", vec![dim]);
            add("self_attn.k_norm.weight", vec![dim]);
        }
        shapes
    }
}
