//! Tests of OpenAI's Responses interface.

use crate::client::{HttpResponse, Running, TEMPLATE, start, start_with};
use ringspan_http::Settings;
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
    let without = json!({"input": "x", "text": {"format": {"type": "json_schema", "name": "x"}}});
    assert_eq!(server.post("/v1/responses", without).error(400)["param"], "text.format.schema");
}

#[test]
fn a_response_is_continued_by_its_id() {
    let server = start();
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let call = "say:Hm<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let first = server.post("/v1/responses", json!({"input": call, "tools": tools, "instructions": "be brief"})).json();
    let (said, called) = (&first["output"][0], &first["output"][1]);
    let output = json!({"type": "function_call_output", "call_id": called["call_id"], "output": "say:done"});
    let more = json!({"input": [output], "previous_response_id": first["id"], "tools": tools});
    let next = server.post("/v1/responses", more).json();
    assert_eq!(next["output"][0]["content"][0]["text"], "done");
    assert_eq!((&next["previous_response_id"], &next["store"]), (&first["id"], &json!(true)));
    // The same conversation as a whole: all of its prompt but the last token is cached. Instructions are not carried over.
    let user = json!({"role": "user", "content": call});
    let whole = json!({"input": [user, said, called, output], "tools": tools, "store": false});
    let whole = server.post("/v1/responses", whole).json();
    let tokens = |response: &Value, name: &str| response["usage"][name].as_u64().unwrap();
    let details = &whole["usage"]["input_tokens_details"];
    assert_eq!(tokens(&next, "input_tokens"), tokens(&whole, "input_tokens"));
    assert_eq!(details["cached_tokens"].as_u64().unwrap(), tokens(&next, "input_tokens") - 1);
    assert_eq!(details["cache_write_tokens"], 1);
    // Streams are stored, too, and can be asked for once they have ended.
    let events = server.post("/v1/responses", json!({"input": "say:hi", "stream": true})).events();
    let last = &events.last().unwrap().1["response"];
    assert_eq!(server.get(&format!("/v1/responses/{}", last["id"].as_str().unwrap())).json(), *last);
}

#[test]
fn items_of_stored_responses_are_referred_to_by_their_ids() {
    let server = start();
    let tools = json!([{"type": "function", "name": "f", "parameters": {"type": "object"}}]);
    let call = "say:Hm<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let asked = json!({"id": "mine \\\"1\\", "role": "user", "content": call});
    let first = server.post("/v1/responses", json!({"input": [asked], "tools": tools})).json();
    let (said, called) = (&first["output"][0], &first["output"][1]);
    let output = json!({"type": "function_call_output", "call_id": called["call_id"], "output": "say:done"});
    let whole = json!({"input": [asked, said, called, output], "tools": tools, "store": false});
    let whole = server.post("/v1/responses", whole).json();
    let reference = |item: &Value| json!({"type": "item_reference", "id": item["id"]});
    let input = json!([reference(&asked), {"id": said["id"]}, reference(called), output]);
    let referring = server.post("/v1/responses", json!({"input": input, "tools": tools})).json();
    assert_eq!(referring["output"][0]["content"][0]["text"], "done");
    assert_eq!(referring["usage"]["input_tokens"], whole["usage"]["input_tokens"]);
    let path = format!("/v1/responses/{}", referring["id"].as_str().unwrap());
    let list = server.get(&format!("{path}/input_items?order=asc")).json();
    assert_eq!((&list["data"][1], &list["data"][2]), (said, called), "what is referred to is stored as it was");

    let twice = json!({"input": [reference(called), reference(called)], "tools": tools});
    assert_eq!(server.post("/v1/responses", twice).error(400)["param"], "input[1].id");
    let nothing = json!({"input": [asked, {"type": "item_reference"}]});
    assert_eq!(server.post("/v1/responses", nothing).error(400)["param"], "input[1].id");
    // An item stays as long as a response has it.
    for id in [&first["id"], &referring["id"]] {
        let again = json!({"input": [reference(said), {"role": "user", "content": "say:more"}], "store": false});
        assert_eq!(server.post("/v1/responses", again).json()["output"][0]["content"][0]["text"], "more");
        assert_eq!(server.request("DELETE", &format!("/v1/responses/{}", id.as_str().unwrap()), "", b"").status, 200);
    }
    let gone = server.post("/v1/responses", json!({"input": [reference(said)]})).error(404);
    assert_eq!(gone["param"], "input[0].id");
    assert!(gone["message"].as_str().unwrap().contains(said["id"].as_str().unwrap()), "{gone}");
}

