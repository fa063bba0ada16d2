//! Tests of chat completions.

use crate::client::{start, start_with};
use ringspan_http::Settings;
use serde_json::{Map, Value, json};

#[test]
fn an_answer_has_openais_fields() {
    let server = start();
    let answer = server.chat("say:Grüße 😀", json!({}));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("test")));
    let choice = &body["choices"][0];
    assert_eq!(choice["message"], json!({"role": "assistant", "content": "Grüße 😀", "refusal": null}));
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    // <|user|>user: say:…<|assistant|>: two special tokens and the bytes of the rest.
    let prompt = 2 + "user: say:Grüße 😀".len();
    let completion = "Grüße 😀".len() + 1;
    assert_eq!(body["usage"]["prompt_tokens"], prompt);
    assert_eq!(body["usage"]["completion_tokens"], completion);
    assert_eq!(body["usage"]["total_tokens"], prompt + completion);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = server.chat("say:Grüße 😀", json!({})).json();
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], prompt - 1);
}

#[test]
fn a_stream_is_a_role_then_whole_characters_then_a_reason_then_usage() {
    let server = start();
    let answer = server.chat("say:é😀x", json!({"stream": true, "stream_options": {"include_usage": true}}));
    assert!(answer.headers.contains("content-type: text/event-stream"), "{}", answer.headers);
    let chunks = answer.chunks();
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"]));
    let delta = |chunk: &Value| chunk["choices"][0]["delta"].clone();
    assert_eq!(delta(&chunks[0]), json!({"role": "assistant", "content": ""}));
    let said: Vec<Value> = chunks[1..4].iter().map(delta).collect();
    assert_eq!(said, [json!({"content": "é"}), json!({"content": "😀"}), json!({"content": "x"})]);
    let last = chunks.iter().filter(|chunk| chunk["choices"][0]["finish_reason"] == "stop").count();
    assert_eq!(last, 1);
    let usage = chunks.last().unwrap();
    assert_eq!((&usage["choices"], &usage["usage"]["completion_tokens"]), (&json!([]), &json!(8)));
    assert!(chunks[0]["usage"].is_null() && chunks[0].as_object().unwrap().contains_key("usage"));
    let without = server.chat("say:x", json!({"stream": true})).chunks();
    assert!(without.iter().all(|chunk| chunk.get("usage").is_none()));
}

#[test]
fn the_usage_of_each_choice_so_far_may_be_in_each_chunk() {
    let server = start();
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let chunks = server.chat("say:é😀x", json!({"stream": true, "n": 2, "stream_options": options})).chunks();
    let prompt = chunks.last().unwrap()["usage"]["prompt_tokens"].clone();
    for index in 0..2 {
        let of_choice = chunks.iter().filter(|chunk| chunk["choices"][0]["index"] == index);
        let usage: Vec<&Value> = of_choice.map(|chunk| &chunk["usage"]).collect();
        assert!(usage.iter().all(|usage| usage["prompt_tokens"] == prompt), "{usage:?}");
        assert!(usage.iter().all(|usage| usage.get("prompt_tokens_details").is_none()), "known at the end only");
        let counts: Vec<&Value> = usage.iter().map(|usage| &usage["completion_tokens"]).collect();
        assert_eq!(counts, [0, 2, 6, 7, 8], "role, three characters, end");
    }
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 16);
    let alone = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    let error = server.chat("x", alone).error(400);
    assert!(error["message"].as_str().unwrap().contains("include_usage"), "{error}");
}

#[test]
fn stop_strings_end_texts_across_tokens_and_are_left_out() {
    let server = start();
    for stream in [false, true] {
        let answer =
            server.chat("say:one END two", json!({"stop": ["ZZ", " END"], "stream": stream, "logprobs": true}));
        let (content, reason, tokens) = match stream {
            false => {
                let choice = answer.json()["choices"][0].clone();
                let tokens = choice["logprobs"]["content"].as_array().unwrap().len();
                (choice["message"]["content"].as_str().unwrap().to_owned(), choice["stop_reason"].clone(), tokens)
            }
            true => {
                let chunks = answer.chunks();
                let text = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str());
                let tokens = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array());
                let reason = chunks.iter().find_map(|chunk| chunk["choices"][0].get("stop_reason").cloned());
                (text.collect(), reason.unwrap(), tokens.map(Vec::len).sum())
            }
        };
        assert_eq!((content.as_str(), reason, tokens), ("one", json!(" END"), 3), "stream: {stream}");
    }
    let usage = server.chat("say:one END two", json!({"stop": " END"})).json()["usage"].clone();
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], prompt - 1, "what was cached is known before the end");
}

