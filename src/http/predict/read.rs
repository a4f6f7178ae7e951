//! A predict request: JSON whose shapes are in its nesting, straight into the binary form of the model's datatypes.

use super::SIGNATURE;
use crate::http::data::{bool, number, values_of};
use crate::http::error::ApiError;
use crate::http::reader::{Fault, Reader, integer, must_be};
use crate::model::{InferRequest, InputTensor, ModelSpec, TensorSpec};
use crate::tensor::{DataType, MAX_RANK, Shape, Tensor};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use half::{bf16, f16};
use jiter::Peek;
use std::fmt::Display;

/// How a request names its tensors, and so how its answer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// `instances`: one entry for each row.
    Rows,
    /// `inputs`: one entry for each tensor.
    Columns,
}

/// Reads a body for a model.
pub(super) fn read(model: &ModelSpec, body: &[u8]) -> Result<(InferRequest, Form), ApiError> {
    enum Key {
        Instances,
        Inputs,
        Signature,
        Other,
    }
    let key = |name: &str| match name {
        "instances" => Key::Instances,
        "inputs" => Key::Inputs,
        "signature_name" => Key::Signature,
        _ => Key::Other,
    };
    let mut reader = Reader::new(body);
    let mut form = None;
    let mut columns: Vec<Column<'_>> = model.inputs.iter().map(Column::new).collect();
    reader.object(&"the request", key, |reader, key| {
        let found = match key {
            Key::Instances => Form::Rows,
            Key::Inputs => Form::Columns,
            Key::Signature => return signature(reader),
            Key::Other => return reader.skip(&"the request"),
        };
        if form.replace(found).is_some() {
            return Err(ApiError::invalid("send either instances (rows) or inputs (columns), once"));
        }
        match found {
            Form::Rows => rows(reader, model, &mut columns),
            Form::Columns => whole(reader, model, &mut columns),
        }
    })?;
    reader.finish()?;
    let form = form.ok_or_else(|| ApiError::invalid("the request needs instances (rows) or inputs (columns)"))?;
    let inputs = columns.into_iter().map(|column| column.finish(form)).collect();
    Ok((InferRequest { inputs, ..InferRequest::default() }, form))
}

fn signature(reader: &mut Reader<'_>) -> Result<(), ApiError> {
    const FIELD: &str = "signature_name";
    if reader.null(&FIELD)? {
        return Ok(());
    }
    match reader.string(&FIELD)?.as_str() {
        "" | SIGNATURE => Ok(()),
        _ => Err(must_be(&FIELD, &format!("'{SIGNATURE}', the one signature that there is"))),
    }
}

/// One input while it is read.
struct Column<'m> {
    spec: &'m TensorSpec,
    bytes: Vec<u8>,
    /// Of a row, or of the whole tensor.
    shape: Option<Shape>,
    rows: usize,
}

impl<'m> Column<'m> {
    fn new(spec: &'m TensorSpec) -> Self {
        Self { spec, bytes: Vec::new(), shape: None, rows: 0 }
    }

    /// Reads a row, or the whole tensor.
    fn add(&mut self, reader: &mut Reader<'_>, at: &dyn Display) -> Result<(), ApiError> {
        let shape = value(reader, self.spec.datatype, &mut self.bytes, 0, at)?;
        self.check(shape, at)
    }

    fn add_text(&mut self, text: &[u8], at: &dyn Display) -> Result<(), ApiError> {
        push(&mut self.bytes, text, at)?;
        self.check(Shape::new(), at)
    }

    fn check(&mut self, shape: Shape, at: &dyn Display) -> Result<(), ApiError> {
        self.rows += 1;
        match &self.shape {
            None => self.shape = Some(shape),
            Some(first) if *first == shape => {}
            Some(first) => {
                return Err(ApiError::invalid(format!(
                    "{at}: input '{}' has shape {shape:?} here and {first:?} before; make all rows equal",
                    self.spec.name
                )));
            }
        }
        Ok(())
    }

