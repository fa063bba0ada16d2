//! Special tokens around a text, and tokens that end it, according to the tokenizer and the files of a model.

use crate::error::{Error, Result};
use serde_json::Value;
use std::path::Path;
use tokenizers::{Encoding, PostProcessor, Token, Tokenizer};

/// The file with a model's settings for generation, which takes precedence over `config.json`.
pub const GENERATION_CONFIG: &str = "generation_config.json";

/// The special tokens that a tokenizer's post-processor puts around a text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// The tokens before the text, such as `<s>`.
    pub prefix: Vec<u32>,
    /// The tokens after the text, such as `</s>`.
    pub suffix: Vec<u32>,
}

impl SpecialTokens {
    /// Finds the tokens that `tokenizer` puts around a text.
    ///
    /// # Errors
    /// A post-processor that fails.
    pub fn of(tokenizer: &Tokenizer) -> tokenizers::Result<Self> {
        let Some(processor) = tokenizer.get_post_processor() else { return Ok(Self::default()) };
        // It is not certain that any text becomes exactly one token, so a token outside the vocabulary stands for the text.
        const TEXT: u32 = u32::MAX;
        let text = Encoding::from_tokens(vec![Token::new(TEXT, "x".into(), (0, 1))], 0);
        let processed = processor.process(text, None, true)?;
        let mut parts = processed.get_ids().split(|id| *id == TEXT);
        let mut part = || parts.next().unwrap_or_default().to_vec();
        Ok(Self { prefix: part(), suffix: part() })
    }

    /// Puts the leading special tokens before `tokens`, unless the text spells them itself.
    #[must_use]
    pub fn begin(&self, tokens: Vec<u32>) -> Vec<u32> {
        if tokens.starts_with(&self.prefix) { tokens } else { [self.prefix.clone(), tokens].concat() }
    }
}

