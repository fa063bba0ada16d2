//! The functions that a request lets the model call.

use crate::error::{ApiError, Result};
use crate::fields::kind;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The tools of a request, in OpenAI's form.
#[derive(Debug, Clone, Default)]
pub(crate) struct Definitions(Arc<[Value]>);

impl Definitions {
    /// The tools of this list.
    pub(crate) fn new(tools: &[Value]) -> Self {
        Self(tools.into())
    }

    /// The names of the functions.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.0.iter().filter_map(|tool| tool["function"]["name"].as_str())
    }

    /// The value of an argument that the model wrote without quotation marks, so that only the function's schema tells a text from
    /// what merely looks like a number.
    pub(super) fn value_of(&self, function: &str, parameter: &str, text: &str) -> Value {
        let parsed = serde_json::from_str::<Value>(text).ok().filter(|value| !value.is_string());
        let function = self.0.iter().find(|tool| tool["function"]["name"] == function);
        let schema = function.map_or(&Value::Null, |tool| &tool["function"]["parameters"]["properties"][parameter]);
        match parsed {
            Some(value) if accepts(schema, &value) || !accepts(schema, &Value::from(text)) => value,
            Some(_) => text.into(),
            // A text may also come with its quotation marks, if the schema lets it be something else as well.
            None => match serde_json::from_str::<Value>(text) {
                Ok(value) if !schema["type"].is_string() => value,
                _ => text.into(),
            },
        }
    }
}

/// Checks the function that a request has at `path`.
///
/// # Errors
/// A name that is no string, and those of [`check_parameters`].
pub(crate) fn check_function(path: &str, function: &Value) -> Result<()> {
    if !function["name"].is_string() {
        return Err(ApiError::field(format!("{path}.name"), "must be a string"));
    }
    check_parameters(format!("{path}.parameters"), &function["parameters"])
}

/// Checks the schema of a function's arguments, which a request has at `field`.
///
/// # Errors
/// What is not the schema of an object, although arguments are one.
pub(crate) fn check_parameters(field: String, schema: &Value) -> Result<()> {
    let problem = match schema {
        Value::Null => return Ok(()),
        Value::Object(schema) => match schema.get("type") {
            None | Some(Value::Null) => return Ok(()),
            Some(kind) if kind == "object" => return Ok(()),
            Some(kind) => format!("must be the schema of an object, so of the type \"object\", not {kind}"),
        },
        other => format!("must be the schema of an object, not {}", kind(other)),
    };
    Err(ApiError::field(field, problem))
}

/// The schema of the arguments of a tool, which are an object also where its parameters do not say so.
pub(crate) fn arguments_schema(tool: &Value) -> Value {
    let mut schema = tool["function"]["parameters"].as_object().cloned().unwrap_or_default();
    if schema.get("type").is_none_or(Value::is_null) {
        schema.insert("type".into(), "object".into());
    }
    Value::Object(schema)
}

/// The schema of a list of calls of these tools.
pub(crate) fn calls_schema(tools: &[Value]) -> Value {
    let call = |(index, tool): (usize, &Value)| {
        let mut arguments = arguments_schema(tool);
        // With an identity of its own, references such as #/$defs/Place are looked up in this schema instead of the outermost.
        if arguments.get("$id").is_none() {
            arguments["$id"] = format!("tool:{index}").into();
        }
        json!({"type": "object", "properties": {"name": {"const": tool["function"]["name"]}, "parameters": arguments},
            "required": ["name", "parameters"], "additionalProperties": false})
    };
    let calls: Vec<Value> = tools.iter().enumerate().map(call).collect();
    // Options of grammars count in the outermost schema alone.
    let options = tools.iter().filter_map(|tool| tool["function"]["parameters"]["x-guidance"].as_object());
    let options: Map<String, Value> = options.flatten().map(|(name, value)| (name.clone(), value.clone())).collect();
    json!({"type": "array", "minItems": 1, "items": {"anyOf": calls}, "x-guidance": options})
}

/// Whether a schema's types and values allow this one; what else it demands makes no difference between a text and its parsed value.
fn accepts(schema: &Value, value: &Value) -> bool {
    if let Some(Value::Array(values)) = schema.get("enum") {
        return values.contains(value);
    }
    if let Some(constant) = schema.get("const") {
        return constant == value;
    }
    let of_type = |name: &Value| match name.as_str() {
        Some("string") => value.is_string(),
        Some("integer") => value.is_i64() || value.is_u64(),
        Some("number") => value.is_number(),
        Some("boolean") => value.is_boolean(),
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("null") => value.is_null(),
        _ => true,
    };
    match schema.get("type") {
        Some(Value::Array(types)) => types.iter().any(of_type),
        Some(name) => of_type(name),
        None => match schema.get("anyOf").or_else(|| schema.get("oneOf")) {
            Some(Value::Array(schemas)) => schemas.iter().any(|schema| accepts(schema, value)),
            _ => true,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schemas_tell_texts_from_what_looks_like_numbers() {
        let tools =
            Definitions::new(&[json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "list": {"type": "array"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "either": {"type": ["number", "string"]},
            "size": {"enum": ["1", "2"]}}}}})]);
        for (parameter, text, value) in [
            ("text", "12", json!("12")),
            ("text", "\"quoted\"", json!("\"quoted\"")),
            ("text", "{\"x\": 1}", json!("{\"x\": 1}")),
            ("count", "12", json!(12)),
            ("count", "a dozen", json!("a dozen")),
            ("list", "[1, \"a\"]", json!([1, "a"])),
            ("maybe", "null", json!(null)),
            ("maybe", "true", json!("true")),
            ("either", "1.5", json!(1.5)),
            ("size", "1", json!("1")),
            ("unknown", "true", json!(true)),
            ("unknown", "some words", json!("some words")),
        ] {
            assert_eq!(tools.value_of("f", parameter, text), value, "{parameter}: {text}");
        }
        assert_eq!(tools.value_of("g", "text", "12"), json!(12), "of a function that is not known");
    }
}
