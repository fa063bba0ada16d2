//! Compares real answers, errors and events of all routes with the description, and demands that all that is described occurs.

use super::schema_check::OPEN;
use super::{Description, requests, with};
use crate::client::{Running, start, start_with};
use ringspan_http::Settings;
use serde_json::{Value, json};
use std::collections::BTreeSet;

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
