//! What surrounds every request: its id, its tracing span, the net under a handler that panics, and what becomes
//! of a body that no handler read.

use super::Phase;
use super::error::ApiError;
use super::traced::Traced;
use super::unread::Unread;
use crate::trace::Tracer;
use axum::extract::{Request, State};
use axum::http::header::CONNECTION;
use axum::http::{HeaderName, HeaderValue, Version};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use std::any::Any;
use std::future::{Future, poll_fn};
use std::hash::{BuildHasher as _, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::watch;
use tracing::Instrument as _;

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// A longer id is not taken over.
const MAX_ID_LEN: usize = 128;

/// Makes ids for requests that bring none: distinct within the process, and unlikely to meet those of another.
#[derive(Clone, Debug)]
pub(super) struct RequestIds {
    seed: u64,
    count: Arc<AtomicU64>,
}

impl RequestIds {
    pub(super) fn new() -> Self {
        Self { seed: RandomState::new().hash_one("request id"), count: Arc::default() }
    }

    fn next(&self) -> HeaderValue {
        let count = self.count.fetch_add(1, Ordering::Relaxed);
        let text = format!("{:016x}-{count:x}", self.seed);
        HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from(count))
    }
}

/// What the middleware knows.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    pub(super) ids: RequestIds,
    /// How long a body may take to arrive.
    pub(super) body_read_timeout: Duration,
    /// Where the process is in its life.
    pub(super) phase: watch::Receiver<Phase>,
    /// Records requests; `None`: nobody does.
    pub(super) tracer: Option<Tracer>,
}

/// The middleware around all routes.
pub(super) async fn edge(State(edge): State<Edge>, mut request: Request, next: Next) -> Response {
    let version = request.version();
    let id = match request.headers().get(REQUEST_ID) {
        Some(given) if acceptable(given.as_bytes()) => given.clone(),
        _ => edge.ids.next(),
    };
    let span = tracing::info_span!(
        "request",
        id = id.to_str().unwrap_or_default(),
        method = %request.method(),
        path = request.uri().path(),
        trace_id = tracing::field::Empty
    );
    let traced = edge.tracer.as_ref().and_then(|tracer| Traced::http(tracer, &mut request));
    if let Some(traced) = &traced {
        span.record("trace_id", tracing::field::display(traced.trace().id()));
    }
    let (request, unread) = Unread::watch(request);
    let mut response = caught(next.run(request), || ApiError::Internal.into_response()).instrument(span).await;
    unread.settle(&mut response, edge.body_read_timeout).await;
    response.headers_mut().insert(REQUEST_ID, id);
    if let Some(traced) = traced {
        traced.answered(&mut response);
    }
    // From the announcement on kept connections are given up one by one, so that their clients find another server.
    if *edge.phase.borrow() > Phase::Serving && version <= Version::HTTP_11 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

fn acceptable(id: &[u8]) -> bool {
    (1..=MAX_ID_LEN).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

/// The response, or what `otherwise` says if making it panics. The future is not polled again after a panic.
pub(crate) async fn caught(response: impl Future<Output = Response>, otherwise: impl FnOnce() -> Response) -> Response {
    let mut response = pin!(response);
    let outcome = poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| response.as_mut().poll(cx))) {
        Ok(poll) => poll.map(Ok),
        Err(panic) => std::task::Poll::Ready(Err(panic)),
    });
    outcome.await.unwrap_or_else(|panic| {
        tracing::error!(panic = text_of(&*panic), "a handler panicked");
        otherwise()
    })
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("?")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_panic_becomes_an_answer() {
        let response = caught(async { panic!("on purpose") }, || ApiError::Internal.into_response()).await;
        assert_eq!(response.status(), 500);
    }
}
