//! Answers over HTTP/2 that their client does not take.
//!
//! The time limit of the socket does not see them: a client may read the socket, answer pings, and grant a stream no window.
//! Then nobody asks the answer's body for more. So each body notes when it was asked, and its connection looks, now and then,
//! for one that has something and was not asked again.

use axum::body::{Body, Bytes};
use axum::response::Response;
use http_body::{Body as _, Frame, SizeHint};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use tokio::sync::mpsc;

/// The most that a body hands over at once: what was handed over is out of sight, so it must not be the whole answer.
const PIECE: usize = 16 << 10;

/// How far a body has come.
#[derive(Debug, Default)]
struct Progress {
    /// How often it was asked.
    asked: AtomicU64,
    /// Whether it is it who is waited for.
    empty: AtomicBool,
}

/// The sending end: bodies are reported as they begin.
pub(super) type Begun = mpsc::Sender<Watched>;

/// A body that is being sent.
#[derive(Debug)]
pub(super) struct Watched {
    progress: Weak<Progress>,
    seen: u64,
}

/// Reports the body of a response, and has it sent in pieces.
pub(super) async fn watch(response: Response, begun: &Begun) -> Response {
    if response.body().is_end_stream() {
        return response;
    }
    let progress = Arc::new(Progress::default());
    // Its connection lives as long as the streams that it carries.
    let _ = begun.send(Watched { progress: Arc::downgrade(&progress), seen: 0 }).await;
    response.map(|body| Body::new(Pieces { body, left: Bytes::new(), progress }))
}

/// The bodies that one connection is sending.
#[derive(Debug)]
pub(super) struct Open {
    bodies: Vec<Watched>,
    /// From so many on, those that have ended are let go at once.
    many: usize,
}

impl Open {
    /// For a connection with so many streams at most.
    pub(super) fn new(streams: usize) -> Self {
        Self { bodies: Vec::new(), many: 2 * streams.max(8) }
    }

    /// Whether there may be any.
    pub(super) fn any(&self) -> bool {
        !self.bodies.is_empty()
    }

    /// Another body has begun.
    pub(super) fn add(&mut self, body: Watched) {
        if self.bodies.len() >= self.many {
            self.bodies.retain(|body| body.progress.strong_count() > 0);
        }
        self.bodies.push(body);
    }

    /// Whether a body that has something was not asked for it since the last look.
    pub(super) fn any_stalls(&mut self) -> bool {
        let mut stalls = false;
        self.bodies.retain_mut(|body| {
            let Some(progress) = body.progress.upgrade() else { return false };
            let asked = progress.asked.load(Ordering::Acquire);
            // The first look at a body only takes note of it: it may have begun a moment ago.
            stalls |= body.seen == asked + 1 && !progress.empty.load(Ordering::Acquire);
            body.seen = asked + 1;
            true
        });
        stalls
    }
}

/// A body in pieces that notes when it is asked for one.
struct Pieces {
    body: Body,
    left: Bytes,
    progress: Arc<Progress>,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.progress.asked.fetch_add(1, Ordering::AcqRel);
        if self.left.is_empty() {
            let poll = Pin::new(&mut self.body).poll_frame(cx);
            self.progress.empty.store(poll.is_pending(), Ordering::Release);
            match poll {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) => self.left = data,
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                other => return other,
            }
        }
        let piece = self.left.len().min(PIECE);
        Poll::Ready(Some(Ok(Frame::data(self.left.split_to(piece)))))
    }

    fn is_end_stream(&self) -> bool {
        self.left.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, left) = (self.body.size_hint(), self.left.len() as u64);
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper + left);
        }
        hint.set_lower(hint.lower() + left);
        hint
    }
}
