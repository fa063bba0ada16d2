//! Chat templates: turn conversations into text, and find the assistant's words in it.

use super::chat_formats;
use crate::error::{Result, template_error};
use ringspan_models::{
    chat_template::{ChatTemplate, Conversation, GENERATION_MARKERS},
    gguf,
};
use serde_json::{Map, Value};
use std::{ops::Range, path::Path};

/// Placeholder for the words of a message when a conversation is rendered with other words; no text may hold it.
const PLACEHOLDER: char = '\u{fdd0}';

/// A model's chat template, and where in its texts the assistant's words are.
#[derive(Debug, Clone)]
pub struct Template(ChatTemplate);

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text that the model reads.
    pub text: String,
    /// Ranges of bytes that the assistant said, in order.
    pub learned: Vec<Range<usize>>,
}

impl Template {
    /// The template in the folder of a model or of a tokenizer; `None` where there is none.
    ///
    /// # Errors
    /// [`Error::Template`](crate::Error::Template) for a damaged file, [`Error::Io`](crate::Error::Io) when the system refuses.
    pub fn from_model_folder(folder: &Path) -> Result<Option<Self>> {
        Ok(ChatTemplate::from_model_folder(folder).map_err(template_error)?.map(Self))
    }

    /// The template that a model's own file (GGUF) holds.
    ///
    /// # Errors
    /// [`Error::Template`](crate::Error::Template) for a damaged template.
    pub fn from_gguf(template: gguf::ChatTemplate, path: &Path) -> Result<Self> {
        ChatTemplate::from_gguf(template, path).map(Self).map_err(template_error)
    }

    /// The template in a Jinja file; the tokenizer's folder, where there is one, names the special tokens.
    ///
    /// # Errors
    /// As [`Self::from_model_folder`].
    pub fn read(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        ChatTemplate::read(path, tokenizer).map(Self).map_err(template_error)
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        self.0.source()
    }

    /// The template's source and special tokens, for a fingerprint.
    pub(crate) fn identity(&self) -> String {
        format!("{}{}", self.0.source(), Value::from(self.0.tokens().clone()))
    }

    /// Renders a conversation and finds the assistant's words. These are the text of `{% generation %}` blocks. Without such
    /// blocks, for each message of the assistant that is learned, they are what the message adds to the prompt that the template
    /// writes before it. Where a message is written differently when others follow, it is searched for in the whole conversation,
    /// between that prompt and the text that closes the message.
    ///
    /// # Errors
    /// A message in words: the template's own error, or that the assistant's words cannot be found without doubt.
    pub fn render(&self, messages: &[Value], tools: &Value) -> std::result::Result<Rendered, String> {
        let is_learned: Vec<bool> = messages.iter().map(chat_formats::is_learned).collect();
        let messages = &messages.iter().map(chat_formats::without_train_key).collect::<Vec<_>>()[..];
        let text = self.render_text(messages, tools, false)?;
        if self.0.has_generation_blocks() {
            return self.keep_learned(unmark(&text)?, messages, &is_learned);
        }
        let mut learned = Vec::new();
        for index in (0..messages.len()).filter(|&index| is_learned[index]) {
            let before = if index == 0 { String::new() } else { self.render_text(&messages[..index], tools, true)? };
            let with = self.render_text(&messages[..=index], tools, false)?;
            let range = match with.starts_with(&before) && text.starts_with(&with) {
                true => Some(before.len()..with.len()),
                false => self.find_message(&text, messages, index, tools),
            };
            let after = learned.last().map_or(0, |range: &Range<usize>| range.end);
            let Some(range) = range.filter(|range| range.start >= after) else {
                return Err(format!(
                    "the template {} writes what comes before or in message {} differently when more follows, so the \
                     assistant's words cannot be found; put them between {{% generation %}} and {{% endgeneration %}} in \
                     it, and give it with --chat-template",
                    self.0.path().display(),
                    index + 1
                ));
            };
            learned.push(range);
        }
        Ok(Rendered { text, learned })
    }

    /// Keeps of the text that a template marks as the assistant's only the messages that are learned.
    fn keep_learned(
        &self,
        rendered: Rendered,
        messages: &[Value],
        is_learned: &[bool],
    ) -> std::result::Result<Rendered, String> {
        let of_assistant = messages.iter().zip(is_learned).filter(|(message, _)| message["role"] == "assistant");
        let is_learned: Vec<bool> = of_assistant.map(|(_, learned)| *learned).collect();
        let block_count = rendered.learned.len();
        match is_learned.iter().all(|learned| *learned) {
            true => Ok(rendered),
            false if block_count == is_learned.len() => {
                let learned = rendered.learned.into_iter().zip(is_learned).filter(|(_, learned)| *learned);
                Ok(Rendered { learned: learned.map(|(range, _)| range).collect(), ..rendered })
            }
            false => Err(format!(
                "some of the assistant's {} messages are not to be learned, but the template {} has {block_count} generation \
                 blocks for them, so it is not known which is whose",
                is_learned.len(),
                self.0.path().display()
            )),
        }
    }

