//! Model folders: the decoder, its tokenizer, and the tokens that end a text.

use crate::mesh::{DEADLINE, MeshArgs};
use anyhow::{Context, Result, bail};
use ringspan::comm::ranks::Ranks;
use ringspan_models::{Decoder, Origin, RopeScaling};
use ringspan_serve::{Mesh, Model};
use serde_json::Value;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Starts the mesh that the flags ask for. Nothing may have been computed before.
pub(crate) fn mesh(args: &MeshArgs, ranks: &Ranks) -> Result<Mesh> {
    let (_, threads) = args.start(ranks)?;
    Ok(Mesh { ring: args.ring, ulysses: args.ulysses, threads, deadline: DEADLINE, ranks: ranks.clone() })
}

/// Which model, and for how long texts.
#[derive(Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// A model folder as Hugging Face's (config.json, safetensors, tokenizer.json), an adapter's as PEFT's, or a GGUF file
    #[arg(long = "model", value_name = "PATH")]
    pub(crate) path: PathBuf,
    /// Stretch the model's rotary embedding for longer texts: linear:F, dynamic:F or yarn:F, F times as long
    #[arg(long, value_name = "KIND:F")]
    rope_scaling: Option<RopeScaling>,
}

impl ModelArgs {
    /// Loads the model, if its heads fit the mesh.
    pub(crate) fn load(&self, mesh: &Mesh) -> Result<Model> {
        let origin = Origin::at(&self.path).context("--model")?;
        let json = origin.config_json()?;
        let (mut config, weights) = origin.load()?;
        if let Some(scaling) = &self.rope_scaling {
            config = serde_json::from_value(scaling.apply(&json)?)?;
        }
        let heads = config.num_attention_heads;
        ringspan::schedule::HeadShare::all(heads, config.num_key_value_heads(), (mesh.ring, mesh.ulysses).into())?;
        let decoder = Decoder::new(config)?;
        Model::new(decoder, weights).with_context(|| format!("the model in {}", self.path.display()))
    }
}

/// Tells a person whose texts pass the positions that a model is made for.
pub(crate) fn warn_beyond(model: &Model, length: usize) {
    if let Some(beyond) = model.decoder().config().beyond(length) {
        eprintln!("warning: {beyond}");
    }
}

/// The tokenizer of the model at `path`.
pub(crate) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let found = Origin::at(path).and_then(|origin| origin.tokenizer()).context("--model")?;
    found.with_context(|| format!("{} has no tokenizer.json", path.display()))
}

/// The tokens of `text`, with the special tokens that the tokenizer puts around a text.
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>> {
    match tokenizer.encode(text, true) {
        Ok(encoding) => Ok(encoding.get_ids().to_vec()),
        Err(error) => bail!("the tokenizer cannot encode the text: {error}"),
    }
}

/// The tokens that end a text: `eos_token_id` of `generation_config.json`, else of `config.json`; a number or a list.
pub(crate) fn end_tokens(path: &Path) -> Result<Vec<u32>> {
    let origin = Origin::at(path)?;
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.with_context(|| format!("{}: eos_token_id {value} is not a token", path.display()))
    };
    let of = |json: &Value| match json.get("eos_token_id") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) => list.iter().map(id).collect::<Result<_>>().map(Some),
        Some(value) => Ok(Some(vec![id(value)?])),
    };
    for file in origin.folders().into_iter().map(|folder| folder.join("generation_config.json")) {
        if !file.exists() {
            continue;
        }
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let json = serde_json::from_str(&text).with_context(|| format!("{} is not JSON", file.display()))?;
        if let Some(tokens) = of(&json)? {
            return Ok(tokens);
        }
    }
    Ok(of(&origin.config_json()?)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::end_tokens;

    #[test]
    fn end_tokens_come_from_the_generation_config_first() {
        let folder = tempfile::tempdir().expect("folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("file");
        write("config.json", "{}");
        assert_eq!(end_tokens(folder.path()).expect("none"), [0; 0]);
        write("config.json", r#"{"eos_token_id": 7}"#);
        assert_eq!(end_tokens(folder.path()).expect("one"), [7]);
        write("generation_config.json", r#"{"eos_token_id": [8, 9]}"#);
        assert_eq!(end_tokens(folder.path()).expect("two"), [8, 9]);
        write("generation_config.json", r#"{"eos_token_id": null}"#);
        assert_eq!(end_tokens(folder.path()).expect("none here"), [7]);
        write("config.json", r#"{"eos_token_id": -1}"#);
        assert!(end_tokens(folder.path()).expect_err("no token").to_string().contains("-1"));
    }
}
