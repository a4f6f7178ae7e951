//! An infer request, from its body to [`InferRequest`]: JSON, binary tensors, or both.

use super::error::ApiError;
use super::reader::{Reader, must_be};
use super::{binary, data};
use crate::model::{InferRequest, InputTensor};
use crate::tensor::{Chunks, DataType, MAX_RANK, Shape, Tensor, element_count};
use std::time::Duration;

/// A decoded request and how its answer is to look.
#[derive(Debug, PartialEq)]
pub(super) struct Decoded {
    pub(super) request: InferRequest,
    pub(super) forms: Forms,
}

/// How one listed output is to look.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Form {
    pub(super) binary: bool,
    /// So many of the largest elements instead of all; 0: the tensor itself.
    pub(super) classification: u64,
}

/// Which outputs leave in which form.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Forms {
    /// By position of the listed outputs; empty if none are listed.
    pub(super) listed: Vec<Form>,
    /// For all outputs if none are listed.
    pub(super) unlisted: bool,
}

impl Forms {
    /// Whether the output at this position of the answer is binary. A listed output without `binary_data` is JSON, whatever
    /// `binary_data_output` says.
    pub(super) fn is_binary(&self, position: usize) -> bool {
        if self.listed.is_empty() { self.unlisted } else { self.listed.get(position).is_some_and(|form| form.binary) }
    }
}

/// Decodes a body of which the first `json_len` bytes are JSON and the rest binary tensors.
pub(super) fn decode(body: &Chunks, json_len: usize) -> Result<Decoded, ApiError> {
    let head = body.slice(0..json_len).to_contiguous();
    // Few clients write `Inf`, and only theirs are read a second time.
    decode_head(&head, body, json_len).or_else(|fault| match data::spelt_out(&head) {
        Some(head) => decode_head(&head, body, json_len),
        None => Err(fault),
    })
}

fn decode_head(head: &[u8], body: &Chunks, json_len: usize) -> Result<Decoded, ApiError> {
    let mut reader = Reader::new(head);
    let mut parsed = Parsed::default();
    reader.object(&"the request", Key::of, |reader, key| parsed.read(reader, key))?;
    reader.finish()?;
    let inputs = parsed.inputs.ok_or_else(|| ApiError::invalid("inputs is missing; send an array of input tensors"))?;
    let mut tail = Tail { body, offset: json_len };
    let mut request = parsed.request;
    for (index, input) in inputs.into_iter().enumerate() {
        request.inputs.push(input.finish(head, &mut tail, index)?);
    }
    tail.finish()?;
    Ok(Decoded { request, forms: parsed.forms })
}

/// The binary tensors behind the JSON, taken in order.
struct Tail<'a> {
    body: &'a Chunks,
    offset: usize,
}

impl Tail<'_> {
    fn take(&mut self, size: u64, input: usize) -> Result<Chunks, ApiError> {
        let left = self.body.len() - self.offset;
        match usize::try_from(size) {
            Ok(size) if size <= left => {
                let start = self.offset;
                self.offset += size;
                Ok(self.body.slice(start..self.offset))
            }
            _ => Err(ApiError::invalid(format!(
                "inputs[{input}].parameters.binary_data_size is {size}, but only {left} bytes follow; send the tensor after \
                 the JSON and the length of the JSON as Inference-Header-Content-Length"
            ))),
        }
    }

    fn finish(&self) -> Result<(), ApiError> {
        match self.body.len() - self.offset {
            0 => Ok(()),
            left => Err(ApiError::invalid(format!(
                "{left} bytes are left after the last binary tensor; make Inference-Header-Content-Length and every \
                 binary_data_size add up to the body"
            ))),
        }
    }
}

/// The keys that mean something, at any level.
#[derive(Clone, Copy)]
enum Key {
    Id,
    Parameters,
    Inputs,
    Outputs,
    Name,
    Shape,
    Datatype,
    Data,
    Priority,
    Timeout,
    BinaryData,
    BinaryDataSize,
    BinaryDataOutput,
    Classification,
    SharedMemoryRegion,
    Other,
}

impl Key {
    fn of(name: &str) -> Self {
        match name {
            "id" => Self::Id,
            "parameters" => Self::Parameters,
            "inputs" => Self::Inputs,
            "outputs" => Self::Outputs,
            "name" => Self::Name,
            "shape" => Self::Shape,
            "datatype" => Self::Datatype,
            "data" => Self::Data,
            "priority" => Self::Priority,
            "timeout" => Self::Timeout,
            "binary_data" => Self::BinaryData,
            "binary_data_size" => Self::BinaryDataSize,
            "binary_data_output" => Self::BinaryDataOutput,
            "classification" => Self::Classification,
            "shared_memory_region" => Self::SharedMemoryRegion,
            _ => Self::Other,
        }
    }
}

