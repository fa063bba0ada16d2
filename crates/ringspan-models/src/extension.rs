//! Contexts longer than a model was trained for: how many positions it reaches, and how its rotary embedding is scaled.

use crate::config::Config;
use crate::error::{Error, Result};
use crate::registry::with_family_defaults;
use serde_json::{Map, Value, json};
use std::fmt;
use std::str::FromStr;

/// A scaling of the rotary embedding by a factor, written `yarn:4`, or another base for it, written `theta:8e6`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeScaling {
    kind: ScalingMethod,
    /// The scaling factor; for [`ScalingMethod::Theta`], the new base.
    factor: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScalingMethod {
    /// Divides all positions by the factor (Chen et al., 2023).
    Linear,
    /// The base grows with the length of the text, once it passes the trained positions (dynamic NTK-aware scaling).
    Dynamic,
    /// Stretches pairs that rotate slowly and keeps fast ones (YaRN; Peng et al., 2023).
    Yarn,
    /// Like [`Yarn`](Self::Yarn), with borders by wavelength (Dubey et al., 2024, "The Llama 3 Herd of Models").
    Llama3,
    /// Another base: all pairs rotate more slowly, the slow ones most (Xiong et al., 2023).
    Theta,
}

impl ScalingMethod {
    const ALL: [(Self, &str); 5] = [
        (Self::Linear, "linear"),
        (Self::Dynamic, "dynamic"),
        (Self::Yarn, "yarn"),
        (Self::Llama3, "llama3"),
        (Self::Theta, "theta"),
    ];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

impl FromStr for RopeScaling {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let refuse = |problem: &str| {
            let kinds = ScalingMethod::ALL.map(|(_, name)| name).join(", ");
            Error::RopeScaling(format!(
                "'{text}' {problem}: it is a kind and a factor, as yarn:4, or a base, as theta:8e6; kinds are {kinds}"
            ))
        };
        let (name, factor) = text.split_once(':').ok_or_else(|| refuse("has no factor"))?;
        let found = ScalingMethod::ALL.into_iter().find(|(_, known)| *known == name);
        let (kind, _) = found.ok_or_else(|| refuse(&format!("has the unknown kind '{name}'")))?;
        let factor = factor.parse().ok().filter(|factor: &f64| *factor > 1.0 && factor.is_finite());
        Ok(Self { kind, factor: factor.ok_or_else(|| refuse("needs a number above 1 as its factor"))? })
    }
}

impl fmt::Display for RopeScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.factor)
    }
}

impl RopeScaling {
    /// Returns `config.json` with the scaled rotary embedding, to compute with and to save with the weights.
    ///
    /// Linear, YaRN and Llama 3 scaling multiply `max_position_embeddings`; dynamic scaling leaves it, since its base is computed
    /// from it; a new base says nothing of positions, so they become `length` where it is known and larger. A model that is already
    /// scaled can be scaled further by the same kind, or given another base. If local and global layers have parameters of their
    /// own, only those of global layers are scaled, since local layers attend within a window.
    ///
    /// # Errors
    /// A model that is scaled by another kind, or does not say how many positions it is made for.
    pub fn apply(&self, config: &Value, length: Option<usize>) -> Result<Value> {
        let mut json = with_family_defaults(config.clone());
        let parsed: Config = serde_json::from_value(json.clone()).map_err(|error| Error::Config(error.to_string()))?;
        let refuse = |problem: String| Err(Error::RopeScaling(format!("{self} cannot scale this model: {problem}")));
        let Some(positions) = parsed.max_position_embeddings else {
            return refuse("config.json has no max_position_embeddings".into());
        };
        let Some(keys) = json.as_object_mut() else { return refuse("config.json is no object".into()) };
        if self.kind == ScalingMethod::Theta {
            new_base(keys, self.factor);
            keys.insert("max_position_embeddings".into(), positions.max(length.unwrap_or(0)).into());
            return Ok(json);
        }
        let parameters = parameters(keys);
        let kind = ["rope_type", "type"].iter().find_map(|key| parameters.get(*key)?.as_str().map(str::to_owned));
        let before = parameters.get("factor").and_then(Value::as_f64);
        if let Some(kind) = kind.as_ref().filter(|kind| *kind != "default" && *kind != self.kind.name()) {
            return refuse(format!(
                "its rotary embedding is already scaled ({kind}, factor {}): {kind}:F scales it further, theta:BASE \
                 changes its base",
                before.unwrap_or(1.0)
            ));
        }
        let before = kind.filter(|kind| kind != "default").and(before).unwrap_or(1.0);
        parameters.remove("type");
        parameters.insert("rope_type".into(), self.kind.name().into());
        parameters.insert("factor".into(), json!(before * self.factor));
        if let ScalingMethod::Yarn | ScalingMethod::Llama3 = self.kind {
            parameters.entry("original_max_position_embeddings").or_insert(positions.into());
        }
        if self.kind == ScalingMethod::Llama3 {
            // Defaults of Llama 3.1.
            parameters.entry("low_freq_factor").or_insert(json!(1.0));
            parameters.entry("high_freq_factor").or_insert(json!(4.0));
        }
        if self.kind != ScalingMethod::Dynamic {
            let more = (positions as f64 * self.factor).round() as usize;
            keys.insert("max_position_embeddings".into(), more.into());
        }
        Ok(json)
    }
}

