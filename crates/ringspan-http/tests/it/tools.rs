//! Tests of tool calls.

use crate::client::{start, start_with};
use ringspan_http::Settings;
use serde_json::{Value, json};

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "the weather of a place", "parameters":
        {"type": "object", "properties": {"place": {"enum": ["Ulm"]}}, "required": ["place"],
        "additionalProperties": false}}}])
}

const CALL: &str = "say:Well.<tool_call>{\"name\": \"weather\", \"arguments\": {\"place\": \"Ulm\"}}</tool_call>";

#[test]
fn a_call_is_no_text() {
    let server = start();
    let body = server.chat(CALL, json!({"tools": weather()})).json();
    let choice = &body["choices"][0];
    assert_eq!((&choice["message"]["content"], &choice["finish_reason"]), (&json!("Well."), &json!("tool_calls")));
    let call = &choice["message"]["tool_calls"][0];
    assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function");
    assert_eq!(call["function"], json!({"name": "weather", "arguments": "{\"place\":\"Ulm\"}"}));
    // Without tools, or where they may not be used, the same text is text.
    for more in [json!({}), json!({"tools": weather(), "tool_choice": "none"})] {
        let body = server.chat(CALL, more).json();
        assert!(body["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
    }
}

#[test]
fn a_stream_has_each_call_whole() {
    let server = start();
    let chunks = server.chat(CALL, json!({"tools": weather(), "stream": true})).chunks();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, "Well.");
    let calls: Vec<&Value> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0]["index"], &calls[0]["function"]["name"]), (&json!(0), &json!("weather")));
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn calls_that_must_be_made_are_made_by_grammar() {
    let server = start();
    let named = json!({"type": "function", "function": {"name": "weather"}});
    for choice in [json!("required"), named] {
        let asked = json!({"tools": weather(), "tool_choice": choice, "max_tokens": 500, "parallel_tool_calls": false});
        let answer = server.chat("say:I will not.", asked);
        assert_eq!(answer.status, 200, "{}", answer.body);
        let choice = answer.json()["choices"][0].clone();
        let call = &choice["message"]["tool_calls"][0]["function"];
        // The test's engine likes white space, which grammars limit.
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!((&call["name"], arguments), (&json!("weather"), json!({"place": "Ulm"})), "{choice}");
        assert!(choice["message"]["content"].is_null() && choice["finish_reason"] == "tool_calls", "{choice}");
    }
}

/// The schemas of nested models of pydantic have references, which each tool resolves in its own schema.
#[test]
fn parameters_may_have_references() {
    let server = start();
    let tool = |name: &str, place: &str| {
        json!({"type": "function", "function": {"name": name, "parameters": {
            "$defs": {"Place": {"type": "object", "properties": {"name": {"enum": [place]}}, "required": ["name"],
                "additionalProperties": false}},
            "type": "object", "properties": {"place": {"$ref": "#/$defs/Place"}}, "required": ["place"],
            "additionalProperties": false}}})
    };
    for (name, place) in [("weather", "Ulm"), ("time", "Bonn")] {
        let choice = json!({"type": "function", "function": {"name": name}});
        let tools = [tool("weather", "Ulm"), tool("time", "Bonn")];
        let asked = json!({"tools": tools, "tool_choice": choice, "max_tokens": 999, "parallel_tool_calls": false});
        let answer = server.chat("say:no", asked).json();
        let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!((&call["name"], arguments), (&json!(name), json!({"place": {"name": place}})), "{answer}");
    }
    let asked =
        json!({"tools": [tool("weather", "Ulm"), tool("time", "Bonn")], "tool_choice": "required", "max_tokens": 999});
    assert_eq!(server.chat("say:no", asked).status, 200);
}

#[test]
fn tools_that_are_wrong_are_refused() {
    let server = start();
    let error = |more: Value| server.chat("x", more).error(400)["param"].clone();
    assert_eq!(error(json!({"tools": [{"type": "web_search"}]})), "tools[0]");
    assert_eq!(
        error(json!({"tools": weather(), "tool_choice": {"type": "function", "function": {"name": "f"}}})),
        "tool_choice"
    );
    assert_eq!(error(json!({"tool_choice": "required"})), "tool_choice");
    assert_eq!(error(json!({"tools": weather(), "tool_choice": "maybe"})), "tool_choice");
    assert_eq!(error(json!({"functions": [{}]})), "functions");
    assert_eq!(error(json!({"tools": [{"type": "function", "function": {}}]})), "tools[0].function.name");
    let without = start_with(Settings::default(), Some("{{ messages[0].content }}"));
    assert_eq!(without.chat("x", json!({"tools": weather()})).error(400)["param"], "tools");
    let unknown = start_with(Settings::default(), Some("{{ tools }}{{ messages[0].content }}"));
    assert_eq!(unknown.chat("x", json!({"tools": weather()})).error(400)["param"], "tool_choice");
}

#[test]
fn parameters_are_the_schema_of_an_object() {
    let server = start();
    let with = |parameters: &Value| json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    for parameters in [json!("x"), json!([]), json!({"type": "wizard"}), json!({"type": ["object", "null"]})] {
        for choice in ["none", "auto", "required"] {
            let tools = json!([weather()[0], with(&parameters)]);
            let error = server.chat("x", json!({"tools": tools, "tool_choice": choice})).error(400);
            assert_eq!(error["param"], "tools[1].function.parameters", "{parameters}, {choice}: {error}");
        }
        let mut flat = with(&parameters)["function"].clone();
        flat["type"] = json!("function");
        let error = server.post("/v1/responses", json!({"input": "x", "tools": [flat]})).error(400);
        assert_eq!(error["param"], "tools[0].parameters", "{parameters}: {error}");
    }
    // Without a type, they are those of an object as well.
    for parameters in [json!(null), json!({}), json!({"properties": {}}), json!({"type": null})] {
        let asked = json!({"tools": [with(&parameters)], "tool_choice": "required", "max_tokens": 5});
        assert_eq!(server.chat("x", asked).status, 200, "{parameters}");
        let named = json!({"type": "function", "function": {"name": "f"}});
        let body =
            server.chat("x", json!({"tools": [with(&parameters)], "tool_choice": named, "max_tokens": 5})).json();
        let call = &body["choices"][0]["message"]["tool_calls"][0]["function"];
        assert!(call["arguments"].as_str().unwrap().starts_with('{'), "{parameters}: {body}");
    }
}

/// Options of grammars that parameters have count where a grammar has the parameters of several tools.
#[test]
fn parameters_may_have_options_of_grammars() {
    let server = start();
    let either = json!([{"type": "string"}, {"type": "string", "minLength": 2}]);
    let mut parameters = json!({"type": "object", "properties": {"x": {"oneOf": either}}});
    let ask = |parameters: &Value| {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
        server.chat("x", json!({"tools": [tool], "tool_choice": "required", "max_tokens": 5}))
    };
    let message = ask(&parameters).error(400)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("tools: ") && message.contains("coerce_one_of"), "{message}");
    parameters["x-guidance"] = json!({"coerce_one_of": true});
    assert_eq!(ask(&parameters).status, 200);
}

#[test]
fn results_of_tools_go_back_to_the_model() {
    let server = start();
    let messages = json!([{"role": "user", "content": "weather?"},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "weather", "arguments": "{\"place\": \"Ulm\"}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "say:sunny"}]);
    let body = server.post("/v1/chat/completions", json!({"messages": messages, "tools": weather()})).json();
    assert_eq!(body["choices"][0]["message"]["content"], "sunny");
}