#[test]
fn a_stored_response_is_read_listed_and_deleted() {
    let server = start();
    let first = server.post("/v1/responses", json!({"input": "say:one"})).json();
    let more = json!({"input": [{"role": "user", "content": "say:two"}], "previous_response_id": first["id"]});
    let second = server.post("/v1/responses", more).json();
    let path = format!("/v1/responses/{}", second["id"].as_str().unwrap());
    assert_eq!(server.get(&path).json(), second);
    assert_eq!(server.get(&format!("{path}?include[]=a&include[]=b&stream=false")).json(), second);
    assert_eq!(server.get(&format!("{path}?stream=true")).error(400)["param"], "stream");
    let list = server.get(&format!("{path}/input_items?order=asc&limit=2")).json();
    assert_eq!((&list["data"][0]["content"][0]["text"], &list["has_more"]), (&json!("say:one"), &json!(true)));
    assert_eq!(list["data"][1], first["output"][0]);
    let after = list["last_id"].as_str().unwrap();
    let rest = server.get(&format!("{path}/input_items?order=asc&after={after}")).json();
    assert_eq!((&rest["data"][0]["content"], &rest["has_more"]), (&json!("say:two"), &json!(false)));
    assert_eq!(server.get(&format!("{path}/input_items")).json()["data"][0], rest["data"][0], "the newest comes first");
    for wrong in ["limit=0", "limit=x", "order=up", "after=nothing"] {
        assert_eq!(server.get(&format!("{path}/input_items?{wrong}")).status, 400, "{wrong}");
    }
    let cancelled = server.post(&format!("{path}/cancel"), json!({})).error(400);
    assert!(cancelled["message"].to_string().contains("background"), "{cancelled}");
    let deleted = server.request("DELETE", &path, "", b"");
    assert_eq!((deleted.status, &deleted.json()["deleted"]), (200, &json!(true)));
    for (method, path) in [("GET", path.clone()), ("DELETE", path.clone()), ("POST", format!("{path}/cancel"))] {
        server.request(method, &path, "", b"").error(404);
    }
    let more = json!({"input": "x", "previous_response_id": second["id"]});
    let error = server.post("/v1/responses", more).error(400);
    assert_eq!(
        (&error["param"], &error["code"]),
        (&json!("previous_response_id"), &json!("previous_response_not_found"))
    );
}

