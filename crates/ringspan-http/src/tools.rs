//! Tool calls in a model's text: each family of models writes them in its own form.

mod deepseek;
mod definitions;
mod glm4;
mod glm45;
mod granite;
mod harmony;
mod json_calls;
mod llama;
mod marked;
mod mistral;
mod phi4;
mod qwen_coder;

pub(crate) use definitions::{Definitions, arguments_schema, calls_schema, check_function, check_parameters};

use marked::{Mark, MarkedCalls};
use serde_json::Value;
use std::fmt::Debug;

/// The form in which a model writes calls of tools.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, as Hermes, Qwen and Granite 4 write.
    Hermes,
    /// `[TOOL_CALLS]` and a list of calls, or `[TOOL_CALLS]name[ARGS]{…}`, as Mistral's models write.
    Mistral,
    /// `{"name": …, "parameters": …}` and nothing else, as Llama 3 writes.
    Llama,
    /// `<｜tool▁call▁begin｜>…<｜tool▁sep｜>…<｜tool▁call▁end｜>`, as DeepSeek-V3, R1 and V3.1 write.
    DeepSeek,
    /// The name on a line of its own, then the arguments as JSON, as GLM-4 writes.
    Glm4,
    /// `<tool_call>name`, then `<arg_key>` and `<arg_value>` for each argument, as GLM-4.5 writes.
    Glm45,
    /// Messages on channels, of which those `to=functions.name` are calls, as gpt-oss writes.
    Harmony,
    /// `<|tool_call|>` and a list of calls, as Granite 3 writes.
    Granite,
    /// `<|tool_call|>…<|/tool_call|>`, or `functools` and a list of calls, as Phi-4-mini writes.
    Phi4,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, as Qwen3-Coder writes.
    QwenCoder,
}

impl ToolFormat {
    /// The form that a chat template writes, found by the marks in its source. Marks that several families share come last.
    pub(crate) fn of(template: &str) -> Option<Self> {
        let has = |mark: &str| template.contains(mark);
        if has(harmony::CHANNEL) && has(harmony::MESSAGE) {
            Some(Self::Harmony)
        } else if has(deepseek::CALL_BEGIN) {
            Some(Self::DeepSeek)
        } else if has(glm45::KEY[0]) {
            Some(Self::Glm45)
        } else if has(granite::MARK) && has("<|start_of_role|>") {
            Some(Self::Granite)
        } else if has(phi4::TOOLS_END) {
            Some(Self::Phi4)
        } else if has(HERMES[0].open) {
            Some(if has("<function=") { Self::QwenCoder } else { Self::Hermes })
        } else if has(mistral::MARK) {
            Some(Self::Mistral)
        } else if has("[gMASK]") && has("metadata") {
            Some(Self::Glm4)
        } else if has("tools") && (has(llama::PYTHON_TAG) || (has("\"parameters\": ") && has(llama::HEADER_END))) {
            Some(Self::Llama)
        } else {
            None
        }
    }

    /// The marks of calls. Where the tokenizer has them as special tokens, texts must not leave those out.
    pub(crate) fn marks(self) -> &'static [&'static str] {
        match self {
            Self::Hermes | Self::QwenCoder => &["<tool_call>"],
            Self::Mistral => &[mistral::MARK],
            Self::Llama => &[llama::PYTHON_TAG],
            Self::DeepSeek => &[deepseek::CALL_BEGIN],
            Self::Glm4 => &[glm4::ASSISTANT],
            Self::Glm45 => &["<tool_call>", glm45::KEY[0]],
            Self::Harmony => &[harmony::CHANNEL, harmony::MESSAGE],
            Self::Granite => &[granite::MARK],
            Self::Phi4 => &[phi4::CALL[0].open],
        }
    }

    /// Tokens that end a text after a call. Files of models may name only the one that ends an answer.
    pub(crate) fn ends(self) -> &'static [&'static str] {
        match self {
            Self::Harmony => &["<|call|>", "<|return|>"],
            Self::Glm4 | Self::Glm45 => &["<|observation|>", "<|user|>"],
            Self::Llama => &["<|eom_id|>"],
            _ => &[],
        }
    }

    /// The messages of a conversation as this template reads them: OpenAI's form has calls and their results in fields which some
    /// templates ignore, although the model knows how to read them.
    pub(crate) fn messages(self, template: &str, messages: &[Value], tools: &Value) -> Vec<Value> {
        match self {
            Self::Mistral => mistral::messages(template, messages),
            Self::DeepSeek => deepseek::messages(messages),
            Self::Glm4 => glm4::messages(template, messages, tools),
            Self::Harmony => harmony::messages(messages),
            Self::Granite => granite::messages(template, messages),
            Self::Phi4 => phi4::messages(template, messages, tools),
            Self::Hermes | Self::Llama | Self::Glm45 | Self::QwenCoder => messages.to_vec(),
        }
    }

    fn parser(self, tools: &Definitions) -> Box<dyn CallParser> {
        let marked = |marks, read| Box::new(MarkedCalls::new(marks, &[], read, tools.clone()));
        match self {
            Self::Hermes => marked(&HERMES, |text, _| json_calls::calls(text)),
            Self::Mistral => marked(&mistral::CALLS, |text, _| mistral::calls(text)),
            Self::Llama => Box::new(llama::LlamaCalls::default()),
            Self::DeepSeek => Box::new(MarkedCalls::new(
                &deepseek::CALL,
                &deepseek::AROUND_CALLS,
                |text, _| deepseek::call(text),
                tools.clone(),
            )),
            Self::Glm4 => Box::new(glm4::Glm4Calls::new(tools.clone())),
            Self::Glm45 => marked(&HERMES, glm45::call),
            Self::Harmony => Box::new(harmony::HarmonyMessages::new(Some(tools.clone()))),
            Self::Granite => marked(&granite::CALLS, |text, _| granite::calls(text)),
            Self::Phi4 => marked(&phi4::CALL, |text, _| phi4::calls(text)),
            Self::QwenCoder => marked(&HERMES, qwen_coder::call),
        }
    }
}

