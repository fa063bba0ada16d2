//! Tests of the forms in which families of models write calls, from the request to the answer.

use crate::client::{Running, start_tokenizing, start_with};
use crate::engine::{tokenizer, tokenizer_of};
use ringspan_http::Settings;
use serde_json::{Value, json};

/// What all templates of these tests write.
const MESSAGES: &str = "{% for m in messages %}<|user|>{{ m.content }}\n{% endfor %}<|assistant|>";

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "parameters":
        {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}])
}

/// A server whose template has these marks.
fn with_marks(marks: &str) -> Running {
    start_with(Settings::default(), Some(&format!("{{% if tools %}}{marks}\n{{% endif %}}{MESSAGES}")))
}

/// The content, the name and the arguments of the call, and why the text ended: of the answer as a whole and as a stream.
fn answers(server: &Running, said: &str) -> [(String, String, String, String); 2] {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let body = server.chat(said, json!({"tools": weather()})).json();
    let choice = &body["choices"][0];
    let call = &choice["message"]["tool_calls"][0]["function"];
    let whole = (
        text(&choice["message"]["content"]),
        text(&call["name"]),
        text(&call["arguments"]),
        text(&choice["finish_reason"]),
    );
    let mut streamed = (String::new(), String::new(), String::new(), String::new());
    for chunk in server.chat(said, json!({"tools": weather(), "stream": true})).chunks() {
        let choice = &chunk["choices"][0];
        let call = &choice["delta"]["tool_calls"][0]["function"];
        streamed.0 += &text(&choice["delta"]["content"]);
        streamed.1 += &text(&call["name"]);
        streamed.2 += &text(&call["arguments"]);
        streamed.3 += &text(&choice["finish_reason"]);
    }
    [whole, streamed]
}

#[test]
fn each_family_calls_in_its_own_form() {
    for (marks, said) in [
        (
            "<｜tool▁call▁begin｜>",
            "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"place\":\"12\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ),
        (
            "<tool_call><arg_key>",
            "Well.<tool_call>weather<arg_key>place</arg_key><arg_value>12</arg_value></tool_call>",
        ),
        (
            "<tool_call><function=",
            "Well.<tool_call><function=weather><parameter=place>12</parameter></function></tool_call>",
        ),
        (
            "<|channel|><|message|>",
            "<|channel|>commentary<|message|>Well.<|start|>assistant<|channel|>commentary to=functions.weather \
             <|constrain|>json<|message|>{\"place\":\"12\"}",
        ),
        (
            "<|start_of_role|><|tool_call|>",
            "Well.<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"place\": \"12\"}}]",
        ),
        (
            "<|tool|><|/tool|>",
            "Well.<|tool_call|>[{\"name\": \"weather\", \"arguments\": {\"place\": \"12\"}}]<|/tool_call|>",
        ),
    ] {
        let call = ("Well.".into(), "weather".into(), "{\"place\":\"12\"}".into(), "tool_calls".into());
        assert_eq!(answers(&with_marks(marks), &format!("say:{said}")), [call.clone(), call], "{marks}");
    }
}

#[test]
fn what_begins_like_a_call_may_be_a_text() {
    for (marks, said) in [
        ("<｜tool▁call▁begin｜>", "a <｜tool▁call▁begin｜> b"),
        ("<tool_call><arg_key>", "a <tool_call>no call</tool_call> b"),
        ("<|start_of_role|><|tool_call|>", "a <|tool_call|> b"),
        ("[gMASK] metadata", "weather or not"),
    ] {
        let text = (said.to_owned(), String::new(), String::new(), "stop".to_owned());
        assert_eq!(answers(&with_marks(marks), &format!("say:{said}")), [text.clone(), text], "{marks}");
    }
}

/// A server of gpt-oss's form, whose marks are special tokens of the tokenizer.
fn harmony() -> Running {
    let marks =
        [(259, "<|channel|>"), (260, "<|message|>"), (261, "<|start|>"), (262, "<|constrain|>"), (263, "<|call|>")];
    let template = format!("{{% if tools %}}tools\n{{% endif %}}{{# <|channel|>analysis<|message|> #}}{MESSAGES}");
    start_tokenizing(Settings::default(), Some(&template), tokenizer_of(&marks, Value::Null))
}

const THOUGHT: &str =
    "say:<|channel|>analysis<|message|>A greeting.<|start|>assistant<|channel|>final<|message|>Hello!";

#[test]
fn reasoning_is_no_content() {
    let server = harmony();
    let message = server.chat(THOUGHT, json!({})).json()["choices"][0]["message"].clone();
    assert_eq!((&message["content"], &message["reasoning_content"]), (&json!("Hello!"), &json!("A greeting.")));
    let chunks = server.chat(THOUGHT, json!({"stream": true})).chunks();
    let joined = |field: &str| -> String {
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("content"), joined("reasoning_content")), ("Hello!".into(), "A greeting.".into()));
    // Who wants the text as the model wrote it may have it.
    let raw = server.chat(THOUGHT, json!({"skip_special_tokens": false})).json();
    assert_eq!(raw["choices"][0]["message"]["content"], THOUGHT["say:".len()..]);

    let body = server.post(
        "/v1/messages",
        json!({"model": "test", "max_tokens": 500,
        "messages": [{"role": "user", "content": THOUGHT}]}),
    );
    assert_eq!(body.json()["content"], json!([{"type": "text", "text": "Hello!"}]));
}

