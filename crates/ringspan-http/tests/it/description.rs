//! Tests that `/openapi.json` describes what the server accepts and answers: each field of each request and of each answer, and the
//! methods of each path.
//!
//! The server names all fields that it knows when it refuses an unknown one, so nobody has to list them here. The fields of answers
//! are compared with answers in which everything occurs that is described.

use crate::client::{HttpResponse, Running, start, start_with};
use ringspan_http::Settings;
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

/// Schemas of what answers repeat of requests, whose forms the tests of requests send.
const REPEATED: [&str; 4] = ["ResponseText", "ResponseReasoning", "Temperature", "TopP"];

/// Fields whose values are open: what requests have sent or a model has written, and the description itself.
const OPEN: [&str; 7] = ["metadata", "tools", "tool_choice", "input", "info", "paths", "components"];

/// Follows the place of a field that an answer does not have.
const ABSENT: &str = " is absent";

/// Whether a value is of a type that a schema names.
fn is_of_type(name: &Value, value: &Value) -> bool {
    match name.as_str() {
        Some("null") => value.is_null(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        Some("number") => value.is_number(),
        Some("string") => value.is_string(),
        Some("array") => value.is_array(),
        Some("object") => value.is_object(),
        _ => panic!("{name} is no type"),
    }
}

/// Whether one of the values of a list, or its only value, is as wanted; `seen` gets its place.
fn one_of(place: &str, rule: &Value, seen: &mut BTreeSet<String>, wanted: impl Fn(&Value) -> bool) -> bool {
    let list = rule.as_array().map_or(std::slice::from_ref(rule), Vec::as_slice);
    let index = list.iter().position(wanted);
    index.is_some_and(|index| {
        seen.insert(format!("{place}/{index}"));
        true
    })
}

impl Description {
    fn at(&self, place: &str) -> &Value {
        self.0.pointer(place).unwrap_or_else(|| panic!("{place} is nowhere"))
    }

    /// Compares a value with the schema at a place; `seen` gets the parts of the schema by which the value is admitted.
    ///
    /// Each keyword of the schema must be known here, so that none is passed over.
    fn check(&self, at: &str, value: &Value, seen: &mut BTreeSet<String>) -> Result<(), String> {
        let schema = self.at(at).as_object().unwrap_or_else(|| panic!("{at} is no schema"));
        let properties = schema.get("properties").and_then(Value::as_object);
        for (keyword, rule) in schema {
            let place = format!("{at}/{keyword}");
            let (limit, number) = (rule.as_f64().unwrap_or_default(), value.as_f64());
            let length = value.as_array().map(|list| list.len() as f64);
            let admitted = match keyword.as_str() {
                "description" | "contentMediaType" | "contentEncoding" => true,
                "$ref" => {
                    let target = rule.as_str().unwrap().trim_start_matches('#');
                    seen.insert(target.to_owned());
                    self.check(target, value, seen)?;
                    true
                }
                "anyOf" => {
                    let mut problems = Vec::new();
                    for index in 0..rule.as_array().unwrap().len() {
                        let (one, mut by) = (format!("{place}/{index}"), BTreeSet::new());
                        match self.check(&one, value, &mut by) {
                            Ok(()) => seen.extend(by.into_iter().chain([one])),
                            Err(problem) => problems.push(problem),
                        }
                    }
                    if problems.len() == rule.as_array().unwrap().len() {
                        return Err(format!("{at}: no alternative admits {value}: {}", problems.join("; ")));
                    }
                    true
                }
                "type" => one_of(&place, rule, seen, |name| is_of_type(name, value)),
                "enum" => one_of(&place, rule, seen, |listed| listed == value),
                "const" => rule == value,
                "minimum" => number.is_none_or(|number| number >= limit),
                "exclusiveMinimum" => number.is_none_or(|number| number > limit),
                "maximum" => number.is_none_or(|number| number <= limit),
                "minItems" => length.is_none_or(|length| length >= limit),
                "maxItems" => length.is_none_or(|length| length <= limit),
                "maxLength" => value.as_str().is_none_or(|text| text.chars().count() as f64 <= limit),
                "items" => {
                    for item in value.as_array().into_iter().flatten() {
                        self.check(&place, item, seen)?;
                    }
                    true
                }
                "required" => {
                    let has = |name: &Value| value.get(name.as_str().unwrap()).is_some();
                    !value.is_object() || rule.as_array().unwrap().iter().all(has)
                }
                "properties" => {
                    for name in rule.as_object().unwrap().keys() {
                        let field = format!("{place}/{name}");
                        if let Some(inner) = value.get(name) {
                            self.check(&field, inner, seen)?;
                            seen.insert(field);
                        } else if value.is_object() {
                            seen.insert(field + ABSENT);
                        }
                    }
                    true
                }
                "additionalProperties" => {
                    let is_other =
                        |(name, _): &(&String, &Value)| properties.is_none_or(|own| !own.contains_key(*name));
                    let mut others = value.as_object().into_iter().flatten().filter(is_other);
                    match rule.as_bool() {
                        Some(open) => open || others.next().is_none(),
                        None => {
                            others.try_for_each(|(_, inner)| self.check(&place, inner, seen))?;
                            true
                        }
                    }
                }
                "propertyNames" => {
                    assert_eq!(*rule, json!({"pattern": "^[0-9]+$"}), "{place}");
                    let is_number = |name: &String| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
                    value.as_object().is_none_or(|map| map.keys().all(is_number))
                }
                "contentSchema" => {
                    let inner: Value = serde_json::from_str(value.as_str().unwrap_or_default())
                        .map_err(|error| format!("{at}: {value} is no JSON: {error}"))?;
                    self.check(&place, &inner, seen)?;
                    true
                }
                unknown => panic!("{at}: this test does not know what {unknown} demands"),
            };
            if !admitted {
                return Err(format!("{at}: {keyword} {rule} does not admit {value}"));
            }
        }
        Ok(())
    }

    /// The parts of a schema that must occur in answers, with those of the schemas that it refers to: fields that are not required
    /// must be absent from some. Objects must say whether they have other fields.
    fn parts(&self, at: &str, all: &mut BTreeSet<String>) {
        let schema = self.at(at);
        if schema["type"].to_string().contains("\"object\"") {
            assert!(schema.get("additionalProperties").is_some(), "{at} is an object of any form");
        }
        for (keyword, rule) in schema.as_object().unwrap() {
            let place = format!("{at}/{keyword}");
            match keyword.as_str() {
                "$ref" => {
                    let target = rule.as_str().unwrap().trim_start_matches('#').to_owned();
                    let name = target.rsplit('/').next().unwrap();
                    if all.insert(target.clone()) && !REPEATED.contains(&name) {
                        self.parts(&target, all);
                    }
                }
                "anyOf" | "properties" => {
                    let names = match rule {
                        Value::Object(map) => map.keys().cloned().collect(),
                        list => (0..list.as_array().unwrap().len()).map(|index| index.to_string()).collect::<Vec<_>>(),
                    };
                    for name in names {
                        let part = format!("{place}/{name}");
                        self.parts(&part, all);
                        let required = schema["required"].as_array().is_some_and(|list| list.contains(&json!(name)));
                        if keyword == "properties" && !required {
                            all.insert(part.clone() + ABSENT);
                        }
                        all.insert(part);
                    }
                }
                "type" | "enum" => {
                    let count = rule.as_array().map_or(1, Vec::len);
                    all.extend((0..count).map(|index| format!("{place}/{index}")));
                }
                "items" | "additionalProperties" | "contentSchema" if rule.is_object() => self.parts(&place, all),
                _ => {}
            }
        }
    }
}

/// Answers that are compared with the description.
struct Answers {
    description: Description,
    /// What was compared, after the place of its schema.
    compared: Vec<(String, Value)>,
    /// The parts of schemas that have occurred.
    seen: BTreeSet<String>,
}

impl Answers {
    /// Compares an answer with the schema at a place.
    fn compare(&mut self, place: String, value: Value) {
        if let Err(problem) = self.description.check(&place, &value, &mut self.seen) {
            panic!("{value} is not as {place} describes it: {problem}");
        }
        self.compared.push((place, value));
    }

    /// Asks, and compares the answer with what is described for its status: a whole answer, or each event of a stream.
    fn ask(&mut self, server: &Running, method: &str, route: &str, id: &str, body: &Value) -> Value {
        let path = route.replace("{id}", id).replace("{model}", id);
        let answer = server.request(method, &path, "content-type: application/json\r\n", body.to_string().as_bytes());
        let of_status =
            format!("/paths/{}/{}/responses/{}", route.replace('/', "~1"), method.to_lowercase(), answer.status);
        let of_status = match self.description.at(&of_status)["$ref"].as_str() {
            Some(target) => target.trim_start_matches('#').to_owned(),
            None => of_status,
        };
        if !answer.headers.contains("content-type: text/event-stream") {
            self.compare(format!("{of_status}/content/application~1json/schema"), answer.json());
            return answer.json();
        }
        let of_event = format!("{of_status}/content/text~1event-stream/x-oai-itemSchema");
        let of_data = format!("{of_event}/properties/data");
        for (name, data) in answer.events() {
            let mut event = json!({"data": data.as_str().map_or_else(|| data.to_string(), str::to_owned)});
            if let Some(name) = name {
                assert_eq!(data["type"], name.as_str(), "{path}");
                event["event"] = name.into();
            }
            self.compare(of_event.clone(), event);
            if data.is_object() {
                let place = [format!("{of_data}/anyOf/0/contentSchema"), format!("{of_data}/contentSchema")];
                let place = place.into_iter().find(|place| self.description.0.pointer(place).is_some());
                self.compare(place.expect("a schema of the data"), data);
            }
        }
        Value::Null
    }

    fn get(&mut self, server: &Running, route: &str, id: &str) -> Value {
        self.ask(server, "GET", route, id, &Value::Null)
    }

    fn post(&mut self, server: &Running, route: &str, body: Value) -> Value {
        self.ask(server, "POST", route, "", &body)
    }

    /// Asks for a whole answer, which is returned, and for a stream.
    fn both(&mut self, server: &Running, route: &str, body: &Value) -> Value {
        self.post(server, route, with(body, "stream", json!(true)));
        self.post(server, route, body.clone())
    }
}

/// A body with more fields.
fn extended(body: &Value, more: Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A text with a call, and one that is a call alone.
const CALLS: [&str; 2] = [
    "say:Hm<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>",
    "say:<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>",
];

const THOUGHT: &str =
    "say:<|channel|>analysis<|message|>A greeting.<|start|>assistant<|channel|>final<|message|>Hello!";

/// Answers of all routes, in all forms that there are.
fn answers() -> Answers {
    let server = start();
    // Its texts are read as those of gpt-oss, which have reasoning.
    let template =
        "{# <|channel|><|message|> #}{% for m in messages %}<|user|>{{ m.content }}\n{% endfor %}<|assistant|>";
    let thinking = start_with(Settings::default(), Some(template));
    let mut all = Answers { description: Description::of(&server), compared: Vec::new(), seen: BTreeSet::new() };
    for (route, _, body) in requests().into_iter().filter(|(route, ..)| !route.contains("lora")) {
        all.post(&server, route, body.clone());
        all.post(&server, route, with(&body, "model", json!("nothing")));
    }
    chats(&server, &thinking, &mut all);
    completions(&server, &mut all);
    messages(&server, &mut all);
    responses(&server, &thinking, &mut all);
    stored_responses(&server, &thinking, &mut all);
    all.post(&server, "/v1/embeddings", json!({"input": ["a", "b"], "encoding_format": "base64"}));
    all.post(&server, "/tokenize", json!({"prompt": "x", "return_token_strs": true}));
    let adapter = json!({"lora_name": "a", "lora_path": std::env::temp_dir()});
    assert_eq!(server.post("/v1/load_lora_adapter", adapter).status, 200);
    all.get(&server, "/v1/models/{model}", "a");
    for route in ["/v1/models", "/health", "/version", "/openapi.json"] {
        all.get(&server, route, "");
    }
    all
}

/// How streams may report the usage.
fn usage_options() -> [Value; 2] {
    let at_end = json!({"include_usage": true});
    let in_each_chunk = json!({"include_usage": true, "continuous_usage_stats": true});
    [at_end, in_each_chunk].map(|options| json!({"stream": true, "stream_options": options}))
}

/// Fields that end a text by its length, by a string, and by a token.
fn ends(max_tokens: &str) -> [Value; 3] {
    [json!({max_tokens: 1}), json!({"stop": "c"}), json!({"stop_token_ids": [u32::from(b'c')]})]
}

fn chats(server: &Running, thinking: &Running, all: &mut Answers) {
    let route = "/v1/chat/completions";
    let chat = |text: &str| json!({"messages": [{"role": "user", "content": text}]});
    let reports = json!({"logprobs": true, "top_logprobs": 2, "prompt_logprobs": 1, "return_token_ids": true, "n": 2});
    all.both(server, route, &extended(&chat("say:ab"), reports));
    for more in ends("max_tokens") {
        all.both(server, route, &extended(&chat("say:abcd"), more));
    }
    for more in usage_options() {
        all.post(server, route, extended(&chat("say:ab"), more));
    }
    let tools = json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]});
    for call in CALLS {
        all.both(server, route, &extended(&chat(call), tools.clone()));
    }
    all.both(thinking, route, &chat(THOUGHT));
    for role in ["assistant", "user", "system", "tool"] {
        let messages = json!([{"role": role, "content": "say:ab"}]);
        all.both(server, route, &json!({"messages": messages, "continue_final_message": true}));
    }
    all.both(server, route, &chat("FAIL"));
}

