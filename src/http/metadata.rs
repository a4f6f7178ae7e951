//! What the server and its models are: metadata, configuration, the index of the repository.

use super::error::ApiError;
use super::path::ModelPath;
use super::status::json_response;
use super::{AppState, body};
use crate::model::{ModelSpec, ModelState, TensorSpec};
use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::{Value, json};
use std::sync::Arc;

/// Extensions under the names that Triton gives them: those that work here.
const EXTENSIONS: [&str; 4] = ["binary_tensor_data", "parameters", "schedule_policy", "model_configuration"];

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
    Ok(config_of(&*path.ready(state)?))
}

fn config_of(spec: &ModelSpec) -> Value {
    // Clients that read a positive `max_batch_size` take the first dimension for the batch: only then may it be published.
    let batched = spec.batch_axis == Some(0);
    let settings = &spec.settings;
    let tensor = |tensor: &TensorSpec| {
        let dims: Vec<i64> = tensor.wire_shape().into_iter().skip(usize::from(batched)).collect();
        json!({
            "name": tensor.name,
            "data_type": tensor.datatype.config_name(),
            "dims": dims,
            "is_shape_tensor": false,
        })
    };
    let input = |spec: &TensorSpec| {
        let mut value = tensor(spec);
        value["format"] = "FORMAT_NONE".into();
        value["allow_ragged_batch"] = false.into();
        value["optional"] = false.into();
        value
    };
    let mut config = json!({
        "name": spec.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "max_batch_size": if batched { spec.max_batch_size } else { 0 },
        "version_policy": {"specific": {"versions": [spec.version]}},
        "input": spec.inputs.iter().map(input).collect::<Vec<_>>(),
        "output": spec.outputs.iter().map(tensor).collect::<Vec<_>>(),
        "model_transaction_policy": {"decoupled": false},
        "response_cache": {"enable": false},
    });
    if batched {
        config["dynamic_batching"] = json!({
            "preferred_batch_size": [],
            "max_queue_delay_microseconds": u64::try_from(settings.max_queue_delay.as_micros()).unwrap_or(u64::MAX),
            "preserve_ordering": false,
            "priority_levels": settings.priority_levels,
            "default_priority_level": settings.default_priority,
            "default_queue_policy": {"timeout_action": "REJECT", "allow_timeout_override": true},
        });
    }
    config
}

pub(super) async fn repository_index(
    State(state): State<Arc<AppState>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let (body, _room) = body::read(&parts.headers, body, &state.limits, &state.bodies).await?;
    let only_ready = only_ready(&body.to_contiguous())?;
    Ok(json_response(&index_of(&state, only_ready)))
}

/// Every version of every model, or only those that are ready.
pub(crate) fn index_of(state: &AppState, only_ready: bool) -> Value {
    let table = state.models.load();
    let versions = table.models.iter().flat_map(|(name, versions)| versions.iter().map(move |entry| (name, entry)));
    let index: Vec<Value> = versions
        .filter(|(_, (_, state))| !only_ready || matches!(state, ModelState::Ready(_)))
        .map(|(name, (version, state))| {
            let (word, reason) = match state {
                ModelState::Loading => ("LOADING", ""),
                ModelState::Ready(_) => ("READY", ""),
                ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, .. } => ("UNAVAILABLE", &**reason),
            };
            json!({"name": name, "version": version.to_string(), "state": word, "reason": reason})
        })
        .collect();
    Value::Array(index)
}

/// The body is empty, or an object in which `ready` may be true or false.
fn only_ready(body: &[u8]) -> Result<bool, ApiError> {
    if body.is_empty() {
        return Ok(false);
    }
    let value: Value = serde_json::from_slice(body)
        .map_err(|error| ApiError::invalid(format!("the body must be empty or a JSON object: {error}")))?;
    match (value.as_object(), value.get("ready")) {
        (None, _) => Err(ApiError::invalid("the body must be empty or a JSON object")),
        (Some(_), None) => Ok(false),
        (Some(_), Some(ready)) => ready.as_bool().ok_or_else(|| ApiError::invalid("ready must be true or false")),
    }
}
