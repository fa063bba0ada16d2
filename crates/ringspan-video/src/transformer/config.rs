//! The configuration of a WAN transformer, as diffusers writes it.

use crate::error::{Error, Result};
use crate::tensor_folder::read_json;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::path::Path;

/// The sizes of a transformer, by their names in `config.json`. Absent keys have diffusers' defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct WanConfig {
    /// Frames, rows and columns of latents that make a token.
    pub patch_size: [usize; 3],
    /// Number H of attention heads.
    pub num_attention_heads: usize,
    /// Width D of a head.
    pub attention_head_dim: usize,
    /// Channels of the input: of latents, and of what is appended to them.
    pub in_channels: usize,
    /// Channels of the velocity; as many as `in_channels` if absent.
    pub out_channels: Option<usize>,
    /// Width of the text encoder's embeddings.
    pub text_dim: usize,
    /// Width of the sinusoids of a time step.
    pub freq_dim: usize,
    /// Inner width of the feed-forward layers.
    pub ffn_dim: usize,
    /// Number of blocks.
    pub num_layers: usize,
    /// Whether a norm precedes cross-attention.
    pub cross_attn_norm: bool,
    /// The norm of queries and keys.
    qk_norm: Option<String>,
    /// Epsilon of all norms but those of image embeddings.
    pub eps: f64,
    /// Width of the image encoder's embeddings, in models that take them.
    pub image_dim: Option<usize>,
    /// Width of the projected image embeddings, in models that take them.
    pub added_kv_proj_dim: Option<usize>,
    /// Most tokens on an axis of the grid.
    pub rope_max_seq_len: usize,
    /// Number of image embeddings that have learned positions: those of two images.
    pub pos_embed_seq_len: Option<usize>,
    /// Blocks to which VACE's control blocks add.
    pub vace_layers: Option<Vec<usize>>,
    /// Channels of VACE's control.
    pub vace_in_channels: Option<usize>,
    #[serde(skip)]
    class: String,
}

impl Default for WanConfig {
    fn default() -> Self {
        Self {
            patch_size: [1, 2, 2],
            num_attention_heads: 40,
            attention_head_dim: 128,
            in_channels: 16,
            out_channels: Some(16),
            text_dim: 4096,
            freq_dim: 256,
            ffn_dim: 13824,
            num_layers: 40,
            cross_attn_norm: true,
            qk_norm: Some(QK_NORM.into()),
            eps: 1e-6,
            image_dim: None,
            added_kv_proj_dim: None,
            rope_max_seq_len: 1024,
            pos_embed_seq_len: None,
            vace_layers: None,
            vace_in_channels: None,
            class: PLAIN.into(),
        }
    }
}

const QK_NORM: &str = "rms_norm_across_heads";
const PLAIN: &str = "WanTransformer3DModel";
const VACE: &str = "WanVACETransformer3DModel";

