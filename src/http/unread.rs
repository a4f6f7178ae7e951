//! Bodies that nobody read: a refusal that did not look at its body either reads it after all, if it is small, or says that
//! the connection ends with it. What is left of a body would be taken for the next request.

use axum::body::{Body, Bytes};
use axum::http::header::CONNECTION;
use axum::http::{HeaderValue, Request, Version};
use axum::response::Response;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::oneshot;

/// What is read only so that the connection can go on.
const MOST_BYTES: u64 = 64 << 10;

/// The body of a request whose handler drops it unread comes back through this.
pub(super) struct Unread {
    back: Option<oneshot::Receiver<Body>>,
}

impl Unread {
    /// Watches over the body of a request. HTTP/2 has streams for what is left of a body.
    pub(super) fn watch(request: Request<Body>) -> (Request<Body>, Self) {
        if request.body().is_end_stream() || request.version() >= Version::HTTP_2 {
            return (request, Self { back: None });
        }
        let (sender, back) = oneshot::channel();
        let watched = |body| Body::new(Watched { body, ended: false, back: Some(sender) });
        (request.map(watched), Self { back: Some(back) })
    }

    /// Reads what is left, or says in the response that the connection ends. `within` is how long a body may take.
    pub(super) async fn settle(self, response: &mut Response, within: Duration) {
        if response.headers().contains_key(CONNECTION) {
            return;
        }
        let Some(body) = self.back.and_then(|mut back| back.try_recv().ok()) else { return };
        if !tokio::time::timeout(within, drained(body)).await.unwrap_or(false) {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
    }
}

/// Reads a small body to its end.
async fn drained(mut body: Body) -> bool {
    let mut left = MOST_BYTES;
    while body.size_hint().lower() <= left {
        match body.frame().await {
            None => return true,
            Some(Err(_)) => return false,
            Some(Ok(frame)) => {
                let len = frame.data_ref().map_or(0, |data| data.len() as u64);
                match left.checked_sub(len) {
                    Some(rest) => left = rest,
                    None => return false,
                }
            }
        }
    }
    false
}

/// A body that sends what is left of it back when it is dropped.
struct Watched {
    body: Body,
    ended: bool,
    back: Option<oneshot::Sender<Body>>,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let poll = Pin::new(&mut self.body).poll_frame(cx);
        self.ended |= matches!(poll, Poll::Ready(None | Some(Err(_))));
        poll
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.ended
            && !self.body.is_end_stream()
            && let Some(back) = self.back.take()
        {
            // Nobody waits for it if the connection has gone.
            let _ = back.send(std::mem::take(&mut self.body));
        }
    }
}
