//! `adapter_config.json`: which keys are read, and which are refused because ignoring them would compute another model.

use crate::error::{Error, Result};
use crate::lora::Lora;
use crate::lora::names::{AdaptedLayers, LayerNames, Pattern};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The keys that are read below.
const READ: [&str; 13] = [
    "peft_type",
    "base_model_name_or_path",
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "init_lora_weights",
];

/// Keys that record how the adapter was made, or serve other programs; they do not change what is computed.
const WITHOUT_EFFECT: [&str; 12] = [
    "task_type",
    "revision",
    "inference_mode",
    "auto_mapping",
    "peft_version",
    "runtime_config",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    // These two belong to features that are refused by a key of their own.
    "megatron_core",
    "qalora_group_size",
];

/// Initialisations of an adapter that leave the model as it is. PEFT's default is `true`.
const PLAIN: [&str; 3] = ["gaussian", "eva", "orthogonal"];
/// Initialisations that take something out of the model's weights, or quantise them; some have a number after their name.
const CHANGES_MODEL: [&str; 5] = ["pissa", "olora", "corda", "loftq", "lora_ga"];
/// An initialisation whose matrix B is never trained.
const FREEZES_B: &str = "mica";

/// Keys that turn LoRA into another method, with PEFT's defaults, which alone are accepted.
fn refused() -> [(&'static str, Value); 17] {
    [
        ("bias", json!("none")),
        ("fan_in_fan_out", json!(false)),
        ("use_dora", json!(false)),
        ("lora_bias", json!(false)),
        ("modules_to_save", Value::Null),
        ("target_parameters", Value::Null),
        ("trainable_token_indices", Value::Null),
        ("ensure_weight_tying", json!(false)),
        ("layer_replication", Value::Null),
        ("alora_invocation_tokens", Value::Null),
        ("use_qalora", json!(false)),
        ("megatron_config", Value::Null),
        ("velora_config", Value::Null),
        ("monteclora_config", Value::Null),
        ("kasa_config", Value::Null),
        ("use_bdlora", Value::Null),
        ("arrow_config", Value::Null),
    ]
}

/// A parsed `adapter_config.json`.
#[derive(Debug)]
pub(super) struct Config {
    pub(super) base: Option<String>,
    pub(super) lora: Lora,
    /// The reason why training of the adapter cannot be continued, if it cannot.
    pub(super) frozen: Option<&'static str>,
}

impl Config {
    /// Parses `text`; `path` is the file's name for messages.
    ///
    /// # Errors
    /// Methods other than LoRA, keys whose value changes what is computed, and values of a wrong type.
    pub(super) fn parse(text: &[u8], path: &Path) -> Result<Self> {
        let refuse = |problem: String| Error::Format { path: path.to_owned(), problem };
        let keys: Map<String, Value> = serde_json::from_slice(text).map_err(|error| refuse(error.to_string()))?;
        Self::of(&keys).map_err(|error| refuse(error.to_string()))
    }

    fn of(keys: &Map<String, Value>) -> Result<Self> {
        check(keys)?;
        let frozen = check_initialisation(keys)?;
        let rank = value(keys, "r")?.unwrap_or(8);
        let alpha = value(keys, "lora_alpha")?.unwrap_or(8.0);
        let ranks = patterns(keys, "rank_pattern")?;
        let alphas = patterns(keys, "alpha_pattern")?;
        let lora = Lora::for_layers(rank, alpha, layers(keys)?)?.with_patterns(ranks, alphas)?;
        let lora = lora.with_dropout(value(keys, "lora_dropout")?.unwrap_or(0.0))?;
        let rank_stabilized = value(keys, "use_rslora")?.unwrap_or(false);
        Ok(Self { base: value(keys, "base_model_name_or_path")?, lora: Lora { rank_stabilized, ..lora }, frozen })
    }
}

/// Refuses methods other than LoRA, and keys whose value extends LoRA.
fn check(keys: &Map<String, Value>) -> Result<()> {
    let method = keys.get("peft_type").unwrap_or(&Value::Null);
    if method != "LORA" {
        return Err(Error::Lora(format!("`peft_type` is {method}: possible is \"LORA\"")));
    }
    let refused = refused();
    for (key, value) in keys {
        if READ.contains(&key.as_str()) || WITHOUT_EFFECT.contains(&key.as_str()) || is_empty(value) {
            continue;
        }
        match refused.iter().find(|(known, _)| known == key) {
            Some((_, default)) if value == default => {}
            Some((_, default)) => {
                return Err(Error::Lora(format!(
                    "`{key}` is {}, which makes it something else than plain LoRA: possible is the default, {default}",
                    shortened(value)
                )));
            }
            None => {
                return Err(Error::Lora(format!(
                    "`{key}` is {}, and this key is unknown here: possible are the defaults of such keys, null, false and what \
                     is empty",
                    shortened(value)
                )));
            }
        }
    }
    Ok(())
}

/// Refuses adapters whose initialisation changed the model's weights. Returns the reason why training of the adapter cannot be
/// continued, if it cannot.
fn check_initialisation(keys: &Map<String, Value>) -> Result<Option<&'static str>> {
    let given = keys.get("init_lora_weights").unwrap_or(&Value::Null);
    let word = match given {
        Value::Null | Value::Bool(_) => return Ok(None),
        Value::String(word) => word.to_lowercase(),
        _ => String::new(),
    };
    if PLAIN.contains(&word.as_str()) {
        return Ok(None);
    }
    if word == FREEZES_B {
        return Ok(Some(
            "its `init_lora_weights` is \"mica\", which trains A alone, and here both matrices are trained",
        ));
    }
    let problem = match CHANGES_MODEL.iter().any(|changes| word.starts_with(changes)) {
        true => {
            "which changed the model's own weights when the adapter was made: beside the model as it is, it would be another \
             one. Save it once more with PEFT, converted (`path_initial_model_for_weight_conversion` of `save_pretrained`); or \
             save the changed model, name it in `base_model_name_or_path`, and set this to true, the default"
        }
        false => {
            "which is unknown here: possible are the default true, false, \"gaussian\", \"eva\", \"orthogonal\", \"mica\""
        }
    };
    Err(Error::Lora(format!("`init_lora_weights` is {given}, {problem}")))
}

