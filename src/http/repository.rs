//! The model repository extension: the index, and loading and unloading for those who hold the admin token.

use super::error::ApiError;
use super::path::Segment;
use super::status::json_response;
use super::{AppState, admin, body};
use crate::repository::Controller;
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub(super) async fn index(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let (body, _room) = body::read_small(&parts, body, &state, body::SMALL_BODY_BYTES).await?;
    let object = object(&body)?;
    let only_ready = match object.get("ready") {
        None => false,
        Some(ready) => ready.as_bool().ok_or_else(|| ApiError::invalid("ready must be true or false"))?,
    };
    Ok(json_response(&index_of(&state, only_ready)))
}

/// Every version of every model, or only those that are ready.
pub(crate) fn index_of(state: &AppState, only_ready: bool) -> Value {
    let table = state.models.load();
    let entries = table.index().filter(|entry| !only_ready || entry.state == "READY").map(|entry| {
        json!({
            "name": entry.name,
            "version": entry.version.to_string(),
            "state": entry.state,
            "reason": entry.reason,
        })
    });
    Value::Array(entries.collect())
}

pub(super) async fn load(
    State(state): State<Arc<AppState>>,
    Segment(model): Segment,
    request: Request,
) -> Result<Response, ApiError> {
    let (controller, parameters) = asked(&state, request).await?;
    let text = |(name, value): (&String, &Value)| match value.as_str() {
        Some(text) => Ok((name.clone(), text.to_owned())),
        None => Err(ApiError::invalid(format!("parameters.{name} must be a string"))),
    };
    let parameters: Vec<(String, String)> = parameters.iter().map(text).collect::<Result<_, _>>()?;
    controller.load(&model, parameters.iter().map(|(name, value)| (name.as_str(), value.as_str()))).await?;
    Ok(json_response(&json!({"name": model, "load": true})))
}

pub(super) async fn unload(
    State(state): State<Arc<AppState>>,
    Segment(model): Segment,
    request: Request,
) -> Result<Response, ApiError> {
    let (controller, parameters) = asked(&state, request).await?;
    // Nothing depends on another model here, so that both values mean the same.
    if let Some((name, value)) =
        parameters.iter().find(|(name, value)| *name != "unload_dependents" || !value.is_boolean())
    {
        return Err(ApiError::invalid(format!(
            "parameters.{name} = {value}: expected unload_dependents, true or false"
        )));
    }
    controller.unload(&model).await?;
    Ok(json_response(&json!({"name": model, "unload": true})))
}

/// A repository with a name: there is one, without.
pub(super) async fn named() -> ApiError {
    ApiError::Unsupported("a repository with a name")
}

/// The handle for whoever may use it, and the request's `parameters`.
async fn asked(state: &AppState, request: Request) -> Result<(&Controller, Map<String, Value>), ApiError> {
    let (parts, body) = request.into_parts();
    // First of all: strangers get no byte of theirs read.
    admin::required(state, &parts.headers)?;
    let controller = controller(state)?;
    let (body, _room) = body::read_small(&parts, body, state, body::LOAD_BODY_BYTES).await?;
    let parameters = match object(&body)?.remove("parameters") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(parameters)) => parameters,
        Some(_) => return Err(ApiError::invalid("parameters must be an object")),
    };
    Ok((controller, parameters))
}

/// The handle that loads and unloads.
pub(crate) fn controller(state: &AppState) -> Result<&Controller, ApiError> {
    state.repository.as_ref().ok_or(ApiError::RouteNotFound)
}

/// A body that is empty or an object.
fn object(body: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if body.is_empty() {
        return Ok(Map::new());
    }
    let fault = |reason: String| ApiError::invalid(format!("the body must be empty or a JSON object{reason}"));
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(fault(String::new())),
        Err(error) => Err(fault(format!(": {error}"))),
    }
}
