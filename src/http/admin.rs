//! The admin routes: looking at the memory and changing its limits while the server runs. They exist only with a token.

use super::access::bearer;
use super::error::ApiError;
use super::status::json_response;
use super::{AppState, body};
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::response::Response;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::error::Category;
use std::fmt;
use std::sync::Arc;
use subtle::ConstantTimeEq as _;

/// Changes limits; the error says what is wrong with which key.
pub type ChangeMemory = Box<dyn Fn(&MemoryChange) -> Result<Value, String> + Send + Sync>;

/// What the admin routes do, and for whom.
pub struct Admin {
    /// What `Authorization: Bearer` must say.
    pub token: String,
    /// All numbers of the memory.
    pub read: Box<dyn Fn() -> Value + Send + Sync>,
    /// Changes limits and answers the numbers that hold then.
    pub change: ChangeMemory,
}

impl fmt::Debug for Admin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admin").finish_non_exhaustive()
    }
}

/// What shall be changed: each key as it was sent, `None` if it was not.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryChange {
    /// Which device.
    #[serde(default, deserialize_with = "sent")]
    pub device: Option<Value>,
    /// The most memory that may be used of it.
    #[serde(default, deserialize_with = "sent")]
    pub limit: Option<Value>,
    /// The memory of it that is left to neighbours.
    #[serde(default, deserialize_with = "sent")]
    pub headroom: Option<Value>,
}

/// A `null` is a value like any other: it must not look like a key that was not sent.
fn sent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

pub(super) async fn read_memory(State(state): State<Arc<AppState>>, headers: HeaderMap) -> Result<Response, ApiError> {
    Ok(json_response(&(authorized(&state, &headers)?.read)()))
}

pub(super) async fn change_memory(State(state): State<Arc<AppState>>, request: Request) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    // First of all: strangers get no byte of theirs read.
    let admin = authorized(&state, &parts.headers)?;
    let (body, _room) = body::read_small(&parts, body, &state, body::SMALL_BODY_BYTES).await?;
    let change = memory_change(&body)?;
    (admin.change)(&change).map(|memory| json_response(&memory)).map_err(ApiError::invalid)
}

/// The way to what admin routes do.
fn authorized<'a>(state: &'a AppState, headers: &HeaderMap) -> Result<&'a Admin, ApiError> {
    let admin = state.admin.as_ref().ok_or(ApiError::RouteNotFound)?;
    let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes())).unwrap_or_default();
    // How long it takes tells the length of the token at most, never how much of it was right. No header carries the empty
    // token, so that one opens nothing.
    let right = bool::from(given.ct_eq(admin.token.as_bytes())) && !admin.token.is_empty();
    if right { Ok(admin) } else { Err(ApiError::Unauthorized) }
}

/// Refuses whoever may not use what the admin token guards; without a token nobody may.
pub(crate) fn required(state: &AppState, headers: &HeaderMap) -> Result<(), ApiError> {
    if state.admin.is_none() {
        return Err(ApiError::NoAdmin("loading and unloading models"));
    }
    authorized(state, headers).map(|_| ())
}

fn memory_change(body: &[u8]) -> Result<MemoryChange, ApiError> {
    let malformed = |reason: &str| ApiError::invalid(format!("the body must be a JSON object: {reason}"));
    // Otherwise a list would do as well, as the values in the order of the keys.
    if !body.trim_ascii_start().starts_with(b"{") {
        return Err(malformed("it does not begin with '{'"));
    }
    serde_json::from_slice(body).map_err(|error| match error.classify() {
        // JSON, but with a key that is not known or given twice.
        Category::Data => ApiError::invalid(error.to_string()),
        _ => malformed(&error.to_string()),
    })
}
