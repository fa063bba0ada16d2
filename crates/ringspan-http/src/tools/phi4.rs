//! The form of Phi-4-mini.

use super::marked::Mark;
use super::{ToolCall, call_list, calls_of, json_calls};
use serde_json::{Value, json};

/// What ends the definitions of tools in a prompt.
pub(super) const TOOLS_END: &str = "<|/tool|>";
pub(super) const CALL: [Mark; 2] = [
    Mark { open: "<|tool_call|>", close: Some("<|/tool_call|>") },
    // Without its tokens for calls, the model writes a list after this word.
    Mark { open: "functools[", close: None },
];

/// The calls between two marks: a call, or a list of them, whose bracket may belong to the mark.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    json_calls::calls(text).or_else(|| json_calls::calls(&format!("[{text}")))
}

/// The messages as the model's own template reads them: the tools are a field of the system message, and roles and contents are all
/// else that it writes.
pub(super) fn messages(template: &str, messages: &[Value], tools: &Value) -> Vec<Value> {
    let mut messages = messages.to_vec();
    if tools.as_array().is_some_and(|tools| !tools.is_empty()) && template.contains("message['tools']") {
        if messages.first().is_none_or(|first| first["role"] != "system") {
            messages.insert(0, json!({"role": "system", "content": ""}));
        }
        let functions = tools.as_array().into_iter().flatten().map(|tool| tool["function"].clone());
        messages[0]["tools"] = Value::from(functions.collect::<Vec<_>>()).to_string().into();
    }
    if template.contains("tool_calls") {
        return messages;
    }
    for message in &mut messages {
        if !calls_of(message).is_empty() {
            let said = message["content"].as_str().unwrap_or_default();
            message["content"] = format!("{said}<|tool_call|>{}<|/tool_call|>", call_list(message)).into();
        } else if message["role"] == "tool" {
            message["role"] = "tool_response".into();
        }
    }
    messages
}
