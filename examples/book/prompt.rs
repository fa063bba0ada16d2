//! A long text, and questions about it as prompts of a model.

use anyhow::{Context, Result, anyhow};
use ringspan_models::{
    ModelSource,
    chat_template::{ChatTemplate, Conversation},
    special_tokens::SpecialTokens,
};
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use tokenizers::Tokenizer;

/// The beginning of a text, with the model's tokenizer and chat template.
pub(crate) struct Book {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    text: String,
}

impl Book {
    /// Reads files, and keeps the first `tokens` tokens of them.
    ///
    /// # Errors
    /// Files that cannot be read, and a model without a tokenizer.
    pub(crate) fn read(source: &ModelSource, files: &[PathBuf], tokens: usize) -> Result<Self> {
        let tokenizer = source.tokenizer()?.context("--model: the model has no tokenizer")?;
        let read = |file: &PathBuf| std::fs::read_to_string(file).with_context(|| format!("--text {}", file.display()));
        let text = files.iter().map(read).collect::<Result<Vec<_>>>()?.join("\n\n");
        let encoding = tokenizer.encode_fast(text.as_str(), false).map_err(|error| anyhow!("--text: {error}"))?;
        let ids = encoding.get_ids();
        let text = match ids.len() > tokens {
            true => tokenizer.decode(&ids[..tokens], true).map_err(|error| anyhow!("--text: {error}"))?,
            false => text,
        };
        Ok(Self { tokenizer, template: ChatTemplate::of(source)?, text })
    }

    /// The tokens of the text with a question after it, as the model's chat template writes a user's message.
    ///
    /// # Errors
    /// A template that refuses it.
    pub(crate) fn ask(&self, question: &str) -> Result<Vec<u32>> {
        let asked = format!("{}\n\n{question}", self.text);
        let wrong = |error: tokenizers::Error| anyhow!("the tokenizer cannot encode the prompt: {error}");
        let Some(template) = &self.template else {
            let ids = self.tokenizer.encode_fast(format!("{asked}\n"), false).map_err(wrong)?.get_ids().to_vec();
            return Ok(SpecialTokens::of(&self.tokenizer).map_err(wrong)?.begin(ids));
        };
        let rendered = template.render(&Conversation {
            messages: &[json!({ "role": "user", "content": asked })],
            tools: &Value::Null,
            add_generation_prompt: true,
            variables: &Map::new(),
        });
        let text = rendered.map_err(|error| anyhow!("the chat template: {error}"))?;
        Ok(self.tokenizer.encode_fast(text, false).map_err(wrong)?.get_ids().to_vec())
    }

    /// The text of an answer.
    ///
    /// # Errors
    /// Tokens that the tokenizer does not know.
    pub(crate) fn text(&self, tokens: &[u32]) -> Result<String> {
        self.tokenizer.decode(tokens, true).map_err(|error| anyhow!("the answer: {error}"))
    }
}
