//! The form of gpt-oss (harmony): messages on channels, some of them to functions.

use super::{CallParser, Definitions, Parsed, ToolCall, calls_of, certain_before, json_calls, text_of};
use serde_json::Value;

pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const MESSAGE: &str = "<|message|>";
const START: &str = "<|start|>";
/// What ends a message's text: the first three marks say so, the others begin the next message.
const ENDS: [&str; 5] = ["<|end|>", "<|call|>", "<|return|>", START, CHANNEL];
/// The length of the longest of them, in bytes.
const LONGEST_END: usize = CHANNEL.len();
/// Marks the recipient in a header.
const RECIPIENT: &str = "to=";
/// The namespace of a request's tools.
const FUNCTIONS: &str = "functions.";

/// Reads messages: those to functions are calls, those on the channel `analysis` are reasoning, all others are the answer.
#[derive(Debug)]
pub(super) struct HarmonyMessages {
    /// The tools that may be called; without any, calls are text.
    tools: Option<Definitions>,
    /// What is not certain yet.
    held: String,
    /// Bytes of `held` in which a call's end does not begin.
    searched: usize,
    position: MessagePosition,
    /// Whether nothing of the message's text has been released.
    is_new: bool,
    has_answer: bool,
    has_reasoning: bool,
}

/// The part of a message in which the parser is.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MessagePosition {
    /// The beginning of the whole text. There may be no header, since grammars allow none, and a prompt may end within a message.
    Beginning,
    /// A message's header, which ends with [`MESSAGE`].
    Header,
    /// A message's text.
    Text(MessageKind),
}

/// What a message is to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
enum MessageKind {
    Answer,
    Reasoning,
    /// A call of this function.
    Call(String),
}

impl HarmonyMessages {
    pub(super) fn new(tools: Option<Definitions>) -> Self {
        Self {
            tools,
            held: String::new(),
            searched: 0,
            position: MessagePosition::Beginning,
            is_new: true,
            has_answer: false,
            has_reasoning: false,
        }
    }

    fn advance(&mut self, end: bool) -> Vec<Parsed> {
        let mut parsed = Vec::new();
        loop {
            match self.position.clone() {
                MessagePosition::Beginning => match begins_with_header(&self.held) {
                    None if !end => return parsed,
                    Some(true) => self.position = MessagePosition::Header,
                    _ => self.position = MessagePosition::Text(MessageKind::Answer),
                },
                MessagePosition::Header => match self.held.find(MESSAGE) {
                    Some(at) => {
                        let header: String = self.held.drain(..at + MESSAGE.len()).collect();
                        self.position = MessagePosition::Text(self.kind(&header));
                        (self.is_new, self.searched) = (true, 0);
                    }
                    None => {
                        if end && begins_with_header(&self.held) == Some(false) {
                            // Text outside of messages belongs to the answer; an unfinished header is dropped.
                            let rest = std::mem::take(&mut self.held);
                            self.say(&MessageKind::Answer, rest, &mut parsed);
                        }
                        return parsed;
                    }
                },
                MessagePosition::Text(kind) => {
                    let from = self.held.floor_char_boundary(self.searched);
                    let found = ENDS.iter().filter_map(|mark| Some((from + self.held[from..].find(mark)?, *mark)));
                    let found = found.min_by_key(|(at, _)| *at);
                    let certain = match (found, &kind) {
                        (Some((at, _)), _) => at,
                        (None, _) if end => self.held.len(),
                        (None, MessageKind::Call(_)) => 0,
                        (None, _) => certain_before(&self.held, ENDS.into_iter()),
                    };
                    let text: String = self.held.drain(..certain).collect();
                    match kind {
                        MessageKind::Call(name) if found.is_some() || end => self.call(name, text, &mut parsed),
                        MessageKind::Call(_) => self.searched = self.held.len().saturating_sub(LONGEST_END),
                        kind => self.say(&kind, text, &mut parsed),
                    }
                    let Some((_, mark)) = found else { return parsed };
                    if mark != START && mark != CHANNEL {
                        self.held.drain(..mark.len());
                    }
                    self.position = MessagePosition::Header;
                }
            }
        }
    }

    /// What a message with this header is. The recipient is named before the channel or after it.
    fn kind(&self, header: &str) -> MessageKind {
        let word = |after: &str| {
            let (_, rest) = header.split_once(after)?;
            let rest = rest.trim_start();
            Some(rest[..rest.find(|c: char| c.is_whitespace() || c == '<').unwrap_or(rest.len())].to_owned())
        };
        match (word(RECIPIENT), &self.tools) {
            (Some(recipient), Some(tools)) => match recipient.strip_prefix(FUNCTIONS) {
                Some(function) => return MessageKind::Call(function.to_owned()),
                None if tools.names().any(|name| name == recipient) => return MessageKind::Call(recipient),
                // To a tool that the model knows from its training; nobody would answer.
                None => return MessageKind::Reasoning,
            },
            (Some(_), None) => return MessageKind::Answer,
            (None, _) => {}
        }
        if word(CHANNEL).is_some_and(|channel| channel == "analysis") {
            MessageKind::Reasoning
        } else {
            MessageKind::Answer
        }
    }

    fn call(&mut self, name: String, text: String, parsed: &mut Vec<Parsed>) {
        match json_calls::arguments(&text) {
            Some(arguments) => parsed.push(Parsed::Call(ToolCall { name, arguments })),
            None => self.say(&MessageKind::Answer, text, parsed),
        }
    }

    /// Releases text, on a new line if it is of another message than the text before.
    fn say(&mut self, kind: &MessageKind, mut text: String, parsed: &mut Vec<Parsed>) {
        if text.is_empty() {
            return;
        }
        let is_reasoning = *kind == MessageKind::Reasoning;
        let has_text = if is_reasoning { &mut self.has_reasoning } else { &mut self.has_answer };
        if self.is_new && *has_text {
            text.insert(0, '\n');
        }
        (self.is_new, *has_text) = (false, true);
        if is_reasoning {
            parsed.push(Parsed::Reasoning(text));
        } else {
            parsed.extend(text_of(text));
        }
    }
}

impl CallParser for HarmonyMessages {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        self.held.push_str(text);
        self.advance(false)
    }

    fn finish(&mut self) -> Vec<Parsed> {
        self.advance(true)
    }
}

/// Whether a text begins with a message's header; `None` while it is too short to tell.
fn begins_with_header(text: &str) -> Option<bool> {
    let begun = text.trim_start();
    let beginnings = [START, CHANNEL, MESSAGE, RECIPIENT];
    if beginnings.iter().any(|beginning| begun.starts_with(beginning)) {
        Some(true)
    } else if beginnings.iter().any(|beginning| beginning.starts_with(begun)) {
        None
    } else {
        Some(false)
    }
}

/// The messages with their reasoning in the field that the template reads, and without empty lists of calls, whose first call it
/// would take.
pub(super) fn messages(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in &mut messages {
        let has_calls = !calls_of(message).is_empty();
        let Some(fields) = message.as_object_mut() else { continue };
        if !has_calls {
            fields.shift_remove("tool_calls");
        }
        let reasoning = fields.shift_remove("reasoning_content").filter(Value::is_string);
        // Before a call, the template accepts either `content` or `thinking`, so reasoning is added only if `content` is empty.
        let is_free = !has_calls || fields.get("content").is_none_or(|content| content == "");
        if let Some(reasoning) = reasoning.filter(|_| is_free && !fields.contains_key("thinking")) {
            fields.insert("thinking".into(), reasoning);
        }
    }
    messages
}
