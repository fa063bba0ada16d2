//! Maps the tensors of a file to a model's parameters: other prefixes, tensors of vision towers, experts stacked in one tensor.

use std::collections::BTreeMap;

/// A parameter, and the part of a stored tensor that holds it.
#[derive(Debug, PartialEq)]
pub(super) struct StoredPart {
    pub(super) name: String,
    /// Offset of its first element in the stored tensor.
    pub(super) start: usize,
    pub(super) shape: Vec<usize>,
}

/// The parameters that are stored in tensor `name` of `shape`; `known` has the shapes of the model's parameters. Empty if the
/// tensor belongs to no decoder.
pub(super) fn parts(name: &str, shape: &[usize], tied: bool, known: &BTreeMap<String, Vec<usize>>) -> Vec<StoredPart> {
    let Some(name) = of_text(name) else { return Vec::new() };
    // Some folders store the tied matrix a second time, as the output head.
    if name.ends_with("rotary_emb.inv_freq") || (tied && name == crate::decoder::HEAD) {
        return Vec::new();
    }
    if known.contains_key(&name) {
        return vec![StoredPart { name, start: 0, shape: shape.to_vec() }];
    }
    // Transformers keeps the experts of a layer in one tensor, and some files do so, too.
    if let (Some(prefix), [experts, both, width]) = (name.strip_suffix("experts.gate_up_proj"), shape) {
        let wide = both / 2;
        let part = |expert: usize, which: usize, end: &str| StoredPart {
            name: format!("{prefix}experts.{expert}.{end}.weight"),
            start: (expert * both + which * wide) * width,
            shape: vec![wide, *width],
        };
        return (0..*experts).flat_map(|e| [part(e, 0, "gate_proj"), part(e, 1, "up_proj")]).collect();
    }
    if let (Some(prefix), [experts, width, wide]) = (name.strip_suffix("experts.down_proj"), shape) {
        let part = |expert: usize| StoredPart {
            name: format!("{prefix}experts.{expert}.down_proj.weight"),
            start: expert * width * wide,
            shape: vec![*width, *wide],
        };
        return (0..*experts).map(part).collect();
    }
    vec![StoredPart { name, start: 0, shape: shape.to_vec() }]
}

/// The name of a parameter inside the language model of a multimodal model; `None` for parameters of its vision part.
fn of_text(name: &str) -> Option<String> {
    let inner = name.strip_prefix("model.").unwrap_or(name);
    if ["vision_tower.", "multi_modal_projector."].iter().any(|part| inner.starts_with(part)) {
        return None;
    }
    // Older files have `language_model.model.`, newer ones `model.language_model.`.
    if let Some(rest) = name.strip_prefix("model.language_model.") {
        return Some(format!("model.{rest}"));
    }
    Some(name.strip_prefix("language_model.").unwrap_or(name).to_owned())
}

#[cfg(test)]
mod tests {
    use super::{StoredPart, parts};
    use std::collections::BTreeMap;

    fn names(name: &str) -> Vec<String> {
        parts(name, &[4, 2], false, &BTreeMap::new()).into_iter().map(|part| part.name).collect()
    }

    #[test]
    fn language_model_tensors_of_a_vision_model_have_plain_names() {
        assert_eq!(names("language_model.model.layers.0.mlp.up_proj.weight"), ["model.layers.0.mlp.up_proj.weight"]);
        assert_eq!(names("model.language_model.embed_tokens.weight"), ["model.embed_tokens.weight"]);
        assert_eq!(names("language_model.lm_head.weight"), ["lm_head.weight"]);
        for seen in ["vision_tower.a.weight", "model.vision_tower.a", "model.multi_modal_projector.b"] {
            assert_eq!(names(seen), [""; 0]);
        }
    }

    #[test]
    fn experts_in_one_tensor_are_parts_of_it() {
        let both = parts("model.layers.3.mlp.experts.gate_up_proj", &[2, 6, 5], false, &BTreeMap::new());
        let part = |name: &str, start: usize| StoredPart { name: name.into(), start, shape: vec![3, 5] };
        assert_eq!(both[0], part("model.layers.3.mlp.experts.0.gate_proj.weight", 0));
        assert_eq!(both[3], part("model.layers.3.mlp.experts.1.up_proj.weight", 45));
        let down = parts("model.layers.3.mlp.experts.down_proj", &[2, 5, 3], false, &BTreeMap::new());
        let last =
            StoredPart { name: "model.layers.3.mlp.experts.1.down_proj.weight".into(), start: 15, shape: vec![5, 3] };
        assert_eq!((down.len(), &down[1]), (2, &last));
    }
}
