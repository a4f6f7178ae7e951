//! Compressed bodies: gzip and deflate, in both directions, within limits.
//!
//! Bodies of any size pass through here on the threads that serve all connections, so the work is done in pieces with a word
//! to the others in between.

use super::body::Room;
use super::error::ApiError;
use crate::tensor::Chunks;
use axum::http::HeaderMap;
use axum::http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use bytes::{Buf as _, Bytes};
use flate2::Compression;
use flate2::bufread::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use flate2::write::{GzEncoder, ZlibEncoder};
use std::collections::VecDeque;
use std::io::{self, BufRead, Read, Write};

/// What is worked through in one go.
const PIECE: usize = 64 << 10;
/// What is smaller is not worth compressing.
const LEAST_BYTES: usize = 1024;
/// So much of an answer is tried first: floats hardly shrink, and most answers are floats.
const SAMPLE_BYTES: usize = 16 << 10;
/// The sample must shrink to less than so many hundredths.
const WORTHWHILE_PERCENT: usize = 90;

/// How a body is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Coding {
    Gzip,
    Deflate,
}

impl Coding {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Gzip => "gzip",
            Self::Deflate => "deflate",
        }
    }

    /// The coding of this name, in letters of any case.
    pub(crate) fn of(name: &str) -> Option<Self> {
        let is = |other: &str| name.eq_ignore_ascii_case(other);
        if is("gzip") || is("x-gzip") { Some(Self::Gzip) } else { is("deflate").then_some(Self::Deflate) }
    }
}

/// How the body of a request is compressed; `None`: it is not.
pub(super) fn of_request(headers: &HeaderMap) -> Result<Option<Coding>, ApiError> {
    let mut values = headers.get_all(CONTENT_ENCODING).iter().map(|value| value.to_str().unwrap_or("?").trim());
    let value = values.next().unwrap_or_default();
    if let Some(second) = values.next() {
        return Err(ApiError::Encoding(format!("{value}, {second}")));
    }
    match Coding::of(value) {
        None if value.is_empty() || value.eq_ignore_ascii_case("identity") => Ok(None),
        None => Err(ApiError::Encoding(value.to_owned())),
        coding => Ok(coding),
    }
}

/// Decompresses a body, up to a limit. The room that it takes up grows with it.
pub(crate) async fn inflate(coding: Coding, body: Chunks, limit: usize, room: &mut Room) -> Result<Chunks, ApiError> {
    let mut inflater = Inflater::new(coding, &body);
    // What has been decompressed is let go, piece by piece.
    drop(body);
    let mut out = Chunks::new();
    loop {
        let Piece { data, last } = inflater
            .piece()
            .map_err(|error| ApiError::Compressed { coding: coding.name(), reason: error.to_string() })?;
        if data.len() > limit - out.len() {
            return Err(ApiError::InflatedTooLarge { limit });
        }
        out.push(data);
        room.hold(out.len() as u64)?;
        if last {
            return Ok(out);
        }
        tokio::task::yield_now().await;
    }
}

/// What one go has made of a body.
struct Piece {
    data: Bytes,
    last: bool,
}

/// What is called deflate comes with the wrapper of zlib, as the standard says, or without, as some clients have it; and some
/// call gzip deflate.
enum Inflater {
    Gzip(MultiGzDecoder<Rope>),
    Zlib(ZlibDecoder<Rope>),
    Raw(DeflateDecoder<Rope>),
}

impl Inflater {
    fn new(coding: Coding, body: &Chunks) -> Self {
        let mut start = [0; 2];
        if body.len() >= 2 {
            body.copy_to(0, &mut start);
        }
        let rope = Rope { parts: body.iter().cloned().collect(), allowance: PIECE };
        match (coding, start) {
            (Coding::Gzip, _) | (_, [0x1f, 0x8b]) => Self::Gzip(MultiGzDecoder::new(rope)),
            (_, [method, _]) if method & 0x0f == 8 && u16::from_be_bytes(start).is_multiple_of(31) => {
                Self::Zlib(ZlibDecoder::new(rope))
            }
            _ => Self::Raw(DeflateDecoder::new(rope)),
        }
    }

    /// The next piece, of no more than [`PIECE`] bytes, from no more than so many: there are bodies of which much is nothing.
    fn piece(&mut self) -> io::Result<Piece> {
        self.rope_mut().allowance = PIECE;
        let mut piece = vec![0; PIECE];
        let mut filled = 0;
        let mut last = false;
        while filled < PIECE && !last {
            let read = match self {
                Self::Gzip(inner) => inner.read(&mut piece[filled..]),
                Self::Zlib(inner) => inner.read(&mut piece[filled..]),
                Self::Raw(inner) => inner.read(&mut piece[filled..]),
            };
            match read {
                Ok(0) => {
                    self.expect_end()?;
                    last = true;
                }
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        // What is counted is what there is.
        let data = if filled == PIECE { piece.into() } else { Bytes::copy_from_slice(&piece[..filled]) };
        Ok(Piece { data, last })
    }

    fn rope_mut(&mut self) -> &mut Rope {
        match self {
            Self::Gzip(inner) => inner.get_mut(),
            Self::Zlib(inner) => inner.get_mut(),
            Self::Raw(inner) => inner.get_mut(),
        }
    }

    fn expect_end(&self) -> io::Result<()> {
        let rope = match self {
            Self::Gzip(inner) => inner.get_ref(),
            Self::Zlib(inner) => inner.get_ref(),
            Self::Raw(inner) => inner.get_ref(),
        };
        if rope.parts.is_empty() { Ok(()) } else { Err(io::Error::other("something follows its end")) }
    }
}

/// The bytes of a body, let go as they are read.
struct Rope {
    parts: VecDeque<Bytes>,
    /// How many more may be read for now; the reader is then told to come again.
    allowance: usize,
}

impl Read for Rope {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.fill_buf()?.read(out)?;
        self.consume(len);
        Ok(len)
    }
}

impl BufRead for Rope {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        match self.parts.front() {
            None => Ok(&[]),
            Some(_) if self.allowance == 0 => Err(io::ErrorKind::WouldBlock.into()),
            Some(part) => Ok(&part[..part.len().min(self.allowance)]),
        }
    }

