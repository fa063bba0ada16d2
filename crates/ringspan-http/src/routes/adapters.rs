//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields.

use crate::app::App;
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use axum::extract::State;
use axum::http::StatusCode;
use std::path::PathBuf;
use std::sync::Arc;

pub(crate) async fn load(State(app): State<Arc<App>>, Body(body): Body) -> Result<String> {
    let load = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        let (name, path) = (fields.string("lora_name")?, fields.string("lora_path")?);
        let name = fields.required("lora_name", name)?;
        let path = PathBuf::from(fields.required("lora_path", path)?);
        fields.only("load_inplace", &[false.into()], "unload the adapter first")?;
        fields.finish()?;
        if name.is_empty() {
            return Err(ApiError::field("lora_name", "must not be empty, since requests ask for the adapter by it"));
        }
        if name == app.name {
            let message = format!("`{name}` is the name of the model itself; an adapter needs one of its own");
            return Err(ApiError::field("lora_name", message));
        }
        app.engine.load_adapter(&name, &path)?;
        Ok(format!("the adapter `{name}` is loaded"))
    };
    app.wait(load).await
}

pub(crate) async fn unload(State(app): State<Arc<App>>, Body(body): Body) -> Result<String> {
    let unload = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        let name = fields.string("lora_name")?;
        let name = fields.required("lora_name", name)?;
        fields.integer("lora_int_id", 0..=i64::MAX)?;
        fields.finish()?;
        let loaded = app.engine.adapters();
        if !loaded.contains(&name) {
            let message = match loaded.is_empty() {
                true => format!("there is no adapter `{name}`; none is loaded"),
                false => format!("there is no adapter `{name}`; loaded are: {}", loaded.join(", ")),
            };
            return Err(ApiError {
                status: StatusCode::NOT_FOUND,
                code: Some("model_not_found"),
                ..ApiError::field("lora_name", message)
            });
        }
        app.engine.unload_adapter(&name)?;
        Ok(format!("the adapter `{name}` is unloaded"))
    };
    app.wait(unload).await
}