/// Changes the base under the key that the file uses: inside `rope_parameters`, or at the top level.
fn new_base(keys: &mut Map<String, Value>, base: f64) {
    const BASE: &str = "rope_theta";
    match keys.get("rope_parameters") {
        Some(Value::Object(_)) => drop(parameters(keys).insert(BASE.into(), json!(base))),
        _ => drop(keys.insert(BASE.into(), json!(base))),
    }
}

/// The file's object with the parameters of the (global) rotary embedding; it is created if there is none.
fn parameters(keys: &mut Map<String, Value>) -> &mut Map<String, Value> {
    let mut at =
        if keys.get("rope_parameters").is_some_and(Value::is_object) { "rope_parameters" } else { "rope_scaling" };
    let mut keys = keys;
    loop {
        let value = keys.entry(at).or_insert(Value::Null);
        if !value.is_object() {
            *value = json!({});
        }
        let Value::Object(inner) = value else { unreachable!("made an object above") };
        keys = inner;
        match ["full_attention", "sliding_attention"].iter().any(|kind| keys.contains_key(*kind)) {
            true => at = "full_attention",
            false => return keys,
        }
    }
}

/// A text that is longer than the positions that a model is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContextOverflow {
    /// Tokens of the text.
    pub length: usize,
    /// Number of positions that the model is made for.
    pub positions: usize,
    /// The kind of scaling that would extend the positions, if there is one for this model.
    pub by: Option<&'static str>,
}

impl fmt::Display for ContextOverflow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { length, positions, .. } = self;
        write!(f, "{length} tokens pass the {positions} positions that the model is made for")?;
        if let Some(kind) = self.by {
            write!(f, "; rope scaling {kind}:{} would extend them", length.div_ceil(*positions))?;
        }
        Ok(())
    }
}

impl Config {
    /// Returns `Some` if a text of `length` tokens has more positions than the model is made for. Such a text can be computed, but
    /// the model's output is rarely meaningful there.
    pub fn context_overflow(&self, length: usize) -> Option<ContextOverflow> {
        let trained = self.max_position_embeddings.filter(|positions| *positions > 0)?;
        let (kind, factor, original) = self.global_rope();
        let positions = match kind {
            "dynamic" => (trained as f64 * factor) as usize,
            // Some files add YaRN and leave `max_position_embeddings` as it was.
            "yarn" => trained.max((original.unwrap_or(trained as f64) * factor) as usize),
            _ => trained,
        };
        let own = ScalingMethod::ALL.iter().map(|(_, name)| *name).find(|name| *name == kind);
        let by = own.or((kind == "default").then_some("yarn"));
        Some(ContextOverflow { length, positions, by }).filter(|_| length > positions)
    }
}

