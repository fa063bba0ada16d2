//! Turns documents into masked tokens: token ids with the loss mask in their highest bit, which is set if a token is no target.

use super::{Content, Template, chat_formats};
use crate::{
    error::{Error, Result},
    fingerprint::fingerprint,
    tokenizer::Tokenizer,
};
use std::{
    ffi::OsStr,
    ops::Range,
    path::{Path, PathBuf},
};

/// Bit that is set in a masked token that the loss leaves out, as it does labels of -100 in PyTorch.
pub const NOT_LEARNED: u32 = 1 << 31;

/// Turns documents into masked tokens.
#[derive(Debug, Clone, Copy)]
pub struct Encoder<'a> {
    tokenizer: &'a Tokenizer,
    template: Option<&'a Template>,
    /// Why `template` is none, in words.
    template_error: &'a str,
}

impl<'a> Encoder<'a> {
    /// An encoder; `template` is needed for conversations only.
    #[must_use]
    pub fn new(tokenizer: &'a Tokenizer, template: Option<&'a Template>) -> Self {
        let template_error =
            "the model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)";
        Self { tokenizer, template, template_error }
    }

    /// This encoder for a model whose template cannot be used; `why` enters the error where one is needed.
    #[must_use]
    pub fn without_template(self, why: &'a str) -> Self {
        Self { template: None, template_error: why, ..self }
    }

    /// The tokenizer.
    pub(super) fn tokenizer(&self) -> &'a Tokenizer {
        self.tokenizer
    }

    /// The masked tokens of a document: token ids, with [`NOT_LEARNED`] set where the token is not learned. `source` and `name` locate the
    /// document in error messages.
    ///
    /// Text, and a prompt with its completion, begin with the special tokens that the tokenizer puts before a text, which are
    /// no targets, and end with those that it puts after a text, and the end of text; a conversation begins and ends as its template
    /// says. A prompt and its completion are tokenized separately, as in generation, where only the prompt is known. A token of a
    /// conversation is learned if any byte of it is the assistant's.
    ///
    /// # Errors
    /// [`Error::Data`] for a conversation that the template refuses or that spells a special token, and where there is no
    /// template; [`Error::Tokenizer`] when the tokenizer has no token for a part.
    pub fn encode(&self, content: &Content, source: &Path, name: &str) -> Result<Vec<u32>> {
        let not_learned = |token: u32| token | NOT_LEARNED;
        match content {
            Content::Text(text) => {
                let mut masked_tokens = self.masked_prefix();
                masked_tokens.extend(self.tokenizer.encode(text)?);
                masked_tokens.extend(self.tokenizer.suffix_tokens());
                Ok(masked_tokens)
            }
            Content::Completion { prompt, completion } => {
                let mut masked_tokens = self.masked_prefix();
                masked_tokens.extend(self.tokenizer.encode(prompt)?.into_iter().map(not_learned));
                masked_tokens.extend(self.tokenizer.encode(completion)?);
                masked_tokens.extend(self.tokenizer.suffix_tokens());
                Ok(masked_tokens)
            }
            Content::Chat { messages, tools } => {
                let wrong = |problem: String| Error::Data { path: document_path(source, name), problem };
                let Some(template) = self.template else {
                    return Err(wrong(format!(
                        "holds a conversation, but {}; give one with --chat-template",
                        self.template_error
                    )));
                };
                for (index, message) in messages.iter().enumerate() {
                    let texts = chat_formats::strings(message);
                    let is_spelled_out = |token: &&str| texts.iter().any(|text| text.contains(*token));
                    // Special tokens of the template have a meaning; those in the data would end turns that they did not open.
                    if let Some(token) = self.tokenizer.special_tokens().find(is_spelled_out) {
                        return Err(wrong(format!("message {} spells the special token {token}; mask it", index + 1)));
                    }
                }
                let rendered = template.render(messages, tools).map_err(wrong)?;
                let tokens = self.tokenizer.encode_with_special_tokens(&rendered.text)?;
                let learned = |at: &Range<usize>| rendered.learned.iter().any(|r| r.start < at.end && at.start < r.end);
                Ok(tokens.into_iter().map(|(t, at)| if learned(&at) { t } else { not_learned(t) }).collect())
            }
        }
    }

    /// The masked tokens that a text begins with: the tokenizer's special tokens, none of which is a target.
    pub(super) fn masked_prefix(&self) -> Vec<u32> {
        self.tokenizer.prefix_tokens().iter().map(|token| token | NOT_LEARNED).collect()
    }

    /// A fingerprint of everything that decides how documents become masked tokens.
    pub(crate) fn fingerprint(&self) -> Result<u64> {
        let template = self.template.map_or_else(|| self.template_error.to_owned(), Template::identity);
        let json = self.tokenizer.to_json()?;
        // The token that ends a document may be named by another file.
        let end = self.tokenizer.end_of_text().map_or(0, |end| u64::from(end) + 1);
        Ok(fingerprint(json.bytes().chain([0]).chain(template.bytes()).map(u64::from).chain([end])))
    }
}

