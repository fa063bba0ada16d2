//! The items of responses: what the model reads and writes in OpenAI's newer interface.

use super::references;
use crate::app::App;
use crate::conversation::{Conversation, text_content};
use crate::error::{ApiError, Result};
use crate::fields::kind;
use crate::response_store::StoredResponse;
use serde_json::{Map, Value, json};

/// The values of an item's `status`.
const STATUSES: [&str; 3] = ["in_progress", "completed", "incomplete"];
/// Most bytes of an item's id, as for OpenAI: ids cost no token of the prompt, but memory of the store.
const LONGEST_ID: usize = 64;

/// Parses `input`, a string or a list, into items, resolves references to earlier items, and gives each item an id. Unknown fields and
/// reasoning items are dropped: they would fill the store without being a part of the prompt.
///
/// # Errors
/// Input of another kind, items of a kind that the model cannot read, ids that are too long, references to nothing.
pub(super) fn parse_input(app: &App, input: Value) -> Result<Vec<Value>> {
    let items = match input {
        Value::String(text) => {
            let content = json!([{"type": "input_text", "text": text}]);
            vec![json!({"type": "message", "role": "user", "content": content})]
        }
        Value::Array(mut items) => {
            references::resolve(app, &mut items)?;
            items
        }
        _ => return Err(ApiError::field("input", "must be a string or a list of items")),
    };
    let mut read = Vec::with_capacity(items.len());
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("input[{index}]");
        let Value::Object(mut item) = item else {
            return Err(ApiError::field(path, format!("must be an object, not {}", kind(&item))));
        };
        let type_ = item.get("type").filter(|type_| !type_.is_null());
        if type_.is_some_and(|type_| !type_.is_string()) {
            return Err(ApiError::field(format!("{path}.type"), "must be a string"));
        }
        let fields: &[&str] = match type_.and_then(Value::as_str) {
            None | Some("message") => &["id", "type", "role", "status", "content"],
            Some("function_call") => &["id", "type", "call_id", "name", "arguments", "status"],
            Some("function_call_output") => &["id", "type", "call_id", "output", "status"],
            // Reasoning of earlier answers is dropped; only the chat route passes it on to templates.
            Some("reasoning") => continue,
            Some(other) => {
                return Err(ApiError::field(format!("{path}.type"), format!("is {other}, which is not supported")));
            }
        };
        item.retain(|name, value| fields.contains(&name.as_str()) && !value.is_null());
        if item.get("status").is_some_and(|status| !STATUSES.iter().any(|known| status == known)) {
            return Err(ApiError::field(format!("{path}.status"), format!("must be one of {}", STATUSES.join(", "))));
        }
        for name in ["id", "call_id"] {
            if item.get(name).is_some_and(|id| id.as_str().is_none_or(|id| id.len() > LONGEST_ID)) {
                let message = format!("must be a string of at most {LONGEST_ID} bytes");
                return Err(ApiError::field(format!("{path}.{name}"), message));
            }
        }
        for name in ["content", "output"] {
            if let Some(Value::Array(parts)) = item.get_mut(name) {
                parts.iter_mut().filter_map(Value::as_object_mut).for_each(keep_text);
            }
        }
        item.entry("id").or_insert_with(|| app.id("msg_").into());
        read.push(Value::Object(item));
    }
    Ok(read)
}

/// Reduces a part of a content to its text, and to the empty lists that clients expect with it.
fn keep_text(part: &mut Map<String, Value>) {
    let text = if part.get("type").is_some_and(|type_| type_ == "refusal") { "refusal" } else { "text" };
    part.retain(|name, _| ["type", text, "annotations", "logprobs"].contains(&name.as_str()));
    for name in ["annotations", "logprobs"] {
        if let Some(list) = part.get_mut(name) {
            *list = json!([]);
        }
    }
}

/// The items that a stored response has read and written.
///
/// # Errors
/// A response that is not stored, has not ended, or has no answer.
pub(super) fn of_previous(app: &App, id: &str) -> Result<Vec<Value>> {
    let field = "previous_response_id";
    let unknown = || ApiError {
        code: Some("previous_response_not_found"),
        ..ApiError::field(field, format!("{}; send the whole conversation as `input`", not_stored(app, id)))
    };
    let StoredResponse { input, response } = app.responses.get(id).ok_or_else(unknown)?;
    let mut items: Vec<Value> = serde_json::from_str(&input).map_err(|error| damaged(id, &error))?;
    let mut response: Value = serde_json::from_str(&response).map_err(|error| damaged(id, &error))?;
    let output = response["output"].take();
    match (response["status"].as_str(), output) {
        (Some("completed" | "incomplete"), Value::Array(output)) => items.extend(output),
        (status, _) => {
            let status = status.unwrap_or("unknown");
            return Err(ApiError::field(field, format!("the response {id} has no answer: its status is {status}")));
        }
    }
    Ok(items)
}

/// The failure of a stored response that cannot be read.
pub(super) fn damaged(id: &str, error: &serde_json::Error) -> ApiError {
    ApiError::failed(format!("the response {id} is damaged: {error}"))
}

/// Why there is no response with an id.
pub(super) fn not_stored(app: &App, id: &str) -> String {
    match app.responses.capacity() {
        0 => format!("there is no response `{id}`, since this server stores none (--response-store 0)"),
        bytes => format!(
            "there is no response `{id}`: it was never stored, was deleted, or has made room for newer ones (the server stores \
             {bytes} bytes of them, --response-store)"
        ),
    }
}

/// The messages of `instructions` and of items.
///
/// # Errors
/// Items of a kind that the model cannot read.
pub(super) fn messages(instructions: Option<String>, items: Vec<Value>) -> Result<Vec<Value>> {
    let mut messages: Vec<Value> =
        instructions.into_iter().map(|text| json!({"role": "system", "content": text})).collect();
    for (index, item) in items.into_iter().enumerate() {
        let path = format!("input[{index}]");
        match item["type"].as_str() {
            None | Some("message") => {
                messages.push(json!({"role": item["role"], "content": item["content"]}));
            }
            Some("function_call") => {
                let call = json!({"id": item["call_id"], "type": "function",
                    "function": {"name": item["name"], "arguments": item["arguments"]}});
                // The model's text before its calls, and calls that it made at once, are one message.
                match messages.last_mut().filter(|last| last["role"] == "assistant") {
                    Some(last) => match last.get_mut("tool_calls").and_then(Value::as_array_mut) {
                        Some(calls) => calls.push(call),
                        None => last["tool_calls"] = json!([call]),
                    },
                    None => messages.push(json!({"role": "assistant", "content": null, "tool_calls": [call]})),
                }
            }
            Some("function_call_output") => {
                let output = text_content(item["output"].clone())
                    .map_err(|(field, problem)| ApiError::field(format!("{path}.output{field}"), problem))?;
                messages.push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": output}));
            }
            // Reasoning of earlier responses is no part of the prompt; `parse_input` has refused all unknown types.
            Some(_) => {}
        }
    }
    Conversation::read(messages).map_err(|error| ApiError {
        param: Some("input".into()),
        message: error.message.replace("messages", "input"),
        ..error
    })
}