#[cfg(test)]
mod tests {
    use super::{ContextOverflow, RopeScaling};
    use crate::{Config, Decoder};
    use serde_json::{Value, json};

    fn model(more: Value) -> Value {
        let mut config = json!({
            "model_type": "llama", "vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 1000
        });
        config.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        config
    }

    fn scaling(text: &str) -> RopeScaling {
        text.parse().expect("a scaling")
    }

    fn config(json: &Value) -> Config {
        let config: Config = serde_json::from_value(json.clone()).expect("sizes");
        assert!(Decoder::new(config.clone()).is_ok(), "{json}");
        config
    }

    fn refused(result: crate::Result<impl std::fmt::Debug>, words: &[&str]) {
        let message = result.expect_err("must be refused").to_string();
        for word in words {
            assert!(message.contains(word), "'{word}' is not in: {message}");
        }
    }

    #[test]
    fn a_scaling_is_a_kind_and_a_factor() {
        for text in ["linear:2", "dynamic:1.5", "yarn:4"] {
            assert_eq!(scaling(text).to_string(), text);
        }
        refused("yarn".parse::<RopeScaling>(), &["'yarn'", "yarn:4"]);
        refused("su:4".parse::<RopeScaling>(), &["'su'", "linear, dynamic, yarn, llama3, theta"]);
        for factor in ["1", "0", "-2", "nan", "inf", "four", ""] {
            refused(format!("linear:{factor}").parse::<RopeScaling>(), &["above 1", factor]);
        }
    }

