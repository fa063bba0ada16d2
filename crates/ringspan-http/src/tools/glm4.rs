//! The form of GLM-4: the name of a function on a line of its own, and its arguments below.

use super::{
    CallParser, Definitions, Parsed, ToolCall, calls_of, calls_or_text, certain_before, json_calls, name_and_arguments,
    text_of,
};
use serde_json::{Value, json};

/// What begins a message, and so stands between two calls.
pub(super) const ASSISTANT: &str = "<|assistant|>";

/// Finds messages that are calls. Since no mark tells them from texts, the first line must be the name of a tool.
#[derive(Debug)]
pub(super) struct Glm4Calls {
    tools: Definitions,
    /// What is not certain yet, from the beginning of the message if that may be a call.
    held: String,
    is_text: bool,
}

impl Glm4Calls {
    pub(super) fn new(tools: Definitions) -> Self {
        Self { tools, held: String::new(), is_text: false }
    }

    fn advance(&mut self, end: bool) -> Vec<Parsed> {
        let mut parsed = Vec::new();
        loop {
            if !self.is_text && self.may_be_call() {
                match self.held.find(ASSISTANT) {
                    Some(at) => parsed.extend(self.message(at)),
                    None if end => parsed.extend(self.message(self.held.len())),
                    None => return parsed,
                }
            } else if let Some(at) = self.held.find(ASSISTANT) {
                parsed.extend(text_of(self.held.drain(..at).collect()));
            } else {
                self.is_text = true;
                let certain =
                    if end { self.held.len() } else { certain_before(&self.held, std::iter::once(ASSISTANT)) };
                parsed.extend(text_of(self.held.drain(..certain).collect()));
                return parsed;
            }
            // The next message may be a call, whatever this one was.
            if !self.held.starts_with(ASSISTANT) {
                return parsed;
            }
            self.held.drain(..ASSISTANT.len());
            self.is_text = false;
        }
    }

    /// Whether the message has begun as a call, or could still do so.
    fn may_be_call(&self) -> bool {
        let begun = self.held.trim_start();
        match begun.split_once('\n') {
            Some((name, rest)) => {
                let rest = rest.trim_start();
                (rest.is_empty() || rest.starts_with('{')) && self.tools.names().any(|tool| tool == name.trim_end())
            }
            None => self.tools.names().any(|tool| tool.starts_with(begun) || tool == begun.trim_end()),
        }
    }

    /// Takes the message that ends here.
    fn message(&mut self, end: usize) -> Vec<Parsed> {
        let message: String = self.held.drain(..end).collect();
        let call = message.trim().split_once('\n').and_then(|(name, arguments)| {
            Some(vec![ToolCall { name: name.trim_end().to_owned(), arguments: json_calls::arguments(arguments)? }])
        });
        calls_or_text(call, message)
    }
}

impl CallParser for Glm4Calls {
    fn push(&mut self, text: &str) -> Vec<Parsed> {
        self.held.push_str(text);
        self.advance(false)
    }

    fn finish(&mut self) -> Vec<Parsed> {
        self.advance(true)
    }
}

/// The messages as the model's templates read them: a call is a message with the function's name as `metadata`, and its result is an
/// observation. Older templates have the tools in the system message.
pub(super) fn messages(template: &str, messages: &[Value], tools: &Value) -> Vec<Value> {
    if template.contains("tool_calls") {
        return messages.to_vec();
    }
    let mut written = Vec::new();
    for message in messages {
        let calls = calls_of(message);
        if message["role"] == "tool" {
            written.push(json!({"role": "observation", "content": message["content"]}));
        } else if calls.is_empty() || message["content"].as_str().is_some_and(|said| !said.trim().is_empty()) {
            let mut said = message.clone();
            if let Some(fields) = said.as_object_mut() {
                fields.shift_remove("tool_calls");
            }
            written.push(said);
        }
        for call in calls {
            let (name, arguments) = name_and_arguments(call);
            written.push(json!({"role": "assistant", "metadata": name, "content": arguments}));
        }
    }
    if tools.as_array().is_some_and(|tools| !tools.is_empty()) && template.contains("item['tools']") {
        match written.first_mut().filter(|first| first["role"] == "system") {
            Some(system) => system["tools"] = tools.clone(),
            None => written.insert(0, json!({"role": "system", "content": "", "tools": tools})),
        }
    }
    written
}