/// Removes the truncation and padding that a tokenizer's file may ask for: they belong to the training of the model's authors,
/// and here would silently shorten every text.
///
/// # Errors
/// Never in practice: removing truncation cannot fail.
pub fn without_truncation(mut tokenizer: Tokenizer) -> tokenizers::Result<Tokenizer> {
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

/// The message for a `folder` without tokenizer.json; some models come with SentencePiece's file alone.
pub fn without_tokenizer(folder: &Path) -> String {
    let sentence_piece = folder.join("tokenizer.model");
    match sentence_piece.exists() {
        true => format!(
            "is missing, and tokenizer.model next to it is another format (SentencePiece's), which is not read: make one of it \
             with transformers, `AutoTokenizer.from_pretrained(\"{folder}\").save_pretrained(\"{folder}\")`",
            folder = folder.display()
        ),
        false => "is missing".into(),
    }
}

/// Tokens that end a text, from the first file that names any: `generation_config.json` in one of `folders`, then `config`.
///
/// # Errors
/// A file that is damaged, and an `eos_token_id` that is not a token, with the file's name.
pub fn end_tokens(folders: &[&Path], config: &Value) -> Result<Vec<u32>> {
    for folder in folders {
        let path = folder.join(GENERATION_CONFIG);
        if !path.exists() {
            continue;
        }
        let broken = |problem: String| Error::Format { path: path.clone(), problem };
        let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
        let json: Value = serde_json::from_str(&text).map_err(|error| broken(format!("not JSON: {error}")))?;
        if let Some(tokens) = eos(&json).map_err(broken)? {
            return Ok(tokens);
        }
    }
    Ok(eos(config).map_err(|problem| Error::Config(format!("config.json: {problem}")))?.unwrap_or_default())
}

/// `eos_token_id`: a number or a list.
fn eos(json: &Value) -> std::result::Result<Option<Vec<u32>>, String> {
    let id = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("eos_token_id {value} is not a token"))
    };
    match json.get("eos_token_id") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Array(list)) => list.iter().map(id).collect::<std::result::Result<_, _>>().map(Some),
        Some(value) => Ok(Some(vec![id(value)?])),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tokenizer(post_processor: Value) -> Tokenizer {
        let special = |id: u32, content: &str| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true})
        };
        let json = json!({"version": "1.0", "truncation": {"direction": "Right", "max_length": 3, "strategy":
            "LongestFirst", "stride": 0}, "padding": {"strategy": {"Fixed": 9}, "direction": "Right",
            "pad_to_multiple_of": null, "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"},
            "added_tokens": [special(0, "<s>"), special(1, "</s>")], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "post_processor": post_processor, "decoder": null,
            "model": {"type": "WordLevel", "vocab": {"<s>": 0, "</s>": 1, "a": 2, "b": 3}, "unk_token": "<s>"}});
        Tokenizer::from_bytes(json.to_string()).expect("a tokenizer")
    }

    /// A template `<s> text </s>`, with each special token only where it is wanted.
    fn template(prefix: bool, suffix: bool) -> Value {
        let special = |id: &str| json!({"SpecialToken": {"id": id, "type_id": 0}});
        let mut single = vec![json!({"Sequence": {"id": "A", "type_id": 0}})];
        if prefix {
            single.insert(0, special("<s>"));
        }
        if suffix {
            single.push(special("</s>"));
        }
        json!({"type": "TemplateProcessing", "single": single, "pair": [{"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 0}}], "special_tokens": {"<s>": {"id": "<s>", "ids": [0],
            "tokens": ["<s>"]}, "</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}}})
    }

    #[test]
    fn special_tokens_are_those_that_the_post_processor_adds() {
        let around = |processor| SpecialTokens::of(&tokenizer(processor)).expect("processed");
        assert_eq!(around(Value::Null), SpecialTokens::default());
        assert_eq!(around(template(true, false)), SpecialTokens { prefix: vec![0], suffix: vec![] });
        assert_eq!(around(template(false, true)), SpecialTokens { prefix: vec![], suffix: vec![1] });
        let both = around(template(true, true));
        assert_eq!(both, SpecialTokens { prefix: vec![0], suffix: vec![1] });
        assert_eq!(both.begin(vec![2, 3]), [0, 2, 3]);
        assert_eq!(both.begin(vec![0, 2]), [0, 2], "what the text spells is not doubled");
    }

    #[test]
    fn a_text_is_neither_cut_nor_padded() {
        let whole = without_truncation(tokenizer(Value::Null)).expect("uncut");
        for text in ["a b a b a b a b a b a b", "a"] {
            let tokens = whole.encode(text, false).expect("tokens");
            assert_eq!(tokens.get_ids().len(), text.split(' ').count());
        }
        let json = whole.to_string(false).expect("JSON");
        assert!(json.contains("\"truncation\":null") && json.contains("\"padding\":null"), "{json}");
    }

    #[test]
    fn a_file_of_sentence_piece_is_named_where_the_tokenizer_is_missing() {
        let folder = tempfile::tempdir().expect("folder");
        assert_eq!(without_tokenizer(folder.path()), "is missing");
        std::fs::write(folder.path().join("tokenizer.model"), b"\x0a").expect("file");
        let words = without_tokenizer(folder.path());
        let path = folder.path().display().to_string();
        assert!(
            words.contains("tokenizer.model") && words.contains("from_pretrained") && words.contains(&path),
            "{words}"
        );
    }

    #[test]
    fn end_tokens_come_from_the_generation_config_first() {
        let folder = tempfile::tempdir().expect("folder");
        let write = |text: &str| std::fs::write(folder.path().join(GENERATION_CONFIG), text).expect("file");
        let ends = |config: Value| end_tokens(&[folder.path()], &config).map_err(|error| error.to_string());
        assert_eq!(ends(json!({})), Ok(vec![]));
        assert_eq!(ends(json!({"eos_token_id": 7})), Ok(vec![7]));
        write(r#"{"eos_token_id": [8, 9]}"#);
        assert_eq!(ends(json!({"eos_token_id": 7})), Ok(vec![8, 9]));
        write(r#"{"eos_token_id": null}"#);
        assert_eq!(ends(json!({"eos_token_id": 7})), Ok(vec![7]));
        assert!(ends(json!({"eos_token_id": -1})).expect_err("no token").contains("-1"));
        write("{");
        assert!(ends(json!({})).expect_err("damaged").contains(GENERATION_CONFIG));
    }
}
