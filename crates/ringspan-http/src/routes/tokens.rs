//! `POST /tokenize` and `POST /detokenize`, with vLLM's fields.

use crate::app::App;
use crate::body::Body;
use crate::conversation::{self, Conversation, PromptEnd};
use crate::error::{ApiError, Result};
use crate::fields::Fields;
use axum::Json;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use std::sync::Arc;

pub(crate) async fn tokenize(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let read = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        app.target(&mut fields)?;
        let (prompt, messages) = (fields.string("prompt")?, fields.list("messages")?);
        let special = fields.boolean("add_special_tokens")?;
        let with_strings = fields.boolean("return_token_strs")?.unwrap_or(false);
        let tokens = match (prompt, messages) {
            (Some(prompt), None) => app.encode(&prompt, special.unwrap_or(true))?,
            (None, Some(messages)) => {
                let conversation = Conversation {
                    messages: Conversation::read(messages)?,
                    tools: conversation::tools(fields.list("tools")?.unwrap_or_default())?,
                    variables: conversation::variables(app, &mut fields)?,
                    end: PromptEnd::take(&mut fields)?,
                    ..Conversation::default()
                };
                let tokens = conversation.prompt(app)?;
                if special == Some(true) { app.special.begin(tokens) } else { tokens }
            }
            _ => return Err(ApiError::invalid("give either `prompt` or `messages`")),
        };
        fields.finish()?;
        Ok((tokens, with_strings))
    };
    let (tokens, with_strings) = app.compute(read).await?;
    let tokenizer = app.vocabulary.tokenizer();
    let strings: Option<Vec<_>> =
        with_strings.then(|| tokens.iter().map(|token| tokenizer.id_to_token(*token)).collect());
    let longest = app.engine.limits().max_model_len;
    let body = json!({"count": tokens.len(), "max_model_len": longest, "tokens": tokens, "token_strs": strings});
    Ok(Json(body).into_response())
}

pub(crate) async fn detokenize(State(app): State<Arc<App>>, Body(body): Body) -> Result<Response> {
    let read = move |app: &Arc<App>| {
        let mut fields = Fields::new(body);
        app.target(&mut fields)?;
        let tokens = fields.tokens("tokens")?;
        let tokens = fields.required("tokens", tokens)?;
        fields.finish()?;
        app.decode(&tokens, false)
    };
    let prompt = app.compute(read).await?;
    Ok(Json(json!({"prompt": prompt})).into_response())
}