fn completions(server: &Running, all: &mut Answers) {
    let route = "/v1/completions";
    let prompt = json!({"prompt": ["say:abcd", "say:b"]});
    let reports = json!({"logprobs": 1, "prompt_logprobs": 1, "return_token_ids": true, "n": 2});
    all.both(server, route, &extended(&prompt, reports.clone()));
    all.both(server, route, &with(&extended(&prompt, reports), "echo", json!(true)));
    for more in ends("max_tokens") {
        all.both(server, route, &extended(&prompt, more));
    }
    for more in usage_options() {
        all.post(server, route, extended(&prompt, more));
    }
    all.both(server, route, &json!({"prompt": "FAIL"}));
}

fn messages(server: &Running, all: &mut Answers) {
    let route = "/v1/messages";
    let message = |text: &str| json!({"max_tokens": 100, "messages": [{"role": "user", "content": text}]});
    for more in ends("max_tokens") {
        all.both(server, route, &extended(&message("say:abcd"), more));
    }
    let tools = json!([{"name": "f", "input_schema": {"type": "object"}}]);
    all.both(server, route, &with(&message(CALLS[0]), "tools", tools));
    all.both(server, route, &message("FAIL"));
}

fn responses(server: &Running, thinking: &Running, all: &mut Answers) {
    let route = "/v1/responses";
    let sent = json!({"input": "say:ab", "instructions": "be brief", "temperature": 0.5, "top_p": 0.5, "text": null,
        "parallel_tool_calls": false, "max_output_tokens": 500, "store": false});
    for metadata in [json!({"a": "b"}), json!(["a"]), json!("a"), json!(1), json!(true)] {
        all.both(server, route, &with(&sent, "metadata", metadata));
    }
    all.both(server, route, &json!({"input": "say:ab", "max_output_tokens": 1}));
    let parameters = json!({"type": "object", "additionalProperties": false});
    let tools = json!([{"type": "function", "name": "f", "parameters": parameters, "strict": true}]);
    let with_tools = with(&sent, "tools", tools);
    let named = json!({"type": "function", "name": "f"});
    for choice in [json!("none"), json!("auto"), json!("required"), named] {
        all.both(server, route, &extended(&with_tools, json!({"tool_choice": choice, "input": CALLS[0]})));
    }
    all.both(thinking, route, &json!({"input": THOUGHT}));
    all.both(server, route, &json!({"input": "FAIL"}));
}

