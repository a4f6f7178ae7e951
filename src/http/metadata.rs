//! What the server and its models are: metadata and configuration.

use super::AppState;
use super::error::ApiError;
use super::path::ModelPath;
use super::status::json_response;
use crate::model::TensorSpec;
use crate::model::config::published;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Extensions under the names that Triton gives them: those that work here.
const EXTENSIONS: [&str; 8] = [
    "binary_tensor_data",
    "classification",
    "logging",
    "model_configuration",
    "model_repository",
    "parameters",
    "schedule_policy",
    "statistics",
];

pub(super) async fn server() -> Response {
    json_response(&server_metadata())
}

/// What the server is.
pub(crate) fn server_metadata() -> Value {
    json!({
        "name": env!("CARGO_PKG_NAME"),
        "version": env!("CARGO_PKG_VERSION"),
        "extensions": EXTENSIONS,
    })
}

pub(super) async fn models(State(state): State<Arc<AppState>>) -> Response {
    let table = state.models.load();
    json_response(&json!({"models": table.models.keys().collect::<Vec<_>>()}))
}

pub(super) async fn model(State(state): State<Arc<AppState>>, path: ModelPath) -> Result<Response, ApiError> {
    model_metadata(&state, &path).map(|metadata| json_response(&metadata))
}

/// What a model is.
pub(crate) fn model_metadata(state: &AppState, path: &ModelPath) -> Result<Value, ApiError> {
    let spec = path.ready(state)?;
    let table = state.models.load();
    let versions: Vec<String> =
        table.ready().filter(|ready| ready.name == spec.name).map(|ready| ready.version.to_string()).collect();
    let tensors = |specs: &[TensorSpec]| -> Vec<Value> {
        let tensor = |spec: &TensorSpec| json!({"name": spec.name, "datatype": spec.datatype.name(), "shape": spec.wire_shape()});
        specs.iter().map(tensor).collect()
    };
    Ok(json!({
        "name": spec.name,
        "versions": versions,
        "platform": "onnxruntime_onnx",
        "inputs": tensors(&spec.inputs),
        "outputs": tensors(&spec.outputs),
    }))
}

/// Triton's model configuration, as far as it is true here.
pub(super) async fn config(State(state): State<Arc<AppState>>, path: ModelPath) -> Result<Response, ApiError> {
    model_config(&state, &path).map(|config| json_response(&config))
}

/// How a model is configured.
pub(crate) fn model_config(state: &AppState, path: &ModelPath) -> Result<Value, ApiError> {
    Ok(published(&*path.ready(state)?))
}
