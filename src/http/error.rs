//! Every way in which a request can fail, and the one function that turns it into a response.

use super::JSON;
use crate::batcher::{InferError, Rejection};
use crate::model::InvalidRequest;
use crate::repository::Refused;
use axum::body::Body;
use axum::http::header::{ACCEPT_ENCODING, ALLOW, CONNECTION, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use std::time::Duration;

/// When to try again where nothing better is known (a model that loads, a server that drains).
const RETRY_LATER: Duration = Duration::from_secs(2);

/// The stable word for a kind of failure, which clients and metrics may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Code {
    /// The request is malformed or does not fit the model.
    InvalidRequest,
    /// No such model or version.
    ModelNotFound,
    /// No such route, or no such shared memory region.
    NotFound,
    /// The route exists, but not with this method.
    MethodNotAllowed,
    /// The body is larger than the server takes.
    BodyTooLarge,
    /// The body did not arrive in time.
    BodyTimeout,
    /// The body has an encoding that the server does not speak.
    UnsupportedEncoding,
    /// One row of the request does not fit the device.
    RequestTooLarge,
    /// Too much is queued or in flight.
    Overloaded,
    /// The request waited, or would have waited, past its deadline.
    DeadlineExceeded,
    /// The server or the model does not serve now.
    Unavailable,
    /// The device has no memory for it now.
    DeviceMemoryExhausted,
    /// The model failed on the request.
    DeviceError,
    /// A feature of the protocol that this server does not have.
    Unsupported,
    /// A model could not be loaded.
    LoadFailed,
    /// The request may not do this.
    Unauthorized,
    /// Nobody may do this here.
    Forbidden,
    /// A bug.
    Internal,
}

impl Code {
    /// Every code.
    pub const ALL: [Self; 18] = [
        Self::InvalidRequest,
        Self::ModelNotFound,
        Self::NotFound,
        Self::MethodNotAllowed,
        Self::BodyTooLarge,
        Self::BodyTimeout,
        Self::UnsupportedEncoding,
        Self::RequestTooLarge,
        Self::Overloaded,
        Self::DeadlineExceeded,
        Self::Unavailable,
        Self::DeviceMemoryExhausted,
        Self::DeviceError,
        Self::Unsupported,
        Self::LoadFailed,
        Self::Unauthorized,
        Self::Forbidden,
        Self::Internal,
    ];

    /// The word on the wire.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidRequest => "invalid_request",
            Self::ModelNotFound => "model_not_found",
            Self::NotFound => "not_found",
            Self::MethodNotAllowed => "method_not_allowed",
            Self::BodyTooLarge => "body_too_large",
            Self::BodyTimeout => "body_timeout",
            Self::UnsupportedEncoding => "unsupported_encoding",
            Self::RequestTooLarge => "request_too_large",
            Self::Overloaded => "overloaded",
            Self::DeadlineExceeded => "deadline_exceeded",
            Self::Unavailable => "unavailable",
            Self::DeviceMemoryExhausted => "device_memory_exhausted",
            Self::DeviceError => "device_error",
            Self::Unsupported => "unsupported",
            Self::LoadFailed => "load_failed",
            Self::Unauthorized => "unauthorized",
            Self::Forbidden => "forbidden",
            Self::Internal => "internal",
        }
    }
}

