//! The form of DeepSeek-V3, of R1, and of V3.1.

use super::marked::Mark;
use super::{ToolCall, calls_of, json_calls};
use serde_json::Value;

pub(super) const CALL_BEGIN: &str = "<｜tool▁call▁begin｜>";
pub(super) const CALL: [Mark; 1] = [Mark { open: CALL_BEGIN, close: Some("<｜tool▁call▁end｜>") }];
pub(super) const AROUND_CALLS: [&str; 2] = ["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"];
const SEPARATOR: &str = "<｜tool▁sep｜>";

/// The call between two marks: `function`, the separator, the name, and the arguments as a block of code, as V3 and R1 write; or the
/// name, the separator and the arguments, as V3.1 writes.
pub(super) fn call(text: &str) -> Option<Vec<ToolCall>> {
    let (before, after) = text.split_once(SEPARATOR)?;
    let (name, arguments) = match after.split_once("```") {
        Some((name, code)) if !name.trim_start().starts_with('{') => {
            let code = code.trim_end();
            (name, code.strip_prefix("json").unwrap_or(code).strip_suffix("```").unwrap_or(code))
        }
        _ => (before, after),
    };
    let name = name.trim();
    let is_name = !name.is_empty() && !name.contains(char::is_whitespace);
    is_name.then_some(vec![ToolCall { name: name.to_owned(), arguments: json_calls::arguments(arguments)? }])
}

/// Replaces empty content of messages with tool calls by null, since the templates write calls only if a message has no content.
pub(super) fn messages(messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    for message in messages.iter_mut().filter(|message| !calls_of(message).is_empty() && message["content"] == "") {
        message["content"] = Value::Null;
    }
    messages
}
