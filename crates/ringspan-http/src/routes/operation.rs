//! Routes for operators: `/health`, `/version`, `/metrics`, `/openapi.json`, and the page at `/`.

use crate::app::App;
use crate::error::{ApiError, Result};
use crate::metrics::CONTENT_TYPE as METRICS;
use axum::Json;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{Html, IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;

/// The description of all routes.
pub(crate) const OPENAPI: &str = include_str!("../openapi.json");

/// A chat, and what the engine does, in one file.
const PAGE: &str = include_str!("../page.html");

/// Passes a token through every rank; a rank that has died makes it 503.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>> {
    app.wait(|app| Ok(app.engine.check_health()?)).await?;
    Ok(Json(json!({"status": "ok"})))
}

pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Result<Response> {
    let text = app.metrics.text().map_err(|error| ApiError::failed(error.to_string()))?;
    Ok(([(CONTENT_TYPE, METRICS)], text).into_response())
}

pub(crate) async fn openapi() -> Response {
    ([(CONTENT_TYPE, "application/json")], OPENAPI).into_response()
}

pub(crate) async fn page() -> Html<&'static str> {
    Html(PAGE)
}