#[test]
fn texts_end_by_length_by_tokens_or_by_neither() {
    let server = start();
    let reason = |body: Value| {
        let body = server.chat("say:abcdef", body).json();
        let choice = &body["choices"][0];
        (
            choice["message"]["content"].as_str().unwrap().to_owned(),
            choice["finish_reason"].as_str().unwrap().to_owned(),
        )
    };
    assert_eq!(reason(json!({"max_tokens": 2})), ("ab".into(), "length".into()));
    assert_eq!(reason(json!({"max_completion_tokens": 3, "max_tokens": 2})), ("abc".into(), "length".into()));
    assert_eq!(reason(json!({"stop_token_ids": [u32::from(b'd')]})), ("abc".into(), "stop".into()));
    let ignored = reason(json!({"ignore_eos": true, "max_tokens": 8, "skip_special_tokens": false}));
    assert_eq!(ignored, ("abcdef<|end|><|end|>".into(), "length".into()));
    let forced = reason(json!({"min_tokens": 8, "max_tokens": 8}));
    assert_eq!(forced.0.len(), 8);
}

#[test]
fn log_probabilities_have_bytes_and_alternatives() {
    let server = start();
    let body = server.chat("say:é", json!({"logprobs": true, "top_logprobs": 2})).json();
    let content = body["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    assert_eq!(content.len(), 2);
    assert_eq!(content[0]["bytes"], json!([0xc3]));
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert_eq!(content[0]["top_logprobs"][0]["logprob"], content[0]["logprob"]);
    let own = content[0]["logprob"].as_f64().unwrap();
    assert!(own < 0.0 && own > -0.1, "{own}");
    let error = server.chat("x", json!({"top_logprobs": 2})).error(400);
    assert_eq!(error["param"], "top_logprobs");
}

#[test]
fn several_answers_are_several_choices() {
    let server = start();
    let body = server.chat("say:hi", json!({"n": 3, "seed": 1})).json();
    let choices = body["choices"].as_array().unwrap();
    assert_eq!(choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(choices.iter().all(|choice| choice["message"]["content"] == "hi"));
    assert_eq!(body["usage"]["completion_tokens"], 9);
}

#[test]
fn token_ids_are_reported_if_asked_for() {
    let server = start();
    let body = server.chat("say:hi", json!({"return_token_ids": true, "prompt_logprobs": 1})).json();
    assert_eq!(body["choices"][0]["token_ids"], json!([104, 105]));
    assert_eq!(body["prompt_token_ids"][0], 257);
    let prompt = body["prompt_logprobs"].as_array().unwrap();
    assert!(prompt[0].is_null() && prompt[1]["117"]["logprob"].as_f64().unwrap() < 0.0, "{}", prompt[1]);
}

#[test]
fn answers_follow_grammars() {
    let server = start();
    let content = |body: Value| {
        let answer = server.chat("say:zzz", body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    assert_eq!(content(json!({"structured_outputs": {"choice": ["no", "yes"]}})), "no");
    let digits = content(json!({"structured_outputs": {"regex": "[0-9]{3}"}}));
    assert!(digits.len() == 3 && digits.chars().all(|c| c.is_ascii_digit()), "{digits}");
    let lark = content(json!({"structured_outputs": {"grammar": "start: \"(\" /[ab]/ \")\""}}));
    assert_eq!(lark, "(a)");
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"$ref": "#/$defs/n"}},
        "required": ["ok", "n"], "additionalProperties": false, "$defs": {"n": {"enum": [7, 8]}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    let text = content(json!({"response_format": format}));
    let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert!(value["ok"].is_boolean() && (value["n"] == 7 || value["n"] == 8), "{text}");
}

#[test]
fn impossible_grammars_are_refused() {
    let server = start();
    for structured in [
        json!({"json": {"type": "string", "minLength": 5, "maxLength": 2}}),
        json!({"regex": "["}),
        json!({"grammar": "start: nothing"}),
        json!({"json": {"type": "nonsense"}}),
        json!({}),
        json!({"regex": "a", "choice": ["b"]}),
    ] {
        let answer = server.chat("x", json!({"structured_outputs": structured}));
        assert_eq!(answer.status, 400, "{structured}: {}", answer.body);
    }
    let error = server.chat("x", json!({"response_format": {"type": "json_schema"}})).error(400);
    assert_eq!(error["param"], "response_format.json_schema.schema");
}

/// The grammar library finds some of its limits exceeded only in the middle of a text, where that would be a failure of the server.
#[test]
fn grammars_that_are_too_large_are_refused_by_name() {
    let server = start();
    let properties: Map<String, Value> =
        (0..600).map(|i| (format!("p{i}"), json!({"type": "string", "pattern": "^[a-z]{1,10}$"}))).collect();
    let large = json!({"type": "object", "properties": properties});
    let inner = json!({"type": "object", "properties": {"inner": large}, "required": ["inner"]});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": large}});
    let alternatives: Vec<String> = (0..3000).map(|i| format!("\"option {i}\"")).collect();
    let lark = format!("start: {}", alternatives.join(" | "));
    for (field, limit, asked) in [
        ("response_format.json_schema.schema", "max is 2000", json!({"response_format": format})),
        ("structured_outputs.json", "max is 2000", json!({"structured_outputs": {"json": inner}})),
        ("structured_outputs.grammar", "max is 2000", json!({"structured_outputs": {"grammar": lark}})),
        (
            "structured_outputs.regex",
            "repetitions of repetitions",
            json!({"structured_outputs": {"regex": "(((a{1,100}){1,100}){1,100}){1,100}"}}),
        ),
    ] {
        let message = server.chat("x", asked).error(400)["message"].as_str().unwrap().to_owned();
        assert!(message.contains(field) && message.contains(limit), "{message}");
        assert!(!message.contains("verbose"), "{message}");
    }
}

#[test]
fn choices_may_be_many_and_mean_what_they_say() {
    let server = start();
    let odd = ["\"quoted\" \\n", "a.*|b", "/x/i # no", "\u{7f}é😀\t"];
    let mut choices: Vec<String> = (0..3000).map(|i| format!("option {i}")).collect();
    choices.extend(odd.map(str::to_owned));
    let content = |text: &str, choices: &[String]| {
        let answer = server.chat(&format!("say:{text}"), json!({"structured_outputs": {"choice": choices}}));
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["message"]["content"].as_str().unwrap().to_owned()
    };
    for text in odd.into_iter().chain(["option 17", "option 2999"]) {
        assert_eq!(content(text, &choices), text);
    }
    assert_eq!(content("axb", &choices), "a.*|b", "a choice is no regular expression");
    assert_eq!(content("A", &["a".to_owned()]), "a");
    assert_eq!(content("x", &["\n".to_owned()]), "\n");
}

#[test]
fn options_of_a_schema_leave_white_space_limited() {
    let server = start();
    let schema = json!({"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"],
        "additionalProperties": false, "x-guidance": {"coerce_one_of": true}});
    let choice = server.chat("x", json!({"structured_outputs": {"json": schema}, "max_tokens": 1000})).json();
    // The test's engine likes white space.
    assert_eq!(choice["choices"][0]["finish_reason"], "stop", "{choice}");
}

#[test]
fn what_schemas_cannot_say_is_refused_with_what_they_can() {
    let server = start();
    let ask = |schema: Value| server.chat("x", json!({"structured_outputs": {"json": schema}, "max_tokens": 5}));
    let either = json!([{"type": "string"}, {"type": "string", "minLength": 2}]);
    let message = ask(json!({"oneOf": either})).error(400)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("\"x-guidance\": {\"coerce_one_of\": true}"), "{message}");
    assert_eq!(ask(json!({"oneOf": either, "x-guidance": {"coerce_one_of": true}})).status, 200);
    let message = ask(json!({"type": "array", "uniqueItems": true})).error(400)["message"].as_str().unwrap().to_owned();
    assert!(message.contains("not supported: [\"uniqueItems\"]"), "{message}");
    // Formats that are not known are annotations.
    let secret = json!({"type": "object", "properties": {"format": {"type": "string", "format": "password"}}});
    assert_eq!(ask(secret).status, 200);
}

#[test]
fn fields_that_are_not_supported_are_refused_whatever_their_type() {
    let server = start();
    for (field, value) in [
        ("functions", json!([{}])),
        ("modalities", json!(["audio"])),
        ("bad_words", json!(["x"])),
        ("function_call", json!({"name": "f"})),
    ] {
        let message = server.chat("x", json!({field: value})).error(400)["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(&format!("{field}: is not supported: ")), "{message}");
    }
    let message = server.chat("x", json!({"max_token": 1})).error(400)["message"].as_str().unwrap().to_owned();
    assert!(message.starts_with("max_token: did you mean `max_tokens`? "), "{message}");
}

#[test]
fn messages_of_unknown_forms_are_refused_by_name() {
    let server = start();
    let error = |messages: Value| {
        server.post("/v1/chat/completions", json!({"model": "test", "messages": messages})).error(400)["param"].clone()
    };
    assert_eq!(error(json!([])), "messages");
    assert_eq!(error(json!("hi")), "messages");
    assert_eq!(error(json!([{"role": "robot", "content": "x"}])), "messages[0].role");
    assert_eq!(error(json!([{"role": "user"}])), "messages[0].content");
    let image = json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]);
    assert_eq!(error(image), "messages[0].content[0].type");
    let parts = json!({"model": "test", "messages": [{"role": "developer", "content": "be nice"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "say:hi"}]}]});
    let body = server.post("/v1/chat/completions", parts).json();
    assert_eq!(body["choices"][0]["message"]["content"], "hi");
}