/// The marks of the forms that write each call between tags.
const HERMES: [Mark; 1] = [Mark { open: "<tool_call>", close: Some("</tool_call>") }];

/// How the text of a request may contain tool calls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ToolMode {
    /// The text is not searched for calls.
    None,
    /// The text has channels, of which some are no answer, but no calls.
    Channels,
    /// The model decides between text and calls.
    Auto(ToolFormat),
    /// The text is a JSON list of calls, by grammar.
    Required,
    /// The text is the arguments of this function, by grammar.
    Named(String),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolCall {
    /// The function.
    pub(crate) name: String,
    /// Its arguments as JSON.
    pub(crate) arguments: String,
}

/// A parsed part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Parsed {
    /// Text for the user.
    Text(String),
    /// What the model thinks before it answers.
    Reasoning(String),
    /// A complete call.
    Call(ToolCall),
}

/// Finds the calls of one form.
trait CallParser: Debug + Send {
    /// Adds text; returns what is certain.
    fn push(&mut self, text: &str) -> Vec<Parsed>;

    /// Ends the text; returns what was held back.
    fn finish(&mut self) -> Vec<Parsed>;
}

/// Finds calls in a text that arrives in parts.
#[derive(Debug)]
pub(crate) struct ToolParser {
    parser: Box<dyn CallParser>,
    /// The number of calls that may still be returned.
    left: usize,
}

impl ToolParser {
    /// A parser that returns at most `most` calls of these tools.
    pub(crate) fn new(mode: ToolMode, most: usize, tools: &Definitions) -> Self {
        let parser: Box<dyn CallParser> = match mode {
            ToolMode::None => Box::new(PlainText),
            ToolMode::Channels => Box::new(harmony::HarmonyMessages::new(None)),
            ToolMode::Auto(format) => format.parser(tools),
            ToolMode::Required => Box::new(WholeText { name: None, text: String::new() }),
            ToolMode::Named(name) => Box::new(WholeText { name: Some(name), text: String::new() }),
        };
        Self { parser, left: most }
    }

    /// Adds text; returns what is certain.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Parsed> {
        let parsed = self.parser.push(text);
        self.admit(parsed)
    }

    /// Ends the text; returns what was held back.
    pub(crate) fn finish(&mut self) -> Vec<Parsed> {
        let parsed = self.parser.finish();
        self.admit(parsed)
    }

    /// Drops calls beyond the number asked for.
    fn admit(&mut self, mut parsed: Vec<Parsed>) -> Vec<Parsed> {
        parsed.retain(|part| match part {
            Parsed::Call(_) if self.left == 0 => false,
            Parsed::Call(_) => {
                self.left -= 1;
                true
            }
            Parsed::Text(_) | Parsed::Reasoning(_) => true,
        });
        parsed
    }
}

/// A text without calls.
#[derive(Debug)]
struct PlainText;

impl CallParser for PlainText {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        text_of(text.to_owned())
    }

    fn finish(&mut self) -> Vec<Parsed> {
        Vec::new()
    }
}

/// A text that a grammar makes one thing: a list of calls, or the arguments of the named function.
#[derive(Debug)]
struct WholeText {
    name: Option<String>,
    text: String,
}

impl CallParser for WholeText {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        self.text.push_str(text);
        Vec::new()
    }

    fn finish(&mut self) -> Vec<Parsed> {
        let arguments = std::mem::take(&mut self.text);
        match self.name.take() {
            Some(name) => vec![Parsed::Call(ToolCall { name, arguments })],
            None => calls_or_text(json_calls::calls(&arguments), arguments),
        }
    }
}

fn text_of(text: String) -> Vec<Parsed> {
    if text.is_empty() { Vec::new() } else { vec![Parsed::Text(text)] }
}

/// The calls that a text was read as; the text itself if it has none.
fn calls_or_text(calls: Option<Vec<ToolCall>>, text: String) -> Vec<Parsed> {
    match calls {
        Some(calls) if !calls.is_empty() => calls.into_iter().map(Parsed::Call).collect(),
        _ => text_of(text),
    }
}

/// Bytes of `text` that cannot be the beginning of any of these marks.
fn certain_before<'a>(text: &str, marks: impl Iterator<Item = &'a str> + Clone) -> usize {
    let may_begin = |at: &usize| marks.clone().any(|mark| mark.starts_with(&text[*at..]));
    text.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(text.len())
}

/// The calls of an assistant's message in OpenAI's form; empty for other messages.
fn calls_of(message: &Value) -> &[Value] {
    message["tool_calls"].as_array().map_or(&[], Vec::as_slice)
}

/// The name and the arguments of a call in OpenAI's form, with the arguments as JSON text.
fn name_and_arguments(call: &Value) -> (&str, String) {
    let function = &call["function"];
    let arguments = match &function["arguments"] {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    (function["name"].as_str().unwrap_or_default(), arguments)
}

/// The calls of a message in OpenAI's form as the list of objects that most models write.
fn call_list(message: &Value) -> String {
    let each = |call: &Value| serde_json::json!({"name": call["function"]["name"], "arguments": call["function"]["arguments"]});
    Value::from(calls_of(message).iter().map(each).collect::<Vec<_>>()).to_string()
}

#[cfg(test)]
mod test;
