//! Tests of the token that begins texts: the tokenizer's post-processor puts it before texts that are sent as they are, and before
//! conversations only their template does.

use crate::client::{Running, TEMPLATE, start_tokenizing};
use crate::engine::tokenizer_of;
use ringspan_http::Settings;
use serde_json::{Value, json};

/// The token that begins texts.
const BEGIN: u32 = 259;

/// A server whose tokenizer has a token that its post-processor puts before texts.
fn start(template: &str) -> Running {
    let begin = "<|begin|>";
    let token = json!({"SpecialToken": {"id": begin, "type_id": 0}});
    let text = |sequence: &str| json!({"Sequence": {"id": sequence, "type_id": 0}});
    let processor = json!({"type": "TemplateProcessing", "single": [token, text("A")],
        "pair": [token, text("A"), text("B")], "special_tokens": {begin: {"id": begin, "ids": [BEGIN], "tokens": [begin]}}});
    start_tokenizing(Settings::default(), Some(template), tokenizer_of(&[(BEGIN, begin)], processor))
}

/// The tokens of the first prompt that the model has read.
fn prompt_of(server: &Running, path: &str, mut body: Value) -> Vec<u64> {
    body["return_token_ids"] = json!(true);
    body["max_tokens"] = json!(1);
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = answer.json();
    let tokens = answer["choices"][0].get("prompt_token_ids").or_else(|| answer.get("prompt_token_ids"));
    tokens.and_then(Value::as_array).expect("the tokens").iter().filter_map(Value::as_u64).collect()
}

/// How often a prompt has the token that begins texts.
fn begins(prompt: &[u64]) -> usize {
    prompt.iter().filter(|token| **token == u64::from(BEGIN)).count()
}

#[test]
fn texts_get_the_token_that_begins_them_and_conversations_do_not() {
    let server = start(TEMPLATE);
    let of_text = |body: Value| prompt_of(&server, "/v1/completions", body);
    assert_eq!(of_text(json!({"prompt": "ab"})), [u64::from(BEGIN), 97, 98]);
    assert_eq!(of_text(json!({"prompt": ["ab"]})), [u64::from(BEGIN), 97, 98]);
    assert_eq!(of_text(json!({"prompt": "ab", "add_special_tokens": false})), [97, 98]);
    assert_eq!(of_text(json!({"prompt": "<|begin|>ab"})), [u64::from(BEGIN), 97, 98], "a text may spell it itself");
    assert_eq!(of_text(json!({"prompt": [97, 98]})), [97, 98], "tokens are read as they are");
    let stream = json!({"prompt": "say:abc", "return_token_ids": true, "max_tokens": 3, "n": 2, "stream": true});
    let chunks = server.post("/v1/completions", stream).events();
    let choices = chunks.iter().map(|(_, chunk)| &chunk["choices"][0]).filter(|choice| choice.is_object());
    let with_prompt: Vec<&Value> = choices.filter(|choice| choice.get("prompt_token_ids").is_some()).collect();
    assert_eq!(with_prompt.len(), 2, "once for each choice");
    assert_ne!(with_prompt[0]["index"], with_prompt[1]["index"]);
    let messages = json!([{"role": "user", "content": "ab"}]);
    let chat = prompt_of(&server, "/v1/chat/completions", json!({"messages": messages}));
    assert_eq!((begins(&chat), chat[0]), (0, 257), "the template begins with its own token: {chat:?}");
}

#[test]
fn a_template_that_writes_the_token_itself_has_it_once() {
    let server = start(&format!("<|begin|>{TEMPLATE}"));
    let messages = json!([{"role": "user", "content": "ab"}]);
    let chat = prompt_of(&server, "/v1/chat/completions", json!({"messages": messages}));
    assert_eq!((begins(&chat), chat[0]), (1, u64::from(BEGIN)), "{chat:?}");
    let (input, max) = (json!({"input": "ab"}), json!({"messages": messages, "max_tokens": 1}));
    let counts = [
        server.post("/v1/responses", input).json()["usage"]["input_tokens"].clone(),
        server.post("/v1/messages", max).json()["usage"]["input_tokens"].clone(),
        server.post("/v1/messages/count_tokens", json!({"messages": messages})).json()["input_tokens"].clone(),
    ];
    // All interfaces read the same conversation as the same tokens; what the first has cached is not counted by Anthropic's.
    assert_eq!(counts[2], json!(chat.len()));
    assert_eq!(counts[0], counts[2]);
    assert!(counts[1].as_u64() <= counts[2].as_u64(), "{counts:?}");
}

#[test]
fn tokens_are_counted_and_embedded_with_the_token_that_begins_texts() {
    let server = start(TEMPLATE);
    let tokenize = |body: Value| server.post("/tokenize", body).json()["tokens"].clone();
    assert_eq!(tokenize(json!({"prompt": "a"})), json!([BEGIN, 97]));
    assert_eq!(tokenize(json!({"prompt": "a", "add_special_tokens": false})), json!([97]));
    let messages = json!([{"role": "user", "content": "a"}]);
    assert_eq!(tokenize(json!({"messages": messages}))[0], 257);
    assert_eq!(tokenize(json!({"messages": messages, "add_special_tokens": true}))[0], BEGIN);
    let tokens = |body: Value| server.post("/v1/embeddings", body).json()["usage"]["prompt_tokens"].clone();
    assert_eq!(tokens(json!({"input": "a"})), 2);
    assert_eq!(tokens(json!({"input": "a", "add_special_tokens": false})), 1);
}