    /// The configuration keeps the file's spelling of keys, so that other programs read it as before.
    #[test]
    fn a_scaled_configuration_says_what_it_was_made_for() {
        let yarn = scaling("yarn:4").apply(&model(json!({ "rope_theta": 5e5 })), None).expect("scaled");
        let wanted = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000 });
        assert_eq!((&yarn["rope_scaling"], &yarn["max_position_embeddings"]), (&wanted, &json!(4000)));
        assert_eq!(yarn["rope_theta"], json!(5e5));

        let new = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } });
        let linear = scaling("linear:2.5").apply(&model(new), None).expect("scaled");
        let wanted = json!({ "rope_type": "linear", "factor": 2.5, "rope_theta": 5e5 });
        assert_eq!((&linear["rope_parameters"], &linear["max_position_embeddings"]), (&wanted, &json!(2500)));

        let dynamic = scaling("dynamic:2").apply(&model(json!({ "rope_scaling": null })), None).expect("scaled");
        assert_eq!(dynamic["rope_scaling"], json!({ "rope_type": "dynamic", "factor": 2.0 }));
        assert_eq!(dynamic["max_position_embeddings"], json!(1000), "its base is counted from there");
        for json in [yarn, linear, dynamic] {
            config(&json);
        }
    }

    #[test]
    fn local_layers_are_not_scaled() {
        let gemma = |more: Value| {
            let mut all = model(more);
            all["model_type"] = "gemma3_text".into();
            all
        };
        let old = scaling("linear:2").apply(&gemma(json!({})), None).expect("scaled");
        assert_eq!(old["rope_scaling"], json!({ "rope_type": "linear", "factor": 2.0 }));
        let own = json!({ "full_attention": { "rope_type": "default" }, "sliding_attention": { "rope_theta": 1e4 } });
        let new = scaling("linear:2").apply(&gemma(json!({ "rope_parameters": own })), None).expect("scaled");
        assert_eq!(new["rope_parameters"]["full_attention"], json!({ "rope_type": "linear", "factor": 2.0 }));
        assert_eq!(new["rope_parameters"]["sliding_attention"], json!({ "rope_theta": 1e4 }));
        config(&old);
        assert_eq!(config(&new).context_overflow(2001).and_then(|overflow| overflow.by), Some("linear"));
    }

    /// Llama 3.1 is published with scaling, and is scaled further by the same kind.
    #[test]
    fn a_scaled_model_is_scaled_further_by_its_own_kind() {
        let rope = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 125
        });
        let llama = model(json!({ "rope_scaling": rope, "rope_theta": 5e5 }));
        let further = scaling("llama3:4").apply(&llama, None).expect("scaled");
        assert_eq!(further["rope_scaling"]["factor"], json!(32.0));
        assert_eq!(further["rope_scaling"]["original_max_position_embeddings"], json!(125));
        assert_eq!(further["max_position_embeddings"], json!(4000));
        refused(scaling("yarn:4").apply(&llama, None), &["yarn:4", "already", "llama3", "8", "llama3:F", "theta:BASE"]);
        let fresh = scaling("llama3:8").apply(&model(json!({})), None).expect("scaled");
        let wanted = json!({
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1000
        });
        assert_eq!(fresh["rope_scaling"], wanted);
        for json in [further, fresh] {
            config(&json);
        }
        let mut endless = model(json!({}));
        endless.as_object_mut().expect("an object").remove("max_position_embeddings");
        refused(scaling("yarn:4").apply(&endless, None), &["max_position_embeddings"]);
    }

    #[test]
    fn another_base_replaces_the_old_one() {
        let rope = json!({ "rope_type": "linear", "factor": 2.0 });
        let old = scaling("theta:8e6").apply(&model(json!({ "rope_theta": 1e4, "rope_scaling": rope })), Some(4000));
        let old = old.expect("a base");
        assert_eq!((&old["rope_theta"], &old["rope_scaling"]), (&json!(8e6), &rope));
        assert_eq!(old["max_position_embeddings"], json!(4000));
        let new = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 5e5 } });
        let new = scaling("theta:8e6").apply(&model(new), Some(10)).expect("a base");
        assert_eq!(new["rope_parameters"]["rope_theta"], json!(8e6));
        assert_eq!((new.get("rope_theta"), &new["max_position_embeddings"]), (None, &json!(1000)));
        let own = json!({ "full_attention": { "rope_theta": 1e6 }, "sliding_attention": { "rope_theta": 1e4 } });
        let mut gemma = model(json!({ "rope_parameters": own }));
        gemma["model_type"] = "gemma3_text".into();
        let gemma = scaling("theta:8e6").apply(&gemma, None).expect("a base");
        assert_eq!(gemma["rope_parameters"]["full_attention"]["rope_theta"], json!(8e6));
        assert_eq!(gemma["rope_parameters"]["sliding_attention"]["rope_theta"], json!(1e4));
        for json in [old, new, gemma] {
            config(&json);
        }
    }

    #[test]
    fn texts_beyond_the_trained_positions_are_reported() {
        let plain = config(&model(json!({})));
        assert_eq!(plain.context_overflow(1000), None);
        let overflow = plain.context_overflow(2001).expect("longer");
        assert_eq!(overflow, ContextOverflow { length: 2001, positions: 1000, by: Some("yarn") });
        for word in ["2001", "1000", "yarn:3"] {
            assert!(overflow.to_string().contains(word), "{overflow}");
        }
        for kind in ["linear", "dynamic", "yarn"] {
            let config = config(&scaling(&format!("{kind}:2")).apply(&model(json!({})), None).expect("scaled"));
            assert_eq!(config.context_overflow(2000), None, "{kind}");
            let overflow = config.context_overflow(2001).expect("longer");
            assert!(overflow.to_string().contains(&format!("{kind}:2")), "{overflow}");
        }
        // The configuration that Qwen's model cards recommend.
        let rope = json!({ "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1000 });
        assert_eq!(config(&model(json!({ "rope_scaling": rope }))).context_overflow(2000), None);
        let mut endless = model(json!({}));
        endless.as_object_mut().expect("an object").remove("max_position_embeddings");
        assert_eq!(config(&endless).context_overflow(1 << 40), None, "the file does not say");
    }
}
