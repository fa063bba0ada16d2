//! Tests of text completions, embeddings, and tokenization.

use crate::client::start;
use serde_json::{Value, json};

#[test]
fn prompts_are_texts_or_tokens_one_or_several() {
    let server = start();
    let texts = |prompt: Value| {
        let answer = server.complete(prompt, json!({}));
        assert_eq!(answer.status, 200, "{}", answer.body);
        let choices = answer.json()["choices"].as_array().unwrap().clone();
        choices.iter().map(|choice| choice["text"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let tokens = |text: &str| Value::from(text.bytes().map(u32::from).collect::<Vec<_>>());
    assert_eq!(texts(json!("say:a")), ["a"]);
    assert_eq!(texts(json!(["say:a", "say:b"])), ["a", "b"]);
    assert_eq!(texts(tokens("say:a")), ["a"]);
    assert_eq!(texts(json!([tokens("say:a"), tokens("say:b")])), ["a", "b"]);
    let body = server.complete(json!(["say:a", "say:b"]), json!({"n": 2})).json();
    assert_eq!(body["choices"].as_array().unwrap().len(), 4);
    assert_eq!(body["choices"][3]["text"], "b");
    assert_eq!((&body["usage"]["prompt_tokens"], &body["usage"]["completion_tokens"]), (&json!(10), &json!(8)));
    for wrong in [json!([]), json!({}), json!(3), json!([1.5]), json!(["a", 1]), json!(""), json!([]), json!([[]])] {
        assert_eq!(server.complete(wrong.clone(), json!({})).status, 400, "{wrong}");
    }
    let error = server.complete(json!([1, 264]), json!({})).error(400);
    assert!(error["message"].as_str().unwrap().contains("264"), "{error}");
}

/// The fields of a response that lm-eval reads.
#[test]
fn echo_with_log_probabilities_scores_the_prompt() {
    let server = start();
    let prompt: Vec<u32> = "abca".bytes().map(u32::from).collect();
    let body = server
        .complete(json!([prompt]), json!({"echo": true, "logprobs": 1, "max_tokens": 0, "temperature": 0}))
        .json();
    let choice = &body["choices"][0];
    assert_eq!(choice["text"], "abca");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["a", "b", "c", "a"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 2, 3]));
    assert!(logprobs["token_logprobs"][0].is_null() && logprobs["top_logprobs"][0].is_null());
    for at in 1..4 {
        let own = logprobs["token_logprobs"][at].as_f64().unwrap();
        let top = logprobs["top_logprobs"][at].as_object().unwrap();
        // The test's engine prefers to repeat the last token; the token of the prompt is reported in addition.
        assert!(own < -1.0 && top.len() == 2 && top.values().any(|value| value.as_f64() == Some(own)), "{logprobs}");
    }
    let more = server.complete("say:xy", json!({"echo": true, "logprobs": 0, "max_tokens": 5})).json();
    let choice = &more["choices"][0];
    assert_eq!(choice["text"], "say:xyxy");
    assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), 8);
    assert_eq!(choice["logprobs"]["text_offset"][7], 7);
    let plain = server.complete("say:xy", json!({"echo": true})).json();
    assert_eq!(plain["choices"][0]["text"], "say:xyxy");
    // Special tokens have their place in the text where it shows them: in a text as it was sent, and in decoded tokens if asked for.
    let offsets = |prompt: Value, more: Value| {
        let mut asked = json!({"echo": true, "logprobs": 0, "max_tokens": 0});
        asked.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        let choice = server.complete(prompt, asked).json()["choices"][0].clone();
        (choice["text"].clone(), choice["logprobs"]["text_offset"].clone())
    };
    let tokens =
        server.post("/tokenize", json!({"prompt": "a<|user|>b", "add_special_tokens": false})).json()["tokens"].clone();
    assert_eq!(tokens.as_array().unwrap().len(), 3);
    assert_eq!(offsets(json!("a<|user|>b"), json!({})), (json!("a<|user|>b"), json!([0, 1, 9])));
    assert_eq!(
        offsets(json!([tokens]), json!({"skip_special_tokens": false})),
        (json!("a<|user|>b"), json!([0, 1, 9]))
    );
    assert_eq!(offsets(json!([tokens]), json!({})), (json!("ab"), json!([0, 1, 1])));
}

#[test]
fn a_stream_ends_with_a_reason_and_usage() {
    let server = start();
    let asked = json!({"stream": true, "stream_options": {"include_usage": true}, "logprobs": 0, "echo": true});
    let chunks = server.complete("say:é!", asked).chunks();
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, "say:é!é!");
    let tokens: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(Value::from(tokens), json!([0, 1, 2, 3, 4, 4, 5, 6, 6, 7]));
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 4);
}

