//! The form of Mistral's models.

use super::marked::Mark;
use super::{ToolCall, json_calls};
use serde_json::Value;

pub(super) const MARK: &str = "[TOOL_CALLS]";
pub(super) const CALLS: [Mark; 1] = [Mark { open: MARK, close: None }];

/// Length that some templates require of a call's id.
const ID_LENGTH: usize = 9;

/// The calls after the mark.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    named_arguments(text).or_else(|| json_calls::calls(text))
}

/// Calls as newer models write them: `name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}`, separated by the mark.
fn named_arguments(text: &str) -> Option<Vec<ToolCall>> {
    let each = |part: &str| {
        let (name, arguments) = part.split_once("[ARGS]")?;
        let name = name.split("[CALL_ID]").next().unwrap_or(name).trim();
        Some(ToolCall { name: name.to_owned(), arguments: json_calls::arguments(arguments)? })
    };
    text.split(MARK).map(each).collect()
}

/// The messages with ids of nine letters and digits, where the template refuses others.
pub(super) fn messages(template: &str, messages: &[Value]) -> Vec<Value> {
    let mut messages = messages.to_vec();
    if !template.contains("!= 9") {
        return messages;
    }
    for message in &mut messages {
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        for id in calls.into_iter().flatten().filter_map(|call| call.get_mut("id")) {
            shorten(id);
        }
        if let Some(id) = message.get_mut("tool_call_id") {
            shorten(id);
        }
    }
    messages
}

/// Replaces an id by its last nine letters and digits, in which this server's ids differ. Shorter ids are padded with zeros, and ids of
/// nine characters stay.
fn shorten(id: &mut Value) {
    let Some(text) = id.as_str().filter(|text| text.len() != ID_LENGTH) else { return };
    let letters: Vec<char> = text.chars().filter(char::is_ascii_alphanumeric).collect();
    let end: String = letters[letters.len().saturating_sub(ID_LENGTH)..].iter().collect();
    *id = format!("{end:0>ID_LENGTH$}").into();
}

#[cfg(test)]
mod tests {
    use super::super::calls_of;
    use super::*;
    use serde_json::json;

    #[test]
    fn ids_become_as_long_as_templates_want_them() {
        let conversation = [
            json!({"role": "assistant", "tool_calls": [{"id": "call_00000123456789abcdef"}, {"id": "abcdefghi"}, {"id": "7"}]}),
            json!({"role": "tool", "tool_call_id": "call_00000123456789abcdef"}),
        ];
        let ids = |template: &str| -> Vec<Value> {
            let written = messages(template, &conversation);
            let calls = calls_of(&written[0]).iter().map(|call| call["id"].clone());
            calls.chain([written[1]["tool_call_id"].clone()]).collect()
        };
        let strict = "{% if tool_call.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}";
        assert_eq!(ids(strict), ["789abcdef", "abcdefghi", "000000007", "789abcdef"]);
        assert_eq!(ids("{{ tool_call.id }}")[0], "call_00000123456789abcdef");
    }
}
