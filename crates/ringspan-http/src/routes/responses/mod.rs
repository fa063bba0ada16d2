//! `/v1/responses`: OpenAI's newer interface, whose responses are stored as long as there is room, and can be continued by their id.

mod answer;
mod items;
mod references;
mod request;

use crate::app::App;
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::routes::begin::begin;
use crate::sse;
use answer::ModelResponse;
use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header::CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use request::ResponseRequest;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most items in one answer of a list.
const MOST_ITEMS: usize = 100;

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let (request, reply): (ResponseRequest, _) = begin(&app, body).await?;
    let (stream, background) = (request.stream, request.background);
    let answer = ModelResponse::new(app, request);
    match (stream, background) {
        (true, _) => Ok(sse::stream(failure, |writer| answer.stream(reply, writer))),
        (false, true) => Ok(Json(answer.in_background(reply)?).into_response()),
        (false, false) => Ok(Json(answer.whole(reply).await?).into_response()),
    }
}

/// The fields of a request's address.
type AddressFields = Query<Vec<(String, String)>>;

/// `GET /v1/responses/{id}`.
pub(crate) async fn retrieve(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(fields): AddressFields,
) -> Result<Response> {
    if fields.iter().any(|(name, value)| name == "stream" && value != "false") {
        return Err(ApiError::field("stream", "a stored response is not streamed again; leave the field out"));
    }
    let stored = app.responses.get(&id).ok_or_else(|| unknown(&app, &id))?;
    Ok(json_text(&stored.response))
}

/// `DELETE /v1/responses/{id}`; it ends a response in the background.
pub(crate) async fn delete(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>> {
    match app.responses.delete(&id) {
        true => Ok(Json(json!({"id": id, "object": "response", "deleted": true}))),
        false => Err(unknown(&app, &id)),
    }
}

/// `POST /v1/responses/{id}/cancel`, for responses in the background; one that has ended stays as it is.
pub(crate) async fn cancel(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response> {
    let stored = app.responses.get(&id).ok_or_else(|| unknown(&app, &id))?;
    let mut response: Value = serde_json::from_str(&stored.response).map_err(|error| items::damaged(&id, &error))?;
    if response["background"] != true {
        let message = format!("the response `{id}` was not made with background: true, so it has ended already");
        return Err(ApiError::invalid(message));
    }
    response["status"] = "cancelled".into();
    app.responses.end(&id, response.to_string()).map_err(|error| ApiError::failed(error.to_string()))?;
    let stored = app.responses.get(&id).ok_or_else(|| unknown(&app, &id))?;
    Ok(json_text(&stored.response))
}

/// `GET /v1/responses/{id}/input_items`: the items that the model has read, the newest first unless `order` is `asc`.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Path(id): Path<String>,
    Query(fields): AddressFields,
) -> Result<Json<Value>> {
    let field = |wanted: &str| fields.iter().find(|(name, _)| name == wanted).map(|(_, value)| value.as_str());
    let limit = match field("limit").map(str::parse::<usize>) {
        None => MOST_ITEMS,
        Some(Ok(limit @ 1..=MOST_ITEMS)) => limit,
        Some(_) => return Err(ApiError::field("limit", format!("must be a number from 1 to {MOST_ITEMS}"))),
    };
    let stored = app.responses.get(&id).ok_or_else(|| unknown(&app, &id))?;
    let mut items: Vec<Value> = serde_json::from_str(&stored.input).map_err(|error| items::damaged(&id, &error))?;
    match field("order") {
        None | Some("desc") => items.reverse(),
        Some("asc") => {}
        Some(other) => return Err(ApiError::field("order", format!("must be asc or desc, not {other}"))),
    }
    if let Some(after) = field("after") {
        let at = items.iter().position(|item| item["id"] == after);
        let at = at.ok_or_else(|| ApiError::field("after", format!("the response has no item `{after}`")))?;
        items.drain(..=at);
    }
    let has_more = items.len() > limit;
    items.truncate(limit);
    let id = |item: Option<&Value>| item.map(|item| item["id"].clone());
    let (first, last) = (id(items.first()), id(items.last()));
    Ok(Json(json!({"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more})))
}

fn unknown(app: &App, id: &str) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, items::not_stored(app, id))
}

fn json_text(text: &str) -> Response {
    ([(CONTENT_TYPE, "application/json")], text.to_owned()).into_response()
}

fn failure(error: &ApiError) -> Vec<(Option<&'static str>, String)> {
    let event = json!({"type": "error", "code": error.code.unwrap_or("server_error"), "message": error.message,
        "param": error.param, "sequence_number": 0});
    vec![(Some("error"), event.to_string())]
}