/// Selects the layers that have adapters.
fn layers(keys: &Map<String, Value>) -> Result<AdaptedLayers> {
    let targets = names(keys, "target_modules")?;
    let Some(targets) = targets else {
        return Err(Error::Lora("`target_modules` is null: it must name layers, or match their names".into()));
    };
    let excluded = names(keys, "exclude_modules")?;
    let indices = one_or_more::<usize>(keys, "layers_to_transform")?.filter(|indices| !indices.is_empty());
    let lists = one_or_more::<String>(keys, "layers_pattern")?.unwrap_or_default();
    if indices.is_some() && !matches!(targets, LayerNames::Ends(_)) {
        return Err(Error::Lora(
            "`layers_to_transform` belongs to a list of names, but `target_modules` is a word or an expression".into(),
        ));
    }
    if indices.is_none() && !lists.is_empty() {
        return Err(Error::Lora("`layers_pattern` has no effect without `layers_to_transform`".into()));
    }
    let mut lists = lists.iter().map(|list| Pattern::list(list)).collect::<Result<Vec<_>>>()?;
    if indices.is_some() && lists.is_empty() {
        lists.push(Pattern::any_list()?);
    }
    Ok(AdaptedLayers { targets, excluded, indices, lists })
}

/// Names of layers: a list, or a single string.
fn names(keys: &Map<String, Value>, key: &str) -> Result<Option<LayerNames>> {
    match keys.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(word)) => LayerNames::word(word).map(Some),
        Some(_) => Ok(value(keys, key)?.map(LayerNames::Ends)),
    }
}

/// The patterns of layer names in the value of `key`, each with its number, in the order of the file.
fn patterns<T: DeserializeOwned>(keys: &Map<String, Value>, key: &str) -> Result<Vec<(Pattern, T)>> {
    let all: Map<String, Value> = value(keys, key)?.unwrap_or_default();
    let pattern = |text: &String| Ok((Pattern::end(text)?, value(&all, text)?));
    let given = all.keys().map(pattern).collect::<Result<Vec<(Pattern, Option<T>)>>>()?;
    Ok(given.into_iter().filter_map(|(pattern, value)| Some((pattern, value?))).collect())
}

/// The value of a key; `None` if it is absent or null.
fn value<T: DeserializeOwned>(keys: &Map<String, Value>, key: &str) -> Result<Option<T>> {
    let given = keys.get(key).cloned().unwrap_or_default();
    let wrong = |error| Error::Lora(format!("`{key}` is {}: {error}", shortened(&given)));
    serde_json::from_value(given.clone()).map_err(wrong)
}

/// Like [`value`], for a key whose value may be a list or a single element.
fn one_or_more<T: DeserializeOwned>(keys: &Map<String, Value>, key: &str) -> Result<Option<Vec<T>>> {
    match keys.get(key) {
        None | Some(Value::Null | Value::Array(_)) => value(keys, key),
        Some(_) => Ok(value(keys, key)?.map(|one| vec![one])),
    }
}

/// Whether a value stands for an absent one.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(keys) => keys.is_empty(),
        _ => false,
    }
}

/// A value as JSON, shortened for an error message.
fn shortened(value: &Value) -> String {
    const MAX_PATTERN: usize = 80;
    let text = value.to_string();
    match text.char_indices().nth(MAX_PATTERN) {
        Some((end, _)) => format!("{} ...", &text[..end]),
        None => text,
    }
}

/// The contents of `adapter_config.json` for an adapter of the model in `base`, as PEFT writes it.
pub(super) fn written(lora: &Lora, base: &Path) -> Value {
    let words = |names: &LayerNames| match names {
        LayerNames::Ends(ends) => json!(ends),
        LayerNames::Matching(pattern) => json!(pattern.as_str()),
        // `Decoder::with_lora` replaces these words by names, so adapters of a model never have them.
        LayerNames::AllLinear | LayerNames::AllButRouters => json!(crate::lora::names::ALL_LINEAR),
    };
    let AdaptedLayers { targets, excluded, indices, lists } = &lora.layers;
    // The pattern that stands for a missing `layers_pattern` has an empty text, and is not written.
    let lists: Vec<&str> = lists.iter().map(Pattern::as_str).filter(|list| !list.is_empty()).collect();
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.to_string_lossy(),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": words(targets),
        "exclude_modules": excluded.as_ref().map(words),
        "layers_to_transform": indices,
        "layers_pattern": (!lists.is_empty()).then_some(lists),
        "rank_pattern": of_patterns(&lora.ranks),
        "alpha_pattern": of_patterns(&lora.alphas),
        "use_rslora": lora.rank_stabilized,
        "init_lora_weights": true,
        "bias": "none",
        "use_dora": false,
        "fan_in_fan_out": false,
        "modules_to_save": null,
        "inference_mode": true,
    })
}

fn of_patterns<T: Copy + Into<Value>>(patterns: &[(Pattern, T)]) -> Map<String, Value> {
    patterns.iter().map(|(pattern, value)| (pattern.as_str().to_owned(), (*value).into())).collect()
}
