//! Chat templates: turn conversations into text, and find in it what the assistant said.

use super::chat_formats;
use crate::{
    error::{Error, Result},
    tokenizer_config::{self, TOKENIZER_CONFIG},
};
use minijinja::{Environment, ErrorKind, Value as TemplateValue, value::Kwargs};
use ringspan_models::gguf::ChatTemplate;
use serde::Serialize;
use serde_json::Value;
use std::{
    ops::Range,
    path::{Path, PathBuf},
};

/// Markers around the text of a `{% generation %}` block while a template is rendered; data may not hold them.
const GENERATION_MARKERS: [char; 2] = ['\u{10fffe}', '\u{10ffff}'];

/// Placeholder for the words of a message when a conversation is rendered with other words; no text may hold it.
const PLACEHOLDER: char = '\u{fdd0}';

/// A model's chat template, as Hugging Face keeps it beside the tokenizer.
#[derive(Debug, Clone)]
pub struct Template {
    environment: Environment<'static>,
    /// Special tokens that the template may use, by name.
    tokens: serde_json::Map<String, Value>,
    source: String,
    /// Whether the template itself marks the assistant's words, by `{% generation %}` blocks.
    has_generation_blocks: bool,
    path: PathBuf,
}

/// A conversation as text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The text that the model reads.
    pub text: String,
    /// Ranges of bytes that the assistant said, in order.
    pub learned: Vec<Range<usize>>,
}

impl Template {
    /// The template in the folder of a model or of a tokenizer: `chat_template.jinja`, or else `chat_template` in
    /// `tokenizer_config.json`, which also names the special tokens. `None` where there is none.
    ///
    /// # Errors
    /// [`Error::Template`] for a damaged file, [`Error::Io`] when the system refuses.
    pub fn from_model_folder(folder: &Path) -> Result<Option<Self>> {
        let config_path = folder.join(TOKENIZER_CONFIG);
        let config = tokenizer_config::strings(&config_path)?;
        let path = folder.join("chat_template.jinja");
        if path.exists() {
            return Self::parse(read(&path)?, config, &path).map(Some);
        }
        let source = match config.get("chat_template") {
            Some(Value::String(source)) => source.clone(),
            // Some models have several templates, each with a name.
            Some(Value::Array(all)) => match all.iter().find(|one| one["name"] == "default") {
                Some(one) => one["template"].as_str().unwrap_or_default().to_owned(),
                None => return Ok(None),
            },
            _ => return Ok(None),
        };
        Self::parse(source, config, &config_path).map(Some)
    }

    /// The template that a model's own file (GGUF) holds.
    ///
    /// # Errors
    /// [`Error::Template`] for a damaged template.
    pub fn from_gguf(template: ChatTemplate, path: &Path) -> Result<Self> {
        Self::parse(template.source, template.tokens, path)
    }

    /// The template in a Jinja file; the tokenizer's folder, where there is one, names the special tokens.
    ///
    /// # Errors
    /// As [`Self::from_model_folder`].
    pub fn read(path: &Path, tokenizer: Option<&Path>) -> Result<Self> {
        let tokens = tokenizer.map(|folder| tokenizer_config::strings(&folder.join(TOKENIZER_CONFIG))).transpose()?;
        Self::parse(read(path)?, tokens.unwrap_or_default(), path)
    }

    fn parse(source: String, tokens: serde_json::Map<String, Value>, path: &Path) -> Result<Self> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function(
            "raise_exception",
            |message: String| -> std::result::Result<TemplateValue, minijinja::Error> {
                Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
            },
        );
        environment.add_filter("tojson", python_json);
        let (marked_source, has_generation_blocks) = mark_generation(&source);
        let broken = |e: minijinja::Error| Error::Template { path: path.into(), problem: error_text(&e) };
        environment.add_template_owned("chat", marked_source).map_err(broken)?;
        Ok(Self { environment, tokens, source, has_generation_blocks, path: path.into() })
    }

    /// The template's source.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The template's source and special tokens, for a fingerprint.
    pub(crate) fn identity(&self) -> String {
        format!("{}{}", self.source, Value::from(self.tokens.clone()))
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
        if self.has_generation_blocks {
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
                    self.path.display(),
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
                self.path.display()
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
        let mut context = self.tokens.clone();
        context.insert("messages".into(), messages.into());
        context.insert("tools".into(), tools.clone());
        context.insert("documents".into(), Value::Null);
        context.insert("add_generation_prompt".into(), prompt.into());
        let template = self.environment.get_template("chat").map_err(|e| error_text(&e))?;
        let text = template.render(TemplateValue::from_serialize(&context)).map_err(|e| error_text(&e))?;
        Ok(text)
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

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(Error::io("read", path))
}

/// The message of a template engine's error, with its causes.
fn error_text(error: &minijinja::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text.replace('\n', " ")
}

/// Replaces Hugging Face's `generation` tags by what this engine knows: a marker inside an empty condition, whose two tags keep
/// the trimming of white space on both sides as it was. Also returns whether there was any.
fn mark_generation(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut has_generation_blocks) = (source, false);
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start..].find("%}").map(|end| start + end + 2) else { break };
        let tag = &rest[start..end];
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']);
        let sign = |c: Option<char>| c.filter(|c| "-+".contains(*c)).map_or(String::new(), String::from);
        let (left, right) = (sign(tag[2..].chars().next()), sign(tag[..tag.len() - 2].chars().last()));
        out.push_str(&rest[..start]);
        match inner.trim() {
            "generation" => {
                has_generation_blocks = true;
                out.push_str(&format!("{{%{left} if true %}}{}{{% if true {right}%}}", GENERATION_MARKERS[0]));
            }
            "endgeneration" => {
                out.push_str(&format!("{{%{left} endif %}}{}{{% endif {right}%}}", GENERATION_MARKERS[1]))
            }
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    (out, has_generation_blocks)
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

/// Writes JSON as Python does, for which templates were written: with a space after colons and commas.
fn python_json(value: &TemplateValue, options: Kwargs) -> std::result::Result<TemplateValue, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // The other arguments of Python's function do not change this output.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let failed = |e: serde_json::Error| minijinja::Error::new(ErrorKind::BadSerialization, e.to_string());
    let mut bytes = Vec::new();
    match indent {
        Some(width) => {
            let indent = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&indent);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, pretty)).map_err(failed)?;
        }
        None => {
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut bytes, PythonSpacing)).map_err(failed)?
        }
    }
    Ok(TemplateValue::from_safe_string(String::from_utf8_lossy(&bytes).into_owned()))
}

struct PythonSpacing;

impl serde_json::ser::Formatter for PythonSpacing {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod test;
