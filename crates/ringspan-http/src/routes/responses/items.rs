//! The items of responses: what the model reads and writes in OpenAI's newer interface.

use crate::app::App;
use crate::conversation::{Conversation, text_content};
use crate::error::{ApiError, Result};
use crate::response_store::StoredResponse;
use serde_json::{Value, json};

/// The items of `input`, which is a text or a list; each has an id.
///
/// # Errors
/// Input of another kind.
pub(super) fn list(app: &App, input: Value) -> Result<Vec<Value>> {
    let mut items = match input {
        Value::String(text) => {
            let content = json!([{"type": "input_text", "text": text}]);
            vec![json!({"type": "message", "role": "user", "content": content})]
        }
        Value::Array(items) => items,
        _ => return Err(ApiError::field("input", "must be a string or a list of items")),
    };
    for item in items.iter_mut().filter_map(Value::as_object_mut) {
        if item.get("id").is_none_or(Value::is_null) {
            item.insert("id".into(), app.id("msg_").into());
        }
    }
    Ok(items)
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
    let damaged = |error: serde_json::Error| ApiError::failed(format!("the response {id} is damaged: {error}"));
    let mut items: Vec<Value> = serde_json::from_str(&input).map_err(damaged)?;
    let mut response: Value = serde_json::from_str(&response).map_err(damaged)?;
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
                // What the model said before its calls, and calls that it made at once, are one message.
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
            // The thoughts of earlier answers are no part of what templates write.
            Some("reasoning") => {}
            Some(other) => {
                return Err(ApiError::field(format!("{path}.type"), format!("is {other}, which is not supported")));
            }
        }
    }
    Conversation::read(messages).map_err(|error| ApiError {
        param: Some("input".into()),
        message: error.message.replace("messages", "input"),
        ..error
    })
}
