//! What a document is before it becomes tokens.

use serde_json::Value;

/// A document: text, or a conversation in some form.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Learned whole.
    Text(String),
    /// Only the completion is learned.
    Completion {
        /// What is given.
        prompt: String,
        /// What should follow.
        completion: String,
    },
    /// Only the assistant's words are learned.
    Chat {
        /// Objects with `role` and `content`.
        messages: Vec<Value>,
        /// Tools the template may name; null where there are none.
        tools: Value,
    },
}

impl Content {
    /// The one form that an object of a data file has: `text`, `messages`, or `prompt` and `completion`. What else it
    /// holds is left aside; `None` for empty text.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub(crate) fn from_object(mut object: Value) -> Result<Option<Self>, String> {
        let mut take = |key: &str| object.get_mut(key).map(Value::take).filter(|value| !value.is_null());
        let (text, messages) = (take("text"), take("messages"));
        let (prompt, completion, tools) = (take("prompt"), take("completion"), take("tools").unwrap_or_default());
        let forms = [text.is_some(), messages.is_some(), prompt.is_some() || completion.is_some()];
        if forms.into_iter().filter(|&given| given).count() > 1 {
            return Err("has more than one of `text`, `messages`, and `prompt` with `completion`".into());
        }
        let content = match (text, messages, prompt, completion) {
            (Some(text), ..) => Self::Text(string("text", text)?),
            (_, Some(messages), ..) => Self::Chat { messages: conversation(messages)?, tools },
            (.., Some(prompt), Some(completion)) => {
                Self::Completion { prompt: string("prompt", prompt)?, completion: string("completion", completion)? }
            }
            (.., Some(_), None) => return Err("has a `prompt` without a `completion`".into()),
            (.., None, Some(_)) => return Err("has a `completion` without a `prompt`".into()),
            _ => return Err("has none of `text`, `messages`, and `prompt` with `completion`".into()),
        };
        Ok(Some(content).filter(|content| !matches!(content, Self::Text(text) if text.is_empty())))
    }

    /// Whether there is nothing to learn from it.
    #[must_use]
    pub fn is_blank(&self) -> bool {
        match self {
            Self::Text(text) => text.trim().is_empty(),
            Self::Completion { completion, .. } => completion.is_empty(),
            Self::Chat { messages, .. } => !messages.iter().any(|message| message["role"] == "assistant"),
        }
    }

    /// Everything it is made of, for a fingerprint: two contents with the same words make the same tokens.
    pub(crate) fn words(&self) -> Vec<u64> {
        let mut words = Vec::new();
        let mut add = |text: &str| {
            words.push(text.len() as u64);
            let chunk = |bytes: &[u8]| bytes.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte));
            words.extend(text.as_bytes().chunks(8).map(chunk));
        };
        match self {
            Self::Text(text) => add(text),
            Self::Completion { prompt, completion } => [prompt, completion].into_iter().for_each(|text| add(text)),
            Self::Chat { messages, tools } => {
                messages.iter().for_each(|message| add(&message.to_string()));
                add(&tools.to_string());
            }
        }
        words.push(match self {
            Self::Text(_) => 0,
            Self::Completion { .. } => 1,
            Self::Chat { .. } => 2,
        });
        words
    }
}

fn string(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("has a `{key}` that is no string but {}", kind(&other))),
    }
}

fn conversation(value: Value) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("has `messages` that are no list but {}", kind(&value)));
    };
    for (index, message) in messages.iter().enumerate() {
        if !message["role"].is_string() {
            return Err(format!("message {} has no string `role`", index + 1));
        }
        // A call of a tool may come without words.
        let calls = message["content"].is_null() && message.get("tool_calls").is_some();
        if !calls && !message["content"].is_string() {
            let found = kind(&message["content"]);
            return Err(format!("message {} has a `content` that is no string but {found}", index + 1));
        }
    }
    Ok(messages)
}

fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a truth value",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_form_is_known_by_its_keys_and_two_forms_are_refused() {
        let content = |value| Content::from_object(value);
        assert_eq!(content(json!({"text": "a", "id": 3})), Ok(Some(Content::Text("a".into()))));
        assert_eq!(content(json!({"text": "", "messages": null})), Ok(None));
        let pair = Content::Completion { prompt: "p".into(), completion: "c".into() };
        assert_eq!(content(json!({"prompt": "p", "completion": "c"})), Ok(Some(pair)));
        let call = json!([{"role": "assistant", "content": null, "tool_calls": []}]);
        assert!(content(json!({ "messages": call })).is_ok());
        for (value, part) in [
            (json!({"text": "a", "messages": []}), "more than one"),
            (json!({"txt": "a"}), "none of `text`"),
            (json!([1]), "none of `text`"),
            (json!({"text": 3}), "`text` that is no string but a number"),
            (json!({"prompt": "p"}), "without a `completion`"),
            (json!({"completion": "p"}), "without a `prompt`"),
            (json!({"messages": "hi"}), "no list but a string"),
            (
                json!({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}),
                "message 2 has no string `role`",
            ),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "no string but a list"),
            (json!({"messages": [{"role": "user"}]}), "message 1"),
        ] {
            let message = content(value).expect_err("refused");
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn words_tell_forms_borders_and_letters_apart() {
        let pair = |a: &str, b: &str| Content::Completion { prompt: a.into(), completion: b.into() }.words();
        assert_ne!(pair("ab", "c"), pair("a", "bc"));
        assert_ne!(Content::Text("a\0".into()).words(), Content::Text("a".into()).words());
        assert_ne!(Content::Text("12345678".into()).words(), Content::Text("12345679".into()).words());
        assert_eq!(pair("ab", "c"), pair("ab", "c"));
    }
}
