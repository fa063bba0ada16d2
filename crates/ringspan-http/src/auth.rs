//! API keys, compared in constant time.

use crate::error::ApiError;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header::AUTHORIZATION};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// The API keys of the server; without any, it answers all requests.
#[derive(Clone)]
pub(crate) struct ApiKeys(pub(crate) Arc<[String]>);

impl ApiKeys {
    fn admit(&self, key: &[u8]) -> bool {
        // All keys are compared, so that the time does not tell which one is similar.
        self.0.iter().fold(false, |found, known| found | bool::from(known.as_bytes().ct_eq(key)))
    }
}

/// The key that a request brings: as OpenAI's clients send it, or Anthropic's.
fn key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(AUTHORIZATION).and_then(|value| {
        let value = value.as_bytes();
        let (scheme, key) = value.split_at_checked(b"Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// Refuses requests whose API key is missing or wrong, if the server has keys.
pub(crate) async fn check(State(keys): State<ApiKeys>, request: Request, next: Next) -> Response {
    let refused = |message: &str| {
        ApiError { code: Some("invalid_api_key"), ..ApiError::new(StatusCode::UNAUTHORIZED, message) }.into_response()
    };
    if keys.0.is_empty() {
        return next.run(request).await;
    }
    match key(request.headers()) {
        Some(key) if keys.admit(key) => next.run(request).await,
        Some(_) => refused("the API key is not one of this server's"),
        None => refused("this server needs an API key, as `Authorization: Bearer KEY`"),
    }
}