fn stored_responses(server: &Running, thinking: &Running, all: &mut Answers) {
    let (one, items) = ("/v1/responses/{id}", "/v1/responses/{id}/input_items");
    let begin = |all: &mut Answers, input: &str| {
        let begun = all.post(server, "/v1/responses", json!({"input": input, "background": true}));
        begun["id"].as_str().unwrap().to_owned()
    };
    for input in ["say:ab", "FAIL"] {
        let id = begin(all, input);
        while server.get(&one.replace("{id}", &id)).json()["status"] == "in_progress" {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        all.get(server, one, &id);
        all.get(server, items, &id);
    }
    let id = begin(all, "SLOW");
    let cancelled = all.ask(server, "POST", "/v1/responses/{id}/cancel", &id, &json!({}));
    assert_eq!(cancelled["status"], "cancelled");
    all.ask(server, "DELETE", one, &id, &Value::Null);
    all.get(server, one, &id);

    // All that a response can have read: each kind of item with and without what it may leave out.
    let part = |of: &str| json!({"type": of, "text": "a", "annotations": [], "logprobs": []});
    let refusal = json!({"type": "refusal", "refusal": "no", "annotations": [], "logprobs": []});
    let short = [json!({"type": "text", "text": "a"}), json!({"type": "refusal", "refusal": "no"})];
    let parts = json!([part("text"), part("input_text"), part("output_text"), refusal, short[0], short[1]]);
    let input = json!([
        {"role": "system", "content": "a"},
        {"type": "message", "role": "developer", "content": parts, "status": "in_progress"},
        {"type": "message", "role": "assistant", "content": "a", "status": "incomplete"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "in_progress"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "completed"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c", "output": "a"},
        {"type": "function_call_output", "call_id": "c", "output": "a", "status": "in_progress"},
        {"type": "function_call_output", "call_id": "c", "output": "a", "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c", "output": parts, "status": "completed"},
        {"type": "message", "role": "user", "content": THOUGHT, "status": "completed"}
    ]);
    // A text that ends within its reasoning.
    let length = "<|channel|>analysis<|message|>A gr".len();
    let first = all.post(thinking, "/v1/responses", json!({"input": input, "max_output_tokens": length}));
    assert_eq!((&first["output"][0]["type"], &first["status"]), (&json!("reasoning"), &json!("incomplete")));
    let next = all.post(thinking, "/v1/responses", json!({"input": THOUGHT, "previous_response_id": first["id"]}));
    all.get(thinking, items, next["id"].as_str().unwrap());
    let nothing = json!({"input": [{"type": "reasoning"}], "instructions": "say:ab"});
    let id = all.post(server, "/v1/responses", nothing)["id"].as_str().unwrap().to_owned();
    let list = all.get(server, items, &id);
    assert_eq!((&list["data"], &list["first_id"]), (&json!([]), &Value::Null));
}

#[test]
fn answers_have_what_is_described_and_nothing_else() {
    let answers = answers();
    let description = &answers.description;
    let mut parts = BTreeSet::new();
    for (path, methods) in description.0["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            let content = format!("/paths/{}/{method}/responses/200/content", path.replace('/', "~1"));
            for kind in operation["responses"]["200"]["content"].as_object().unwrap().keys() {
                let place = match kind.as_str() {
                    "application/json" => format!("{content}/application~1json/schema"),
                    "text/event-stream" => format!("{content}/text~1event-stream/x-oai-itemSchema"),
                    _ => continue,
                };
                let schema = description.resolve(description.at(&place));
                assert_eq!(
                    (&schema["type"], &schema["additionalProperties"]),
                    (&json!("object"), &json!(false)),
                    "{path}"
                );
                description.parts(&place, &mut parts);
                assert!(
                    answers.compared.iter().any(|(compared, _)| *compared == place),
                    "no answer of {method} {path}"
                );
            }
        }
    }
    let missing: Vec<&String> = parts.difference(&answers.seen).collect();
    assert!(missing.is_empty(), "described, but in no answer: {missing:#?}");
}

/// The places of a value and of all within it, except what is open.
fn places(value: &Value, at: String, all: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (name, inner) in map.iter().filter(|(name, _)| !OPEN.contains(&name.as_str())) {
                places(inner, format!("{at}/{}", name.replace('~', "~0").replace('/', "~1")), all);
            }
        }
        Value::Array(list) => {
            for (index, inner) in list.iter().enumerate() {
                places(inner, format!("{at}/{index}"), all);
            }
        }
        _ => {}
    }
    all.push(at);
}

/// Without this, the test of answers would pass with a description that admits everything.
#[test]
fn answers_with_other_fields_or_values_are_not_as_described() {
    let answers = answers();
    for (place, value) in &answers.compared {
        let mut all = Vec::new();
        places(value, String::new(), &mut all);
        for at in all {
            let mut other = value.clone();
            match other.pointer_mut(&at).unwrap() {
                Value::Object(map) => drop(map.insert("no_such_field".into(), json!([]))),
                leaf => *leaf = json!({"no_such_field": []}),
            }
            let result = answers.description.check(place, &other, &mut BTreeSet::new());
            assert!(result.is_err(), "{place} admits {other}");
        }
    }
}
