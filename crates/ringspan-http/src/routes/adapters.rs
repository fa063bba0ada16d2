//! `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, with vLLM's fields.

use crate::app::App;
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use axum::extract::State;
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
        if name.is_empty() || name == app.name {
            return Err(ApiError::field("lora_name", format!("`{name}` cannot be the name of an adapter")));
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
        if !app.engine.adapters().contains(&name) {
            return Err(ApiError::unknown_model(&name, &app.models()));
        }
        app.engine.unload_adapter(&name)?;
        Ok(format!("the adapter `{name}` is unloaded"))
    };
    app.wait(unload).await
}
