//! The binary tensor data extension, request side: the header, raw requests, and what binary data must be freed from.

use super::decode::{Decoded, Forms};
use super::error::ApiError;
use crate::model::{Dim, InferRequest, InputTensor, ModelSpec};
use crate::tensor::{Chunks, DataType, Shape, Tensor};
use axum::http::{HeaderMap, HeaderName};
use bytes::Bytes;

/// The length of the JSON at the front of a body.
pub(super) const JSON_LENGTH: HeaderName = HeaderName::from_static("inference-header-content-length");

/// What a body is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Framing {
    /// So many bytes of JSON, then binary tensors.
    Json(usize),
    /// One tensor and nothing else.
    Raw,
}

/// How a body of `len` bytes is divided.
pub(super) fn framing(headers: &HeaderMap, len: usize) -> Result<Framing, ApiError> {
    let mut values = headers.get_all(&JSON_LENGTH).iter();
    let Some(value) = values.next() else { return Ok(Framing::Json(len)) };
    // `parse` alone would take "+5".
    let digits = value.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    match digits.and_then(|digits| digits.parse::<usize>().ok()) {
        _ if values.next().is_some() => {}
        Some(0) => return Ok(Framing::Raw),
        Some(json) if json <= len => return Ok(Framing::Json(json)),
        _ => {}
    }
    Err(ApiError::invalid(format!(
        "Inference-Header-Content-Length must be the length of the JSON at the front of the body, from 0 to {len}, once"
    )))
}

/// A request that is only the data of the model's one input.
pub(super) fn raw(model: &ModelSpec, body: Chunks) -> Result<Decoded, ApiError> {
    let [input] = model.inputs.as_slice() else {
        return Err(ApiError::invalid(format!(
            "a raw binary request (Inference-Header-Content-Length: 0) needs a model with one input, and '{}' has {}; send \
             JSON in front of the tensors",
            model.name,
            model.inputs.len()
        )));
    };
    let dims = input.shape.iter().enumerate().map(|(axis, dim)| match dim {
        _ if model.batch_axis == Some(axis) => Some(1),
        Dim::Fixed(size) => Some(*size),
        Dim::Symbol(_) | Dim::Any => None,
    });
    let known = dims.clone().flatten().try_fold(1usize, usize::checked_mul);
    let unsolvable = || {
        ApiError::invalid(format!(
            "{} bytes cannot be one tensor of input '{}' with shape {:?} and datatype {}; a raw binary request may leave one \
             dimension open, send JSON in front of the tensor otherwise",
            body.len(),
            input.name,
            input.wire_shape(),
            input.datatype
        ))
    };
    let (open, data) = match input.datatype.size() {
        // One element without a length in front, whatever it holds.
        None if known == Some(1) => (1, string(&body)?),
        None => return Err(unsolvable()),
        Some(size) => {
            let unit = known.and_then(|known| known.checked_mul(size)).ok_or_else(unsolvable)?;
            let open = match dims.clone().filter(Option::is_none).count() {
                0 => 1,
                1 if unit > 0 && body.len().is_multiple_of(unit) => body.len() / unit,
                _ => return Err(unsolvable()),
            };
            (open, normalised(input.datatype, body))
        }
    };
    let shape: Shape = dims.map(|dim| dim.unwrap_or(open)).collect();
    let tensor = Tensor { datatype: input.datatype, shape, data };
    let request =
        InferRequest { inputs: vec![InputTensor { name: input.name.clone(), tensor }], ..InferRequest::default() };
    Ok(Decoded { request, forms: Forms { listed: Vec::new(), unlisted: true } })
}

/// One BYTES element: its length, then the bytes where they lie.
fn string(body: &Chunks) -> Result<Chunks, ApiError> {
    let len = u32::try_from(body.len()).map_err(|_| ApiError::invalid("one BYTES element holds at most 4 GiB"))?;
    let mut data = Chunks::from(Bytes::copy_from_slice(&len.to_le_bytes()));
    data.append(body.clone());
    Ok(data)
}

/// Binary data as it goes on: as it is, except that a BOOL is 0 or 1 (anything but zero reads as true).
pub(crate) fn normalised(datatype: DataType, data: Chunks) -> Chunks {
    if datatype != DataType::Bool || data.iter().all(|part| part.iter().all(|&byte| byte <= 1)) {
        return data;
    }
    let mut bytes = Vec::with_capacity(data.len());
    for part in data.iter() {
        bytes.extend(part.iter().map(|&byte| u8::from(byte != 0)));
    }
    bytes.into()
}
