//! The configuration of a vision transformer, as transformers writes it.

use crate::error::{Error, Result};
use serde::Deserialize;

/// The sizes of `CLIPVisionModel`, by their names in `config.json`. Absent keys have the defaults of transformers.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct ImageEncoderConfig {
    model_type: String,
    /// Width C of an embedding.
    pub hidden_size: usize,
    /// Inner width of the feed-forward layers.
    pub intermediate_size: usize,
    /// Layers, of which the last is not computed.
    pub num_hidden_layers: usize,
    /// Heads of attention.
    pub num_attention_heads: usize,
    /// Channels of an image.
    pub num_channels: usize,
    /// Pixels of an image's side.
    pub image_size: usize,
    /// Pixels of a patch's side.
    pub patch_size: usize,
    /// The activation of the feed-forward layers: `gelu` or `quick_gelu`.
    pub hidden_act: String,
    /// Added to the variance in norms.
    pub layer_norm_eps: f64,
}

impl Default for ImageEncoderConfig {
    fn default() -> Self {
        Self {
            model_type: MODEL_TYPE.into(),
            hidden_size: 768,
            intermediate_size: 3072,
            num_hidden_layers: 12,
            num_attention_heads: 12,
            num_channels: 3,
            image_size: 224,
            patch_size: 32,
            hidden_act: "quick_gelu".into(),
            layer_norm_eps: 1e-5,
        }
    }
}

const MODEL_TYPE: &str = "clip_vision_model";

impl ImageEncoderConfig {
    /// Checks that the numbers fit each other.
    ///
    /// # Errors
    /// Another model, and the first number that does not fit.
    pub fn check(&self) -> Result<()> {
        let refuse = |problem: String| Err(Error::Config(problem));
        if self.model_type != MODEL_TYPE {
            return refuse(format!("model_type is {}, and {MODEL_TYPE} is supported", self.model_type));
        }
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("image_size", self.image_size),
            ("patch_size", self.patch_size),
        ];
        if let Some((key, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return refuse(format!("{key} is 0"));
        }
        let Self { hidden_size, num_attention_heads: heads, image_size, patch_size, num_channels, .. } = *self;
        if !hidden_size.is_multiple_of(heads) {
            return refuse(format!("hidden_size {hidden_size} is not divisible by num_attention_heads {heads}"));
        }
        if patch_size > image_size {
            return refuse(format!("patch_size {patch_size} is larger than image_size {image_size}"));
        }
        if num_channels != 3 {
            return refuse(format!("num_channels is {num_channels}, and pictures have 3"));
        }
        if !["gelu", "quick_gelu"].contains(&self.hidden_act.as_str()) {
            return refuse(format!("hidden_act {}: gelu and quick_gelu are supported", self.hidden_act));
        }
        Ok(())
    }

    /// Patches of an image's side.
    #[must_use]
    pub fn side(&self) -> usize {
        self.image_size / self.patch_size
    }

    /// Embeddings of an image: one of the whole, and one of each patch.
    #[must_use]
    pub fn embeddings(&self) -> usize {
        self.side() * self.side() + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_is_not_supported_is_refused_by_name() {
        let read = |more| serde_json::from_value::<ImageEncoderConfig>(more).expect("a configuration");
        assert_eq!(read(json!({ "patch_size": 14 })).embeddings(), 257);
        read(json!({})).check().expect("the defaults");
        for (more, words) in [
            (json!({ "model_type": "siglip_vision_model" }), "siglip_vision_model"),
            (json!({ "num_attention_heads": 7 }), "hidden_size 768 is not divisible by num_attention_heads 7"),
            (json!({ "num_attention_heads": 0 }), "num_attention_heads is 0"),
            (json!({ "patch_size": 225 }), "patch_size 225"),
            (json!({ "num_channels": 1 }), "num_channels is 1"),
            (json!({ "hidden_act": "relu" }), "hidden_act relu"),
        ] {
            let message = read(more).check().expect_err("must be refused").to_string();
            assert!(message.contains(words), "{message}");
        }
    }
}
