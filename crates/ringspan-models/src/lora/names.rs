//! Selects layers by name, as PEFT does. An example of a layer's full name is `model.layers.0.self_attn.q_proj`.

use crate::error::{Error, Result};
use fancy_regex::Regex;
use std::fmt;

/// PEFT's word for all linear layers except the output head.
pub(crate) const ALL_LINEAR: &str = "all-linear";

/// A selection of a model's linear layers.
#[derive(Debug, Clone, PartialEq)]
pub enum LayerNames {
    /// Layers whose full name is one of these, or ends with one of these after a dot.
    Ends(Vec<String>),
    /// Layers whose full name matches the pattern.
    Matching(Pattern),
    /// All linear layers except the output head.
    AllLinear,
    /// Like [`AllLinear`](Self::AllLinear), without the routers of experts.
    AllButRouters,
}

impl LayerNames {
    /// Parses a string in PEFT's configuration: `all-linear`, or a regular expression.
    pub(crate) fn word(word: &str) -> Result<Self> {
        if word == ALL_LINEAR { Ok(Self::AllLinear) } else { Pattern::whole(word).map(Self::Matching) }
    }

    /// Whether the layer with this full name is selected.
    pub(crate) fn has(&self, layer: &str) -> Result<bool> {
        match self {
            Self::Ends(ends) => Ok(ends.iter().any(|end| ends_with(layer, end))),
            Self::Matching(pattern) => pattern.matches(layer),
            Self::AllLinear | Self::AllButRouters => Ok(true),
        }
    }
}

impl fmt::Display for LayerNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ends(ends) => f.write_str(&ends.join(", ")),
            Self::Matching(pattern) => write!(f, "the layers that match {}", pattern.as_str()),
            Self::AllLinear => f.write_str(ALL_LINEAR),
            Self::AllButRouters => f.write_str("all linear layers but routers"),
        }
    }
}

/// Whether a full name equals `end`, or ends with it after a dot.
pub(crate) fn ends_with(layer: &str, end: &str) -> bool {
    layer.strip_suffix(end).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}

/// A regular expression, together with the text that its author wrote.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    regex: Regex,
}

impl PartialEq for Pattern {
    /// Compares the authors' texts only: patterns that are compiled differently are never compared with each other.
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Pattern {
    /// A pattern that the full name must match.
    pub(crate) fn whole(text: &str) -> Result<Self> {
        Self::of(text, format!("^(?:{text})$"))
    }

    /// A pattern that the full name must match, or its end after some dot.
    pub(crate) fn end(text: &str) -> Result<Self> {
        Self::of(text, format!(r"^(.*\.)?({text})$"))
    }

    /// A pattern for the module that holds a model's layers in a list; in names, the layer's number follows it.
    pub(crate) fn list(text: &str) -> Result<Self> {
        Self::of(text, format!(r"^(?:|.*?\.){text}\.(?P<index>\d+)\."))
    }

    /// A pattern for the first numbered list in a name.
    pub(crate) fn any_list() -> Result<Self> {
        Self::of("", r"^.*?\.[^.]*\.(?P<index>\d+)\.".to_owned())
    }

    fn of(text: &str, whole: String) -> Result<Self> {
        match Regex::new(&whole) {
            Ok(regex) => Ok(Self { text: text.to_owned(), regex }),
            Err(error) => Err(Error::Lora(format!("'{text}' is not understood as a regular expression: {error}"))),
        }
    }

    /// The text that its author wrote.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    pub(crate) fn matches(&self, layer: &str) -> Result<bool> {
        self.regex.is_match(layer).map_err(|error| self.too_hard(layer, &error))
    }

    /// The number that follows this list in a full name, if the pattern matches.
    fn index(&self, layer: &str) -> Result<Option<usize>> {
        let found = self.regex.captures(layer).map_err(|error| self.too_hard(layer, &error))?;
        Ok(found.and_then(|found| found.name("index")?.as_str().parse().ok()))
    }

    fn too_hard(&self, layer: &str, error: &fancy_regex::Error) -> Error {
        Error::Lora(format!("the regular expression '{}' cannot be compared with {layer}: {error}", self.text))
    }
}

/// The selection of layers that have adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct AdaptedLayers {
    /// The target layers.
    pub(crate) targets: LayerNames,
    /// Target layers that have no adapter nevertheless (PEFT's `exclude_modules`).
    pub(crate) excluded: Option<LayerNames>,
    /// If given, only layers with these numbers have adapters (`layers_to_transform`), unless a target is the layer's full
    /// name.
    pub(crate) indices: Option<Vec<usize>>,
    /// The lists in which layers are numbered (`layers_pattern`, or [`Pattern::any_list`]).
    pub(crate) lists: Vec<Pattern>,
}

