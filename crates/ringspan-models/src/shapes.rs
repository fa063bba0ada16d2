//! The parameters of a model: their names, by Hugging Face's, and their shapes.

use crate::architecture::Sparse;
use crate::config::Config;
use crate::decoder::{Decoder, EMBEDDING, NORM};
use std::collections::BTreeMap;

impl Decoder {
    /// The parameters of layer `index`.
    pub fn layer_names(&self, index: usize) -> Vec<String> {
        self.layer_shapes(index).into_iter().map(|(name, _)| name).collect()
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        let Config { vocab_size, hidden_size, num_hidden_layers, .. } = *self.config();
        let mut shapes: BTreeMap<String, Vec<usize>> =
            (0..num_hidden_layers).flat_map(|index| self.layer_shapes(index)).collect();
        shapes.insert(NORM.into(), vec![hidden_size]);
        shapes.insert(EMBEDDING.into(), vec![vocab_size, hidden_size]);
        shapes.insert(self.head_name().into(), vec![vocab_size, hidden_size]);
        shapes
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
        }
        if model.qk_norm {
            add("self_attn.q_norm.weight", vec![dim]);
            add("self_attn.k_norm.weight", vec![dim]);
        }
        shapes
    }
}