#[test]
fn variables_of_templates_are_set_if_the_template_reads_them() {
    let server = start();
    assert_eq!(
        server.chat("x", json!({"max_tokens": 1, "chat_template_kwargs": {"enable_thinking": false}})).status,
        200
    );
    let error = server.chat("x", json!({"chat_template_kwargs": {"thinking": false}})).error(400);
    assert!(error["message"].as_str().unwrap().contains("`thinking`"), "{error}");
    assert_eq!(error["param"], "chat_template_kwargs");
    let error = server.chat("x", json!({"chat_template_kwargs": {"reasoning_effort": "low"}})).error(400);
    assert_eq!(error["param"], "chat_template_kwargs");
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, field, asked) in [
        ("/v1/chat/completions", "reasoning_effort", json!({"messages": messages, "reasoning_effort": "low"})),
        ("/tokenize", "reasoning_effort", json!({"messages": messages, "reasoning_effort": "low"})),
        ("/v1/responses", "reasoning.effort", json!({"input": "x", "reasoning": {"effort": "low"}})),
    ] {
        let error = server.post(path, asked).error(400);
        assert_eq!(error["param"], field, "{error}");
        assert!(error["message"].as_str().unwrap().contains("`reasoning_effort`"), "{error}");
    }
}

#[test]
fn a_model_without_a_template_has_no_chat() {
    let server = start_with(Settings::default(), None);
    let error = server.chat("x", json!({})).error(400);
    assert!(error["message"].as_str().unwrap().contains("no chat template"), "{error}");
    assert_eq!(server.complete("say:hi", json!({})).json()["choices"][0]["text"], "hi");
}

