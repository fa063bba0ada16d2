//! Tests of `cache_salt`: it reaches the engine from every route, and must be usable.

use crate::client::{Running, start};
use serde_json::{Value, json};

/// Tokens of the prompt that were cached, by the answer of a route.
fn cached(server: &Running, path: &str, mut body: Value, salt: &Value) -> u64 {
    body["cache_salt"] = salt.clone();
    let answer = server.post(path, body);
    assert_eq!(answer.status, 200, "{path}: {}", answer.body);
    let usage = answer.json()["usage"].clone();
    let places =
        ["/prompt_tokens_details/cached_tokens", "/input_tokens_details/cached_tokens", "/cache_read_input_tokens"];
    places.iter().find_map(|place| usage.pointer(place)).and_then(Value::as_u64).expect("cached tokens")
}

#[test]
fn each_route_keeps_the_caches_of_salts_apart() {
    let messages = json!([{"role": "user", "content": "say:x"}]);
    for (path, body) in [
        ("/v1/completions", json!({"prompt": "say:x"})),
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/responses", json!({"input": "say:x"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 4})),
    ] {
        let server = start();
        for salt in [json!(null), json!("one"), json!("two")] {
            assert_eq!(cached(&server, path, body.clone(), &salt), 0, "{path} with {salt}");
            assert!(cached(&server, path, body.clone(), &salt) > 0, "{path} with {salt} again");
        }
    }
}

#[test]
fn salts_are_strings_of_limited_size() {
    let server = start();
    for wrong in [json!(""), json!("x".repeat(1025)), json!(7)] {
        let error = server.complete("say:x", json!({"cache_salt": wrong})).error(400);
        assert_eq!(error["param"], "cache_salt");
    }
    assert_eq!(server.complete("say:x", json!({"cache_salt": "x".repeat(1024)})).status, 200);
    assert_eq!(server.post("/v1/embeddings", json!({"input": "x", "cache_salt": "one"})).status, 200);
}
