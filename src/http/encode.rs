//! An infer response, from tensors to a body: JSON, binary tensors, or both.

use super::binary::JSON_LENGTH;
use super::body::Frames;
use super::coding::Coding;
use super::decode::Forms;
use super::error::ApiError;
use super::{BINARY, JSON};
use crate::model::{InferResponse, ModelSpec};
use crate::tensor::{Chunks, DataType};
use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::response::Response;
use bytes::Bytes;
use half::{bf16, f16};
use std::collections::VecDeque;

/// The answer to a request with this `id`.
pub(super) fn encode(model: &ModelSpec, id: &str, answer: InferResponse, forms: &Forms) -> Result<Encoded, ApiError> {
    let mut head = Vec::with_capacity(256);
    let mut frames = VecDeque::with_capacity(1 + answer.outputs.len());
    let mut any_binary = false;
    head.push(b'{');
    if !id.is_empty() {
        head.extend_from_slice(b"\"id\":");
        string(&mut head, id);
        head.push(b',');
    }
    head.extend_from_slice(b"\"model_name\":");
    string(&mut head, &model.name);
    head.extend_from_slice(b",\"model_version\":\"");
    integer(&mut head, model.version);
    head.extend_from_slice(b"\",\"outputs\":[");
    for (position, output) in answer.outputs.into_iter().enumerate() {
        let name = model.outputs.get(output.index).map(|spec| &*spec.name).ok_or(ApiError::Internal)?;
        let tensor = output.tensor;
        head.extend_from_slice(if position == 0 { b"{\"name\":" } else { b",{\"name\":" });
        string(&mut head, name);
        head.extend_from_slice(b",\"datatype\":\"");
        head.extend_from_slice(tensor.datatype.name().as_bytes());
        head.extend_from_slice(b"\",\"shape\":[");
        list(&mut head, tensor.shape.iter(), |head, &size| integer(head, size));
        if forms.is_binary(position) {
            any_binary = true;
            head.extend_from_slice(b"],\"parameters\":{\"binary_data_size\":");
            integer(&mut head, tensor.data.len());
            head.extend_from_slice(b"}}");
            frames.extend(tensor.data.iter().cloned());
        } else {
            head.extend_from_slice(b"],\"data\":[");
            elements(&mut head, tensor.datatype, &tensor.data, name)?;
            head.extend_from_slice(b"]}");
        }
    }
    head.extend_from_slice(b"]}");
    let json_length = any_binary.then_some(head.len());
    frames.push_front(Bytes::from(head));
    Ok(Encoded { frames, json_length })
}

/// An answer as it would leave uncompressed.
pub(super) struct Encoded {
    pub(super) frames: VecDeque<Bytes>,
    /// The length of the JSON at its front, if binary tensors follow.
    json_length: Option<usize>,
}

impl Encoded {
    /// The response; `compressed` is its body in that coding.
    pub(super) fn respond(self, compressed: Option<(Coding, Bytes)>) -> Response {
        let coding = compressed.as_ref().map(|(coding, _)| *coding);
        let body = compressed.map_or_else(|| Body::new(Frames::new(self.frames)), |(_, body)| Body::from(body));
        let mut response = Response::new(body);
        let headers = response.headers_mut();
        if let Some(json_length) = self.json_length {
            headers.insert(CONTENT_TYPE, BINARY);
            headers.insert(JSON_LENGTH, HeaderValue::from(json_length));
        } else {
            headers.insert(CONTENT_TYPE, JSON);
        }
        if let Some(coding) = coding {
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static(coding.name()));
        }
        response
    }
}

