//! What messages may cost before they are whole: their size, their time, and the room for all bodies together.
//!
//! The library behind the service reads a message to its end before anybody sees it. So the frames are followed on their way
//! there: a message that announces too much is refused by its first five bytes, one that arrives too slowly is given up, and
//! what has arrived of it counts among the bytes of all requests.

use super::status::status;
use crate::http::{ApiError, Bodies, Phase, Room};
use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Sleep;
use tonic::Status;

/// A flag and four bytes that say how long the message behind them is.
const PREFIX: usize = 5;

/// Limits of the messages of one call.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    pub(super) message_bytes: usize,
    pub(super) message_timeout: Duration,
    pub(super) bodies: Bodies,
    /// Whether the call may last: it is then ended between two messages when the server closes, and may be silent between them.
    pub(super) lasting: Option<watch::Receiver<Phase>>,
}

/// The body of a call, watched.
pub(super) struct Intake {
    body: Body,
    gate: Gate,
    closing: Option<Pin<Box<dyn Future<Output = ()> + Send>>>,
    /// Since when a message is waited for; none is between the messages of a lasting call.
    slow: Option<Pin<Box<Sleep>>>,
    prefix: [u8; PREFIX],
    /// How many bytes of `prefix` are there.
    seen: usize,
    /// How many bytes of the message behind the prefix are still to come.
    left: usize,
    /// The room for what has come of the present message.
    room: Option<Room>,
    ended: bool,
}

impl Intake {
    pub(super) fn new(body: Body, gate: Gate) -> Self {
        let slow = gate.lasting.is_none().then(|| Box::pin(tokio::time::sleep(gate.message_timeout)));
        let closing = gate.lasting.clone().map(|mut phase| -> Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                let _gone = phase.wait_for(|phase| *phase == Phase::Closing).await;
            })
        });
        Self { body, gate, closing, slow, prefix: [0; PREFIX], seen: 0, left: 0, room: None, ended: false }
    }

    fn between(&self) -> bool {
        self.seen == 0 && self.left == 0
    }

    /// Follows the bytes of one frame.
    fn follow(&mut self, mut data: &[u8]) -> Result<(), ApiError> {
        let arrived = data.len();
        while !data.is_empty() {
            if self.left > 0 {
                let step = self.left.min(data.len());
                self.left -= step;
                data = &data[step..];
                continue;
            }
            let step = (PREFIX - self.seen).min(data.len());
            self.prefix[self.seen..self.seen + step].copy_from_slice(&data[..step]);
            self.seen += step;
            data = &data[step..];
            if self.seen == PREFIX {
                let [_, length @ ..] = self.prefix;
                self.left = u32::from_be_bytes(length) as usize;
                self.seen = 0;
                if self.left > self.gate.message_bytes {
                    return Err(ApiError::BodyTooLarge { limit: self.gate.message_bytes });
                }
            }
        }
        match &mut self.room {
            Some(room) => room.grow(arrived as u64),
            None => self.gate.bodies.admit(arrived as u64).map(|room| self.room = Some(room)),
        }
    }

    fn refuse(&mut self, error: &ApiError) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        self.ended = true;
        self.room = None;
        Poll::Ready(Some(Err(status(error))))
    }
}

impl http_body::Body for Intake {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        if this.between() {
            // What was whole has been taken over by whoever asks for more.
            this.room = None;
            if this.gate.lasting.is_some() {
                this.slow = None;
            }
            if this.closing.as_mut().is_some_and(|closing| closing.as_mut().poll(cx).is_ready()) {
                return this.refuse(&ApiError::ServerNotReady("the server is shutting down".to_owned()));
            }
        }
        if this.slow.as_mut().is_some_and(|slow| slow.as_mut().poll(cx).is_ready()) {
            let limit = this.gate.message_timeout;
            return this.refuse(&ApiError::BodyTimeout { limit });
        }
        match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
            None => {
                this.ended = true;
                Poll::Ready(None)
            }
            Some(Err(error)) => this.refuse(&ApiError::BodyBroken(error.to_string())),
            Some(Ok(frame)) => {
                if let Some(Err(error)) = frame.data_ref().map(|data| this.follow(data)) {
                    return this.refuse(&error);
                }
                if !this.between() && this.slow.is_none() {
                    this.slow = Some(Box::pin(tokio::time::sleep(this.gate.message_timeout)));
                }
                Poll::Ready(Some(Ok(frame)))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.ended || (self.between() && self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