#[test]
fn the_usage_of_each_text_so_far_may_be_in_each_chunk() {
    let server = start();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let asked = json!({"prompt": ["say:é!", "say:ab"], "stream": true, "stream_options": options});
    let chunks = server.complete("", asked).chunks();
    let mut prompts = 0;
    for index in 0..2 {
        let of_text: Vec<&Value> = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index).collect();
        let counts: Vec<u64> =
            of_text.iter().map(|chunk| chunk["usage"]["completion_tokens"].as_u64().unwrap()).collect();
        assert_eq!(counts, [vec![2, 3, 4], vec![1, 2, 3]][index], "characters, end");
        prompts += of_text[0]["usage"]["prompt_tokens"].as_u64().unwrap();
    }
    let usage = &chunks.last().unwrap()["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(prompts), &json!(7)));
}

#[test]
fn what_has_no_meaning_here_is_refused_by_name() {
    let server = start();
    for (name, value) in [
        ("suffix", json!("x")),
        ("best_of", json!(2)),
        ("use_beam_search", json!(true)),
        ("logprobs", json!(21)),
        ("max_tokens", json!(-1)),
        ("temprature", json!(1)),
        ("stream_options", json!({"include_usage": true})),
        ("prompt_logprobs", json!(-1)),
        ("min_tokens", json!(17)),
        ("priority", json!(1)),
    ] {
        let error = server.complete("x", json!({name: value})).error(400);
        assert_eq!(error["param"], name, "{error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let fine =
        json!({"best_of": 1, "suffix": null, "user": "me", "priority": 0, "use_beam_search": false, "max_tokens": 1});
    assert_eq!(server.complete("x", fine).status, 200);
}

#[test]
fn a_text_longer_than_the_model_reads_is_refused_with_the_numbers() {
    let server = start();
    let error = server.complete("x".repeat(4090), json!({"max_tokens": 7})).error(400);
    assert_eq!(error["code"], "context_length_exceeded");
    for number in ["4090", "7", "4096"] {
        assert!(error["message"].as_str().unwrap().contains(number), "{error}");
    }
    assert_eq!(server.complete("x".repeat(4090), json!({"max_tokens": 6})).status, 200);
}

#[test]
fn embeddings_have_length_one_and_come_as_numbers_or_base64() {
    let server = start();
    let embed = |body: Value| server.post("/v1/embeddings", body).json();
    let body = embed(json!({"model": "test", "input": ["a", "ab"]}));
    assert_eq!((&body["object"], &body["usage"]["prompt_tokens"]), (&json!("list"), &json!(3)));
    assert_eq!(body["data"][0]["embedding"], json!([0.0, 1.0, 0.0, 0.0]));
    let half = std::f32::consts::FRAC_1_SQRT_2;
    assert_eq!(body["data"][1]["embedding"], json!([0.0, half, half, 0.0]));
    let last = embed(json!({"input": "ab", "pooling": "last", "dimensions": 3}));
    assert_eq!(last["data"][0]["embedding"], json!([0.0, 0.0, 1.0]));
    let coded = embed(json!({"input": [97], "encoding_format": "base64"}));
    assert_eq!(coded["data"][0]["embedding"], "AAAAAAAAgD8AAAAAAAAAAA==");
    for (name, value) in [
        ("dimensions", json!(5)),
        ("encoding_format", json!("int8")),
        ("pooling", json!("max")),
        ("priority", json!(-1)),
    ] {
        let error = server.post("/v1/embeddings", json!({"input": "a", name: value})).error(400);
        assert_eq!(error["param"], name);
    }
}

#[test]
fn inputs_longer_than_the_model_reads_are_refused_by_name() {
    let server = start();
    let long = "x".repeat(4097);
    for (input, field) in [(json!(long), "input"), (json!(["a", long]), "input[1]")] {
        let error = server.post("/v1/embeddings", json!({"input": input})).error(400);
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(field)));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("4097") && message.contains("4096"), "{message}");
    }
    assert_eq!(server.post("/v1/embeddings", json!({"input": "x".repeat(4096)})).status, 200);
}

#[test]
fn texts_become_tokens_and_back() {
    let server = start();
    let body = server.post("/tokenize", json!({"prompt": "aé", "return_token_strs": true})).json();
    assert_eq!(
        (&body["tokens"], &body["count"], &body["max_model_len"]),
        (&json!([97, 195, 169]), &json!(3), &json!(4096))
    );
    assert_eq!(body["token_strs"][0], "a");
    let chat = server.post("/tokenize", json!({"messages": [{"role": "user", "content": "x"}]})).json();
    assert_eq!((&chat["tokens"][0], &chat["tokens"][8]), (&json!(257), &json!(258)));
    let without = json!({"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": false});
    assert_eq!(server.post("/tokenize", without).json()["count"], 8);
    assert_eq!(server.post("/detokenize", json!({"tokens": [97, 195, 169, 256]})).json()["prompt"], "aé<|end|>");
    server.post("/detokenize", json!({"tokens": [999]})).error(400);
    server.post("/tokenize", json!({})).error(400);
}
