//! TensorFlow Serving's REST interface: predict in rows or columns, the status of a model, its metadata.
//!
//! The routes below `/v1/models` also answer what KServe's first protocol and OpenAI's list of models ask there: the answers
//! are objects with the keys of all of them.

mod read;
mod write;

use super::error::ApiError;
use super::inference::Inference;
use super::path::{ModelPath, segments};
use super::status::json_response;
use super::{AppState, JSON, Outcome, body};
use crate::model::{Lookup, ModelSpec, ModelState, TensorSpec};
use crate::tensor::DataType;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::response::Response;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// The methods of a path without a verb.
const LOOKS: &str = "GET,HEAD";
/// The methods of a path with one.
const DOES: &str = "POST";

/// The one signature that a model has.
const SIGNATURE: &str = "serving_default";

/// A path below `/v1/models`. What is last may end in a verb, such as `:predict`.
#[derive(Debug, Deserialize)]
pub(super) struct Target {
    model: String,
    version: Option<String>,
    label: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for Target {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        segments(parts, state).await
    }
}

/// What stands behind the last colon of a path.
#[derive(Debug, PartialEq)]
enum Verb {
    None,
    Predict,
    /// TensorFlow Serving has it, this server has not.
    Absent,
}

impl Target {
    /// The path without the verb, and that.
    fn verb(mut self) -> Result<(Self, Verb), ApiError> {
        let last = self.version.as_mut().or(self.label.as_mut()).unwrap_or(&mut self.model);
        let Some((rest, verb)) = last.rsplit_once(':') else { return Ok((self, Verb::None)) };
        let verb = match verb {
            "predict" => Verb::Predict,
            "classify" | "regress" | "explain" => Verb::Absent,
            _ => return Err(ApiError::RouteNotFound),
        };
        *last = rest.to_owned();
        Ok((self, verb))
    }

    /// What has no verb is looked at, what has one is done.
    fn only_looked_at(self) -> Result<Self, ApiError> {
        match self.verb()? {
            (target, Verb::None) => Ok(target),
            _ => Err(ApiError::MethodNotAllowed { allow: DOES }),
        }
    }

    /// The model and the version that are meant.
    fn resolve(self, state: &AppState) -> Result<ModelPath, ApiError> {
        let version = match (&self.version, &self.label) {
            (None, None) => None,
            (Some(version), _) => Some(super::path::version(version)?),
            (None, Some(label)) => Some(labelled(state, &self.model, label)?),
        };
        Ok(ModelPath { model: self.model, version })
    }
}

/// The version that a label names.
fn labelled(state: &AppState, model: &str, label: &str) -> Result<u64, ApiError> {
    let Lookup::Ready(spec) = state.models.load().lookup(model, None) else {
        return ModelPath { model: model.to_owned(), version: None }.ready(state).map(|spec| spec.version);
    };
    spec.settings
        .version_labels
        .get(label)
        .copied()
        .ok_or_else(|| ApiError::LabelNotFound { model: model.to_owned(), label: label.to_owned() })
}

pub(super) async fn predict(
    State(state): State<Arc<AppState>>,
    target: Result<Target, ApiError>,
    request: Request,
) -> Response {
    let mut outcome = Outcome::of(&state, &request);
    let answer = answer(&state, target, request, &mut outcome).await;
    outcome.response(answer)
}

async fn answer(
    state: &AppState,
    target: Result<Target, ApiError>,
    request: Request,
    outcome: &mut Outcome,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    // First of all, so that the connection can go on after whatever error.
    let (body, _room) = body::read(&parts.headers, body, &state.limits, &state.bodies).await?;
    let target = match target?.verb()? {
        (target, Verb::Predict) => target,
        (_, Verb::Absent) => return Err(ApiError::Unsupported("any verb but predict")),
        (_, Verb::None) => return Err(ApiError::MethodNotAllowed { allow: LOOKS }),
    };
    let mut inference = Inference::of(state, &target.resolve(state)?, outcome)?;
    let (request, form) = read::read(&inference.model, &body.to_contiguous())?;
    drop(body);
    let answer = inference.run(request, &[]).await?;
    let mut response = Response::new(Body::from(write::write(&inference.model, answer, form)?));
    inference.written();
    response.headers_mut().insert(CONTENT_TYPE, JSON);
    Ok(response)
}

/// A method that is neither to look nor to do.
pub(super) async fn other_method(target: Target) -> ApiError {
    match target.verb() {
        Ok((_, Verb::None)) => ApiError::MethodNotAllowed { allow: LOOKS },
        Ok(_) => ApiError::MethodNotAllowed { allow: DOES },
        Err(error) => error,
    }
}

