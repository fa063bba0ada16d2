//! Converts the forms in which data sets hold conversations into messages of `role` and `content`.

use serde_json::{Value, json};

/// Names of speakers in ShareGPT's turns, and the role of each in a message.
const SPEAKERS: [(&str, &str); 12] = [
    ("human", "user"),
    ("user", "user"),
    ("gpt", "assistant"),
    ("chatgpt", "assistant"),
    ("bing", "assistant"),
    ("bard", "assistant"),
    ("model", "assistant"),
    ("assistant", "assistant"),
    ("system", "system"),
    ("tool", "tool"),
    ("observation", "tool"),
    ("function_response", "tool"),
];

/// The keys by which a message says whether it is learned: OpenAI's, and the one of other formats.
const LEARNED_KEYS: [&str; 2] = ["weight", "train"];

pub(super) fn string(key: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        other => Err(format!("has a `{key}` that is no string but {}", json_type(&other))),
    }
}

/// The messages of a list of objects with `role` and `content`.
pub(super) fn conversation(key: &str, value: Value) -> Result<Vec<Value>, String> {
    let Value::Array(messages) = value else {
        return Err(format!("has `{key}` that are no list but {}", json_type(&value)));
    };
    let each = |(index, message)| self::message(message).map_err(|problem| format!("message {} {problem}", index + 1));
    messages.into_iter().enumerate().map(each).collect()
}

/// Normalises a message: its content becomes one string, and an assistant's that is not learned has `"train": false`.
fn message(mut message: Value) -> Result<Value, String> {
    let Some(role) = message["role"].as_str().map(str::to_owned) else { return Err("has no string `role`".into()) };
    let Some(keys) = message.as_object_mut() else { return Err("is no object".into()) };
    let train = train(keys)?;
    if role == "assistant" && train == Some(false) {
        keys.insert("train".into(), false.into());
    } else if role != "assistant" && train == Some(true) {
        return Err(format!("of role {role} is to be learned, but only the assistant's words can be"));
    }
    // A message that calls a tool may have no content.
    let calls = keys.get("content").is_none_or(Value::is_null) && keys.contains_key("tool_calls");
    if let (Some(content), false) = (keys.get_mut("content"), calls) {
        *content = content_text(content.take())?.into();
    } else if !calls {
        return Err("has a `content` that is no string but null".into());
    }
    Ok(message)
}

/// Removes the keys that say whether a message is learned, and returns their value.
fn train(keys: &mut serde_json::Map<String, Value>) -> Result<Option<bool>, String> {
    let [weight, train] = LEARNED_KEYS.map(|key| keys.shift_remove(key).filter(|value| !value.is_null()));
    let weight = match weight.as_ref().map(|weight| weight.as_f64().ok_or(weight)) {
        None => None,
        Some(Ok(0.0)) => Some(false),
        Some(Ok(1.0)) => Some(true),
        Some(Ok(other)) => return Err(format!("has `weight` {other}, but can be learned (1) or not (0)")),
        Some(Err(other)) => return Err(format!("has a `weight` that is no number but {}", json_type(other))),
    };
    let train = match &train {
        None => None,
        Some(Value::Bool(train)) => Some(*train),
        Some(other) => return Err(format!("has a `train` that is no truth value but {}", json_type(other))),
    };
    match (weight, train) {
        (Some(weight), Some(train)) if weight != train => {
            Err(format!("contradicts itself: `weight` {} and `train` {train}", u8::from(weight)))
        }
        _ => Ok(weight.or(train)),
    }
}

/// The text of a content, which is a string or a list of text parts.
fn content_text(content: Value) -> Result<String, String> {
    let Value::Array(parts) = content else {
        return match content {
            Value::String(text) => Ok(text),
            other => Err(format!("has a `content` that is no string but {}", json_type(&other))),
        };
    };
    let text_of = |part: &Value| match (part["type"].as_str(), &part["text"]) {
        (Some("text"), Value::String(text)) => Ok(text.clone()),
        (Some("text"), _) => Err("has a part of type text without a string `text`".to_owned()),
        (Some(other), _) => Err(format!("has a part of type {other}, but only text can be learned")),
        (None, _) => Err("has a part without a `type`".into()),
    };
    parts.iter().map(text_of).collect()
}