    /// The range of `messages[index]` in `text`, which is the rendering of all `messages`. The conversation is rendered once more
    /// with other words in that message: the text after those words in both is after the message, and the prompt before them is
    /// before it. `None` where anything else changes with the words.
    fn find_message(&self, text: &str, messages: &[Value], index: usize, tools: &Value) -> Option<Range<usize>> {
        let mut with_placeholder = messages.to_vec();
        let words = replace_words(&mut with_placeholder[index]);
        let placeholder_text = self.render_text(&with_placeholder, tools, false).ok()?;
        // The first message may have nothing before it that a template could write.
        let before = if index == 0 { messages } else { &messages[..index] };
        let with_prompt = self.render_text(before, tools, true).ok()?;
        let prompt = with_prompt.strip_prefix(&self.render_text(before, tools, false).ok()?)?;
        if text.contains(PLACEHOLDER) || placeholder_text.matches(PLACEHOLDER).count() > words {
            return None;
        }
        let text_after_placeholder =
            |text: &str| text.rfind(PLACEHOLDER).map(|at| text[at + PLACEHOLDER.len_utf8()..].to_owned());
        let same = text.bytes().zip(placeholder_text.bytes()).take_while(|(a, b)| a == b).count();
        let start = match prompt {
            "" => (0..=same).rev().find(|&at| text.is_char_boundary(at))?,
            prompt => placeholder_text[..placeholder_text.find(PLACEHOLDER)?].rfind(prompt)? + prompt.len(),
        };
        let rest = text_after_placeholder(&placeholder_text)?;
        // The text with which the template closes the message when nothing follows.
        let closing = text_after_placeholder(&self.render_text(&with_placeholder[..=index], tools, false).ok()?)?;
        let words_end = text.strip_suffix(&rest)?.len();
        let end = words_end + closing.len();
        (start <= same && start <= end && rest.starts_with(&closing)).then_some(start..end)
    }

    fn render_text(&self, messages: &[Value], tools: &Value, prompt: bool) -> std::result::Result<String, String> {
        let variables = &Map::new();
        self.0.render_marked(&Conversation { messages, tools, add_generation_prompt: prompt, variables })
    }
}

/// Replaces each text of a message by [`PLACEHOLDER`], and counts the replacements.
fn replace_words(message: &mut Value) -> usize {
    let mut slots: Vec<&mut Value> = Vec::new();
    let Some(keys) = message.as_object_mut() else { return 0 };
    for (key, value) in keys.iter_mut() {
        match (key.as_str(), value) {
            ("content" | "reasoning_content", value) if value.as_str().is_some_and(|text| !text.is_empty()) => {
                slots.push(value);
            }
            // Tool calls stand after the content, and their arguments after their names.
            ("tool_calls", Value::Array(calls)) => {
                slots.extend(calls.iter_mut().filter_map(|call| call.pointer_mut("/function/name")));
            }
            _ => {}
        }
    }
    let count = slots.len();
    slots.into_iter().for_each(|slot| *slot = PLACEHOLDER.to_string().into());
    if count == 0 {
        message["content"] = PLACEHOLDER.to_string().into();
    }
    count.max(1)
}

/// Removes the markers from a text and records the ranges between them.
fn unmark(marked: &str) -> std::result::Result<Rendered, String> {
    let mut rendered = Rendered { text: String::with_capacity(marked.len()), learned: Vec::new() };
    let mut open = None;
    for c in marked.chars() {
        match (c, open) {
            (c, None) if c == GENERATION_MARKERS[0] => open = Some(rendered.text.len()),
            (c, Some(start)) if c == GENERATION_MARKERS[1] => {
                rendered.learned.push(start..rendered.text.len());
                open = None;
            }
            (c, _) if GENERATION_MARKERS.contains(&c) => {
                return Err("generation blocks lie in each other, or the text holds U+10FFFE or U+10FFFF".into());
            }
            (c, _) => rendered.text.push(c),
        }
    }
    Ok(rendered)
}

#[cfg(test)]
mod test;
