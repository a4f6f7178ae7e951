//! What messages may cost before they are whole: their size, their time, what they hold, and the room for all bodies together.
//!
//! The library behind the service reads a message to its end, inflates it and takes it apart before anybody sees it. So each
//! message is put together here, and handed on when it is known to be harmless: one that announces too much is refused by its
//! first five bytes, one that arrives too slowly is given up, one that grows too large when inflated, or holds too many parts,
//! goes no further; and what has arrived of it counts among the bytes of all requests.

use super::bounds;
use super::status::status;
use crate::http::{ApiError, Bodies, Coding, Collected, Phase, Room, inflate};
use crate::tensor::Chunks;
use axum::body::Body;
use bytes::Bytes;
use futures_util::stream::unfold;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use std::collections::VecDeque;
use std::pin::Pin;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::Sleep;

/// A flag and four bytes that say how long the message behind them is.
const PREFIX: usize = 5;

/// Limits of the messages of one call.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    /// The most bytes of a message, as it comes and when it is inflated.
    pub(super) message_bytes: usize,
    pub(super) message_timeout: Duration,
    pub(super) bodies: Bodies,
    /// How messages are compressed that say that they are.
    pub(super) coding: Option<Coding>,
    /// Whether messages are inferences.
    pub(super) inferences: bool,
    /// Whether the call may last: it is then ended between two messages when the server closes, may be silent between them, and
    /// has any number of them. Other calls have one.
    pub(super) lasting: Option<watch::Receiver<Phase>>,
}

/// The body of a call, message by message.
pub(super) fn watched(body: Body, gate: Gate) -> Body {
    let intake = Intake {
        body,
        gate,
        arrived: Bytes::new(),
        message: VecDeque::new(),
        room: None,
        slow: None,
        within: false,
        begun: 0,
        ended: false,
    };
    let frames = unfold(intake, |mut intake| async move {
        let frame = match intake.next().await {
            Ok(data) => Ok(Frame::data(data?)),
            Err(error) => {
                intake.ended = true;
                intake.room = None;
                Err(status(&error))
            }
        };
        Some((frame, intake))
    });
    Body::new(StreamBody::new(frames))
}

struct Intake {
    body: Body,
    gate: Gate,
    /// What has come of the body and belongs to a message that has not been begun.
    arrived: Bytes,
    /// What is left to hand over of a whole message, its prefix included.
    message: VecDeque<Bytes>,
    /// The room for it. A call with one message keeps it to its end, as the library keeps the message until then. In a lasting
    /// call whoever takes the last piece of a message counts the message itself before it asks for another one.
    room: Option<Room>,
    /// Since when a message is waited for; none is between the messages of a lasting call.
    slow: Option<Pin<Box<Sleep>>>,
    /// Whether a message has come in part.
    within: bool,
    /// How many messages have begun.
    begun: usize,
    ended: bool,
}

impl Intake {
    /// The next piece of a message that is whole; `None` at the end of the call.
    async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        if self.message.is_empty() && !self.put_together().await? {
            return Ok(None);
        }
        let piece = self.message.pop_front();
        if self.message.is_empty() && self.gate.lasting.is_some() {
            self.room = None;
        }
        Ok(piece)
    }

    /// Reads the next message and looks at it; false: there is none.
    async fn put_together(&mut self) -> Result<bool, ApiError> {
        if self.ended {
            return Ok(false);
        }
        if self.gate.lasting.as_ref().is_some_and(|phase| *phase.borrow() == Phase::Closing) {
            return Err(closing());
        }
        let mut room = self.gate.bodies.admit(0)?;
        let mut message = Collected::default();
        self.within = false;
        if !self.read(&mut message, PREFIX, &mut room).await? {
            self.ended = true;
            return if message.len() == 0 { Ok(false) } else { Err(broken_off()) };
        }
        self.begun += 1;
        if self.gate.lasting.is_none() && self.begun > 1 {
            return Err(ApiError::invalid("a call of this method has one message, and a second one came"));
        }
        let mut prefix = [0; PREFIX];
        let head = message.finish();
        head.copy_to(0, &mut prefix);
        let [flag, length @ ..] = prefix;
        let length = u32::from_be_bytes(length) as usize;
        let limit = self.gate.message_bytes;
        if length > limit {
            return Err(ApiError::BodyTooLarge { limit });
        }
        let mut message = Collected::default();
        if !self.read(&mut message, length, &mut room).await? {
            return Err(broken_off());
        }
        let message = message.finish();
        let message = match (flag, self.gate.coding) {
            (0, _) => message,
            (1, Some(coding)) => inflate(coding, message, limit, &mut room).await?,
            (1, None) => return Err(ApiError::invalid("a message is compressed, but the call has no grpc-encoding")),
            _ => return Err(ApiError::invalid(format!("a message begins with {flag} and not with 0 or 1"))),
        };
        if self.gate.inferences {
            bounds::check(&message)?;
        }
        if self.gate.lasting.is_some() {
            self.slow = None;
        }
        self.hand_over(&message);
        self.room = Some(room);
        Ok(true)
    }

    fn hand_over(&mut self, message: &Chunks) {
        // No message is as long as a `u32` can say.
        let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes();
        let prefix = [&[0][..], &length].concat();
        self.message = std::iter::once(prefix.into()).chain(message.iter().cloned()).collect();
    }

    /// Reads on until so many bytes of a message are there; false: the body has ended before.
    async fn read(&mut self, message: &mut Collected, wanted: usize, room: &mut Room) -> Result<bool, ApiError> {
        while message.len() < wanted {
            if self.arrived.is_empty() {
                match self.frame().await? {
                    Some(data) => self.arrived = data,
                    None => return Ok(false),
                }
            }
            let step = self.arrived.len().min(wanted - message.len());
            room.grow(step as u64)?;
            self.within = true;
            message.push(self.arrived.split_to(step));
        }
        Ok(true)
    }

    /// The next bytes of the body; `None` at its end.
    async fn frame(&mut self) -> Result<Option<Bytes>, ApiError> {
        let Self { body, gate, slow, within, .. } = self;
        let (within, limit, lasting) = (*within, gate.message_timeout, gate.lasting.as_mut());
        let quiet = lasting.is_some() && !within;
        let closes = async {
            match lasting.filter(|_| !within) {
                Some(phase) => _ = phase.wait_for(|phase| *phase == Phase::Closing).await,
                None => std::future::pending().await,
            }
        };
        let late = async {
            if quiet {
                std::future::pending::<()>().await;
            }
            slow.get_or_insert_with(|| Box::pin(tokio::time::sleep(limit))).await;
        };
        tokio::select! {
            biased;
            () = closes => Err(closing()),
            // Before the time that it took: while nobody asks, nothing is late that is there.
            frame = body.frame() => match frame {
                None => Ok(None),
                Some(Err(error)) => Err(ApiError::BodyBroken(error.to_string())),
                // Trailers are the end.
                Some(Ok(frame)) => Ok(frame.into_data().ok()),
            },
            () = late => Err(ApiError::BodyTimeout { limit }),
        }
    }
}

fn closing() -> ApiError {
    ApiError::ServerNotReady("the server is shutting down".to_owned())
}

fn broken_off() -> ApiError {
    ApiError::BodyBroken("it ended within a message".to_owned())
}