/// The status of a model's versions: 503 if none serves.
pub(super) async fn status(State(state): State<Arc<AppState>>, target: Target) -> Result<Response, ApiError> {
    let path = target.only_looked_at()?.resolve(&state)?;
    let table = state.models.load();
    let versions =
        table.models.get(&path.model).ok_or_else(|| ApiError::ModelNotFound { model: path.model.clone() })?;
    let wanted = |version: &u64| path.version.is_none_or(|wanted| wanted == *version);
    let statuses: Vec<Value> = versions
        .iter()
        .rev()
        .filter(|(version, _)| wanted(version))
        .map(|(v, state)| version_status(*v, state))
        .collect();
    if let (true, Some(version)) = (statuses.is_empty(), path.version) {
        return Err(ApiError::VersionNotFound { model: path.model, version });
    }
    let serves = path.ready(&state);
    let mut body = described(&path.model);
    body.insert("name".to_owned(), path.model.as_str().into());
    body.insert("ready".to_owned(), serves.is_ok().into());
    body.insert("model_version_status".to_owned(), statuses.into());
    Ok(match serves {
        Ok(_) => json_response(&Value::Object(body)),
        Err(error) => error.respond(body),
    })
}

fn version_status(version: u64, state: &ModelState) -> Value {
    let (word, code, message) = match state {
        ModelState::Loading => ("LOADING", "OK", ""),
        ModelState::Ready(_) => ("AVAILABLE", "OK", ""),
        ModelState::Unavailable { failed: false, .. } => ("END", "OK", ""),
        ModelState::Unhealthy { reason } | ModelState::Unavailable { reason, .. } => ("END", "UNAVAILABLE", &**reason),
    };
    json!({"version": version.to_string(), "state": word, "status": {"error_code": code, "error_message": message}})
}

/// All models.
pub(super) async fn list(State(state): State<Arc<AppState>>) -> Response {
    let table = state.models.load();
    let data: Vec<Value> = table.models.keys().map(|name| Value::Object(described(name))).collect();
    json_response(&json!({"object": "list", "data": data, "models": table.models.keys().collect::<Vec<_>>()}))
}

/// A model as OpenAI's clients know one.
fn described(name: &str) -> Map<String, Value> {
    let keys = [("id", name.into()), ("object", "model".into()), ("created", 0.into())];
    let keys = keys.into_iter().chain([("owned_by", env!("CARGO_PKG_NAME").into())]);
    keys.map(|(key, value): (&str, Value)| (key.to_owned(), value)).collect()
}

/// The signature of a model.
pub(super) async fn metadata(State(state): State<Arc<AppState>>, target: Target) -> Result<Response, ApiError> {
    let spec = target.resolve(&state)?.ready(&state)?;
    let ModelSpec { name, version, inputs, outputs, .. } = &*spec;
    let signature = json!({
        "inputs": tensors(inputs),
        "outputs": tensors(outputs),
        "method_name": "tensorflow/serving/predict",
    });
    Ok(json_response(&json!({
        "model_spec": {"name": name, "signature_name": "", "version": version.to_string()},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    })))
}

fn tensors(specs: &[TensorSpec]) -> Value {
    let tensor = |spec: &TensorSpec| {
        let dim = |size: i64| json!({"size": size.to_string(), "name": ""});
        let dims: Vec<Value> = spec.wire_shape().into_iter().map(dim).collect();
        let tensor = json!({
            "name": spec.name,
            "dtype": dtype(spec.datatype),
            "tensor_shape": {"dim": dims, "unknown_rank": false},
        });
        (spec.name.clone(), tensor)
    };
    Value::Object(specs.iter().map(tensor).collect())
}

fn dtype(datatype: DataType) -> &'static str {
    match datatype {
        DataType::Bool => "DT_BOOL",
        DataType::Uint8 => "DT_UINT8",
        DataType::Uint16 => "DT_UINT16",
        DataType::Uint32 => "DT_UINT32",
        DataType::Uint64 => "DT_UINT64",
        DataType::Int8 => "DT_INT8",
        DataType::Int16 => "DT_INT16",
        DataType::Int32 => "DT_INT32",
        DataType::Int64 => "DT_INT64",
        DataType::Fp16 => "DT_HALF",
        DataType::Bf16 => "DT_BFLOAT16",
        DataType::Fp32 => "DT_FLOAT",
        DataType::Fp64 => "DT_DOUBLE",
        DataType::Bytes => "DT_STRING",
    }
}
