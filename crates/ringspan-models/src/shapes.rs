//! The parameters of a model: their names, by Hugging Face's, and their shapes.

use crate::architecture::Sparse;
use crate::config::Config;
use crate::decoder::{Decoder, EMBEDDING, HEAD, NORM};
use crate::lora::matrices;
use crate::parameters::Unit;
use crate::portion::{Along, Cut};
use std::collections::BTreeMap;

impl Decoder {
    /// The units, in the order in which a forward pass needs them.
    pub fn units(&self) -> impl DoubleEndedIterator<Item = Unit> + use<> {
        let layers = (0..self.config().num_hidden_layers).map(Unit::Layer);
        [Unit::Embedding].into_iter().chain(layers).chain([Unit::Head])
    }

    /// The parameters of a unit with their shapes.
    pub fn unit_shapes(&self, unit: Unit) -> Vec<(String, Vec<usize>)> {
        self.unit_cuts(unit).into_iter().map(|(name, shape, _)| (name, shape)).collect()
    }

    /// The parameters of a unit with their shapes, and how ranks cut them.
    pub(crate) fn unit_cuts(&self, unit: Unit) -> Vec<(String, Vec<usize>, Cut)> {
        let Config { vocab_size, hidden_size, tie_word_embeddings, .. } = *self.config();
        let norm = (NORM.to_owned(), vec![hidden_size], Cut::Whole);
        let words = |name: &str| (name.to_owned(), vec![vocab_size, hidden_size], Cut::Rows(Along::Vocabulary));
        match unit {
            Unit::Embedding => vec![words(EMBEDDING)],
            Unit::Layer(index) => self.layer_cuts(index),
            Unit::Head if tie_word_embeddings => vec![norm],
            Unit::Head => vec![norm, words(HEAD)],
        }
    }

    /// All parameters with their shapes.
    pub fn shapes(&self) -> BTreeMap<String, Vec<usize>> {
        self.units().flat_map(|unit| self.unit_shapes(unit)).collect()
    }

    fn layer_cuts(&self, index: usize) -> Vec<(String, Vec<usize>, Cut)> {
        let (hidden, dim) = (self.config().hidden_size, self.config().head_dim());
        let model = &self.model;
        let mut parameters = Vec::new();
        let mut add = |name: &str, shape: Vec<usize>, cut: Cut| {
            parameters.push((format!("model.layers.{index}.{name}"), shape, cut));
        };
        add("input_layernorm.weight", vec![hidden], Cut::Whole);
        add("post_attention_layernorm.weight", vec![hidden], Cut::Whole);
        if model.post_norms {
            add("pre_feedforward_layernorm.weight", vec![hidden], Cut::Whole);
            add("post_feedforward_layernorm.weight", vec![hidden], Cut::Whole);
        }
        for (name, to, from, bias, cut) in self.linear_layers_of(index) {
            // What is cut by rows has a bias that is, too; sums of columns get theirs whole, once. What is whole beside a
            // matrix of an expert is only there where the expert is.
            let whole = match cut {
                Cut::Rows(Along::Expert(expert)) | Cut::Columns(Along::Expert(expert)) => Cut::WholeOfExpert(expert),
                _ => Cut::Whole,
            };
            let of_sum = if matches!(cut, Cut::Columns(_)) { whole } else { cut };
            add(&format!("{name}.weight"), vec![to, from], cut);
            if bias {
                add(&format!("{name}.bias"), vec![to], of_sum);
            }
            if let Some(size) = self.adapter(&format!("model.layers.{index}.{name}")) {
                let [a, b] = matrices(&name);
                let of_input = if matches!(cut, Cut::Columns(_)) { cut } else { whole };
                add(&a, vec![size.rank, from], of_input);
                add(&b, vec![to, size.rank], of_sum);
            }
        }
        if model.qk_norm {
            add("self_attn.q_norm.weight", vec![dim], Cut::Whole);
            add("self_attn.k_norm.weight", vec![dim], Cut::Whole);
        }
        parameters
    }

    /// The whole names of all linear layers inside layers.
    pub(crate) fn linear_layers(&self) -> Vec<String> {
        let of = |index| {
            self.linear_layers_of(index).into_iter().map(move |(name, ..)| format!("model.layers.{index}.{name}"))
        };
        (0..self.config().num_hidden_layers).flat_map(of).collect()
    }

    /// The linear layers of layer `index`: name inside it, outputs, inputs, whether there is a bias, and how ranks cut it.
    fn linear_layers_of(&self, index: usize) -> Vec<(String, usize, usize, bool, Cut)> {
        let Config { hidden_size: hidden, intermediate_size: wide, num_attention_heads, .. } = *self.config();
        let model = &self.model;
        let dim = self.config().head_dim();
        let (q, kv) = (num_attention_heads * dim, self.config().num_key_value_heads() * dim);
        let mut linear = vec![
            ("self_attn.q_proj".to_owned(), q, hidden, model.qkv_bias, Cut::Rows(Along::Queries)),
            ("self_attn.k_proj".to_owned(), kv, hidden, model.qkv_bias, Cut::Rows(Along::KeyValues)),
            ("self_attn.v_proj".to_owned(), kv, hidden, model.qkv_bias, Cut::Rows(Along::KeyValues)),
            ("self_attn.o_proj".to_owned(), hidden, q, model.output_bias, Cut::Columns(Along::Queries)),
        ];
        let mut gated = |prefix: &str, wide: usize, bias: bool, along: Along| {
            linear.push((format!("{prefix}.gate_proj"), wide, hidden, bias, Cut::Rows(along)));
            linear.push((format!("{prefix}.up_proj"), wide, hidden, bias, Cut::Rows(along)));
            linear.push((format!("{prefix}.down_proj"), hidden, wide, bias, Cut::Columns(along)));
        };
        match model.sparse.filter(|_| model.layers[index].sparse) {
            Some(Sparse { experts, wide, .. }) => {
                let mut one = |expert| gated(&format!("mlp.experts.{expert}"), wide, false, Along::Expert(expert));
                (0..experts).for_each(&mut one);
                linear.push(("mlp.gate".into(), experts, hidden, false, Cut::Whole));
            }
            None => gated("mlp", wide, model.mlp_bias, Along::Width),
        }
        linear
    }
}
