//! The parameters of a rotary embedding, as a configuration gives them.

use crate::error::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;

/// The parameters of a rotary embedding in `config.json`: its base, and how it is scaled.
#[derive(Debug, Clone, PartialEq, Default, Deserialize)]
pub(crate) struct Parameters {
    rope_type: Option<String>,
    /// The older name of `rope_type`; some files have both.
    r#type: Option<String>,
    pub(crate) rope_theta: Option<f64>,
    pub(crate) factor: Option<f64>,
    pub(crate) low_freq_factor: Option<f64>,
    pub(crate) high_freq_factor: Option<f64>,
    pub(crate) original_max_position_embeddings: Option<f64>,
    pub(crate) partial_rotary_factor: Option<f64>,
    pub(crate) attention_factor: Option<f64>,
    pub(crate) beta_fast: Option<f64>,
    pub(crate) beta_slow: Option<f64>,
    pub(crate) mscale: Option<f64>,
    pub(crate) mscale_all_dim: Option<f64>,
    pub(crate) truncate: Option<bool>,
    pub(crate) short_factor: Option<Vec<f64>>,
    pub(crate) long_factor: Option<Vec<f64>>,
    #[serde(flatten)]
    pub(crate) others: BTreeMap<String, serde_json::Value>,
}

impl Parameters {
    /// A copy with another `rope_type`.
    pub(crate) fn with_kind(self, kind: &str) -> Self {
        Self { rope_type: Some(kind.to_owned()), ..self }
    }

    pub(crate) fn kind(&self) -> &str {
        self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default")
    }

    /// Returns `value`, which this kind of scaling needs and which must be above 0.
    pub(crate) fn need(&self, name: &str, value: Option<f64>) -> Result<f64> {
        value
            .filter(|value| *value > 0.0 && value.is_finite())
            .ok_or_else(|| Error::Config(format!("rope type {} needs a positive {name}, given {value:?}", self.kind())))
    }
}