/// The path of a document of `source` in messages: in a folder, a document's name begins below the folder; in a file, it begins
/// with the file's name.
pub(super) fn document_path(source: &Path, name: &str) -> PathBuf {
    let file = source.file_name().and_then(OsStr::to_str);
    match file.and_then(|file| name.strip_prefix(file)) {
        Some(line) if line.is_empty() || line.starts_with(':') => source.with_file_name(name),
        _ => source.join(name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn tokenizer() -> Tokenizer {
        Tokenizer::byte_level(Path::new("byte-level")).expect("a tokenizer")
    }

    fn split_by_learned(masked_tokens: &[u32]) -> (String, String) {
        let text = |keep: fn(u32) -> bool| {
            let byte = |&w: &u32| if w & !NOT_LEARNED == 256 { '$' } else { char::from((w & 0xff) as u8) };
            masked_tokens.iter().filter(|&&w| keep(w)).map(byte).collect::<String>()
        };
        (text(|w| w & NOT_LEARNED != 0), text(|w| w & NOT_LEARNED == 0))
    }

    #[test]
    fn only_completions_and_the_words_of_the_assistant_are_learned() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("t.jinja");
        let source = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}\
                      {% if add_generation_prompt %}assistant: {% endif %}";
        std::fs::write(&path, source).expect("file");
        let template = Template::read(&path, None).expect("a template");
        let tokenizer = tokenizer();
        let encoder = Encoder::new(&tokenizer, Some(&template));
        let masked_tokens = |content: &Content| {
            split_by_learned(&encoder.encode(content, Path::new("d"), "d:1").expect("masked_tokens"))
        };
        let pair = Content::Completion { prompt: "2+2=".into(), completion: "4".into() };
        assert_eq!(masked_tokens(&pair), ("2+2=".into(), "4$".into()));
        assert_eq!(masked_tokens(&Content::Text("all".into())), (String::new(), "all$".into()));
        let say = |role: &str, content: &str| json!({ "role": role, "content": content });
        let messages = vec![say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")];
        let chat = Content::Chat { messages, tools: Value::Null };
        assert_eq!(masked_tokens(&chat), ("user: a$assistant: user: c$assistant: ".into(), "b$d$".into()));
    }

    #[test]
    fn a_document_is_named_once_with_its_folder() {
        let named = |source: &str, name: &str| document_path(Path::new(source), name).to_string_lossy().into_owned();
        assert_eq!(named("a/d.jsonl", "d.jsonl:3"), "a/d.jsonl:3");
        assert_eq!(named("a/d.txt", "d.txt"), "a/d.txt");
        assert_eq!(named("data", "data/d.jsonl:3"), "data/data/d.jsonl:3");
    }

    #[test]
    fn a_conversation_that_cannot_be_written_is_named_with_its_line() {
        let tokenizer = tokenizer();
        let chat =
            |text: &str| Content::Chat { messages: vec![json!({"role": "user", "content": text})], tools: Value::Null };
        let encode = |template: Option<&Template>, text: &str| {
            let encoded = Encoder::new(&tokenizer, template).encode(&chat(text), Path::new("a/d.jsonl"), "d.jsonl:7");
            encoded.expect_err("refused").to_string()
        };
        let message = encode(None, "hi");
        assert!(message.starts_with("a/d.jsonl:7: holds") && message.contains("--chat-template"), "{message}");
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("t.jinja");
        std::fs::write(&path, "{{ raise_exception('roles must alternate') }}").expect("file");
        let template = Template::read(&path, None).expect("a template");
        let message = encode(Some(&template), "hi");
        assert!(message.starts_with("a/d.jsonl:7: ") && message.contains("roles must alternate"), "{message}");
        let message = encode(Some(&template), "so <|endoftext|> ends it");
        assert!(message.contains("message 1 spells the special token <|endoftext|>"), "{message}");
        let mut thought = chat("hi");
        if let Content::Chat { messages, .. } = &mut thought {
            messages[0]["reasoning_content"] = "<|endoftext|>".into();
        }
        let encoded = Encoder::new(&tokenizer, Some(&template)).encode(&thought, Path::new("a/d.jsonl"), "d.jsonl:7");
        let message = encoded.expect_err("refused").to_string();
        assert!(message.contains("message 1 spells"), "{message}");
    }
}