impl AdaptedLayers {
    /// Selects all layers that `targets` names.
    pub(crate) fn named(targets: LayerNames) -> Self {
        Self { targets, excluded: None, indices: None, lists: Vec::new() }
    }

    /// Whether the layer with this full name has an adapter.
    pub(crate) fn has(&self, layer: &str) -> Result<bool> {
        if let Some(excluded) = &self.excluded
            && excluded.has(layer)?
        {
            return Ok(false);
        }
        if !self.targets.has(layer)? {
            return Ok(false);
        }
        let Some(indices) = &self.indices else { return Ok(true) };
        if let LayerNames::Ends(ends) = &self.targets
            && ends.iter().any(|end| end == layer)
        {
            return Ok(true);
        }
        Ok(self.index(layer)?.is_some_and(|index| indices.contains(&index)))
    }

    /// The number of the decoder layer to which a linear layer belongs, by the first list that matches.
    fn index(&self, layer: &str) -> Result<Option<usize>> {
        for list in &self.lists {
            if let Some(index) = list.index(layer)? {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const Q: &str = "model.layers.10.self_attn.q_proj";
    const EXPERT: &str = "model.layers.1.mlp.experts.10.up_proj";

    fn ends(names: &[&str]) -> LayerNames {
        LayerNames::Ends(names.iter().map(|name| (*name).to_owned()).collect())
    }

    fn has(names: &LayerNames, layer: &str) -> bool {
        names.has(layer).expect("an answer")
    }

    #[test]
    fn names_are_suffixes_after_dots_and_expressions_are_whole() {
        for end in ["q_proj", "self_attn.q_proj", "10.self_attn.q_proj", Q] {
            assert!(has(&ends(&["v_proj", end]), Q), "{end}");
        }
        for end in ["proj", "_proj", "0.self_attn.q_proj", "q_projection", "gate"] {
            assert!(!has(&ends(&[end]), Q), "{end}");
        }
        assert!(!has(&ends(&["gate"]), "model.layers.0.mlp.gate_proj"));
        for (text, matches) in [
            (r".*\.(q|v)_proj", true),
            ("q_proj", false),
            (r"model\.layers\.1", false),
            (r"^(?!.*mlp).*_proj$", true),
            (r"model\.layers\.\d\.self_attn\.q_proj|.*k_proj", false),
        ] {
            assert_eq!(has(&LayerNames::word(text).expect("one"), Q), matches, "{text}");
        }
        assert!(has(&LayerNames::word("all-linear").expect("a word"), Q));
        let refused = LayerNames::word("(q_proj").expect_err("no expression").to_string();
        assert!(refused.contains("'(q_proj'"), "{refused}");
    }

    #[test]
    fn layers_are_counted_in_the_first_list_or_in_the_one_that_is_named() {
        let of = |indices: &[usize], lists: &[&str]| AdaptedLayers {
            indices: Some(indices.to_vec()),
            lists: match lists {
                [] => vec![Pattern::any_list().expect("a list")],
                lists => lists.iter().map(|list| Pattern::list(list).expect("a list")).collect(),
            },
            ..AdaptedLayers::named(ends(&["q_proj", "up_proj"]))
        };
        for (indices, lists, in_q, in_expert) in [
            (&[10][..], &[][..], true, false),
            (&[1], &[], false, true),
            (&[10], &["layers"], true, false),
            (&[10], &["experts"], false, true),
            (&[10], &["experts", "layers"], true, true),
            (&[1, 10], &["h"], false, false),
            (&[], &[], false, false),
        ] {
            let layers = of(indices, lists);
            let got = [Q, EXPERT].map(|layer| layers.has(layer).expect("an answer"));
            assert_eq!(got, [in_q, in_expert], "{indices:?} of {lists:?}");
        }
        let named = AdaptedLayers { targets: ends(&[Q]), ..of(&[3], &[]) };
        assert!(named.has(Q).expect("an answer"), "a whole name counts wherever it is");
        let excluded = AdaptedLayers {
            excluded: Some(ends(&["10.self_attn.q_proj"])),
            ..AdaptedLayers::named(LayerNames::AllLinear)
        };
        assert_eq!([Q, EXPERT].map(|layer| excluded.has(layer).expect("an answer")), [false, true]);
    }
}