#[test]
fn the_end_of_a_call_ends_the_text() {
    let call = "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{\"place\":\"12\"}";
    let expected = (String::new(), "weather".into(), "{\"place\":\"12\"}".into(), "tool_calls".into());
    let said = format!("say:{call}<|call|><|start|>assistant<|channel|>final<|message|>And so on.");
    assert_eq!(answers(&harmony(), &said), [expected.clone(), expected]);
}

#[test]
fn a_response_has_reasoning_as_an_item_of_its_own() {
    let server = harmony();
    let whole = server.post("/v1/responses", json!({"model": "test", "input": THOUGHT})).json();
    let (output, usage) = (&whole["output"], &whole["usage"]);
    let thought = usage["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    // The engine of the test says a byte a token.
    assert!((11..usage["output_tokens"].as_u64().unwrap() - 6).contains(&thought), "{usage}");
    assert_eq!(
        (&output[0]["type"], &output[1]["type"], &output[2]),
        (&json!("reasoning"), &json!("message"), &Value::Null)
    );
    assert_eq!(output[0]["content"], json!([{"type": "reasoning_text", "text": "A greeting."}]));
    assert_eq!(output[1]["content"][0]["text"], "Hello!");
    let events = server.post("/v1/responses", json!({"model": "test", "input": THOUGHT, "stream": true})).events();
    let thought: String = events
        .iter()
        .filter(|(name, _)| name.as_deref() == Some("response.reasoning_text.delta"))
        .filter_map(|(_, event)| event["delta"].as_str())
        .collect();
    assert_eq!(thought, "A greeting.");
    let items: Vec<(&Value, &Value)> = events
        .iter()
        .filter(|(name, _)| name.as_deref() == Some("response.output_item.done"))
        .map(|(_, event)| (&event["output_index"], &event["item"]["type"]))
        .collect();
    assert_eq!(items, [(&json!(0), &json!("reasoning")), (&json!(1), &json!("message"))]);
}

#[test]
fn calls_are_made_by_grammar_in_every_form() {
    // The test's engine likes white space, so that it would fill a text of any length.
    let tools = json!([{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
        "properties": {"place": {"enum": ["Ulm"]}}, "required": ["place"], "additionalProperties": false}}}]);
    for server in [harmony(), with_marks("<tool_call><arg_key>")] {
        let asked = json!({"tools": tools, "tool_choice": "required", "max_tokens": 500, "parallel_tool_calls": false});
        let body = server.chat("say:I will not.", asked).json();
        let call = &body["choices"][0]["message"]["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        assert_eq!((&call["name"], arguments), (&json!("weather"), json!({"place": "Ulm"})), "{body}");
    }
}

#[test]
fn templates_that_join_arguments_to_texts_get_them_as_texts() {
    let template = "{% if tools %}<｜tool▁call▁begin｜>\n{% endif %}{% for m in messages %}{% if m.content is none %}\
        {{ 'called ' + m.tool_calls[0].function.arguments + '\n' }}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}";
    let server = start_tokenizing(Settings::default(), Some(template), tokenizer());
    let messages = json!([{"role": "user", "content": "weather?"},
        {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function":
            {"name": "weather", "arguments": "{\"place\": \"say:Ulm\"}"}}]}]);
    let body = server.post("/v1/chat/completions", json!({"model": "test", "messages": messages, "tools": weather()}));
    assert_eq!(body.json()["choices"][0]["message"]["content"], "Ulm\"}", "{}", body.body);
}
