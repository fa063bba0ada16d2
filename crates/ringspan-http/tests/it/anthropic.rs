//! Tests of Anthropic's interface.

use crate::client::{start, start_with};
use ringspan_http::Settings;
use serde_json::{Value, json};

fn body(text: &str, more: Value) -> Value {
    let mut body = json!({"model": "test", "max_tokens": 100, "messages": [{"role": "user", "content": text}]});
    body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
    body
}

#[test]
fn a_message_has_blocks_and_a_reason() {
    let server = start();
    let asked = body(
        "say:one|two",
        json!({"stop_sequences": ["|"], "system": [{"type": "text", "text": "be brief",
        "cache_control": {"type": "ephemeral"}}], "metadata": {"user_id": "x"}}),
    );
    let message = server.post("/v1/messages", asked).json();
    assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(message["content"], json!([{"type": "text", "text": "one"}]));
    assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!("stop_sequence"), &json!("|")));
    assert_eq!(server.post("/v1/messages", body("say:hi", json!({}))).json()["stop_reason"], "end_turn");
    assert_eq!(
        server.post("/v1/messages", body("say:hi", json!({"max_tokens": 1}))).json()["stop_reason"],
        "max_tokens"
    );
}

#[test]
fn a_stream_opens_and_closes_each_block() {
    let server = start();
    let tools = json!([{"name": "f", "description": "d", "input_schema": {"type": "object"}}]);
    let text = "say:Hm<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}</tool_call>";
    let events = server.post("/v1/messages", body(text, json!({"stream": true, "tools": tools}))).events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_deref().unwrap()).collect();
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_deref().unwrap()));
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert_eq!(events[5].1["content_block"]["name"], "f");
    assert_eq!(events[6].1["delta"], json!({"type": "input_json_delta", "partial_json": "{\"x\":1}"}));
    assert_eq!(events[8].1["delta"]["stop_reason"], "tool_use");
}

#[test]
fn tools_and_their_results_are_blocks() {
    let server = start();
    let asked = json!({"max_tokens": 100, "messages": [{"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text",
            "text": "say:done"}]}]}]});
    let message = server.post("/v1/messages", asked).json();
    assert_eq!(message["content"][0]["text"], "done");
    let asked = body("x", json!({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}));
    let error = server.post("/v1/messages", asked).error(400);
    assert!(
        error["message"].as_str().unwrap().starts_with("tools[0].input_schema: must be the schema of an object"),
        "{error}"
    );
}

/// As in Anthropic's interface, a last message of the assistant is the beginning of the answer.
#[test]
fn a_last_message_of_the_assistant_is_continued() {
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}\
        {% if add_generation_prompt %}assistant: {% endif %}";
    let server = start_with(Settings::default(), Some(template));
    let messages = json!([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "say:one"}]);
    let message = server.post("/v1/messages", body("", json!({"messages": messages}))).json();
    assert_eq!(message["content"], json!([{"type": "text", "text": "one"}]));
    let prompt = "user: Count.;assistant: say:one";
    assert_eq!(message["usage"]["input_tokens"], prompt.len());
    let counted = server.post("/v1/messages/count_tokens", json!({"messages": messages})).json();
    assert_eq!(counted["input_tokens"], prompt.len());
}

#[test]
fn thinking_is_switched_where_the_template_reads_it() {
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is defined %}\
        {{ 'on' if enable_thinking else 'off' }}{% endif %}";
    let (server, other) = (
        start_with(Settings::default(), Some(template)),
        start_with(Settings::default(), Some("{{ messages[0].content }}")),
    );
    let tokens = |thinking: Value| {
        let asked = json!({"messages": [{"role": "user", "content": "x"}], "thinking": thinking});
        server.post("/v1/messages/count_tokens", asked).json()["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(tokens(json!({"type": "enabled", "budget_tokens": 1024})), "xon".len() as u64);
    assert_eq!(tokens(json!({"type": "disabled"})), "xoff".len() as u64);
    assert_eq!((tokens(json!({"type": "adaptive"})), tokens(json!({}))), (1, 1));
    let both = json!({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": false}});
    assert!(server.post("/v1/messages", body("x", both)).error(400)["message"].to_string().contains("contradicts"));
    for (kind, status) in [("adaptive", 200), ("disabled", 200), ("enabled", 400)] {
        assert_eq!(
            other.post("/v1/messages", body("say:a", json!({"thinking": {"type": kind}}))).status,
            status,
            "{kind}"
        );
    }
}

#[test]
fn tokens_are_counted_without_computing() {
    let server = start();
    let asked = json!({"messages": [{"role": "user", "content": "x"}]});
    assert_eq!(server.post("/v1/messages/count_tokens", asked).json(), json!({"input_tokens": 9}));
}

#[test]
fn errors_have_anthropics_shape() {
    let server = start();
    let error = |body: Value, status: u16| {
        let answer = server.post("/v1/messages", body);
        assert_eq!(answer.status, status, "{}", answer.body);
        assert_eq!(answer.json()["type"], "error");
        answer.json()["error"]["type"].as_str().unwrap().to_owned()
    };
    assert_eq!(error(json!({"messages": []}), 400), "invalid_request_error");
    assert_eq!(
        error(body("x", json!({"thinking": {"type": "sometimes", "budget_tokens": 9}})), 400),
        "invalid_request_error"
    );
    assert_eq!(error(body("x", json!({"model": "gpt"})), 404), "not_found_error");
    let answer = server.get("/v1/messages");
    assert_eq!((answer.status, answer.json()["type"].clone()), (405, json!("error")));
    let events = server.post("/v1/messages", body("FAIL", json!({"stream": true}))).events();
    let (name, data) = events.last().unwrap();
    assert_eq!((name.as_deref(), &data["error"]["type"]), (Some("error"), &json!("api_error")));
    let closed = start_with(Settings { api_keys: vec!["k".into()], ..Settings::default() }, None);
    let answer = closed.post("/v1/messages", json!({}));
    assert_eq!((answer.status, &answer.json()["error"]["type"]), (401, &json!("authentication_error")));
    let headers = "content-type: application/json\r\nx-api-key: k\r\n";
    assert_eq!(closed.request("POST", "/v1/messages", headers, b"{}").status, 400);
}
