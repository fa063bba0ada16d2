//! The form of GLM-4.5 and its successors: a name, and a pair of tags for each argument.

use super::{Definitions, ToolCall, json_calls};
use serde_json::{Map, Value};

pub(super) const KEY: [&str; 2] = ["<arg_key>", "</arg_key>"];
const VALUE: [&str; 2] = ["<arg_value>", "</arg_value>"];

/// The call between two marks. Strings are written without quotation marks, so the function's schema decides whether a value is a
/// string.
pub(super) fn call(text: &str, tools: &Definitions) -> Option<Vec<ToolCall>> {
    let (name, mut rest) = text.split_at(text.find(KEY[0]).unwrap_or(text.len()));
    let name = name.trim();
    if name.starts_with('{') {
        return json_calls::calls(text);
    }
    if name.is_empty() || name.contains(char::is_whitespace) {
        return None;
    }
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, after) = rest.trim_start().strip_prefix(KEY[0])?.split_once(KEY[1])?;
        let (value, after) = after.trim_start().strip_prefix(VALUE[0])?.split_once(VALUE[1])?;
        let key = key.trim();
        arguments.insert(key.to_owned(), tools.value_of(name, key, value));
        rest = after;
    }
    Some(vec![ToolCall { name: name.to_owned(), arguments: Value::Object(arguments).to_string() }])
}
