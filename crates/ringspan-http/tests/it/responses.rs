//! OpenAI's Responses interface.

use crate::client::start;
use serde_json::{Value, json};

#[test]
fn a_response_has_items() {
    let server = start();
    let response =
        server.post("/v1/responses", json!({"model": "test", "input": "say:hi", "instructions": "be brief"})).json();
    assert_eq!((&response["object"], &response["status"]), (&json!("response"), &json!("completed")));
    let item = &response["output"][0];
    assert_eq!((&item["type"], &item["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!((&item["content"][0]["type"], &item["content"][0]["text"]), (&json!("output_text"), &json!("hi")));
    assert_eq!(response["usage"]["output_tokens"], 3);
    assert_eq!(response["instructions"], "be brief");
    let short = server.post("/v1/responses", json!({"input": "say:hi", "max_output_tokens": 1})).json();
    assert_eq!(
        (&short["status"], &short["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[test]
fn a_stream_says_each_step_with_a_number() {
    let server = start();
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": false}]);
    let text = "say:Hm<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let events = server.post("/v1/responses", json!({"input": text, "stream": true, "tools": tools})).events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_deref().unwrap()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed"
        ]
    );
    for (number, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["sequence_number"], &data["type"]), (&json!(number), &json!(name)));
    }
    let output = &events.last().unwrap().1["response"]["output"];
    assert_eq!((&output[0]["content"][0]["text"], &output[1]["name"]), (&json!("Hm"), &json!("f")));
}

#[test]
fn items_of_earlier_turns_are_messages() {
    let server = start();
    let input = json!([{"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "say:done"}]);
    let response = server.post("/v1/responses", json!({"input": input})).json();
    assert_eq!(response["output"][0]["content"][0]["text"], "done");
}

#[test]
fn schemas_stand_in_text_format() {
    let server = start();
    let format = json!({"type": "json_schema", "name": "x", "schema": {"enum": ["yes"]}, "strict": true});
    let response = server.post("/v1/responses", json!({"input": "say:no", "text": {"format": format}})).json();
    assert_eq!(response["output"][0]["content"][0]["text"], "\"yes\"");
}

#[test]
fn what_needs_stored_responses_is_refused() {
    let server = start();
    let error = |more: Value| {
        let mut body = json!({"input": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        server.post("/v1/responses", body).error(400)["param"].clone()
    };
    assert_eq!(error(json!({"previous_response_id": "resp_1"})), "previous_response_id");
    assert_eq!(error(json!({"background": true})), "background");
    assert_eq!(error(json!({"tools": [{"type": "web_search"}]})), "tools[0].type");
    assert_eq!(error(json!({"input": [{"type": "item_reference", "id": "x"}]})), "input[0].type");
    assert_eq!(error(json!({"input": [{"role": "user"}]})), "input");
    assert_eq!(server.get("/v1/responses/resp_1").status, 404);
    let events = server.post("/v1/responses", json!({"input": "FAIL", "stream": true})).events();
    assert_eq!(events.last().unwrap().0.as_deref(), Some("error"));
}
