//! Bodies in and out: a request body as a rope of frames, within limits; a response body as frames that are not copied.

use super::Limits;
use super::error::ApiError;
use crate::tensor::Chunks;
use axum::body::Body;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_ENCODING;
use bytes::{Bytes, BytesMut};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt as _;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

/// From this many parts on, small frames are joined: a body of one-byte chunks must not cost a slice for each of them.
const JOIN_AFTER_PARTS: usize = 16;
/// Frames below this size are small.
const SMALL_FRAME: usize = 4096;

/// Reads a whole body. Reading stops at the limit; a body that announces more is not read at all.
pub(super) async fn read(headers: &HeaderMap, body: Body, limits: &Limits) -> Result<Chunks, ApiError> {
    let limit = limits.body_bytes;
    if body.size_hint().lower() > limit as u64 {
        return Err(ApiError::BodyTooLarge { limit });
    }
    let chunks = match tokio::time::timeout(limits.body_read_timeout, collect(body, limit)).await {
        Ok(chunks) => chunks?,
        Err(_) => return Err(ApiError::BodyTimeout { limit: limits.body_read_timeout }),
    };
    // Refused only now that the body is read, so that the connection can go on.
    match headers.get(CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?")) {
        None | Some("" | "identity") => Ok(chunks),
        Some(other) => Err(ApiError::Encoding(other.to_owned())),
    }
}

async fn collect(mut body: Body, limit: usize) -> Result<Chunks, ApiError> {
    let mut chunks = Chunks::new();
    let mut joined = BytesMut::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|error| ApiError::BodyBroken(error.to_string()))?.into_data() else {
            continue; // trailers say nothing here
        };
        if data.len() > limit - chunks.len() - joined.len() {
            return Err(ApiError::BodyTooLarge { limit });
        }
        if data.len() < SMALL_FRAME && chunks.iter().len() >= JOIN_AFTER_PARTS {
            joined.extend_from_slice(&data);
        } else {
            chunks.push(joined.split().freeze());
            chunks.push(data);
        }
    }
    chunks.push(joined.freeze());
    Ok(chunks)
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
