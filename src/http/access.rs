//! Who may ask: API keys as bearer tokens.

use super::AppState;
use super::error::ApiError;
use arc_swap::ArcSwap;
use axum::extract::{Request, State};
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use sha2::{Digest as _, Sha256};
use std::fmt;
use std::sync::Arc;
use subtle::{Choice, ConstantTimeEq as _};

/// Keys that open the door. Only their digests are kept, so that nothing can print one of them.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ApiKeys {
    digests: Vec<[u8; 32]>,
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ApiKeys").field("count", &self.digests.len()).finish()
    }
}

impl<T: AsRef<[u8]>> FromIterator<T> for ApiKeys {
    fn from_iter<I: IntoIterator<Item = T>>(keys: I) -> Self {
        Self { digests: keys.into_iter().map(|key| Sha256::digest(key).into()).collect() }
    }
}

impl ApiKeys {
    /// Whether there is none, so that the door stays shut.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    /// Whether this is one of the keys. How long the answer takes depends on the number of keys, and on nothing of them.
    fn open_to(&self, given: &[u8]) -> bool {
        let given: [u8; 32] = Sha256::digest(given).into();
        self.digests.iter().fold(Choice::from(0), |found, key| found | key.ct_eq(&given)).into()
    }
}

/// The keys in force; they may be replaced while serving. `None`: anybody may ask.
pub type KeyRing = Option<Arc<ArcSwap<ApiKeys>>>;

/// Refuses whoever brings no key, on the routes that need one.
pub(super) async fn guard(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    match allowed(&state.keys, request.uri().path(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn allowed(keys: &KeyRing, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
    if open(path) { Ok(()) } else { authorized(keys, headers) }
}

/// Whether a request brings a key, if it needs one.
pub(crate) fn authorized(keys: &KeyRing, headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(keys) = keys else { return Ok(()) };
    let given = headers.get(AUTHORIZATION).and_then(|value| bearer(value.as_bytes()));
    if given.is_some_and(|given| keys.load().open_to(given)) { Ok(()) } else { Err(ApiError::NoKey) }
}

/// The credentials, if the scheme is `Bearer`, in letters of any case.
pub(super) fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, credentials) = header.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| credentials.trim_ascii())
}

/// What needs no key: probes and scrapers have none, and what the admin token guards is asked for that instead.
pub(super) fn open(path: &str) -> bool {
    const OPEN: [&str; 5] = ["/", "/metrics", "/v2/health/live", "/v2/health/ready", "/openapi.json"];
    let control = path.starts_with("/v2/repository/models/") && (path.ends_with("/load") || path.ends_with("/unload"));
    OPEN.contains(&path) || path.starts_with("/admin/") || control
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_keys_open() {
        let keys: ApiKeys = ["alpha", "beta"].into_iter().collect();
        for (key, opens) in [("alpha", true), ("beta", true), ("alph", false), ("alphabeta", false), ("", false)] {
            assert_eq!(keys.open_to(key.as_bytes()), opens, "{key}");
        }
        assert!(!ApiKeys::default().open_to(b""));
        assert_eq!(format!("{keys:?}"), "ApiKeys { count: 2 }");
    }

    #[test]
    fn probes_and_what_the_admin_token_guards_need_no_key() {
        for path in ["/", "/metrics", "/v2/health/ready", "/admin/memory", "/v2/repository/models/m/load"] {
            assert!(open(path), "{path}");
        }
        for path in [
            "/v2",
            "/v2/models/m/infer",
            "/v2/models/m/ready",
            "/v2/repository/index",
            "/v2/health/live/",
            "/health",
            "/ping",
        ] {
            assert!(!open(path), "{path}");
        }
    }

    #[test]
    fn the_scheme_is_bearer_in_any_case() {
        for (header, key) in [("Bearer k", Some("k")), ("bEARER  k ", Some("k")), ("Basic k", None), ("Bearer", None)] {
            assert_eq!(bearer(header.as_bytes()), key.map(str::as_bytes), "{header}");
        }
    }
}
