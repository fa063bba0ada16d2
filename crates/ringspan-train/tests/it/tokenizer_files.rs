//! Files next to a model's tokenizer (end token, chat template) are respected in training, and are copied to the trained model.

use crate::common::{of_tiny_model, run, text, tiny_model};
use ringspan_train::{Settings, TrainConfig, plan};
use serde_json::{Value, json};
use std::{fs, path::Path};

fn settings(root: &Path, name: &str) -> Settings {
    Settings { ring: Some(1), steps: Some(1), warmup: Some(0), ..of_tiny_model(root, name) }
}

fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Adds tokens after the bytes to the tiny model's tokenizer.
fn with_tokens(root: &Path, tokens: &[(u32, &str, bool)]) {
    let path = root.join("tiny/tokenizer.json");
    let mut json = json_of(&path);
    let token = |(id, content, special): &(u32, &str, bool)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": special})
    };
    json["added_tokens"] = tokens.iter().map(token).collect();
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn a_trained_model_stops_where_its_base_does_and_where_its_texts_ended() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let model = tiny_model(root);
    text(root);
    let (outcome, memory) = run(settings(root, "plain"));
    assert_eq!(json_of(&outcome.out.join("generation_config.json")), json!({"eos_token_id": 256}));
    assert!(!outcome.out.join("special_tokens_map.json").exists());
    assert!(
        memory.plan.to_string().contains("texts end with <|endoftext|> (token 256, by its name)"),
        "{}",
        memory.plan
    );

    let base = json!({"eos_token_id": [10], "temperature": 0.6, "do_sample": true});
    fs::write(model.join("generation_config.json"), base.to_string()).unwrap();
    for name in ["special_tokens_map.json", "added_tokens.json"] {
        fs::write(model.join(name), format!("{{\"of\": \"{name}\"}}")).unwrap();
    }
    fs::write(model.join("tokenizer_config.json"), r#"{"eos_token": "<|endoftext|>"}"#).unwrap();
    let (outcome, memory) = run(settings(root, "told"));
    let kept = json_of(&outcome.out.join("generation_config.json"));
    assert_eq!(kept, json!({"eos_token_id": [256, 10], "temperature": 0.6, "do_sample": true}));
    assert_eq!(json_of(&outcome.out.join("added_tokens.json")), json!({"of": "added_tokens.json"}));
    assert!(outcome.out.join("special_tokens_map.json").exists() && outcome.out.join("tokenizer_config.json").exists());
    assert!(memory.plan.to_string().contains("eos_token of tokenizer_config.json"), "{}", memory.plan);

    // An answer ends as its chat template says, whatever ends a text.
    let (data, template) = crate::common::conversations(root);
    fs::write(model.join("tokenizer_config.json"), "{}").unwrap();
    let chat = Settings { data: Some(vec![data]), chat_template: Some(template), ..settings(root, "chat") };
    let (outcome, memory) = run(chat);
    assert!(memory.plan.documents[0].contains("answers end with <|endoftext|> (token 256)"), "{}", memory.plan);
    assert_eq!(json_of(&outcome.out.join("generation_config.json"))["eos_token_id"], json!([256, 10]));
}

#[test]
fn a_token_that_the_model_lacks_harms_only_where_it_occurs() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    tiny_model(root);
    let data = text(root);
    with_tokens(root, &[(256, "<|endoftext|>", true), (257, "<image>", false)]);
    run(settings(root, "without"));
    let lines = fs::read_to_string(&data).unwrap();
    fs::write(&data, lines.replacen("word 0 of", "<image> of", 1)).unwrap();
    let message = plan(&TrainConfig::resolve(settings(root, "with")).unwrap()).unwrap_err().to_string();
    for part in ["tokenizer.json", "258 tokens", "token 257 (<image>)", "vocabulary is 257"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}
