//! Bodies of requests: JSON objects of limited size.

use crate::error::ApiError;
use axum::body::Bytes;
use axum::extract::{FromRequest, Request, rejection::BytesRejection};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE, ORIGIN};
use serde_json::{Map, Value};
use std::error::Error;
use tower_http::timeout::TimeoutError;

/// The JSON object in a request's body.
#[derive(Debug)]
pub(crate) struct Body(pub(crate) Map<String, Value>);

impl<S: Send + Sync> FromRequest<S> for Body {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let kind = request.headers().get(CONTENT_TYPE).map(|kind| kind.to_str().unwrap_or("?").to_owned());
        // A page of another origin can send bodies without asking, unless they are declared to be JSON.
        let kind = kind.or_else(|| request.headers().contains_key(ORIGIN).then(|| "of no type".to_owned()));
        if let Some(kind) = kind
            && !is_json(&kind)
        {
            let message = format!("the body must be application/json, not {kind}");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let encoding = request.headers().get(CONTENT_ENCODING).map(|encoding| encoding.to_str().unwrap_or("?"));
        if let Some(encoding) = encoding
            && !encoding.eq_ignore_ascii_case("identity")
        {
            let message = format!("the body is encoded as {encoding}; send it without Content-Encoding");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
        }
        let bytes = Bytes::from_request(request, state).await.map_err(|rejection| refused(&rejection))?;
        match serde_json::from_slice(&bytes) {
            Ok(Value::Object(map)) => Ok(Self(map)),
            Ok(other) => {
                Err(ApiError::invalid(format!("the body must be an object, not {}", crate::fields::kind(&other))))
            }
            Err(error) => Err(ApiError::invalid(format!("the body is no JSON: {error}"))),
        }
    }
}

fn is_json(kind: &str) -> bool {
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

fn refused(rejection: &BytesRejection) -> ApiError {
    let mut cause = rejection.source();
    while let Some(error) = cause {
        if error.is::<TimeoutError>() {
            return ApiError::new(StatusCode::REQUEST_TIMEOUT, "the rest of the body has not come in time");
        }
        cause = error.source();
    }
    match rejection.status() {
        StatusCode::PAYLOAD_TOO_LARGE => {
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than this server takes (--max-body)")
        }
        status => ApiError::new(status, format!("the body cannot be read: {rejection}")),
    }
}