impl WanConfig {
    /// Reads `config.json` of a transformer's folder.
    ///
    /// # Errors
    /// No such file, another model's, keys that change the result and that nothing here reads.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join("config.json");
        let json: Map<String, Value> = read_json(&path)?;
        Self::from_json(json).map_err(|error| Error::Format { path, problem: error.to_string() })
    }

    /// A configuration from the keys of `config.json`.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn from_json(json: Map<String, Value>) -> Result<Self> {
        let class = json.get("_class_name").and_then(Value::as_str).unwrap_or_default().to_owned();
        if ![PLAIN, VACE].contains(&class.as_str()) {
            let found = if class.is_empty() { "it has no _class_name".into() } else { format!("it is of a {class}") };
            return Err(Error::Config(format!("this must be the configuration of a {PLAIN} or {VACE}, and {found}")));
        }
        // A key that asks for nothing has no effect, whatever its name is.
        let has_effect = |(key, value): &(String, Value)| {
            !key.starts_with('_') && (Self::reads(key) || !(value.is_null() || *value == Value::Bool(false)))
        };
        let keys: Map<String, Value> = json.into_iter().filter(has_effect).collect();
        let problem = |error: serde_json::Error| Error::Config(error.to_string());
        let mut config: Self = serde_json::from_value(keys.into()).map_err(problem)?;
        config.class = class;
        if config.class == VACE {
            config.vace_layers.get_or_insert_with(|| (0..8).map(|index| 5 * index).collect());
            config.vace_in_channels.get_or_insert(96);
        }
        config.check()?;
        Ok(config)
    }

    /// Whether a key whose value may be null or false is one of these.
    fn reads(key: &str) -> bool {
        ["out_channels", "cross_attn_norm", "qk_norm", "image_dim", "added_kv_proj_dim", "pos_embed_seq_len"]
            .contains(&key)
    }

    fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
        if self.qk_norm.as_deref() != Some(QK_NORM) {
            return refuse(format!("qk_norm is {:?}; the only one that is implemented is {QK_NORM}", self.qk_norm));
        }
        let sizes = [
            ("num_attention_heads", self.num_attention_heads),
            ("attention_head_dim", self.attention_head_dim),
            ("in_channels", self.in_channels),
            ("out_channels", self.out_channels()),
            ("text_dim", self.text_dim),
            ("freq_dim", self.freq_dim),
            ("ffn_dim", self.ffn_dim),
            ("num_layers", self.num_layers),
            ("patch_size", self.patch_size.iter().product()),
        ];
        if let Some((key, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{key} is 0"));
        }
        let (dim, freq) = (self.attention_head_dim, self.freq_dim);
        if dim % 2 != 0 || freq % 2 != 0 {
            return refuse(format!(
                "attention_head_dim {dim} and freq_dim {freq} must be even: they are made of pairs"
            ));
        }
        if self.image_dim.is_some() != self.added_kv_proj_dim.is_some() {
            return refuse(format!(
                "image_dim {:?} and added_kv_proj_dim {:?}: image embeddings need both",
                self.image_dim, self.added_kv_proj_dim
            ));
        }
        if let Some(added) = self.added_kv_proj_dim.filter(|added| *added != self.width()) {
            return refuse(format!(
                "added_kv_proj_dim is {added}, and image embeddings are projected to {}",
                self.width()
            ));
        }
        if let Some(layers) = &self.vace_layers {
            let ascending = layers.is_sorted_by(|a, b| a < b);
            if self.class != VACE {
                return refuse(format!("vace_layers has an effect in a {VACE} only, and this is a {}", self.class));
            }
            if layers.first() != Some(&0) || !ascending || layers.last().is_some_and(|last| *last >= self.num_layers) {
                return refuse(format!(
                    "vace_layers is {layers:?}; it must ascend from 0 to at most num_layers - 1 = {}",
                    self.num_layers - 1
                ));
            }
        }
        Ok(())
    }

    /// Channels of the velocity.
    #[must_use]
    pub fn out_channels(&self) -> usize {
        self.out_channels.unwrap_or(self.in_channels)
    }

    /// Width C of the residual stream: that of all heads.
    #[must_use]
    pub fn width(&self) -> usize {
        self.num_attention_heads * self.attention_head_dim
    }

    /// Number of latent elements that a token stands for, in each channel.
    #[must_use]
    pub fn patch(&self) -> usize {
        self.patch_size.iter().product()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(more: Value) -> Result<WanConfig> {
        let mut json = json!({ "_class_name": PLAIN, "_diffusers_version": "0.42.1", "num_layers": 3 });
        let keys = json.as_object_mut().expect("an object");
        keys.extend(more.as_object().expect("an object").clone());
        WanConfig::from_json(keys.clone())
    }

    #[test]
    fn absent_keys_have_defaults_and_keys_without_effect_are_ignored() {
        let config = read(json!({ "new_key": null, "other": false, "out_channels": null })).expect("a configuration");
        assert_eq!((config.num_layers, config.width(), config.out_channels()), (3, 5120, 16));
        assert!(!read(json!({ "cross_attn_norm": false })).expect("a configuration").cross_attn_norm);
        let vace = read(json!({ "_class_name": VACE, "num_layers": 40 })).expect("a configuration");
        assert_eq!((vace.vace_in_channels, vace.vace_layers.map(|layers| layers.len())), (Some(96), Some(8)));
    }

    #[test]
    fn what_would_change_the_result_is_refused_by_name() {
        for (more, words) in [
            (json!({ "window_size": [4, 4] }), "window_size"),
            (json!({ "qk_norm": "layer_norm" }), "layer_norm"),
            (json!({ "qk_norm": null }), "qk_norm"),
            (json!({ "attention_head_dim": 7 }), "attention_head_dim 7"),
            (json!({ "num_attention_heads": 0 }), "num_attention_heads is 0"),
            (json!({ "image_dim": 8 }), "image_dim Some(8)"),
            (json!({ "vace_layers": [0] }), VACE),
            (json!({ "_class_name": VACE, "vace_layers": [0, 3] }), "[0, 3]"),
            (json!({ "_class_name": "AutoencoderKLWan" }), "AutoencoderKLWan"),
            (json!({ "_class_name": null }), "no _class_name"),
        ] {
            let error = read(more).expect_err("must be refused").to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