/// The request while its JSON is read.
#[derive(Default)]
struct Parsed {
    request: InferRequest,
    forms: Forms,
    inputs: Option<Vec<Input>>,
}

impl Parsed {
    fn read(&mut self, reader: &mut Reader<'_>, key: Key) -> Result<(), ApiError> {
        match key {
            Key::Id if !reader.null(&"id")? => self.request.id = reader.string(&"id")?,
            Key::Parameters if !reader.null(&"parameters")? => {
                reader.object(&"parameters", Key::of, |reader, key| self.parameter(reader, key))?;
            }
            Key::Inputs => self.inputs(reader)?,
            Key::Outputs if !reader.null(&"outputs")? => self.outputs(reader)?,
            // The value of these was `null` and has been read.
            Key::Id | Key::Parameters | Key::Outputs => {}
            _ => reader.skip(&"the request")?,
        }
        Ok(())
    }

    fn parameter(&mut self, reader: &mut Reader<'_>, key: Key) -> Result<(), ApiError> {
        match key {
            Key::Priority => self.request.priority = reader.uint(&"parameters.priority")?,
            Key::Timeout => {
                self.request.timeout = Some(Duration::from_micros(reader.uint(&"parameters.timeout")?));
            }
            Key::BinaryDataOutput => self.forms.unlisted = reader.bool(&"parameters.binary_data_output")?,
            _ => reader.skip(&"parameters")?,
        }
        Ok(())
    }

    fn inputs(&mut self, reader: &mut Reader<'_>) -> Result<(), ApiError> {
        if self.inputs.is_some() {
            return Err(twice(&"inputs"));
        }
        let mut inputs = Vec::new();
        let mut next = reader.array(&"inputs")?;
        while next.is_some() {
            let index = inputs.len();
            let mut input = Input::default();
            reader.object(&format_args!("inputs[{index}]"), Key::of, |reader, key| input.read(reader, key, index))?;
            inputs.push(input);
            next = reader.array_step(&format_args!("inputs[{index}]"))?;
        }
        self.inputs = Some(inputs);
        Ok(())
    }

    fn outputs(&mut self, reader: &mut Reader<'_>) -> Result<(), ApiError> {
        if !self.request.outputs.is_empty() {
            return Err(twice(&"outputs"));
        }
        let mut next = reader.array(&"outputs")?;
        while next.is_some() {
            let index = self.request.outputs.len();
            let at = format_args!("outputs[{index}]");
            let mut name = None;
            let mut form = Form::default();
            reader.object(&at, Key::of, |reader, key| match key {
                Key::Name => {
                    name = Some(reader.string(&format_args!("{at}.name"))?);
                    Ok(())
                }
                Key::Parameters if !reader.null(&format_args!("{at}.parameters"))? => {
                    reader.object(&format_args!("{at}.parameters"), Key::of, |reader, key| {
                        output_parameter(reader, key, index, &mut form)
                    })
                }
                Key::Parameters => Ok(()),
                _ => reader.skip(&at),
            })?;
            self.request.outputs.push(name.ok_or_else(|| missing(&format_args!("{at}.name")))?);
            self.forms.listed.push(form);
            next = reader.array_step(&at)?;
        }
        Ok(())
    }
}

fn output_parameter(reader: &mut Reader<'_>, key: Key, index: usize, form: &mut Form) -> Result<(), ApiError> {
    let at = format_args!("outputs[{index}].parameters");
    match key {
        Key::BinaryData => {
            form.binary = reader.bool(&format_args!("{at}.binary_data"))?;
            Ok(())
        }
        Key::Classification => {
            form.classification = reader.uint(&format_args!("{at}.classification"))?;
            Ok(())
        }
        Key::SharedMemoryRegion => {
            Err(ApiError::SharedMemory(reader.string(&format_args!("{at}.shared_memory_region"))?))
        }
        _ => reader.skip(&at),
    }
}

/// One input while its JSON is read.
#[derive(Default)]
struct Input {
    name: Option<String>,
    shape: Option<Shape>,
    datatype: Option<DataType>,
    data: Option<Data>,
    binary_size: Option<u64>,
}

/// The `data` of an input.
enum Data {
    /// Read: datatype and shape came before it.
    Read(Vec<u8>),
    /// Where it begins in the JSON, to be read once datatype and shape are known.
    Later(usize),
}

/// A position counts from zero and a person by names: where the name is known already, a complaint says both.
fn named(fault: ApiError, name: Option<&str>) -> ApiError {
    match (fault, name) {
        (ApiError::Invalid(fault), Some(name)) => ApiError::invalid(format!("input '{name}': {}", fault.message)),
        (fault, _) => fault,
    }
}