#[test]
fn what_a_template_raises_is_the_answer() {
    let server = start_with(Settings::default(), Some("{{ raise_exception('roles must alternate') }}"));
    let error = server.chat("x", json!({})).error(400);
    assert!(error["message"].as_str().unwrap().contains("roles must alternate"), "{error}");
}

#[test]
fn a_prompt_ends_where_the_request_says() {
    let template = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }};{% endfor %}\
        {% if add_generation_prompt %}<|assistant|>{% endif %}";
    let server = start_with(Settings::default(), Some(template));
    let messages = json!([{"role": "user", "content": "Count."}, {"role": "assistant", "content": "say:one, "}]);
    let ask = |more: Value| {
        let mut body = json!({"messages": messages, "return_token_ids": true, "max_tokens": 3});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap());
        server.post("/v1/chat/completions", body)
    };
    let prompt = |answer: &Value| {
        let tokens = answer["prompt_token_ids"].as_array().unwrap();
        let byte = |token: &Value| u8::try_from(token.as_u64().unwrap()).unwrap_or(b'|');
        String::from_utf8(tokens.iter().map(byte).collect()).unwrap()
    };
    let answer = ask(json!({"continue_final_message": true})).json();
    assert_eq!(prompt(&answer), "|user: Count.;|assistant: say:one, ");
    assert_eq!(answer["choices"][0]["message"], json!({"role": "assistant", "content": "one", "refusal": null}));
    assert_eq!(prompt(&ask(json!({"add_generation_prompt": false})).json()), "|user: Count.;|assistant: say:one, ;");
    assert_eq!(prompt(&ask(json!({})).json()), "|user: Count.;|assistant: say:one, ;|");
    let both = json!({"continue_final_message": true, "add_generation_prompt": true});
    assert_eq!(ask(both).error(400)["param"], "continue_final_message");
    let tokens = server.post("/tokenize", json!({"messages": messages, "continue_final_message": true})).json();
    assert_eq!(tokens["tokens"], answer["prompt_token_ids"]);
    // A message of the user's can be continued as well.
    let user = json!([{"role": "user", "content": "say:yes"}]);
    let body = json!({"messages": user, "continue_final_message": true, "stream": true});
    let chunks = server.post("/v1/chat/completions", body).chunks();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "user");
}

#[test]
fn a_continued_message_is_trimmed_where_the_template_trims() {
    let tokens = |template: &str, text: &str| {
        let server = start_with(Settings::default(), Some(template));
        let messages = json!([{"role": "user", "content": text}, {"role": "assistant", "content": text}]);
        server.post("/tokenize", json!({"messages": messages, "continue_final_message": true}))
    };
    let count = |template: &str, text: &str| tokens(template, text).json()["count"].as_u64().unwrap();
    let plain = "{% for m in messages %}<{{ m.content }}>{% endfor %}";
    assert_eq!((count(plain, " a\n"), count(plain, "")), (9, 3));
    assert_eq!(count("{% for m in messages %}<{{ m.content | trim }}>{% endfor %}", " a\n"), 5);
    let error = tokens("{% for m in messages %}{{ m.role }}{% endfor %}", "a").error(400);
    assert!(error["message"].to_string().contains("does not write"), "{error}");
}
