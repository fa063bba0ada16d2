//! Model folders: the decoder, its tokenizer, and the tokens that end a text.

use crate::mesh::{DEADLINE, MeshArgs};
use anyhow::{Context, Result, bail, ensure};
use ringspan::comm::ranks::Ranks;
use ringspan_models::{Decoder, folder};
use ringspan_serve::{Mesh, Model};
use std::path::Path;
use tokenizers::Tokenizer;

/// Starts the mesh that the flags ask for. Nothing may have been computed before.
pub(crate) fn mesh(args: &MeshArgs, ranks: &Ranks) -> Result<Mesh> {
    let (_, threads) = args.start(ranks)?;
    Ok(Mesh { ring: args.ring, ulysses: args.ulysses, threads, deadline: DEADLINE, ranks: ranks.clone() })
}

/// Loads the model in the folder `path`, if its heads fit the mesh.
pub(crate) fn load(path: &Path, mesh: &Mesh) -> Result<Model> {
    ensure!(path.is_dir(), "--model {}: there is no such folder", path.display());
    let (config, weights) = folder::load(path)?;
    let heads = config.num_attention_heads;
    ringspan::schedule::HeadShare::all(heads, config.num_key_value_heads(), (mesh.ring, mesh.ulysses).into())?;
    let decoder = Decoder::new(config)?;
    Model::new(decoder, weights).with_context(|| format!("the model in {}", path.display()))
}

/// The tokenizer of the model in the folder `path`.
pub(crate) fn tokenizer(path: &Path) -> Result<Tokenizer> {
    let file = path.join("tokenizer.json");
    let bytes = std::fs::read(&file).with_context(|| format!("cannot read {}", file.display()))?;
    match Tokenizer::from_bytes(&bytes) {
        Ok(tokenizer) => Ok(tokenizer),
        Err(error) => bail!("{} is not a tokenizer: {error}", file.display()),
    }
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
    for name in ["generation_config.json", "config.json"] {
        let file = path.join(name);
        if !file.exists() {
            continue;
        }
        let text = std::fs::read_to_string(&file).with_context(|| format!("cannot read {}", file.display()))?;
        let json: serde_json::Value =
            serde_json::from_str(&text).with_context(|| format!("{} is not JSON", file.display()))?;
        let id = |value: &serde_json::Value| {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            id.with_context(|| format!("{}: eos_token_id {value} is not a token", file.display()))
        };
        match json.get("eos_token_id") {
            None | Some(serde_json::Value::Null) => {}
            Some(serde_json::Value::Array(list)) => return list.iter().map(id).collect(),
            Some(value) => return Ok(vec![id(value)?]),
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::end_tokens;

    #[test]
    fn end_tokens_come_from_the_generation_config_first() {
        let folder = tempfile::tempdir().expect("folder");
        let write = |name: &str, text: &str| std::fs::write(folder.path().join(name), text).expect("file");
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
