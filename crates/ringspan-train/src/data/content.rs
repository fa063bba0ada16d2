//! The content of a document before it is tokenized.

use super::chat_formats;
use serde_json::Value;

/// A document: text, or a conversation in some form.
#[derive(Debug, Clone, PartialEq)]
pub enum Content {
    /// Text, of which every token is learned.
    Text(String),
    /// A prompt with its completion, of which only the completion is learned.
    Completion {
        /// The text before the completion, which the loss leaves out.
        prompt: String,
        /// The text that is learned.
        completion: String,
    },
    /// A conversation, of which only the assistant's words are learned.
    Chat {
        /// Objects with `role` and `content`. The loss leaves out an assistant's message with `"train": false`.
        messages: Vec<Value>,
        /// Tools that the template may show; null where there are none.
        tools: Value,
    },
}

/// The keys by which each form is known, in words.
const FORMS: &str = "`text`, `messages`, `conversations`, `prompt` with `completion`, and `instruction` with `output`";

impl Content {
    /// Reads an object of a data file in one of the forms `text`, `messages`, `conversations` (ShareGPT's), `prompt` and
    /// `completion`, or `instruction` and `output` (Alpaca's). Its other keys are ignored; `None` for empty text.
    ///
    /// # Errors
    /// A description of what is wrong with the object.
    pub(crate) fn from_object(mut object: Value) -> Result<Option<Self>, String> {
        let mut take = |key: &str| object.get_mut(key).map(Value::take).filter(|value| !value.is_null());
        let [text, messages, conversations] = ["text", "messages", "conversations"].map(&mut take);
        let [prompt, completion, instruction, output] =
            ["prompt", "completion", "instruction", "output"].map(&mut take);
        let (tools, system) = (take("tools").unwrap_or_default(), take("system"));
        let is_pair = prompt.is_some() || completion.is_some();
        // `output` alone does not make a form: objects in other forms may carry some program's output.
        let given = [text.is_some(), messages.is_some(), conversations.is_some(), is_pair, instruction.is_some()];
        match given.into_iter().filter(|&given| given).count() {
            0 => return Err(format!("has none of {FORMS}")),
            1 => {}
            _ => return Err(format!("has more than one of {FORMS}")),
        }
        let content = match (text, messages, conversations, prompt, completion, instruction, output) {
            (Some(text), ..) => Self::Text(chat_formats::string("text", text)?),
            (_, Some(messages), ..) => {
                Self::Chat { messages: chat_formats::conversation("messages", messages)?, tools }
            }
            (_, _, Some(turns), ..) => Self::Chat { messages: chat_formats::share_gpt(turns, system)?, tools },
            (.., Some(prompt), Some(completion), _, _) => prompt_and_completion(prompt, completion, tools)?,
            (.., Some(_), None, _, _) => return Err("has a `prompt` without a `completion`".into()),
            (.., None, Some(_), _, _) => return Err("has a `completion` without a `prompt`".into()),
            (.., Some(instruction), Some(output)) => {
                let [input, history] = ["input", "history"].map(&mut take);
                Self::Chat { messages: chat_formats::alpaca(instruction, input, output, history, system)?, tools }
            }
            (.., None) => return Err("has an `instruction` without an `output`".into()),
            (.., None, Some(_)) => return Err(format!("has none of {FORMS}")),
        };
        Ok(Some(content).filter(|content| !matches!(content, Self::Text(text) if text.is_empty())))
    }

    /// Whether an object with these keys is in one of the forms.
    pub(super) fn has_form(keys: &[String]) -> bool {
        let has = |key: &str| keys.iter().any(|present| present == key);
        ["text", "messages", "conversations"].into_iter().any(has)
            || has("prompt") && has("completion")
            || has("instruction") && has("output")
    }

    /// Whether nothing in the document is to be learned.
    #[must_use]
    pub fn has_no_targets(&self) -> bool {
        match self {
            Self::Text(text) => text.trim().is_empty(),
            Self::Completion { completion, .. } => completion.is_empty(),
            Self::Chat { messages, .. } => !messages.iter().any(chat_formats::is_learned),
        }
    }

    /// Whether it is a conversation or a completion of which nothing is learned.
    pub(super) fn is_chat_without_targets(&self) -> bool {
        !matches!(self, Self::Text(_)) && self.has_no_targets()
    }

    /// About how many bytes of text the document has.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Completion { prompt, completion } => prompt.len() + completion.len(),
            Self::Chat { messages, .. } => messages.iter().flat_map(chat_formats::strings).map(str::len).sum(),
        }
    }
}

/// A prompt and its completion, as strings or as messages.
fn prompt_and_completion(prompt: Value, completion: Value, tools: Value) -> Result<Content, String> {
    if !(prompt.is_array() && completion.is_array()) {
        return Ok(Content::Completion {
            prompt: chat_formats::string("prompt", prompt)?,
            completion: chat_formats::string("completion", completion)?,
        });
    }
    let mut messages = chat_formats::conversation("prompt", prompt)?;
    // The loss leaves out the assistant's messages in the prompt.
    for message in messages.iter_mut().filter(|message| message["role"] == "assistant") {
        message["train"] = false.into();
    }
    messages.extend(chat_formats::conversation("completion", completion)?);
    Ok(Content::Chat { messages, tools })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_form_is_known_by_its_keys_and_two_forms_are_refused() {
        let content = |value| Content::from_object(value);
        assert_eq!(content(json!({"text": "a", "id": 3, "output": "x"})), Ok(Some(Content::Text("a".into()))));
        assert_eq!(content(json!({"text": "", "messages": null})), Ok(None));
        let pair = Content::Completion { prompt: "p".into(), completion: "c".into() };
        assert_eq!(content(json!({"prompt": "p", "completion": "c"})), Ok(Some(pair)));
        let call = json!([{"role": "assistant", "content": null, "tool_calls": []}]);
        assert!(content(json!({ "messages": call })).is_ok());
        for (value, part) in [
            (json!({"text": "a", "messages": []}), "more than one"),
            (json!({"text": "a", "instruction": "i", "output": "o"}), "more than one"),
            (json!({"txt": "a"}), "none of `text`"),
            (json!({"output": "a"}), "none of `text`"),
            (json!([1]), "none of `text`"),
            (json!({"text": 3}), "`text` that is no string but a number"),
            (json!({"prompt": "p"}), "without a `completion`"),
            (json!({"completion": "p"}), "without a `prompt`"),
            (json!({"instruction": "p"}), "without an `output`"),
            (json!({"messages": "hi"}), "no list but a string"),
            (
                json!({"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}),
                "message 2 has no string `role`",
            ),
            (json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}), "part of type image"),
            (json!({"messages": [{"role": "user"}]}), "message 1"),
        ] {
            let message = content(value).expect_err("refused");
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn the_keys_of_a_record_say_whether_it_can_be_learned() {
        let has = |keys: &[&str]| Content::has_form(&keys.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert!(has(&["id", "text"]) && has(&["conversations"]) && has(&["instruction", "input", "output"]));
        assert!(!has(&["prompt"]) && !has(&["output"]) && !has(&["question", "answer"]));
    }
}
