//! Whether the server and its models live and serve, and its metrics.

use super::error::ApiError;
use super::path::ModelPath;
use super::{AppState, JSON, Phase};
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// 200 with this body.
pub(super) fn json_response(value: &Value) -> Response {
    let mut response = Response::new(Body::from(value.to_string()));
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    response
}

pub(super) fn alive() -> Response {
    json_response(&json!({"status": "alive"}))
}

/// Live as long as there is somebody to answer: while loading and while draining, too.
pub(super) async fn live() -> Response {
    json_response(&json!({"live": true}))
}

pub(super) async fn ready(State(state): State<Arc<AppState>>) -> Response {
    match not_ready(&state) {
        None => json_response(&json!({"live": true, "ready": true})),
        Some(reason) => {
            let error = ApiError::ServerNotReady(reason);
            error.respond(Map::from_iter([("ready".to_owned(), false.into())]))
        }
    }
}

/// Why the server is not ready; `None` if it is.
pub(crate) fn not_ready(state: &AppState) -> Option<String> {
    match *state.phase.borrow() {
        Phase::Serving => state.models.load().not_ready_reason(),
        Phase::Announced | Phase::Closing => Some("the server is draining".to_owned()),
    }
}

pub(super) async fn model_ready(State(state): State<Arc<AppState>>, path: ModelPath) -> Response {
    let name = ("name".to_owned(), Value::from(path.model.as_str()));
    match path.ready(&state) {
        Ok(_) => json_response(&Value::Object(Map::from_iter([name, ("ready".to_owned(), true.into())]))),
        Err(error @ ApiError::ModelNotReady { .. }) => {
            error.respond(Map::from_iter([name, ("ready".to_owned(), false.into())]))
        }
        Err(error) => error.into_response(),
    }
}

pub(super) async fn metrics(State(state): State<Arc<AppState>>) -> Response {
    let mut response = Response::new(Body::from((state.metrics)()));
    let text = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, text);
    response
}
