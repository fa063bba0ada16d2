//! Calls that are JSON objects with a name and arguments, alone or in lists.

use super::ToolCall;
use serde_json::Value;

/// The calls that a text consists of; `None` if it is something else.
pub(super) fn calls(text: &str) -> Option<Vec<ToolCall>> {
    let mut calls = Vec::new();
    // Llama separates calls by semicolons.
    let mut rest = text.trim();
    while !rest.is_empty() {
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let value = stream.next()?.ok()?;
        rest = rest[stream.byte_offset()..].trim_start_matches([';', ',']).trim_start();
        match value {
            Value::Array(list) => calls.extend(list.iter().map(call).collect::<Option<Vec<_>>>()?),
            one => calls.push(call(&one)?),
        }
    }
    Some(calls)
}

fn call(value: &Value) -> Option<ToolCall> {
    let name = value.get("name")?.as_str()?.to_owned();
    let arguments = value.get("arguments").or_else(|| value.get("parameters"));
    let arguments = match arguments {
        None => "{}".to_owned(),
        Some(Value::String(text)) => text.clone(),
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return None,
    };
    Some(ToolCall { name, arguments })
}

/// The text of a JSON object, which is what arguments are; nothing at all stands for no arguments.
pub(super) fn arguments(text: &str) -> Option<String> {
    match text.trim() {
        "" => Some("{}".to_owned()),
        text => serde_json::from_str::<Value>(text).ok().filter(Value::is_object).map(|_| text.to_owned()),
    }
}
