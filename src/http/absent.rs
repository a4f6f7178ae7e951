//! Extensions of the protocol that this server does not have, in the answers that its clients know how to read.

use super::error::ApiError;
use super::path::Segment;
use super::status::json_response;
use super::{AppState, body};
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Over every protocol.
pub(crate) const SHARED_MEMORY: ApiError = ApiError::Unsupported("shared memory (send the data in the body)");

/// Registering a region, or unregistering one or all.
pub(super) async fn shared_memory() -> ApiError {
    SHARED_MEMORY
}

/// All regions: none.
pub(super) async fn no_regions() -> Response {
    json_response(&json!([]))
}

/// One region.
pub(super) async fn no_region(Segment(region): Segment) -> ApiError {
    ApiError::SharedMemory(region)
}

pub(super) async fn trace() -> ApiError {
    ApiError::Unsupported("tracing by request")
}

/// What is logged. It is settled when the server starts.
pub(super) async fn logging(State(state): State<Arc<AppState>>) -> Response {
    json_response(&state.logging)
}

/// Changing that, which works as long as nothing changes.
pub(super) async fn set_logging(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let (body, _room) = body::read_small(&parts, body, &state, body::SMALL_BODY_BYTES).await?;
    let wanted: Map<String, Value> = serde_json::from_slice(&body)
        .map_err(|error| ApiError::invalid(format!("the body must be a JSON object of log settings: {error}")))?;
    log_settings(&state, &wanted).map(|settings| json_response(&settings))
}

/// What is logged, if nothing else is wanted; over every protocol.
pub(crate) fn log_settings(state: &AppState, wanted: &Map<String, Value>) -> Result<Value, ApiError> {
    // Clients send what they do not want to change as null, and keys that are not known mean nothing.
    let differs = |(key, value): (&String, &Value)| {
        !value.is_null() && state.logging.get(key).is_some_and(|current| current != value)
    };
    if wanted.iter().any(differs) {
        return Err(ApiError::Unsupported("changing the log while serving (log.level is read at the start)"));
    }
    Ok(state.logging.clone())
}