    fn finish(self, form: Form) -> InputTensor {
        let mut shape = self.shape.unwrap_or_default();
        if form == Form::Rows {
            shape.insert(0, self.rows);
        }
        let tensor = Tensor { datatype: self.spec.datatype, shape, data: self.bytes.into() };
        InputTensor { name: self.spec.name.clone(), tensor }
    }
}

/// `instances`: a list with an entry for each row.
fn rows(reader: &mut Reader<'_>, model: &ModelSpec, columns: &mut [Column<'_>]) -> Result<(), ApiError> {
    let mut next = reader.array(&"instances")?;
    let mut count = 0;
    while let Some(peek) = next {
        let row = count;
        let at = format_args!("instances[{row}]");
        match columns {
            [only] if peek != Peek::Object => only.add(reader, &at)?,
            _ => named(reader, model, columns, (Unknown::Refuse, &at))?,
        }
        count += 1;
        for column in columns.iter() {
            if column.rows != count {
                let what = if column.rows < count { "is missing" } else { "is given twice" };
                return Err(ApiError::invalid(format!("{at}: input '{}' {what}", column.spec.name)));
            }
        }
        next = reader.array_step(&at)?;
    }
    if count == 0 {
        return Err(ApiError::invalid("instances is empty; send at least one row"));
    }
    Ok(())
}

/// `inputs`: whole tensors by name, or the tensor of the one input.
fn whole(reader: &mut Reader<'_>, model: &ModelSpec, columns: &mut [Column<'_>]) -> Result<(), ApiError> {
    let at = &"inputs";
    match columns {
        [only] if reader.peek(at)? != Peek::Object => only.add(reader, at)?,
        _ => named(reader, model, columns, (Unknown::Skip, at))?,
    }
    match columns.iter().find(|column| column.rows != 1) {
        None => Ok(()),
        Some(Column { rows: 0, spec, .. }) => Err(ApiError::invalid(format!("inputs: '{}' is missing", spec.name))),
        Some(Column { spec, .. }) => Err(ApiError::invalid(format!("inputs: '{}' is given twice", spec.name))),
    }
}

/// What becomes of names that the model does not have.
#[derive(Clone, Copy, PartialEq)]
enum Unknown {
    Refuse,
    Skip,
}