/// Converts ShareGPT's turns, which are `from` a speaker and have a `value`; some data sets write messages under the same key.
pub(super) fn share_gpt(turns: Value, system: Option<Value>) -> Result<Vec<Value>, String> {
    let Value::Array(mut turns) = turns else {
        return Err(format!("has `conversations` that are no list but {}", json_type(&turns)));
    };
    for (index, turn) in turns.iter_mut().enumerate().filter(|(_, turn)| turn.get("from").is_some()) {
        let Some(keys) = turn.as_object_mut() else { continue };
        let from = keys.shift_remove("from").unwrap_or_default();
        let Some((_, role)) = SPEAKERS.iter().find(|(name, _)| from == *name) else {
            let known = SPEAKERS.map(|(name, _)| name).join(", ");
            return Err(format!("message {} is from {from}, and who may speak is: {known}", index + 1));
        };
        let value = keys.shift_remove("value").unwrap_or_default();
        keys.insert("role".into(), (*role).into());
        keys.insert("content".into(), value);
    }
    let turns = system_message(system)?.into_iter().chain(turns).collect();
    conversation("conversations", Value::Array(turns))
}

/// Converts Alpaca's `instruction`, which some data sets extend by an `input`, and the `output`, which is learned; `history`
/// holds earlier pairs of the same conversation.
pub(super) fn alpaca(
    instruction: Value,
    input: Option<Value>,
    output: Value,
    history: Option<Value>,
    system: Option<Value>,
) -> Result<Vec<Value>, String> {
    let mut messages: Vec<Value> = system_message(system)?.into_iter().collect();
    let mut add_turn = |user: String, assistant: String| {
        messages.extend([chat_message("user", user), chat_message("assistant", assistant)]);
    };
    let earlier = match history {
        None => Vec::new(),
        Some(history) => serde_json::from_value::<Vec<[String; 2]>>(history)
            .map_err(|_| "has a `history` that is no list of pairs of strings".to_owned())?,
    };
    earlier.into_iter().for_each(|[user, assistant]| add_turn(user, assistant));
    let (mut user, input) = (string("instruction", instruction)?, input.map(|input| string("input", input)));
    if let Some(input) = input.transpose()?.filter(|input| !input.is_empty()) {
        user = format!("{user}\n{input}");
    }
    let output = string("output", output)?;
    if output.is_empty() {
        return Ok(vec![chat_message("user", user)]);
    }
    add_turn(user, output);
    Ok(messages)
}

fn system_message(system: Option<Value>) -> Result<Option<Value>, String> {
    let system = system.map(|system| string("system", system)).transpose()?;
    Ok(system.filter(|system| !system.is_empty()).map(|system| chat_message("system", system)))
}

fn chat_message(role: &str, content: String) -> Value {
    json!({ "role": role, "content": content })
}

/// Whether a message of a conversation is learned.
pub(super) fn is_learned(message: &Value) -> bool {
    message["role"] == "assistant" && message["train"] != false
}

/// The message as a template sees it, without the key that says whether it is learned.
pub(super) fn without_train_key(message: &Value) -> Value {
    let mut message = message.clone();
    if let Some(keys) = message.as_object_mut() {
        keys.shift_remove("train");
    }
    message
}

/// All strings in a message: its content, its reasoning, and the names and arguments of its tool calls.
pub(super) fn strings(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Array(all) => all.iter().flat_map(strings).collect(),
        Value::Object(keys) => keys.values().flat_map(strings).collect(),
        _ => Vec::new(),
    }
}