#[test]
fn a_response_in_the_background_is_asked_for_and_can_be_cancelled() {
    let server = start();
    let begin = |input: &str| {
        let begun = server.post("/v1/responses", json!({"input": input, "background": true})).json();
        assert_eq!((&begun["status"], &begun["background"]), (&json!("in_progress"), &json!(true)));
        format!("/v1/responses/{}", begun["id"].as_str().unwrap())
    };
    let ended = |path: &str| loop {
        let response = server.get(path).json();
        if response["status"] != "in_progress" {
            return response;
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    };
    let path = begin("say:hi");
    let response = ended(&path);
    assert_eq!(
        (&response["status"], &response["output"][0]["content"][0]["text"]),
        (&json!("completed"), &json!("hi"))
    );
    assert_eq!(server.post(&format!("{path}/cancel"), json!({})).json(), response, "what has ended stays as it is");
    let failed = ended(&begin("FAIL"));
    assert_eq!(failed["status"], "failed");
    assert!(failed["error"]["message"].to_string().contains("rank 1"), "{failed}");
    let error = server.post("/v1/responses", json!({"input": "x", "previous_response_id": failed["id"]})).error(400);
    assert!(error["message"].to_string().contains("its status is failed"), "{error}");
    let idle = || {
        while server.engine.live.load(std::sync::atomic::Ordering::SeqCst) > 0 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    // Both ways to end one free the engine.
    let path = begin("SLOW");
    let cancelled = server.post(&format!("{path}/cancel"), json!({})).json();
    assert_eq!(cancelled["status"], "cancelled");
    idle();
    assert_eq!(server.get(&path).json(), cancelled);
    let path = begin("SLOW");
    assert_eq!(server.request("DELETE", &path, "", b"").status, 200);
    idle();
    server.get(&path).error(404);
}

#[test]
fn memory_for_responses_is_bounded() {
    let server = start_with(Settings { response_store: 4000, ..Settings::default() }, Some(TEMPLATE));
    let ids: Vec<String> = (0..8)
        .map(|_| server.post("/v1/responses", json!({"input": "say:hi"})).json()["id"].as_str().unwrap().to_owned())
        .collect();
    let status = |id: &String| server.get(&format!("/v1/responses/{id}")).status;
    assert_eq!((status(&ids[0]), status(&ids[7])), (404, 200));
    let none = start_with(Settings { response_store: 0, ..Settings::default() }, Some(TEMPLATE));
    let response = none.post("/v1/responses", json!({"input": "say:hi", "store": true})).json();
    assert_eq!(response["store"], false);
    let error = none.get(&format!("/v1/responses/{}", response["id"].as_str().unwrap())).error(404);
    assert!(error["message"].to_string().contains("--response-store 0"), "{error}");
    none.post("/v1/responses", json!({"input": "x", "background": true})).error(400);
}

#[test]
fn what_cannot_be_is_refused() {
    let server = start();
    let error = |more: Value| {
        let mut body = json!({"input": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        server.post("/v1/responses", body).error(400)["param"].clone()
    };
    assert_eq!(error(json!({"previous_response_id": "resp_1"})), "previous_response_id");
    assert_eq!(error(json!({"conversation": "conv_1"})), "conversation");
    assert_eq!(error(json!({"background": true, "store": false})), "background");
    assert_eq!(error(json!({"background": true, "stream": true})), "stream");
    assert_eq!(error(json!({"tools": [{"type": "web_search"}]})), "tools[0].type");
    let named = json!({"type": "function", "name": "f"});
    assert_eq!(error(json!({"tools": [named, {"type": "function"}]})), "tools[1].name");
    assert_eq!(error(json!({"include": ["reasoning.encrypted_content"]})), "include");
    assert_eq!(error(json!({"input": [{"type": "web_search_call", "id": "x"}]})), "input[0].type");
    assert_eq!(error(json!({"input": [{"role": "user"}]})), "input");
    assert_eq!(server.get("/v1/responses/resp_1").status, 404);
    let events = server.post("/v1/responses", json!({"input": "FAIL", "stream": true})).events();
    assert_eq!(events.last().unwrap().0.as_deref(), Some("error"));
}

#[test]
fn a_response_without_room_is_not_stored_and_the_others_stay() {
    let server = start_with(Settings { response_store: 4000, ..Settings::default() }, Some(TEMPLATE));
    let small = server.post("/v1/responses", json!({"input": "say:hi"})).json();
    assert_eq!(small["store"], true);
    let status = |response: &Value| server.get(&format!("/v1/responses/{}", response["id"].as_str().unwrap())).status;
    let input = format!("{} say:hi", "x".repeat(3500));
    let large = server.post("/v1/responses", json!({"input": input})).json();
    assert_eq!((&large["status"], &large["store"]), (&json!("completed"), &json!(false)));
    assert_eq!((status(&large), status(&small)), (404, 200));
    let events = server.post("/v1/responses", json!({"input": input, "stream": true})).events();
    assert_eq!(events.last().unwrap().1["response"]["store"], false);
    let error = server.post("/v1/responses", json!({"input": input, "background": true})).error(400);
    assert!(error["message"].to_string().contains("the server stores 4000 bytes"), "{error}");
    assert_eq!(status(&small), 200);
}

#[test]
fn responses_in_the_background_are_bounded() {
    let begin = |server: &Running, input: &str, previous: &Value| {
        let body = json!({"input": input, "background": true, "previous_response_id": previous});
        server.post("/v1/responses", body)
    };
    let refused = |answer: &HttpResponse, says: &str| {
        let error = answer.error(429);
        assert_eq!((&error["code"], &error["param"]), (&json!("rate_limit_exceeded"), &json!("background")));
        assert!(error["message"].to_string().contains(says), "{error}");
        assert!(answer.headers.contains("retry-after: 1"), "{}", answer.headers);
    };
    let id = |answer: &HttpResponse| {
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["id"].as_str().unwrap().to_owned()
    };
    // The engine lets 8 wait, of which half may be in the background.
    let server = start();
    let ids: Vec<String> = (0..4).map(|_| id(&begin(&server, "SLOW", &Value::Null))).collect();
    refused(&begin(&server, "SLOW", &Value::Null), "4 responses");
    assert_eq!(server.post("/v1/responses", json!({"input": "say:hi"})).json()["status"], "completed");
    server.post(&format!("/v1/responses/{}/cancel", ids[0]), json!({}));
    server.request("DELETE", &format!("/v1/responses/{}", ids[1]), "", b"");
    for _ in 0..2 {
        id(&begin(&server, "SLOW", &Value::Null));
    }
    refused(&begin(&server, "SLOW", &Value::Null), "4 responses");
    // Small requests that continue a large one hold all of its input.
    let server = start_with(Settings { response_store: 8000, ..Settings::default() }, Some(TEMPLATE));
    let large = server.post("/v1/responses", json!({"input": "x".repeat(2000), "max_output_tokens": 1})).json();
    let first = id(&begin(&server, "SLOW", &large["id"]));
    refused(&begin(&server, &"y".repeat(1500), &large["id"]), "of the 8000 bytes");
    assert_eq!(server.get(&format!("/v1/responses/{}", large["id"].as_str().unwrap())).status, 200);
    server.post(&format!("/v1/responses/{first}/cancel"), json!({}));
    id(&begin(&server, &"y".repeat(1500), &large["id"]));
}

#[test]
fn items_keep_what_is_read() {
    let server = start();
    let junk = "x".repeat(100_000);
    let input = json!([
        {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": junk}], "encrypted_content": junk},
        {"role": "user", "more": junk, "content": [
            {"type": "input_text", "text": "go", "refusal": junk, "more": junk},
            {"type": "refusal", "refusal": "no", "text": junk}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Hm", "annotations": [junk], "logprobs": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "more": junk},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "say:done", "more": junk}]}
    ]);
    let response = server.post("/v1/responses", json!({"input": input})).json();
    assert_eq!(response["output"][0]["content"][0]["text"], "done");
    let path = format!("/v1/responses/{}/input_items?order=asc", response["id"].as_str().unwrap());
    let mut items = server.get(&path).json()["data"].take();
    for index in [0, 2, 3] {
        assert!(items[index].as_object_mut().unwrap().shift_remove("id").is_some_and(|id| id.is_string()));
    }
    let kept = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "go"}, {"type": "refusal", "refusal": "no"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "Hm", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "say:done"}]}
    ]);
    assert_eq!(items, kept);
    for (field, item) in [
        ("input[1]", json!("say:hi")),
        ("input[1].type", json!({"type": [junk], "role": "user", "content": "x"})),
        ("input[1].id", json!({"id": junk, "role": "user", "content": "x"})),
        ("input[1].call_id", json!({"type": "function_call_output", "call_id": junk, "output": "x"})),
        ("input[1].status", json!({"status": junk, "role": "user", "content": "x"})),
    ] {
        let body = json!({"input": [{"type": "reasoning", "summary": []}, item]});
        assert_eq!(server.post("/v1/responses", body).error(400)["param"], field);
    }
}
