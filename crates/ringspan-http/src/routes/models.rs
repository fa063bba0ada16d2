//! `GET /v1/models` and `/v1/models/{id}`.

use crate::app::App;
use crate::error::{ApiError, Result};
use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};
use std::sync::Arc;

fn model(app: &App, name: &str) -> Value {
    let parent = (name != app.name).then_some(&app.name);
    json!({"id": name, "object": "model", "created": app.created, "owned_by": "ringspan", "root": name, "parent": parent,
        "max_model_len": app.engine.limits().max_model_len, "capabilities": {"completion_chat": app.template.is_some()}})
}

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let models: Vec<Value> = app.models().iter().map(|name| model(&app, name)).collect();
    Json(json!({"object": "list", "data": models}))
}

pub(crate) async fn one(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>> {
    let models = app.models();
    match models.contains(&name) {
        true => Ok(Json(model(&app, &name))),
        false => Err(ApiError::unknown_model(&name, &models)),
    }
}
