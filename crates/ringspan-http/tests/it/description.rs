//! Tests that `/openapi.json` describes what the server accepts and answers: each field of each request and of each answer, and the
//! methods of each path.
//!
//! The server names all fields that it knows when it refuses an unknown one, so nobody has to list them here. The fields of answers
//! are compared with answers in which everything occurs that is described.

mod answers;
mod schema_check;

use crate::client::{HttpResponse, Running, start};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Requests by the name of their schema, with a body that is complete and soon answered.
fn requests() -> Vec<(&'static str, &'static str, Value)> {
    let messages = json!([{"role": "user", "content": "say:x"}]);
    vec![
        ("/v1/chat/completions", "ChatRequest", json!({"messages": messages})),
        ("/v1/completions", "CompletionRequest", json!({"prompt": "say:x"})),
        ("/v1/embeddings", "EmbeddingRequest", json!({"input": "x"})),
        ("/v1/responses", "ResponseRequest", json!({"input": "say:x"})),
        ("/v1/messages", "MessagesRequest", json!({"messages": messages, "max_tokens": 4})),
        ("/v1/messages/count_tokens", "CountTokensRequest", json!({"messages": messages})),
        ("/tokenize", "TokenizeTextRequest", json!({"prompt": "x"})),
        ("/tokenize", "TokenizeConversationRequest", json!({"messages": messages})),
        ("/detokenize", "DetokenizeRequest", json!({"tokens": [97]})),
        ("/v1/load_lora_adapter", "LoadAdapterRequest", json!({"lora_name": "a", "lora_path": "/nowhere"})),
        ("/v1/unload_lora_adapter", "UnloadAdapterRequest", json!({"lora_name": "a"})),
    ]
}

struct Description(Value);

impl Description {
    fn of(server: &Running) -> Self {
        Self(server.get("/openapi.json").json())
    }

    /// A schema, or the one that it refers to.
    fn resolve<'a>(&'a self, schema: &'a Value) -> &'a Value {
        match schema["$ref"].as_str() {
            Some(at) => self.0.pointer(at.trim_start_matches('#')).unwrap_or_else(|| panic!("{at} is nowhere")),
            None => schema,
        }
    }

    fn schema(&self, name: &str) -> &Value {
        &self.0["components"]["schemas"][name]
    }

    /// The alternatives of a schema; itself if there are none.
    fn alternatives<'a>(&'a self, schema: &'a Value) -> Vec<&'a Value> {
        let schema = self.resolve(schema);
        match schema["anyOf"].as_array() {
            Some(any) => any.iter().flat_map(|one| self.alternatives(one)).collect(),
            None => vec![schema],
        }
    }

    fn admits_null(&self, schema: &Value) -> bool {
        self.alternatives(schema).iter().any(|one| {
            let any_type = one.get("type").is_none() && one.get("enum").is_none() && one.get("const").is_none();
            let listed = |value: &Value, null: &str| {
                value.as_array().is_some_and(|all| all.iter().any(|one| one.is_null() || one == null))
            };
            any_type || one["type"] == "null" || listed(&one["type"], "null") || listed(&one["enum"], "")
        })
    }

    /// A value that the schema admits, and not null where something else is possible.
    fn example(&self, schema: &Value) -> Value {
        let schema = self.alternatives(schema)[0];
        let named = schema.get("const").or_else(|| schema["enum"].get(0)).or_else(|| schema["examples"].get(0));
        if let Some(value) = named {
            return value.clone();
        }
        let kind = if schema["type"].is_array() { &schema["type"][0] } else { &schema["type"] };
        match kind.as_str() {
            Some("string") => json!("x"),
            Some("boolean") => json!(false),
            Some("integer" | "number") => match schema["minimum"].as_f64() {
                Some(least) if least > 0.0 => schema["minimum"].clone(),
                _ if schema["exclusiveMinimum"] == 0 => json!(0.5),
                _ => json!(0),
            },
            Some("array") if schema["minItems"].is_u64() => json!([self.example(&schema["items"])]),
            Some("array") => json!([]),
            Some("object") => {
                let names = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
                names.map(|name| (name.to_owned(), self.example(&schema["properties"][name]))).collect()
            }
            Some("null") => Value::Null,
            _ => json!("any"),
        }
    }
}

/// The fields that the server names when it refuses an unknown one.
fn known(refusal: &HttpResponse) -> BTreeSet<String> {
    assert_eq!(refusal.status, 400, "{}", refusal.body);
    let message = refusal.json()["error"]["message"].as_str().unwrap().to_owned();
    let list = |part: &str| {
        let names = part.strip_prefix("possible are ").or(part.strip_prefix("with the value that changes nothing: "));
        names.map(|names| names.split(", ").map(str::to_owned).collect::<Vec<_>>())
    };
    let names: BTreeSet<String> = message.split("; ").filter_map(list).flatten().collect();
    assert!(!names.is_empty(), "{message}");
    names
}

fn names(schema: &Value) -> BTreeSet<String> {
    schema["properties"].as_object().unwrap().keys().cloned().collect()
}

fn with(body: &Value, field: &str, value: Value) -> Value {
    let mut body = body.clone();
    body[field] = value;
    body
}

