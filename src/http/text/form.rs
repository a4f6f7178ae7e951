//! Errors in the form that the clients of a route read: OpenAI's and TEI's routes have their own.

use crate::http::JSON;
use crate::http::error::{ApiError, Code};
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::middleware::Next;
use axum::response::Response;
use serde_json::{Value, json};

/// The most characters of what is said of an error.
const MOST_MESSAGE: usize = 1000;

/// A form of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    OpenAi,
    Tei,
}

/// The paths of TEI's routes.
const TEI: [&str; 8] = ["/embed", "/embed_all", "/rerank", "/predict", "/similarity", "/tokenize", "/decode", "/info"];

impl Form {
    /// That of a path; `None`: the form of all others.
    fn of(path: &str) -> Option<Self> {
        if path.ends_with("/embeddings") {
            return Some(Self::OpenAi);
        }
        (TEI.contains(&path) || path.starts_with("/tei/")).then_some(Self::Tei)
    }

    fn error(self, error: &ApiError, status: StatusCode) -> (StatusCode, Value) {
        match self {
            Self::OpenAi => (status, openai(error, status)),
            Self::Tei => tei(error, status),
        }
    }
}

/// The schema of what a route refuses with.
pub(in crate::http) fn schema(path: &str) -> &'static str {
    match Form::of(path) {
        Some(Form::OpenAi) => "OpenAiError",
        Some(Form::Tei) => "TeiError",
        None => "Error",
    }
}

/// The middleware that brings errors into the form of their route. Whatever makes a response of an [`ApiError`] leaves it there.
pub(in crate::http) async fn dress(request: Request, next: Next) -> Response {
    let form = Form::of(request.uri().path());
    let mut response = next.run(request).await;
    if let (Some(form), Some(error)) = (form, response.extensions_mut().remove::<ApiError>()) {
        let (status, body) = form.error(&error, response.status());
        *response.status_mut() = status;
        *response.body_mut() = Body::from(body.to_string());
        response.headers_mut().remove(CONTENT_LENGTH);
        response.headers_mut().insert(CONTENT_TYPE, JSON);
    }
    response
}

/// What is said of an error. What a client sent may stand in it, and may be as long as a body.
fn message(error: &ApiError) -> String {
    let mut text = error.to_string();
    if let Some((end, _)) = text.char_indices().nth(MOST_MESSAGE) {
        text.truncate(end);
        text.push('…');
    }
    text
}

fn openai(error: &ApiError, status: StatusCode) -> Value {
    let kind = if status.is_server_error() { "server_error" } else { "invalid_request_error" };
    let param = match error {
        ApiError::Field { field, .. } | ApiError::Nothing { field } => Some(*field),
        ApiError::ModelNotFound { .. } | ApiError::ModelNotReady { .. } | ApiError::Unable { .. } => Some("model"),
        _ => None,
    };
    json!({"error": {"message": message(error), "type": kind, "param": param, "code": error.code().as_str()}})
}

/// TEI has words and statuses of its own for what it knows; the rest keeps its status.
fn tei(error: &ApiError, status: StatusCode) -> (StatusCode, Value) {
    let (status, kind) = match error {
        ApiError::Nothing { .. } => (StatusCode::BAD_REQUEST, "Empty"),
        ApiError::Tokenizer(_) => (StatusCode::UNPROCESSABLE_ENTITY, "Tokenizer"),
        ApiError::Unable { .. } => (StatusCode::FAILED_DEPENDENCY, "Backend"),
        _ => match error.code() {
            Code::InvalidRequest => (StatusCode::UNPROCESSABLE_ENTITY, "Validation"),
            Code::Overloaded => (StatusCode::TOO_MANY_REQUESTS, "Overloaded"),
            Code::DeviceError => (StatusCode::FAILED_DEPENDENCY, "Backend"),
            Code::DeviceMemoryExhausted => (status, "Backend"),
            Code::Unavailable | Code::DeadlineExceeded | Code::Internal => (status, "Unhealthy"),
            _ => (status, "Validation"),
        },
    };
    (status, json!({"error": message(error), "error_type": kind}))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batcher::InferError;

    #[test]
    fn each_route_has_its_form() {
        for (path, form) in [
            ("/v1/embeddings", Some(Form::OpenAi)),
            ("/openai/v1/embeddings", Some(Form::OpenAi)),
            ("/embed", Some(Form::Tei)),
            ("/tei/m/embed", Some(Form::Tei)),
            ("/tei/m/nothing", Some(Form::Tei)),
            ("/v2/models/m/infer", None),
            ("/embed/", None),
        ] {
            assert_eq!(Form::of(path), form, "{path}");
        }
    }

    #[test]
    fn failures_have_the_status_and_the_words_of_their_form() {
        let field = ApiError::Field { field: "dimensions", message: "too many".to_owned() };
        for (error, status, openai, tei) in [
            (field, 400, ("invalid_request_error", "invalid_request", json!("dimensions")), (422, "Validation")),
            (
                ApiError::Nothing { field: "input" },
                400,
                ("invalid_request_error", "invalid_request", json!("input")),
                (400, "Empty"),
            ),
            (
                ApiError::ModelNotFound { model: "m".to_owned() },
                404,
                ("invalid_request_error", "model_not_found", json!("model")),
                (404, "Validation"),
            ),
            (
                ApiError::Unable { model: "m".to_owned(), lack: "gives no vectors for texts" },
                400,
                ("invalid_request_error", "invalid_request", json!("model")),
                (424, "Backend"),
            ),
            (ApiError::TextsFull, 503, ("server_error", "overloaded", Value::Null), (429, "Overloaded")),
            (
                ApiError::Tokenizer("x".to_owned()),
                400,
                ("invalid_request_error", "invalid_request", Value::Null),
                (422, "Tokenizer"),
            ),
            (
                InferError::Model("x".to_owned()).into(),
                500,
                ("server_error", "device_error", Value::Null),
                (424, "Backend"),
            ),
            (InferError::Closed.into(), 503, ("server_error", "unavailable", Value::Null), (503, "Unhealthy")),
        ] {
            let ours = StatusCode::from_u16(status).unwrap();
            let (status, body) = Form::OpenAi.error(&error, ours);
            let (kind, code, param) = openai;
            let expected = json!({"message": error.to_string(), "type": kind, "code": code, "param": param});
            assert_eq!((status, &body["error"]), (ours, &expected));
            let (status, body) = Form::Tei.error(&error, ours);
            assert_eq!((status.as_u16(), &body["error_type"]), (tei.0, &json!(tei.1)), "{error:?}");
            assert_eq!(body["error"], error.to_string());
        }
    }
}
