//! Bodies in and out: a request body as a rope of frames, within limits; a response body as frames that are not copied.

use super::error::ApiError;
use super::{AppState, Limits, coding};
use crate::tensor::Chunks;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// From this many parts on, small frames are joined: a body of one-byte chunks must not cost a slice for each of them.
const JOIN_AFTER_PARTS: usize = 16;
/// Frames below this size are small.
const SMALL_FRAME: usize = 4096;

/// The most bytes of a body that asks or changes something and brings no tensors.
pub(crate) const SMALL_BODY_BYTES: usize = 64 << 10;
/// The most bytes of a body that loads a model: it may bring the model's whole configuration.
pub(crate) const LOAD_BODY_BYTES: usize = 1 << 20;

/// The unit in which bodies are counted: a semaphore has room for any number of bytes then, and a request for any body.
const UNIT: u64 = 1024;

/// Bounds the bytes of all request bodies inside the server together.
#[derive(Clone, Debug)]
pub struct Bodies {
    units: Arc<Semaphore>,
}

impl Bodies {
    /// Room for so many bytes, in whole KiB.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let units = usize::try_from(bytes / UNIT).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(units)) }
    }

    /// Room for so many bytes of one body, if it is there now.
    pub(crate) fn admit(&self, bytes: u64) -> Result<Room, ApiError> {
        let permit = Arc::clone(&self.units).try_acquire_many_owned(units(bytes)).map_err(|_| ApiError::BodiesFull)?;
        Ok(Room { permit, bytes })
    }
}

fn units(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT)).unwrap_or(u32::MAX)
}

/// The room that a body takes up, until it is dropped.
#[derive(Debug)]
pub(crate) struct Room {
    permit: OwnedSemaphorePermit,
    bytes: u64,
}

impl Room {
    /// How many bytes it has room for.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Makes room for so many bytes more.
    pub(crate) fn grow(&mut self, bytes: u64) -> Result<(), ApiError> {
        self.hold(self.bytes.saturating_add(bytes))
    }

    /// Makes room for so many bytes in all, unless it is there.
    pub(crate) fn hold(&mut self, bytes: u64) -> Result<(), ApiError> {
        let lacking = (units(bytes) as usize).saturating_sub(self.permit.num_permits());
        if lacking > 0 {
            let units = Arc::clone(self.permit.semaphore());
            let lacking = u32::try_from(lacking).map_err(|_| ApiError::BodiesFull)?;
            self.permit.merge(units.try_acquire_many_owned(lacking).map_err(|_| ApiError::BodiesFull)?);
        }
        self.bytes = self.bytes.max(bytes);
        Ok(())
    }
}

/// Reads a body that brings no tensors, which is none of those that may be large: see [`read`].
pub(super) async fn read_small(
    parts: &Parts,
    body: Body,
    state: &AppState,
    most: usize,
) -> Result<(Bytes, Room), ApiError> {
    let limits = Limits { body_bytes: most.min(state.limits.body_bytes), ..state.limits.clone() };
    let (body, room) = read(&parts.headers, body, &limits, &state.bodies).await?;
    Ok((body.to_contiguous(), room))
}

/// Reads a whole body, and says what room it takes up until its request is answered. Reading stops at the limit and where
/// there is no room; a body that announces more than the limit is not read at all. Only what has come counts: a client that
/// announces much and sends nothing takes no room from the others.
pub(super) async fn read(
    headers: &HeaderMap,
    body: Body,
    limits: &Limits,
    bodies: &Bodies,
) -> Result<(Chunks, Room), ApiError> {
    let limit = limits.body_bytes;
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge { limit });
    }
    let mut room = bodies.admit(0)?;
    let chunks = match tokio::time::timeout(limits.body_read_timeout, collect(body, limit, &mut room)).await {
        Ok(chunks) => chunks?,
        Err(_) => return Err(ApiError::BodyTimeout { limit: limits.body_read_timeout }),
    };
    // Refused only now that the body is read, so that the connection can go on.
    match coding::of_request(headers)? {
        None => Ok((chunks, room)),
        Some(coding) => Ok((coding::inflate(coding, chunks, limit, &mut room).await?, room)),
    }
}

async fn collect(mut body: Body, limit: usize, room: &mut Room) -> Result<Chunks, ApiError> {
    let mut collected = Collected::default();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| ApiError::BodyBroken(error.to_string()))?.into_data() else {
            continue; // trailers say nothing here
        };
        if data.len() > limit - collected.len() {
            return Err(ApiError::BodyTooLarge { limit });
        }
        room.grow(data.len() as u64)?;
        collected.push(data);
    }
    Ok(collected.finish())
}

/// What has come of a body, in no more parts than is sensible.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    chunks: Chunks,
    joined: BytesMut,
}

impl Collected {
    pub(crate) fn len(&self) -> usize {
        self.chunks.len() + self.joined.len()
    }

    pub(crate) fn push(&mut self, data: Bytes) {
        if data.len() < SMALL_FRAME && self.chunks.iter().len() >= JOIN_AFTER_PARTS {
            self.joined.extend_from_slice(&data);
        } else {
            self.chunks.push(self.joined.split().freeze());
            self.chunks.push(data);
        }
    }

    pub(crate) fn finish(mut self) -> Chunks {
        self.chunks.push(self.joined.freeze());
        self.chunks
    }
}

/// A response body of known size: its frames leave as they are, so the connection writes them without joining them.
#[derive(Debug)]
pub(super) struct Frames {
    frames: VecDeque<Bytes>,
    left: u64,
}

impl Frames {
    pub(super) fn new(frames: VecDeque<Bytes>) -> Self {
        let left = frames.iter().map(|frame| frame.len() as u64).sum();
        Self { frames, left }
    }
}

impl http_body::Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Poll::Ready(self.frames.pop_front().map(|frame| {
            self.left -= frame.len() as u64;
            Ok(Frame::data(frame))
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