/// An object of values by input name, or bytes for the one input.
fn named(
    reader: &mut Reader<'_>,
    model: &ModelSpec,
    columns: &mut [Column<'_>],
    (unknown, at): (Unknown, &dyn Display),
) -> Result<(), ApiError> {
    enum Key {
        Input(usize),
        Base64,
        Other(String),
    }
    let takes_bytes = matches!(columns, [only] if only.spec.datatype == DataType::Bytes);
    let key = |name: &str| match model.input(name) {
        Some((index, _)) => Key::Input(index),
        None if name == "b64" && takes_bytes => Key::Base64,
        None => Key::Other(name.to_owned()),
    };
    if reader.peek(at)? != Peek::Object {
        let names: Vec<&str> = model.inputs.iter().map(|input| &*input.name).collect();
        return Err(must_be(at, &format!("an object with the inputs '{}'", names.join("', '"))));
    }
    reader.object(at, key, |reader, key| match key {
        Key::Input(index) => {
            let name = &model.inputs[index].name;
            columns[index].add(reader, &format_args!("{at}.{name}"))
        }
        Key::Base64 => {
            let bytes = base64_text(reader, at)?;
            columns[0].add_text(&bytes, at)
        }
        Key::Other(name) if unknown == Unknown::Refuse => {
            Err(ApiError::invalid(format!("{at}: model '{}' has no input '{name}'", model.name)))
        }
        Key::Other(_) => reader.skip(at),
    })
}

/// Reads a scalar or a list of values, all of one shape, and says which.
fn value(
    reader: &mut Reader<'_>,
    datatype: DataType,
    out: &mut Vec<u8>,
    depth: usize,
    at: &dyn Display,
) -> Result<Shape, ApiError> {
    if reader.peek(at)? != Peek::Array {
        return scalar(reader, datatype, out, at).map(|()| Shape::new());
    }
    if depth == MAX_RANK {
        return Err(ApiError::invalid(format!("{at} has more than {MAX_RANK} dimensions")));
    }
    let mut inner: Option<Shape> = None;
    let mut count = 0;
    let mut next = reader.array(at)?;
    while next.is_some() {
        let shape = value(reader, datatype, out, depth + 1, at)?;
        match &inner {
            None => inner = Some(shape),
            Some(first) if *first == shape => {}
            Some(first) => {
                return Err(ApiError::invalid(format!(
                    "{at}: a list holds values of shapes {first:?} and {shape:?}; make them equal"
                )));
            }
        }
        count += 1;
        next = reader.array_step(at)?;
    }
    let mut shape = inner.unwrap_or_default();
    shape.insert(0, count);
    Ok(shape)
}

fn scalar(reader: &mut Reader<'_>, datatype: DataType, out: &mut Vec<u8>, at: &dyn Display) -> Result<(), ApiError> {
    let peek = reader.peek(at)?;
    if datatype == DataType::Bytes {
        return text(reader, peek, out, at);
    }
    let json = reader.json();
    macro_rules! read {
        ($read:expr) => {
            $read.map(|value| out.extend_from_slice(&value.to_le_bytes()))
        };
    }
    let result = match datatype {
        DataType::Bool => bool(json, peek).map(|value| out.push(u8::from(value))),
        DataType::Uint8 => read!(integer::<u8>(json, peek)),
        DataType::Uint16 => read!(integer::<u16>(json, peek)),
        DataType::Uint32 => read!(integer::<u32>(json, peek)),
        DataType::Uint64 => read!(integer::<u64>(json, peek)),
        DataType::Int8 => read!(integer::<i8>(json, peek)),
        DataType::Int16 => read!(integer::<i16>(json, peek)),
        DataType::Int32 => read!(integer::<i32>(json, peek)),
        DataType::Int64 => read!(integer::<i64>(json, peek)),
        DataType::Fp16 => read!(number(json, peek).map(f16::from_f64)),
        DataType::Bf16 => read!(number(json, peek).map(bf16::from_f64)),
        DataType::Fp32 => read!(number(json, peek).map(|value| value as f32)),
        DataType::Fp64 => read!(number(json, peek)),
        DataType::Bytes => Err(Fault::Value),
    };
    result.map_err(|fault| match fault {
        Fault::Broken(error) => reader.broken(&error, at),
        Fault::Value => must_be(at, &format!("made of elements that are {} ({datatype})", values_of(datatype))),
    })
}

/// An element of BYTES: a string, or bytes in base64.
fn text(reader: &mut Reader<'_>, peek: Peek, out: &mut Vec<u8>, at: &dyn Display) -> Result<(), ApiError> {
    match peek {
        Peek::String => push(out, reader.string(at)?.as_bytes(), at),
        Peek::Object => {
            let mut bytes = None;
            reader.object(
                at,
                |name| name == "b64",
                |reader, is_base64| {
                    if !is_base64 || bytes.is_some() {
                        return Err(must_be(at, "made of strings and objects {\"b64\": \"...\"}"));
                    }
                    bytes = Some(base64_text(reader, at)?);
                    Ok(())
                },
            )?;
            push(out, &bytes.ok_or_else(|| must_be(at, "made of strings and objects {\"b64\": \"...\"}"))?, at)
        }
        _ => Err(must_be(at, "made of strings and objects {\"b64\": \"...\"} (BYTES)")),
    }
}

fn base64_text(reader: &mut Reader<'_>, at: &dyn Display) -> Result<Vec<u8>, ApiError> {
    let text = reader.string(&format_args!("{at}.b64"))?;
    STANDARD.decode(text).map_err(|error| ApiError::invalid(format!("{at}.b64 is not base64: {error}")))
}

fn push(out: &mut Vec<u8>, element: &[u8], at: &dyn Display) -> Result<(), ApiError> {
    let len = u32::try_from(element.len()).map_err(|_| must_be(at, "shorter than 4 GiB"))?;
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(element);
    Ok(())
}