/// The elements of a tensor, flat, with commas between them.
fn elements(out: &mut Vec<u8>, datatype: DataType, data: &Chunks, name: &str) -> Result<(), ApiError> {
    let data = data.to_contiguous();
    match datatype {
        DataType::Bool => list(out, data.iter(), |out, &byte| {
            out.extend_from_slice(if byte == 0 { b"false" } else { b"true" });
        }),
        DataType::Uint8 => fixed(out, &data, |out, bytes| integer(out, u8::from_le_bytes(bytes))),
        DataType::Uint16 => fixed(out, &data, |out, bytes| integer(out, u16::from_le_bytes(bytes))),
        DataType::Uint32 => fixed(out, &data, |out, bytes| integer(out, u32::from_le_bytes(bytes))),
        DataType::Uint64 => fixed(out, &data, |out, bytes| integer(out, u64::from_le_bytes(bytes))),
        DataType::Int8 => fixed(out, &data, |out, bytes| integer(out, i8::from_le_bytes(bytes))),
        DataType::Int16 => fixed(out, &data, |out, bytes| integer(out, i16::from_le_bytes(bytes))),
        DataType::Int32 => fixed(out, &data, |out, bytes| integer(out, i32::from_le_bytes(bytes))),
        DataType::Int64 => fixed(out, &data, |out, bytes| integer(out, i64::from_le_bytes(bytes))),
        DataType::Fp16 => fixed(out, &data, |out, bytes| float32(out, f16::from_le_bytes(bytes).to_f32())),
        DataType::Bf16 => fixed(out, &data, |out, bytes| float32(out, bf16::from_le_bytes(bytes).to_f32())),
        DataType::Fp32 => fixed(out, &data, |out, bytes| float32(out, f32::from_le_bytes(bytes))),
        DataType::Fp64 => fixed(out, &data, |out, bytes| float64(out, f64::from_le_bytes(bytes))),
        DataType::Bytes => strings(out, &data, name)?,
    }
    Ok(())
}

fn list<T>(out: &mut Vec<u8>, items: impl Iterator<Item = T>, mut item: impl FnMut(&mut Vec<u8>, T)) {
    for (index, value) in items.enumerate() {
        if index > 0 {
            out.push(b',');
        }
        item(out, value);
    }
}

fn fixed<const N: usize>(out: &mut Vec<u8>, data: &[u8], mut item: impl FnMut(&mut Vec<u8>, [u8; N])) {
    let (values, _) = data.as_chunks::<N>();
    // Enough for most numbers; what is longer makes the vector grow.
    out.reserve(values.len() * (2 * N + 2));
    list(out, values.iter(), |out, &bytes| item(out, bytes));
}

pub(super) fn integer(out: &mut Vec<u8>, value: impl itoa::Integer) {
    out.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
}

pub(super) fn float32(out: &mut Vec<u8>, value: f32) {
    if value.is_finite() {
        out.extend_from_slice(zmij::Buffer::new().format_finite(value).as_bytes());
    } else {
        out.extend_from_slice(not_finite(value.is_nan(), value > 0.0));
    }
}

pub(super) fn float64(out: &mut Vec<u8>, value: f64) {
    if value.is_finite() {
        out.extend_from_slice(zmij::Buffer::new().format_finite(value).as_bytes());
    } else {
        out.extend_from_slice(not_finite(value.is_nan(), value > 0.0));
    }
}

/// Not JSON, yet what the protocol's clients read and other servers of it write.
#[cold]
fn not_finite(nan: bool, positive: bool) -> &'static [u8] {
    match (nan, positive) {
        (true, _) => b"NaN",
        (false, true) => b"Infinity",
        (false, false) => b"-Infinity",
    }
}

/// BYTES elements as JSON strings.
fn strings(out: &mut Vec<u8>, data: &[u8], name: &str) -> Result<(), ApiError> {
    let mut rest = data;
    let mut index = 0usize;
    while !rest.is_empty() {
        let (len, tail) = rest.split_first_chunk::<4>().ok_or(ApiError::Internal)?;
        let (element, tail) = tail.split_at_checked(u32::from_le_bytes(*len) as usize).ok_or(ApiError::Internal)?;
        let text = std::str::from_utf8(element).map_err(|_| {
            ApiError::invalid(format!(
                "element {index} of output '{name}' is not valid UTF-8 and has no JSON form; ask for it in binary form \
                 (outputs[].parameters.binary_data: true)"
            ))
        })?;
        if index > 0 {
            out.push(b',');
        }
        string(out, text);
        rest = tail;
        index += 1;
    }
    Ok(())
}

/// A JSON string, quoted and escaped.
pub(super) fn string(out: &mut Vec<u8>, text: &str) {
    let mut start = 0;
    out.push(b'"');
    for (index, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.extend_from_slice(&text.as_bytes()[start..index]);
        start = index + 1;
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            other => {
                const HEX: &[u8; 16] = b"0123456789abcdef";
                out.extend_from_slice(b"\\u00");
                out.push(HEX[usize::from(other >> 4)]);
                out.push(HEX[usize::from(other & 15)]);
            }
        }
    }
    out.extend_from_slice(&text.as_bytes()[start..]);
    out.push(b'"');
}
