//! The form of Granite 3.

use super::marked::Mark;
use super::{ToolCall, call_list, calls_of, json_calls};
use serde_json::Value;

pub(super) const MARK: &str = "<|tool_call|>";
/// The mark as it is written where it is no token.
const PLAIN_MARK: &str = "<tool_call>";
pub(super) const CALLS: [Mark; 2] = [Mark { open: MARK, close: None }, Mark { open: PLAIN_MARK, close: None }];

/// The role of calls in the templates of Granite 3.0.
const CALL_ROLE: &str = "assistant_tool_call";

/// The lists of calls after the first mark.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let lists = text.split(MARK).flat_map(|part| part.split(PLAIN_MARK));
    let read = |list: &str| {
        let list = list.trim();
        json_calls::calls(list.strip_suffix("</tool_call>").unwrap_or(list))
    };
    lists.map(read).collect::<Option<Vec<_>>>().map(|lists| lists.concat())
}

/// The messages with calls written into their contents, for templates that write contents alone.
pub(super) fn messages(template: &str, messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    if template.contains("tool_calls") {
        return messages;
    }
    let has_roles = template.contains(CALL_ROLE);
    for message in &mut messages {
        if !calls_of(message).is_empty() {
            let calls = call_list(message);
            if has_roles {
                message["role"] = CALL_ROLE.into();
                message["content"] = calls.into();
            } else {
                let said = message["content"].as_str().unwrap_or_default();
                message["content"] = format!("{said}{MARK}{calls}").into();
            }
        } else if has_roles && message["role"] == "tool" {
            message["role"] = "tool_response".into();
        }
    }
    messages
}
