//! The answer to a predict request, nested as its tensors are.

use super::read::Form;
use crate::http::encode::{float32, float64, integer, string};
use crate::http::error::ApiError;
use crate::model::{InferResponse, ModelSpec};
use crate::tensor::rows::string_elements;
use crate::tensor::{DataType, Shape, Tensor};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use half::{bf16, f16};

/// The body of the answer.
pub(super) fn write(model: &ModelSpec, answer: InferResponse, form: Form) -> Result<Vec<u8>, ApiError> {
    let mut outputs = Vec::with_capacity(answer.outputs.len());
    for output in answer.outputs {
        let name = model.outputs.get(output.index).map(|spec| &*spec.name).ok_or(ApiError::Internal)?;
        outputs.push(Output::new(name, &output.tensor)?);
    }
    let mut out = Vec::new();
    match form {
        Form::Rows => {
            out.extend_from_slice(b"{\"predictions\":[");
            for row in 0..row_count(&outputs)? {
                separate(&mut out, row);
                by_name(&mut out, &outputs, |out, output| output.row(out, row));
            }
            out.extend_from_slice(b"]}");
        }
        Form::Columns => {
            out.extend_from_slice(b"{\"outputs\":");
            by_name(&mut out, &outputs, |out, output| output.nested(out, &output.shape, 0));
            out.push(b'}');
        }
    }
    Ok(out)
}

/// The value of the one output, or an object with the values of all.
fn by_name(out: &mut Vec<u8>, outputs: &[Output<'_>], write: impl Fn(&mut Vec<u8>, &Output<'_>)) {
    if let [only] = outputs {
        return write(out, only);
    }
    out.push(b'{');
    for (index, output) in outputs.iter().enumerate() {
        separate(out, index);
        string(out, output.name);
        out.push(b':');
        write(out, output);
    }
    out.push(b'}');
}

/// The first dimension, which all outputs must share to be told apart by rows.
fn row_count(outputs: &[Output<'_>]) -> Result<usize, ApiError> {
    let counts: Vec<Option<usize>> = outputs.iter().map(|output| output.shape.first().copied()).collect();
    match counts.first() {
        Some(Some(rows)) if counts.iter().all(|count| *count == Some(*rows)) => Ok(*rows),
        _ => Err(ApiError::invalid(
            "the outputs differ in their first dimension and cannot be divided into rows; send inputs instead of instances",
        )),
    }
}

fn separate(out: &mut Vec<u8>, index: usize) {
    if index > 0 {
        out.push(b',');
    }
}

/// One output, ready to be written element by element.
struct Output<'m> {
    name: &'m str,
    datatype: DataType,
    shape: Shape,
    data: Bytes,
    /// The elements of BYTES.
    strings: Vec<Bytes>,
}

impl<'m> Output<'m> {
    fn new(name: &'m str, tensor: &Tensor) -> Result<Self, ApiError> {
        let data = tensor.data.to_contiguous();
        let strings = match tensor.datatype {
            DataType::Bytes => string_elements(&data).ok_or(ApiError::Internal)?,
            _ => Vec::new(),
        };
        Ok(Self { name, datatype: tensor.datatype, shape: tensor.shape.clone(), data, strings })
    }

    fn row(&self, out: &mut Vec<u8>, row: usize) {
        let inner = &self.shape[1..];
        self.nested(out, inner, row * inner.iter().product::<usize>());
    }

    /// The elements of a part of this shape, from element `start` on.
    fn nested(&self, out: &mut Vec<u8>, shape: &[usize], start: usize) {
        let Some((&count, inner)) = shape.split_first() else { return self.element(out, start) };
        let step = inner.iter().product::<usize>();
        out.push(b'[');
        for index in 0..count {
            separate(out, index);
            self.nested(out, inner, start + index * step);
        }
        out.push(b']');
    }

    fn element(&self, out: &mut Vec<u8>, index: usize) {
        macro_rules! at {
            ($type:ty) => {{
                const SIZE: usize = size_of::<$type>();
                let mut bytes = [0; SIZE];
                bytes.copy_from_slice(&self.data[index * SIZE..(index + 1) * SIZE]);
                <$type>::from_le_bytes(bytes)
            }};
        }
        match self.datatype {
            DataType::Bool => out.extend_from_slice(if at!(u8) == 0 { b"false" } else { b"true" }),
            DataType::Uint8 => integer(out, at!(u8)),
            DataType::Uint16 => integer(out, at!(u16)),
            DataType::Uint32 => integer(out, at!(u32)),
            DataType::Uint64 => integer(out, at!(u64)),
            DataType::Int8 => integer(out, at!(i8)),
            DataType::Int16 => integer(out, at!(i16)),
            DataType::Int32 => integer(out, at!(i32)),
            DataType::Int64 => integer(out, at!(i64)),
            DataType::Fp16 => float32(out, at!(f16).to_f32()),
            DataType::Bf16 => float32(out, at!(bf16).to_f32()),
            DataType::Fp32 => float32(out, at!(f32)),
            DataType::Fp64 => float64(out, at!(f64)),
            DataType::Bytes => self.text(out, &self.strings[index]),
        }
    }

    /// Base64 where the output's name asks for it, and for what is no text.
    fn text(&self, out: &mut Vec<u8>, element: &[u8]) {
        match std::str::from_utf8(element) {
            Ok(text) if !self.name.ends_with("_bytes") => string(out, text),
            _ => {
                out.extend_from_slice(b"{\"b64\":\"");
                out.extend_from_slice(STANDARD.encode(element).as_bytes());
                out.extend_from_slice(b"\"}");
            }
        }
    }
}
