//! References: an item of the input may be the id of one that a stored response has read or written.

use crate::app::App;
use crate::error::{ApiError, Result};
use axum::http::StatusCode;
use serde_json::Value;
use std::collections::HashMap;

/// Replaces each reference among the items of an input by the item that it names, of the newest response that has it.
///
/// # Errors
/// Ids that no stored response has; two references to one item, since many of them would make a large input of a small body.
pub(super) fn resolve(app: &App, items: &mut [Value]) -> Result<()> {
    let mut wanted: HashMap<String, usize> = HashMap::new();
    for (index, item) in items.iter().enumerate().filter(|(_, item)| is_reference(item)) {
        let Value::String(id) = &item["id"] else {
            return Err(ApiError::field(format!("input[{index}].id"), "must be a string"));
        };
        if wanted.insert(id.clone(), index).is_some() {
            return Err(ApiError::field(format!("input[{index}].id"), "is referred to twice"));
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    for stored in app.responses.newest_first() {
        for text in [&stored.response, &stored.input] {
            if !has_one_of(text, &wanted) {
                continue;
            }
            let mut read: Value = serde_json::from_str(text)
                .map_err(|error| ApiError::failed(format!("a stored response is damaged: {error}")))?;
            let list = if read.is_array() { read.take() } else { read["output"].take() };
            for item in list.as_array().into_iter().flatten() {
                if let Some(index) = item["id"].as_str().and_then(|id| wanted.remove(id)) {
                    items[index] = item.clone();
                }
            }
        }
    }
    match wanted.into_iter().min_by_key(|(_, index)| *index) {
        None => Ok(()),
        Some((id, index)) => Err(ApiError {
            param: Some(format!("input[{index}].id")),
            ..ApiError::new(
                StatusCode::NOT_FOUND,
                format!("no stored response has an item `{id}`; send the item itself"),
            )
        }),
    }
}

/// Whether an item is a reference; OpenAI lets its type be left out.
fn is_reference(item: &Value) -> bool {
    match &item["type"] {
        Value::Null => item.get("id").is_some() && item.get("role").is_none(),
        type_ => type_ == "item_reference",
    }
}

/// Whether a stored JSON text has an object with one of these ids: most texts have none, and need not be read as a whole.
fn has_one_of(text: &str, wanted: &HashMap<String, usize>) -> bool {
    let name = "\"id\":";
    text.match_indices(name).any(|(at, _)| {
        let value = serde_json::Deserializer::from_str(&text[at + name.len()..]).into_iter::<String>().next();
        matches!(value, Some(Ok(id)) if wanted.contains_key(&id))
    })
}
