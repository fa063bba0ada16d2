//! Conversations become the text, the tokens and the loss mask that transformers makes of them.

use ringspan_models::chat_template::{self, ChatTemplate};
use ringspan_train::{
    Tokenizer,
    data::{Content, Encoder, NOT_LEARNED, Template},
};
use serde::Deserialize;
use serde_json::Map;
use std::path::{Path, PathBuf};

#[derive(Deserialize)]
struct Conversation {
    messages: Vec<serde_json::Value>,
    #[serde(default)]
    tools: serde_json::Value,
}

#[derive(Deserialize)]
struct Expected {
    text: String,
    tokens: Vec<u32>,
    learned: Vec<u32>,
    /// For each message, the text that an answer continues; `None` where transformers refuses.
    continued: Vec<Option<String>>,
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
}

fn read<T: serde::de::DeserializeOwned>(path: &Path) -> T {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn text_tokens_and_learned_words_are_those_of_transformers() {
    let conversations: Vec<Conversation> = read(&fixtures().join("conversations.json"));
    for name in ["turns", "headers", "brackets", "thinking"] {
        let folder = fixtures().join(name);
        let expected: Vec<Expected> = read(&folder.join("expected.json"));
        assert_eq!(conversations.len(), expected.len());
        let tokenizer = Tokenizer::read(&folder.join("tokenizer.json")).unwrap();
        let template = Template::from_model_folder(&folder).unwrap().unwrap();
        let encoder = Encoder::new(&tokenizer, Some(&template));
        for (index, (conversation, expected)) in conversations.iter().zip(&expected).enumerate() {
            let Conversation { messages, tools } = conversation;
            let rendered = template.render(messages, tools).unwrap();
            assert_eq!(rendered.text, expected.text, "{name}, conversation {index}");
            let content = Content::Chat { messages: messages.clone(), tools: tools.clone() };
            let words = encoder.encode(&content, &folder, "1").unwrap();
            let tokens: Vec<u32> = words.iter().map(|word| word & !NOT_LEARNED).collect();
            assert_eq!(tokens, expected.tokens, "{name}, conversation {index}");
            let learned: Vec<u32> = words.iter().map(|word| u32::from(word & NOT_LEARNED == 0)).collect();
            assert_eq!(learned, expected.learned, "{name}, conversation {index}: {:?}", rendered.learned);
        }
    }
}

#[test]
fn an_unfinished_message_ends_as_that_of_transformers() {
    let conversations: Vec<Conversation> = read(&fixtures().join("conversations.json"));
    let mut refused = 0;
    for name in ["turns", "headers", "brackets", "thinking"] {
        let folder = fixtures().join(name);
        let template = ChatTemplate::from_model_folder(&folder).unwrap().unwrap();
        let expected: Vec<Expected> = read(&folder.join("expected.json"));
        for (index, (Conversation { messages, tools }, expected)) in conversations.iter().zip(&expected).enumerate() {
            for (last, expected) in expected.continued.iter().enumerate() {
                let unfinished = template.render_unfinished(&chat_template::Conversation {
                    messages: &messages[..=last],
                    tools,
                    add_generation_prompt: false,
                    variables: &Map::new(),
                });
                let text = unfinished.as_ref().ok();
                assert_eq!(text, expected.as_ref(), "{name}, conversation {index}, message {last}: {unfinished:?}");
                refused += usize::from(text.is_none());
            }
        }
    }
    assert!(refused > 0, "there is a message that cannot be continued");
}

#[test]
fn an_error_of_a_template_is_reported_with_its_message() {
    let template = Template::from_model_folder(&fixtures().join("brackets")).unwrap().unwrap();
    let messages = [serde_json::json!({"role": "narrator", "content": "meanwhile"})];
    let message = template.render(&messages, &serde_json::Value::Null).unwrap_err();
    assert!(message.contains("only user, assistant and tool may speak, not narrator"), "{message}");
}