/// Why a request is not answered as wished.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("Not Found")]
    RouteNotFound,
    /// `allow` has the methods that there are; empty: the router adds them.
    #[error("Method Not Allowed")]
    MethodNotAllowed { allow: &'static str },
    #[error("{0}")]
    Invalid(#[from] InvalidRequest),
    #[error("the body broke off: {0}")]
    BodyBroken(String),
    #[error("the body is larger than {limit} bytes; send less, or raise the server's limit")]
    BodyTooLarge { limit: usize },
    #[error("the body did not arrive within {} s; send it faster, or raise the server's limit", limit.as_secs_f64())]
    BodyTimeout { limit: Duration },
    #[error("the requests inside the server hold as many bytes as it takes; try again later")]
    BodiesFull,
    #[error("content encoding '{0}' is not supported; send gzip, deflate, or the body as it is")]
    Encoding(String),
    #[error("the body is not {coding}, as its Content-Encoding says: {reason}")]
    Compressed { coding: &'static str, reason: String },
    #[error("the body is larger than {limit} bytes when decompressed; send less, or raise the server's limit")]
    InflatedTooLarge { limit: usize },
    #[error("model '{model}' is not known; GET /v2/models lists the models")]
    ModelNotFound { model: String },
    #[error("model '{model}' has no version {version}")]
    VersionNotFound { model: String, version: u64 },
    #[error("model '{model}' has no version with the label '{label}'; [versions.labels] in its model.toml gives them")]
    LabelNotFound { model: String, label: String },
    #[error("model '{model}' is not ready: {reason}")]
    ModelNotReady { model: String, reason: String },
    #[error("{0}")]
    ServerNotReady(String),
    #[error("unable to find shared memory region '{0}'; send the data in the body")]
    SharedMemory(String),
    #[error("{0} is not supported by this server")]
    Unsupported(&'static str),
    #[error("{}", infer_text(.0))]
    Infer(#[from] InferError),
    #[error(
        "this needs the header 'Authorization: Bearer TOKEN' with the token that the server was given as admin.token"
    )]
    Unauthorized,
    #[error("{0}")]
    Repository(#[from] Refused),
    #[error("{0} needs a server that was given an admin.token")]
    NoAdmin(&'static str),
    #[error("this needs the header 'Authorization: Bearer KEY' with an API key of this server")]
    NoKey,
    #[error("{message}")]
    Field { field: &'static str, message: String },
    #[error("{field} is empty; send at least one text")]
    Nothing { field: &'static str },
    #[error("{0}")]
    Tokenizer(String),
    #[error("model '{model}' {lack}")]
    Unable { model: String, lack: &'static str },
    #[error("{0}")]
    NoTextModel(String),
    #[error("as many requests with texts are inside the server as it takes; try again later")]
    TextsFull,
    #[error("internal error")]
    Internal,
}

/// What the client may know of a failed inference.
fn infer_text(error: &InferError) -> String {
    match error {
        InferError::Overloaded => "too many requests are in flight; try again later".to_owned(),
        InferError::Closed | InferError::Rejected(Rejection::Draining) => {
            "the server is shutting down; send the request to another one".to_owned()
        }
        InferError::Model(text) => format!("the model failed: {text}"),
        InferError::Rejected(Rejection::QueueFull { .. }) => "the queue is full; try again later".to_owned(),
        InferError::Rejected(Rejection::TooLarge { needed, capacity }) => format!(
            "one row of this request needs {needed} of device memory, and the device has {capacity}; send smaller inputs"
        ),
        InferError::Rejected(Rejection::DeadlineExceeded) => {
            "the request would have been answered after its deadline; give it more time, or send fewer".to_owned()
        }
        InferError::Rejected(Rejection::MemoryExhausted { .. }) => {
            "the device has no memory for this request at the moment; try again later".to_owned()
        }
        InferError::Rejected(Rejection::Unhealthy) => "the model has no working instance; try again later".to_owned(),
        InferError::Rejected(Rejection::Failed) => "the model failed on this request".to_owned(),
    }
}

/// How a failure looks on the wire.
#[derive(Debug, PartialEq)]
struct Wire {
    status: StatusCode,
    code: Code,
    retry_after: Option<Duration>,
    close: bool,
}

impl ApiError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::Invalid(InvalidRequest::new(message))
    }

    pub(crate) fn code(&self) -> Code {
        self.wire().code
    }

    /// After how many seconds it is worth trying again; `None`: it is not, as it is.
    pub(crate) fn retry_after(&self) -> Option<u64> {
        self.wire().retry_after.map(whole_seconds)
    }

    /// Logs the failure, once.
    pub(crate) fn log(&self) {
        let Wire { status, code, .. } = self.wire();
        // Only what is a fault of model or server: a refusal for want of room or time is the client's to see, and a probe that
        // finds a loading server asks again every second.
        if status == StatusCode::INTERNAL_SERVER_ERROR {
            tracing::warn!(status = status.as_u16(), code = code.as_str(), error = ?self, "request failed");
        } else {
            tracing::debug!(status = status.as_u16(), code = code.as_str(), error = %self, "request refused");
        }
    }

    /// The table of status codes: the only place where they are decided.
    fn wire(&self) -> Wire {
        use StatusCode as S;
        let of = |status, code| Wire { status, code, retry_after: None, close: false };
        let retry = |code, after| Wire { retry_after: Some(after), ..of(S::SERVICE_UNAVAILABLE, code) };
        match self {
            Self::RouteNotFound | Self::SharedMemory(_) => of(S::NOT_FOUND, Code::NotFound),
            Self::MethodNotAllowed { .. } => of(S::METHOD_NOT_ALLOWED, Code::MethodNotAllowed),
            Self::Invalid(_)
            | Self::BodyBroken(_)
            | Self::Compressed { .. }
            | Self::Field { .. }
            | Self::Nothing { .. }
            | Self::Tokenizer(_)
            | Self::Unable { .. } => of(S::BAD_REQUEST, Code::InvalidRequest),
            // What is left of the body would be taken for the next request.
            Self::BodyTooLarge { .. } => Wire { close: true, ..of(S::PAYLOAD_TOO_LARGE, Code::BodyTooLarge) },
            Self::InflatedTooLarge { .. } => of(S::PAYLOAD_TOO_LARGE, Code::BodyTooLarge),
            Self::BodyTimeout { .. } => Wire { close: true, ..of(S::REQUEST_TIMEOUT, Code::BodyTimeout) },
            Self::Encoding(_) => of(S::UNSUPPORTED_MEDIA_TYPE, Code::UnsupportedEncoding),
            Self::ModelNotFound { .. }
            | Self::VersionNotFound { .. }
            | Self::LabelNotFound { .. }
            | Self::NoTextModel(_) => of(S::NOT_FOUND, Code::ModelNotFound),
            Self::ModelNotReady { .. } | Self::ServerNotReady(_) => retry(Code::Unavailable, RETRY_LATER),
            Self::Unsupported(_) => of(S::NOT_IMPLEMENTED, Code::Unsupported),
            // Its body was not read.
            Self::Unauthorized | Self::NoKey => Wire { close: true, ..of(S::UNAUTHORIZED, Code::Unauthorized) },
            Self::NoAdmin(_) => Wire { close: true, ..of(S::FORBIDDEN, Code::Forbidden) },
            Self::Repository(refused) => match refused {
                Refused::Unknown(_) => of(S::NOT_FOUND, Code::ModelNotFound),
                Refused::Invalid(_) => of(S::BAD_REQUEST, Code::InvalidRequest),
                // What lies in the repository is wrong, and asking again makes it no better.
                Refused::Failed { .. } => of(S::BAD_REQUEST, Code::LoadFailed),
                Refused::Busy => retry(Code::Overloaded, RETRY_LATER),
                Refused::Closed => Wire { close: true, ..retry(Code::Unavailable, RETRY_LATER) },
            },
            Self::Internal => of(S::INTERNAL_SERVER_ERROR, Code::Internal),
            Self::BodiesFull | Self::TextsFull | Self::Infer(InferError::Overloaded) => {
                retry(Code::Overloaded, RETRY_LATER)
            }
            Self::Infer(InferError::Closed) => Wire { close: true, ..retry(Code::Unavailable, RETRY_LATER) },
            Self::Infer(InferError::Model(_)) => of(S::INTERNAL_SERVER_ERROR, Code::DeviceError),
            Self::Infer(InferError::Rejected(rejection)) => match *rejection {
                Rejection::QueueFull { retry_after } => retry(Code::Overloaded, retry_after),
                Rejection::TooLarge { .. } => of(S::PAYLOAD_TOO_LARGE, Code::RequestTooLarge),
                Rejection::DeadlineExceeded => of(S::GATEWAY_TIMEOUT, Code::DeadlineExceeded),
                Rejection::MemoryExhausted { retry_after } => retry(Code::DeviceMemoryExhausted, retry_after),
                Rejection::Draining => Wire { close: true, ..retry(Code::Unavailable, RETRY_LATER) },
                Rejection::Unhealthy => retry(Code::Unavailable, RETRY_LATER),
                Rejection::Failed => of(S::INTERNAL_SERVER_ERROR, Code::DeviceError),
            },
        }
    }

    /// The response, with these keys beside `error` and `code` in its body.
    pub(super) fn respond(&self, mut body: serde_json::Map<String, serde_json::Value>) -> Response {
        let wire = self.wire();
        body.insert("error".to_owned(), self.to_string().into());
        body.insert("code".to_owned(), wire.code.as_str().into());
        self.log();
        let mut response = Response::new(Body::from(serde_json::Value::Object(body).to_string()));
        *response.status_mut() = wire.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, JSON);
        if let Some(after) = wire.retry_after {
            headers.insert(RETRY_AFTER, HeaderValue::from(whole_seconds(after)));
        }
        if wire.close {
            headers.insert(CONNECTION, HeaderValue::from_static("close"));
        }
        match self {
            Self::MethodNotAllowed { allow } if !allow.is_empty() => {
                headers.insert(ALLOW, HeaderValue::from_static(allow))
            }
            Self::Encoding(_) => headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip, deflate")),
            Self::Unauthorized | Self::NoKey => headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            _ => None,
        };
        // For the routes whose clients read errors in another form.
        response.extensions_mut().insert(self.clone());
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(serde_json::Map::new())
    }
}

/// `Retry-After` has whole seconds only; zero would mean "at once".
fn whole_seconds(duration: Duration) -> u64 {
    (duration.as_secs() + u64::from(duration.subsec_nanos() > 0)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_its_status_code_and_retry_after() {
        let second = Duration::from_secs(1);
        let rejected = |rejection| ApiError::Infer(InferError::Rejected(rejection));
        let table = [
            (ApiError::RouteNotFound, 404, "not_found", None),
            (ApiError::MethodNotAllowed { allow: "POST" }, 405, "method_not_allowed", None),
            (ApiError::invalid("x"), 400, "invalid_request", None),
            (ApiError::BodyBroken("x".into()), 400, "invalid_request", None),
            (ApiError::BodyTooLarge { limit: 1 }, 413, "body_too_large", None),
            (ApiError::BodyTimeout { limit: second }, 408, "body_timeout", None),
            (ApiError::BodiesFull, 503, "overloaded", Some("2")),
            (ApiError::Encoding("br".into()), 415, "unsupported_encoding", None),
            (ApiError::ModelNotFound { model: "m".into() }, 404, "model_not_found", None),
            (ApiError::VersionNotFound { model: "m".into(), version: 2 }, 404, "model_not_found", None),
            (ApiError::LabelNotFound { model: "m".into(), label: "l".into() }, 404, "model_not_found", None),
            (ApiError::ModelNotReady { model: "m".into(), reason: "x".into() }, 503, "unavailable", Some("2")),
            (ApiError::ServerNotReady("x".into()), 503, "unavailable", Some("2")),
            (ApiError::SharedMemory("r".into()), 404, "not_found", None),
            (ApiError::Unsupported("x"), 501, "unsupported", None),
            (ApiError::Unauthorized, 401, "unauthorized", None),
            (ApiError::Compressed { coding: "gzip", reason: "x".into() }, 400, "invalid_request", None),
            (ApiError::InflatedTooLarge { limit: 1 }, 413, "body_too_large", None),
            (ApiError::NoAdmin("x"), 403, "forbidden", None),
            (Refused::Unknown("m".into()).into(), 404, "model_not_found", None),
            (Refused::Invalid("x".into()).into(), 400, "invalid_request", None),
            (Refused::Failed { model: "m".into(), reason: "x".into() }.into(), 400, "load_failed", None),
            (Refused::Busy.into(), 503, "overloaded", Some("2")),
            (Refused::Closed.into(), 503, "unavailable", Some("2")),
            (ApiError::NoKey, 401, "unauthorized", None),
            (ApiError::Field { field: "f", message: "x".into() }, 400, "invalid_request", None),
            (ApiError::Nothing { field: "f" }, 400, "invalid_request", None),
            (ApiError::Tokenizer("x".into()), 400, "invalid_request", None),
            (ApiError::Unable { model: "m".into(), lack: "x" }, 400, "invalid_request", None),
            (ApiError::NoTextModel("x".into()), 404, "model_not_found", None),
            (ApiError::TextsFull, 503, "overloaded", Some("2")),
            (ApiError::Internal, 500, "internal", None),
            (InferError::Overloaded.into(), 503, "overloaded", Some("2")),
            (InferError::Closed.into(), 503, "unavailable", Some("2")),
            (InferError::Model("x".into()).into(), 500, "device_error", None),
            (rejected(Rejection::QueueFull { retry_after: second * 7 / 2 }), 503, "overloaded", Some("4")),
            (
                rejected(Rejection::TooLarge { needed: Default::default(), capacity: Default::default() }),
                413,
                "request_too_large",
                None,
            ),
            (rejected(Rejection::DeadlineExceeded), 504, "deadline_exceeded", None),
            (
                rejected(Rejection::MemoryExhausted { retry_after: Duration::ZERO }),
                503,
                "device_memory_exhausted",
                Some("1"),
            ),
            (rejected(Rejection::Draining), 503, "unavailable", Some("2")),
            (rejected(Rejection::Unhealthy), 503, "unavailable", Some("2")),
            (rejected(Rejection::Failed), 500, "device_error", None),
        ];
        for (error, status, code, retry_after) in table {
            let response = error.clone().into_response();
            assert_eq!(response.status().as_u16(), status, "{error:?}");
            assert_eq!(error.code().as_str(), code, "{error:?}");
            assert_eq!(response.headers()[CONTENT_TYPE], "application/json");
            let header = response.headers().get(RETRY_AFTER).map(|value| value.to_str().unwrap());
            assert_eq!(header, retry_after, "{error:?}");
        }
    }

    #[test]
    fn codes_are_distinct() {
        let mut words: Vec<&str> = Code::ALL.iter().map(|code| code.as_str()).collect();
        words.sort_unstable();
        words.dedup();
        assert_eq!(words.len(), Code::ALL.len());
    }
}
