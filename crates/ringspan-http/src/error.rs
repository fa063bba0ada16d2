//! Errors of requests, in the shapes of OpenAI's and Anthropic's interfaces.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header::RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use ringspan_serve::engine::request::Refusal;
use serde_json::{Value, json};

/// Seconds after which a refused client may try again.
const RETRY_SECONDS: u16 = 1;

/// The result of a request.
pub(crate) type Result<T> = std::result::Result<T, ApiError>;

/// The error response of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    /// The status of the response.
    pub(crate) status: StatusCode,
    /// A sentence for a person.
    pub(crate) message: String,
    /// The field of the body that is wrong.
    pub(crate) param: Option<String>,
    /// A word for a program, such as `model_not_found`.
    pub(crate) code: Option<&'static str>,
}

impl ApiError {
    /// An error without a field.
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None }
    }

    /// A request that is wrong as a whole.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A field that is wrong.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        let param = param.into();
        Self { param: Some(param.clone()), ..Self::invalid(format!("{param}: {}", message.into())) }
    }

    /// A model that is not served.
    pub(crate) fn unknown_model(name: &str, served: &[String]) -> Self {
        let message = format!("the model `{name}` does not exist here; there are: {}", served.join(", "));
        Self { param: Some("model".into()), code: Some("model_not_found"), ..Self::new(StatusCode::NOT_FOUND, message) }
    }

    /// A failure that is not the client's.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, without_backtrace(&message.into()))
    }

    /// OpenAI's word for the kind of error.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// Anthropic's word for the kind of error.
    fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        }
    }

    /// The body in OpenAI's shape.
    pub(crate) fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}})
    }

    /// The body in Anthropic's shape.
    pub(crate) fn to_anthropic_json(&self) -> Value {
        json!({"type": "error", "error": {"type": self.anthropic_kind(), "message": self.message}})
    }

    /// The response in Anthropic's shape.
    pub(crate) fn into_anthropic_response(self) -> Response {
        let body = self.to_anthropic_json();
        self.respond(body)
    }

    fn respond(self, body: Value) -> Response {
        let mut response = (self.status, Json(body)).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(RETRY_SECONDS));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert("www-authenticate", HeaderValue::from_static("Bearer"));
        }
        // Routes of other shapes write it again.
        response.extensions_mut().insert(self);
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let body = self.to_json();
        self.respond(body)
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = without_backtrace(&refusal.to_string());
        match refusal {
            Refusal::Invalid(_) => Self::invalid(message),
            Refusal::Busy { .. } => {
                Self { code: Some("rate_limit_exceeded"), ..Self::new(StatusCode::TOO_MANY_REQUESTS, message) }
            }
            Refusal::Stopped(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, message),
        }
    }
}

/// A message of the engine without the backtrace that errors of the tensor library have where RUST_BACKTRACE is set: clients
/// have no use for it, and where a rank has failed, the process prints the whole error when it ends.
fn without_backtrace(message: &str) -> String {
    let is_frame = |line: &&str| {
        let text = line.trim_start();
        let number = text.split_once(": ").map_or("", |(number, _)| number);
        let is_function = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
        text.len() < line.len() && (is_function || text.starts_with("at "))
    };
    message.lines().filter(|line| !is_frame(line)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::backtrace::Backtrace;

    #[test]
    fn clients_get_no_backtraces() {
        let backtrace = Backtrace::force_capture().to_string();
        assert!(backtrace.lines().count() > 3, "{backtrace}");
        let problem = format!("rank 1: shapes differ\n{backtrace}");
        for error in
            [ApiError::failed(&problem), Refusal::Invalid(problem.clone()).into(), Refusal::Stopped(problem).into()]
        {
            assert_eq!(error.message, "rank 1: shapes differ");
        }
        assert_eq!(without_backtrace("one: 1\nat 2: two"), "one: 1\nat 2: two");
    }
}
