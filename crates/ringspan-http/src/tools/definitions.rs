//! The functions that a request lets the model call.

use serde_json::Value;
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
    use serde_json::json;

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
