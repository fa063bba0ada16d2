//! The form of Qwen3-Coder: tags that hold the names of the function and of its parameters.

use super::{Definitions, ToolCall, json_calls};
use serde_json::{Map, Value};

/// The call between two marks. Each value stands on lines of its own. Strings are written without quotation marks, so the function's
/// schema decides whether a value is a string.
pub(super) fn call(text: &str, tools: &Definitions) -> Option<Vec<ToolCall>> {
    let text = text.trim();
    if text.starts_with('{') {
        return json_calls::calls(text);
    }
    let (name, rest) = text.strip_prefix("<function=")?.split_once('>')?;
    // The last tag may be missing where a text was too long.
    let mut rest = rest.trim_end().strip_suffix("</function>").unwrap_or(rest);
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, after) = rest.trim_start().strip_prefix("<parameter=")?.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), tools.value_of(name, key, value));
        rest = after;
    }
    Some(vec![ToolCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() }])
}