fn json_type(value: &Value) -> &'static str {
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
    use crate::data::Content;

    fn chat(object: Value) -> Result<Vec<Value>, String> {
        match Content::from_object(object)?.expect("a document") {
            Content::Chat { messages, .. } => Ok(messages),
            other => panic!("{other:?}"),
        }
    }

    fn test_message(role: &str, content: &str) -> Value {
        chat_message(role, content.into())
    }

    #[test]
    fn turns_of_share_gpt_and_instructions_are_conversations() {
        let turns = json!([{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "train": false},
            {"role": "user", "content": "c"}, {"from": "assistant", "value": "d", "weight": 1}]);
        let mut without_targets = test_message("assistant", "b");
        without_targets["train"] = false.into();
        let expected = [
            test_message("system", "s"),
            test_message("user", "a"),
            without_targets,
            test_message("user", "c"),
            test_message("assistant", "d"),
        ];
        assert_eq!(chat(json!({"conversations": turns, "system": "s"})).unwrap(), expected);
        let message = chat(json!({"conversations": [{"from": "narrator", "value": "a"}]})).unwrap_err();
        assert!(
            message.contains("message 1 is from \"narrator\"") && message.contains("human, user, gpt"),
            "{message}"
        );

        let plain = json!({"instruction": "add", "input": "1 2", "output": "3"});
        assert_eq!(chat(plain).unwrap(), [test_message("user", "add\n1 2"), test_message("assistant", "3")]);
        let more = json!({"instruction": "more", "input": "", "output": "4", "history": [["a", "b"]], "system": "s"});
        let expected = [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "more"), ("assistant", "4")];
        assert_eq!(chat(more).unwrap(), expected.map(|(role, content)| test_message(role, content)));
        let without_targets = Content::from_object(json!({"instruction": "add", "output": ""})).unwrap().unwrap();
        assert!(without_targets.has_no_targets());
        assert!(
            chat(json!({"instruction": "a", "output": "b", "history": [["a"]]})).unwrap_err().contains("`history`")
        );
    }

    #[test]
    fn parts_of_text_are_one_text() {
        let parts = json!([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]);
        let messages = json!([{"role": "user", "content": parts}, {"role": "assistant", "content": []}]);
        assert_eq!(
            chat(json!({ "messages": messages })).unwrap(),
            [test_message("user", "one two"), test_message("assistant", "")]
        );
        for (part, expected) in [
            (json!({"type": "image_url", "image_url": {}}), "message 1 has a part of type image_url"),
            (json!({"type": "text"}), "without a string `text`"),
            (json!("text"), "without a `type`"),
        ] {
            let message = chat(json!({"messages": [{"role": "user", "content": [part]}]})).unwrap_err();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_message_of_weight_0_is_given_and_other_weights_are_refused() {
        let one = |more: Value| {
            let mut message = test_message("assistant", "a");
            message.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            chat(json!({"messages": [test_message("user", "q"), message]})).map(|messages| is_learned(&messages[1]))
        };
        assert_eq!(one(json!({"weight": 0})), Ok(false));
        assert_eq!(one(json!({"weight": 0.0, "train": false})), Ok(false));
        assert_eq!(one(json!({"train": false})), Ok(false));
        for learned in [json!({"weight": 1}), json!({"train": true}), json!({"weight": null}), json!({})] {
            assert_eq!(one(learned), Ok(true));
        }
        for (wrong, part) in [
            (json!({"weight": 0.5}), "message 2 has `weight` 0.5"),
            (json!({"weight": "0"}), "no number but a string"),
            (json!({"train": 0}), "no truth value but a number"),
            (json!({"weight": 0, "train": true}), "`weight` 0 and `train` true"),
        ] {
            let message = one(wrong).unwrap_err();
            assert!(message.contains(part), "{message}");
        }
        let user = |weight: u8| {
            let messages = json!([{"role": "user", "content": "q", "weight": weight}, test_message("assistant", "a")]);
            chat(json!({ "messages": messages }))
        };
        assert_eq!(user(0).unwrap()[0], test_message("user", "q"));
        assert!(user(1).unwrap_err().contains("message 1 of role user is to be learned"));
    }

    #[test]
    fn messages_before_a_completion_are_not_learned() {
        let prompt = json!([test_message("user", "a"), test_message("assistant", "b"), test_message("user", "c")]);
        let messages = chat(json!({"prompt": prompt, "completion": [test_message("assistant", "d")]})).unwrap();
        assert_eq!(messages.iter().map(is_learned).collect::<Vec<_>>(), [false, false, false, true]);
        assert_eq!(without_train_key(&messages[1]), test_message("assistant", "b"));
    }
}