    fn consume(&mut self, len: usize) {
        self.allowance -= len;
        if let Some(front) = self.parts.front_mut() {
            front.advance(len);
            if front.is_empty() {
                self.parts.pop_front();
            }
        }
    }
}

/// The coding that a client wants most for its answer; of equals the first. Only what it names counts.
pub(super) fn wanted(headers: &HeaderMap) -> Option<Coding> {
    let mut best = (0.0, None);
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    for item in values.flat_map(|value| value.split(',')) {
        let mut fields = item.split(';').map(str::trim);
        let name = fields.next().unwrap_or_default();
        let coding = Coding::of(name);
        if coding.is_none() && !name.eq_ignore_ascii_case("identity") {
            continue;
        }
        let quality = fields.find_map(|field| field.strip_prefix("q=").or_else(|| field.strip_prefix("Q=")));
        let quality = quality.map_or(Some(1.0), |text| text.parse::<f32>().ok()).unwrap_or(0.0);
        if quality > best.0 {
            best = (quality, coding);
        }
    }
    best.1
}

/// The frames of an answer, compressed; `None` if that is not worth it, or does not work.
pub(super) async fn deflate(coding: Coding, frames: &VecDeque<Bytes>) -> Option<Bytes> {
    let len: usize = frames.iter().map(Bytes::len).sum();
    if len < LEAST_BYTES || !shrinks(frames, len) {
        return None;
    }
    let mut deflater = Deflater::new(coding);
    for frame in frames {
        for piece in frame.chunks(PIECE) {
            deflater.write(piece).ok()?;
            tokio::task::yield_now().await;
        }
    }
    let out = deflater.finish().ok()?;
    (out.len() < len).then(|| out.into())
}

/// Whether a part of the answer becomes smaller: what lies in its middle, as its head is text in any case.
fn shrinks(frames: &VecDeque<Bytes>, len: usize) -> bool {
    let Some(largest) = frames.iter().max_by_key(|frame| frame.len()) else { return false };
    let start = (largest.len() / 2).saturating_sub(SAMPLE_BYTES / 2);
    let sample = &largest[start..largest.len().min(start + SAMPLE_BYTES)];
    if sample.len() * 2 < len.min(SAMPLE_BYTES) {
        return true; // many small frames
    }
    let mut deflater = Deflater::new(Coding::Deflate);
    let out = deflater.write(sample).and_then(|()| deflater.finish());
    out.is_ok_and(|out| out.len() * 100 < sample.len() * WORTHWHILE_PERCENT)
}

enum Deflater {
    Gzip(GzEncoder<Vec<u8>>),
    Zlib(ZlibEncoder<Vec<u8>>),
}

impl Deflater {
    fn new(coding: Coding) -> Self {
        match coding {
            Coding::Gzip => Self::Gzip(GzEncoder::new(Vec::new(), Compression::fast())),
            Coding::Deflate => Self::Zlib(ZlibEncoder::new(Vec::new(), Compression::fast())),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Gzip(inner) => inner.write_all(bytes),
            Self::Zlib(inner) => inner.write_all(bytes),
        }
    }

    fn finish(self) -> io::Result<Vec<u8>> {
        match self {
            Self::Gzip(inner) => inner.finish(),
            Self::Zlib(inner) => inner.finish(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn a_piece_reads_no_more_than_so_much_and_holds_no_more_than_it_has() {
        let member = Deflater::new(Coding::Gzip).finish().unwrap();
        let nothing = member.repeat(10 * PIECE / member.len());
        let mut deflater = Deflater::new(Coding::Gzip);
        deflater.write(b"end").unwrap();
        let body = [nothing, deflater.finish().unwrap()].concat();
        let mut inflater = Inflater::new(Coding::Gzip, &body.clone().into());
        let mut all = Vec::new();
        let mut left = body.len();
        loop {
            let Piece { data, last } = inflater.piece().unwrap();
            let now: usize = inflater.rope_mut().parts.iter().map(Bytes::len).sum();
            assert!(left - now <= 2 * PIECE, "{} bytes in one go", left - now);
            left = now;
            all.extend_from_slice(&data);
            let capacity = data.try_into_mut().map_or(0, |data| data.capacity());
            assert!(capacity < PIECE, "{capacity}");
            if last {
                break;
            }
        }
        assert_eq!((all.as_slice(), left), (&b"end"[..], 0));
    }

    #[test]
    fn the_coding_that_is_wanted_most_is_taken() {
        let table = [
            ("gzip, deflate", Some(Coding::Gzip)),
            ("deflate, gzip", Some(Coding::Deflate)),
            ("gzip;q=0.5, deflate;q=0.8, br", Some(Coding::Deflate)),
            ("identity, gzip", None),
            ("gzip;q=0.9, identity;q=0.1", Some(Coding::Gzip)),
            ("gzip;q=0", None),
            ("br, zstd", None),
            ("*", None),
            ("", None),
            ("GZIP ; Q=0.3", Some(Coding::Gzip)),
            ("gzip;q=x", None),
        ];
        for (value, expected) in table {
            let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(value))]);
            assert_eq!(wanted(&headers), expected, "{value}");
        }
        assert_eq!(wanted(&HeaderMap::new()), None);
    }
}
