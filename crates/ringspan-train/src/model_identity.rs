//! The identity of a model: a checkpoint can only be resumed with the model that it was saved of.

use crate::{
    checkpoint::{Checkpoint, Identity},
    config::TrainConfig,
    error::{Error, Result, model_error},
    fingerprint::fingerprint,
    human_readable::grouped,
};
use ringspan_models::Config;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The identity of a model, by which its checkpoints are recognised.
pub(crate) fn identity(model: &Config, shapes: &BTreeMap<String, Vec<usize>>) -> Identity {
    let parameters: usize = shapes.values().map(|shape| shape.iter().product::<usize>()).sum();
    let shape_numbers = |(name, shape): (&String, &Vec<usize>)| -> Vec<u64> {
        name.bytes().map(u64::from).chain(shape.iter().map(|&d| d as u64)).collect()
    };
    Identity {
        summary: format!(
            "{}: {} layers, hidden {}, {} heads over {}, vocabulary {}, {} parameters",
            model.model_type,
            model.num_hidden_layers,
            model.hidden_size,
            model.num_attention_heads,
            model.num_key_value_heads(),
            model.vocab_size,
            grouped(parameters as u64)
        ),
        fingerprint: fingerprint(shapes.iter().flat_map(shape_numbers)),
    }
}

/// Refuses a configuration that computes something else than the checkpoint's: where names and shapes are the same, its weights
/// would be taken for those of another model. Keys that do not affect computation may change.
pub(crate) fn check_same_configuration(config: &TrainConfig, saved: &Checkpoint, now: &Value) -> Result<()> {
    let refuse = |problem: String| Err(Error::Checkpoint { path: saved.path.clone(), problem });
    let before = &saved.progress.config;
    if before.is_null() {
        return Ok(());
    }
    let parse = |json: &Value| serde_json::from_value::<Config>(json.clone());
    let old = match parse(before) {
        Ok(old) => old,
        Err(error) => return refuse(format!("damaged: the model's configuration: {error}")),
    };
    // The saved configuration was written and read as text, in which a number may lose its last bit; this one goes the same way.
    let now: Value = serde_json::from_str(&now.to_string()).map_err(model_error)?;
    let new = parse(&now).map_err(model_error)?;
    if old == new {
        return Ok(());
    }
    let keys = |json: &Value| json.as_object().into_iter().flat_map(|keys| keys.keys().cloned()).collect::<Vec<_>>();
    let all: BTreeSet<String> = keys(before).into_iter().chain(keys(&now)).collect();
    let affects_computation = |key: &&String| {
        let mut reverted = now.clone();
        reverted[*key] = before.get(*key).cloned().unwrap_or_default();
        before.get(*key) != now.get(*key) && parse(&reverted).ok().as_ref() != Some(&new)
    };
    let value_text = |json: &Value, key: &str| json.get(key).map_or("absent".into(), Value::to_string);
    let changes: Vec<String> = all
        .iter()
        .filter(affects_computation)
        .map(|key| format!("{key} was {}, now {}", value_text(before, key), value_text(&now, key)))
        .collect();
    let file = config.model_config.as_ref().or(config.model.as_ref()).map(|path| path.display().to_string());
    refuse(format!(
        "it belongs to another model: the configuration in {} has changed since it was saved ({}); change it back to go on",
        file.unwrap_or_default(),
        changes.join("; ")
    ))
}
