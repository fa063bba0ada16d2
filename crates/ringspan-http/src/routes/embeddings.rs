//! `POST /v1/embeddings`.

use super::completions::{Prompt, prompts};
use crate::app::App;
use crate::body::Body;
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::generation;
use crate::sampling::refuse_priority;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use ringspan_serve::engine::request::Pooling;
use serde_json::{Value, json};
use std::sync::Arc;

/// Inputs that are computed at a time for one request, if as many may wait for the engine.
const AT_A_TIME: usize = 16;

pub(crate) async fn create(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let read = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        let target = app.target(&mut fields)?.with_salt(&mut fields)?;
        let special = fields.boolean("add_special_tokens")?.unwrap_or(true);
        let input = fields.value("input");
        let inputs = prompts(app, "input", fields.required("input", input)?, special)?;
        check_lengths(&inputs, app.engine.limits().max_model_len)?;
        let base64 = match fields.string("encoding_format")?.as_deref() {
            None | Some("float") => false,
            Some("base64") => true,
            Some(other) => {
                return Err(ApiError::field("encoding_format", format!("must be float or base64, not {other}")));
            }
        };
        let pooling = match fields.string("pooling")?.as_deref() {
            None | Some("mean") => Pooling::Mean,
            Some("last") => Pooling::Last,
            Some(other) => return Err(ApiError::field("pooling", format!("must be mean or last, not {other}"))),
        };
        let width = app.engine.limits().hidden_size;
        let dimensions =
            fields.integer("dimensions", 1..=width as i64)?.map_or(width, |dimensions| dimensions as usize);
        fields.only("normalize", &[json!(true)], "vectors have length 1")?;
        fields.only("truncate_prompt_tokens", &[], "shorten the input yourself")?;
        refuse_priority(&mut fields)?;
        fields.ignore_without_effect();
        fields.finish()?;
        Ok((target, inputs, base64, pooling, dimensions))
    };
    let (target, inputs, base64, pooling, dimensions) = app.compute(read).await?;
    let tokens: usize = inputs.iter().map(|input| input.tokens.len()).sum();
    let at_a_time = AT_A_TIME.min(app.engine.limits().max_waiting).max(1);
    let mut vectors = Vec::with_capacity(inputs.len());
    let mut inputs = inputs.into_iter();
    loop {
        let some: Vec<_> = inputs.by_ref().take(at_a_time).collect();
        if some.is_empty() {
            break;
        }
        let mut running = tokio::task::JoinSet::new();
        for (index, input) in some.into_iter().enumerate() {
            let (app, target) = (app.clone(), target.clone());
            running.spawn(async move { (index, generation::embed(&app, &target, input.tokens, pooling).await) });
        }
        let mut done = Vec::new();
        while let Some(result) = running.join_next().await {
            let (index, vector) = result.map_err(|_| ApiError::failed("the server has failed on this request"))?;
            done.push((index, vector?));
        }
        done.sort_by_key(|(index, _)| *index);
        vectors.extend(done.into_iter().map(|(_, vector)| vector));
    }
    let each = |(index, vector): (usize, Vec<f32>)| {
        let vector = shortened(vector, dimensions);
        let embedding = match base64 {
            true => {
                let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                Value::from(BASE64_STANDARD.encode(bytes))
            }
            false => Value::from(vector),
        };
        json!({"object": "embedding", "index": index, "embedding": embedding})
    };
    let data: Vec<Value> = vectors.into_iter().enumerate().map(each).collect();
    let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": target.model, "usage": usage})).into_response())
}

/// Refuses inputs that are longer than the longest sequence, before any is computed.
fn check_lengths(inputs: &[Prompt], longest: usize) -> Result<()> {
    let Some(index) = inputs.iter().position(|input| input.tokens.len() > longest) else { return Ok(()) };
    let field = if inputs.len() == 1 { "input".to_owned() } else { format!("input[{index}]") };
    let tokens = inputs[index].tokens.len();
    Err(ApiError {
        code: Some("context_length_exceeded"),
        ..ApiError::field(field, format!("has {tokens} tokens, but the longest sequence has {longest} tokens"))
    })
}

/// The first `dimensions` of a vector, scaled to length 1; a vector of zeros stays.
fn shortened(mut vector: Vec<f32>, dimensions: usize) -> Vec<f32> {
    vector.truncate(dimensions);
    let length = vector.iter().map(|x| f64::from(*x) * f64::from(*x)).sum::<f64>().sqrt();
    if length > 0.0 {
        vector.iter_mut().for_each(|x| *x = (f64::from(*x) / length) as f32);
    }
    vector
}
