//! The model and version that a path names.

use super::AppState;
use super::error::ApiError;
use crate::model::{Lookup, ModelSpec};
use axum::extract::{FromRequestParts, Path};
use axum::http::request::Parts;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// `/v2/models/{model}[/versions/{version}]`, percent-decoded once.
#[derive(Debug)]
pub(crate) struct ModelPath {
    pub(crate) model: String,
    pub(crate) version: Option<u64>,
}

#[derive(Deserialize)]
struct Segments {
    model: String,
    version: Option<String>,
}

impl<S: Send + Sync> FromRequestParts<S> for ModelPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let Segments { model, version } = segments(parts, state).await?;
        let version = version.as_deref().map(self::version).transpose()?;
        Ok(Self { model, version })
    }
}

/// One segment of a path, percent-decoded.
#[derive(Debug)]
pub(super) struct Segment(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Segment {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        segments(parts, state).await.map(Self)
    }
}

/// What the braces of a route stand for. What is not UTF-8 names nothing.
pub(super) async fn segments<T: DeserializeOwned + Send, S: Send + Sync>(
    parts: &mut Parts,
    state: &S,
) -> Result<T, ApiError> {
    Path::from_request_parts(parts, state).await.map(|Path(segments)| segments).map_err(|_| ApiError::RouteNotFound)
}

/// The number that a text is, in digits only; what is none names no route.
pub(crate) fn version(text: &str) -> Result<u64, ApiError> {
    if text.is_empty() || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(ApiError::RouteNotFound);
    }
    text.parse().map_err(|_| ApiError::invalid(format!("version {text} is too large a number")))
}

impl ModelPath {
    /// The model, if it can serve.
    pub(crate) fn ready(&self, state: &AppState) -> Result<Arc<ModelSpec>, ApiError> {
        match state.models.load().lookup(&self.model, self.version) {
            Lookup::Ready(spec) => Ok(spec),
            Lookup::NotReady(reason) => Err(ApiError::ModelNotReady { model: self.model.clone(), reason }),
            Lookup::Unknown => Err(self.unknown(state)),
        }
    }

    fn unknown(&self, state: &AppState) -> ApiError {
        let model = self.model.clone();
        match self.version {
            Some(version) if state.models.load().models.contains_key(&model) => {
                ApiError::VersionNotFound { model, version }
            }
            _ => ApiError::ModelNotFound { model },
        }
    }
}