impl Input {
    fn read(&mut self, reader: &mut Reader<'_>, key: Key, index: usize) -> Result<(), ApiError> {
        match key {
            Key::Name => set(&mut self.name, reader.string(&format_args!("inputs[{index}].name"))?, "name", index),
            Key::Shape => set(&mut self.shape, shape(reader, index)?, "shape", index),
            Key::Datatype => set(&mut self.datatype, datatype(reader, index)?, "datatype", index),
            Key::Data => {
                let at = format_args!("inputs[{index}].data");
                if reader.null(&at)? {
                    return Ok(());
                }
                let data = match (self.datatype, &self.shape) {
                    (Some(datatype), Some(shape)) => {
                        let read = data::read(reader, datatype, elements(shape, index)?, index);
                        Data::Read(read.map_err(|fault| named(fault, self.name.as_deref()))?)
                    }
                    _ => Data::Later(reader.skip_over(&at)?),
                };
                set(&mut self.data, data, "data", index)
            }
            Key::Parameters if !reader.null(&format_args!("inputs[{index}].parameters"))? => {
                reader.object(&format_args!("inputs[{index}].parameters"), Key::of, |reader, key| {
                    self.parameter(reader, key, index)
                })
            }
            Key::Parameters => Ok(()),
            _ => reader.skip(&format_args!("inputs[{index}]")),
        }
    }

    fn parameter(&mut self, reader: &mut Reader<'_>, key: Key, index: usize) -> Result<(), ApiError> {
        let at = format_args!("inputs[{index}].parameters");
        match key {
            Key::BinaryDataSize => {
                let size = reader.uint(&format_args!("{at}.binary_data_size"))?;
                set(&mut self.binary_size, size, "parameters.binary_data_size", index)
            }
            Key::SharedMemoryRegion => {
                Err(ApiError::SharedMemory(reader.string(&format_args!("{at}.shared_memory_region"))?))
            }
            _ => reader.skip(&at),
        }
    }

    /// The tensor, once all of the JSON (`head`) has been read.
    fn finish(self, head: &[u8], tail: &mut Tail<'_>, index: usize) -> Result<InputTensor, ApiError> {
        let name = self.name.ok_or_else(|| missing(&format_args!("inputs[{index}].name")))?;
        let shape = self.shape.ok_or_else(|| missing(&format_args!("inputs[{index}].shape")))?;
        let datatype = self.datatype.ok_or_else(|| missing(&format_args!("inputs[{index}].datatype")))?;
        let data = match (self.data, self.binary_size) {
            (Some(Data::Read(bytes)), None) => bytes.into(),
            (Some(Data::Later(start)), None) => {
                let mut reader = Reader::from(head, start);
                data::read(&mut reader, datatype, elements(&shape, index)?, index)?.into()
            }
            (None, Some(size)) => binary::normalised(datatype, tail.take(size, index)?),
            (None, None) => {
                return Err(ApiError::invalid(format!(
                    "inputs[{index}] has no data; send either data or parameters.binary_data_size"
                )));
            }
            (Some(_), Some(_)) => {
                return Err(ApiError::invalid(format!(
                    "inputs[{index}] has both data and parameters.binary_data_size; send one of them"
                )));
            }
        };
        Ok(InputTensor { name, tensor: Tensor { datatype, shape, data } })
    }
}

fn set<T>(field: &mut Option<T>, value: T, name: &str, index: usize) -> Result<(), ApiError> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(twice(&format_args!("inputs[{index}].{name}"))),
    }
}

fn twice(field: &dyn std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("{field} is given twice; give it once"))
}

fn missing(field: &dyn std::fmt::Display) -> ApiError {
    ApiError::invalid(format!("{field} is missing; add it"))
}

fn elements(shape: &[usize], index: usize) -> Result<usize, ApiError> {
    element_count(shape)
        .ok_or_else(|| ApiError::invalid(format!("inputs[{index}].shape has too many elements to count")))
}

fn shape(reader: &mut Reader<'_>, index: usize) -> Result<Shape, ApiError> {
    let mut shape = Shape::new();
    let at = format_args!("inputs[{index}].shape");
    let mut next = reader.array(&at)?;
    while next.is_some() {
        if shape.len() == MAX_RANK {
            return Err(ApiError::invalid(format!("{at} has more than {MAX_RANK} dimensions")));
        }
        let field = format_args!("inputs[{index}].shape[{}]", shape.len());
        let size = reader.uint(&field)?;
        shape.push(usize::try_from(size).map_err(|_| must_be(&field, "a size that memory could hold"))?);
        next = reader.array_step(&at)?;
    }
    Ok(shape)
}

fn datatype(reader: &mut Reader<'_>, index: usize) -> Result<DataType, ApiError> {
    let field = format_args!("inputs[{index}].datatype");
    let name = reader.string(&field)?;
    DataType::from_name(&name).ok_or_else(|| {
        let known: Vec<&str> = DataType::ALL.iter().map(|datatype| datatype.name()).collect();
        must_be(&field, &format!("one of {}; '{name}' is not known", known.join(", ")))
    })
}