#[test]
fn requests_of_all_paths_are_tested_here() {
    let server = start();
    let description = Description::of(&server);
    let mut described = BTreeSet::new();
    for (path, methods) in description.0["paths"].as_object().unwrap() {
        let schema = &methods["post"]["requestBody"]["content"]["application/json"]["schema"];
        let any = schema["anyOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
        for schema in any.iter().filter_map(|schema| schema["$ref"].as_str()) {
            described.insert((path.clone(), schema.rsplit('/').next().unwrap().to_owned()));
        }
    }
    let tested: BTreeSet<(String, String)> =
        requests().into_iter().map(|(path, schema, _)| (path.to_owned(), schema.to_owned())).collect();
    assert_eq!(described, tested);
}

#[test]
fn requests_have_the_fields_that_are_described_and_no_others() {
    let server = start();
    let description = Description::of(&server);
    for (path, name, body) in requests() {
        let schema = description.schema(name);
        let refusal = server.post(path, with(&body, "no_such_field", json!(1)));
        assert_eq!(known(&refusal), names(schema), "{name}");
        assert_eq!(schema["additionalProperties"], json!({"type": "null"}), "{name} is closed");
    }
}

/// Objects inside of requests whose unknown fields are refused. They are read to their end before the request is.
#[test]
fn objects_in_requests_have_the_fields_that_are_described_and_no_others() {
    let server = start();
    let description = Description::of(&server);
    let mut checked = Vec::new();
    for (path, name, body) in requests() {
        for (field, schema) in description.schema(name)["properties"].as_object().unwrap() {
            let alternatives = description.alternatives(schema);
            let [object, ..] = alternatives[..] else { continue };
            let of_object = |one: &&Value| one["type"].to_string().contains("object");
            // What a format has depends on its type.
            if !of_object(&object) || object["additionalProperties"]["type"] != "null" || field == "response_format" {
                continue;
            }
            let value = with(&description.example(object), "no_such_field", json!(1));
            let refusal = server.post(path, with(&with(&body, "stream", json!(true)), field, value));
            assert_eq!(known(&refusal), names(object), "{field} of {name}");
            checked.push(field.clone());
        }
    }
    for field in ["stream_options", "thinking", "tool_choice", "text", "reasoning"] {
        assert!(checked.iter().any(|one| one == field), "{field} is not closed: {checked:?}");
    }
}

#[test]
fn values_and_nulls_are_accepted_as_described() {
    let server = start();
    let description = Description::of(&server);
    for (path, name, body) in requests().into_iter().filter(|(path, ..)| !path.contains("lora")) {
        let schema = description.schema(name);
        let required = schema["required"].as_array().unwrap();
        for (field, of_field) in schema["properties"].as_object().unwrap() {
            let answer = server.post(path, with(&body, field, Value::Null));
            let accepted = answer.status == 200;
            assert_eq!(accepted, description.admits_null(of_field), "{field} of {name} as null: {}", answer.body);
            assert_eq!(accepted, !required.contains(&json!(field)), "{field} of {name} is required");
            // The id must exist, the template must read the effort, and a model that is asked for must be served.
            if ["previous_response_id", "reasoning_effort", "model"].contains(&field.as_str()) {
                continue;
            }
            let mut body = with(&body, field, description.example(of_field));
            if field == "stream_options" {
                body["stream"] = json!(true);
            }
            let answer = server.post(path, body.clone());
            assert_eq!(answer.status, 200, "{field} of {name}: {body} is refused: {}", answer.body);
        }
    }
}

#[test]
fn paths_have_the_methods_that_are_described_and_no_others() {
    let server = start();
    let description = Description::of(&server);
    for (path, methods) in description.0["paths"].as_object().unwrap() {
        let path = path.replace(['{', '}'], "");
        let answer = server.request("PATCH", &path, "", b"");
        assert_eq!(answer.status, 405, "{path}");
        let allowed = answer.headers.lines().find_map(|line| line.strip_prefix("allow: ")).unwrap_or_default();
        let allowed: BTreeSet<&str> = allowed.split(',').map(str::trim).filter(|method| *method != "head").collect();
        let described: BTreeSet<&str> = methods.as_object().unwrap().keys().map(String::as_str).collect();
        assert_eq!(allowed, described, "{path}");
    }
}

/// References that lead nowhere make a description useless to clients that are generated from it.
#[test]
fn every_reference_has_its_target() {
    fn check(description: &Description, value: &Value) {
        match value {
            Value::Object(map) => {
                description.resolve(value);
                map.values().for_each(|inner| check(description, inner));
            }
            Value::Array(list) => list.iter().for_each(|inner| check(description, inner)),
            _ => {}
        }
    }
    let description = Description::of(&start());
    check(&description, &description.0);
}

/// A field without a meaning on a route is refused with the routes that have it.
#[test]
fn reports_of_tokens_are_refused_where_answers_have_no_place_for_them() {
    let server = start();
    for (path, _, body) in requests().into_iter().filter(|(path, ..)| ["/v1/responses", "/v1/messages"].contains(path))
    {
        for (field, value) in [("prompt_logprobs", json!(1)), ("return_token_ids", json!(true))] {
            let refusal = server.post(path, with(&body, field, value));
            let message = refusal.error(400)["message"].as_str().unwrap().to_owned();
            assert!(message.starts_with(field) && message.contains("/v1/completions"), "{path}: {message}");
        }
        let harmless: Map<String, Value> =
            [("prompt_logprobs".into(), Value::Null), ("return_token_ids".into(), json!(false))].into_iter().collect();
        let mut body = body;
        body.as_object_mut().unwrap().extend(harmless);
        assert_eq!(server.post(path, body).status, 200, "{path}");
    }
}
