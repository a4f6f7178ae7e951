//! Requests and responses of the Open Inference Protocol, whatever wire they came by.

use super::{Dim, ModelSpec, TensorSpec};
use crate::tensor::{Chunks, DataType, MAX_RANK, Tensor, element_count};
use crate::units::{ByteSize, Rows};
use std::sync::Arc;
use std::time::Duration;

/// A tensor without elements costs its client nothing, yet each of its dimensions may become an allocation of the model's:
/// their product, zeros aside, is at most this.
const MAX_EMPTY_SPAN: usize = 1 << 24;

/// One input tensor as a request names it.
#[derive(Clone, Debug, PartialEq)]
pub struct InputTensor {
    /// The input's name.
    pub name: String,
    /// Its datatype, shape and data.
    pub tensor: Tensor,
}

/// An inference request, decoded but not yet compared with the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InferRequest {
    /// The client's request id; empty if it gave none.
    pub id: String,
    /// The inputs, in the request's order.
    pub inputs: Vec<InputTensor>,
    /// The names of the wanted outputs, in the wanted order; empty means all of them.
    pub outputs: Vec<String>,
    /// 1 is the most urgent; 0 means the model's default.
    pub priority: u64,
    /// How long the request may take, from its arrival.
    pub timeout: Option<Duration>,
}

/// A request that fits its model: the only thing that the batcher accepts.
#[derive(Clone, Debug)]
pub struct ValidRequest {
    /// The model.
    pub model: Arc<ModelSpec>,
    /// One tensor per model input, in the model's order.
    pub inputs: Vec<Tensor>,
    /// Positions of the wanted outputs, in the wanted order.
    pub outputs: Vec<usize>,
    /// Rows along the batch axis; 1 for a model without one.
    pub rows: Rows,
    /// Bytes of all inputs.
    pub bytes: ByteSize,
    /// Every dimension of every input except the batch axis, in the model's order, each as large as it runs (padding included):
    /// only requests in which these are equal share a batch.
    pub class_dims: Vec<usize>,
    /// Elements per row over all inputs, padding included.
    pub units: u64,
    /// A priority level of the model, 1 is the most urgent.
    pub priority: u32,
    /// How long the request may take, from its arrival.
    pub timeout: Option<Duration>,
}

impl ValidRequest {
    /// Compares a request with its model. `max_rows` is the most rows that one request may have; more rows than a batch
    /// holds are fine, the scheduler splits them.
    ///
    /// # Errors
    /// The first thing that does not fit, naming the field and the remedy.
    pub fn new(model: Arc<ModelSpec>, request: InferRequest, max_rows: Rows) -> Result<Self, InvalidRequest> {
        let inputs = place_inputs(&model, request.inputs)?;
        let mut rows = None;
        let mut sizes: Vec<(&str, usize, &str)> = Vec::new();
        let mut class_dims = Vec::new();
        let mut units = 0u64;
        let mut bytes = 0u64;
        for (index, (spec, tensor)) in model.inputs.iter().zip(&inputs).enumerate() {
            check_tensor(&model, spec, tensor)?;
            bind_symbols(&model, spec, tensor, &mut sizes)?;
            let mut row_elements = 1u64;
            for (axis, &size) in tensor.shape.iter().enumerate() {
                if model.batch_axis == Some(axis) {
                    agree_on_rows(&model, spec, size, &mut rows)?;
                } else {
                    let size = model.padding.as_ref().map_or(size, |plan| plan.padded(index, axis, size));
                    class_dims.push(size);
                    row_elements = row_elements.saturating_mul(size as u64);
                }
            }
            units = units.saturating_add(row_elements);
            bytes = bytes.saturating_add(tensor.data.len() as u64);
        }
        let rows = check_rows(&model, rows.map_or(1, |(rows, _)| rows), max_rows)?;
        let outputs = place_outputs(&model, &request.outputs)?;
        let priority = match u32::try_from(request.priority) {
            Ok(level) if (1..=model.settings.priority_levels).contains(&level) => level,
            _ => model.settings.default_priority,
        };
        let timeout = request.timeout.filter(|timeout| !timeout.is_zero());
        Ok(Self { model, inputs, outputs, rows, bytes: ByteSize(bytes), class_dims, units, priority, timeout })
    }
}

impl ValidRequest {
    /// What requests have in common that may share a batch although they are not equally long: [`Self::class_dims`] without the
    /// padded dimension. `None` if this request runs with its like only: the model has none, or several of them, which would make
    /// some rows longer than others in one and shorter in another, or this one is as no length provides for.
    #[must_use]
    pub fn family_dims(&self) -> Option<Vec<usize>> {
        let plan = self.model.padding.as_ref()?;
        let [dim] = plan.dims.as_slice() else { return None };
        let size = plan.size_of(0, &self.inputs)?;
        if size == 0 || dim.lengths.last().is_none_or(|longest| size > *longest) {
            return None;
        }
        let axes = self.inputs.iter().zip(&plan.inputs).flat_map(|(tensor, padded)| {
            let axes = (0..tensor.shape.len()).filter(|axis| self.model.batch_axis != Some(*axis));
            axes.map(|axis| padded.axes.iter().any(|other| other.axis == axis))
        });
        Some(axes.zip(&self.class_dims).map(|(is_padded, size)| if is_padded { 0 } else { *size }).collect())
    }
}

/// The tensors in the model's order: each input exactly once.
fn place_inputs(model: &ModelSpec, given: Vec<InputTensor>) -> Result<Vec<Tensor>, InvalidRequest> {
    let mut placed: Vec<Option<Tensor>> = model.inputs.iter().map(|_| None).collect();
    for (position, input) in given.into_iter().enumerate() {
        let Some((index, _)) = model.input(&input.name) else {
            return Err(InvalidRequest::new(format!(
                "inputs[{position}]: model '{}' has no input '{}'; its inputs are {}",
                model.name,
                input.name,
                names(&model.inputs)
            )));
        };
        if placed[index].replace(input.tensor).is_some() {
            return Err(InvalidRequest::new(format!(
                "inputs[{position}]: input '{}' is given twice; give it once",
                input.name
            )));
        }
    }
    let count = placed.iter().flatten().count();
    let missing: Vec<&str> =
        model.inputs.iter().zip(&placed).filter(|(_, tensor)| tensor.is_none()).map(|(spec, _)| &*spec.name).collect();
    if !missing.is_empty() {
        return Err(InvalidRequest::new(format!(
            "model '{}' needs {} but got {count}: add '{}'",
            model.name,
            if model.inputs.len() == 1 { "1 input".to_owned() } else { format!("{} inputs", model.inputs.len()) },
            missing.join("', '")
        )));
    }
    Ok(placed.into_iter().flatten().collect())
}

/// Datatype, rank, fixed dimensions and number of bytes.
fn check_tensor(model: &ModelSpec, spec: &TensorSpec, tensor: &Tensor) -> Result<(), InvalidRequest> {
    let name = &spec.name;
    if tensor.datatype != spec.datatype {
        return Err(InvalidRequest::new(format!(
            "input '{name}' has datatype {}, but model '{}' expects {}",
            tensor.datatype, model.name, spec.datatype
        )));
    }
    let fits = tensor.shape.len() <= MAX_RANK
        && tensor.shape.len() == spec.shape.len()
        && tensor.shape.iter().zip(&spec.shape).enumerate().all(|(axis, (&size, dim))| match dim {
            Dim::Fixed(fixed) => *fixed == size || model.batch_axis == Some(axis),
            Dim::Symbol(_) | Dim::Any => true,
        });
    if !fits {
        return Err(InvalidRequest::new(format!(
            "input '{name}' has shape {:?}, but model '{}' expects {:?} (-1: any size)",
            tensor.shape,
            model.name,
            spec.wire_shape()
        )));
    }
    let elements = element_count(&tensor.shape).ok_or_else(|| {
        InvalidRequest::new(format!("input '{name}' has shape {:?}: too many elements to count", tensor.shape))
    })?;
    if elements == 0 {
        check_span(name, &tensor.shape)?;
    }
    match spec.datatype.size() {
        Some(size) if elements.checked_mul(size) == Some(tensor.data.len()) => Ok(()),
        Some(size) => Err(InvalidRequest::new(format!(
            "input '{name}' has {} bytes of data, but shape {:?} of {} needs {}",
            tensor.data.len(),
            tensor.shape,
            spec.datatype,
            elements as u128 * size as u128
        ))),
        None => check_strings(name, &tensor.data, elements),
    }
}

/// Bounds the dimensions of a tensor without elements. Those of any other are bounded by its data, to less than an `i64`.
fn check_span(name: &str, shape: &[usize]) -> Result<(), InvalidRequest> {
    let span = shape.iter().try_fold(1usize, |span, &dim| span.checked_mul(dim.max(1)));
    if span.is_some_and(|span| span <= MAX_EMPTY_SPAN) {
        return Ok(());
    }
    Err(InvalidRequest::new(format!(
        "input '{name}' has shape {shape:?}, which holds no elements; make the product of its other dimensions at most \
         {MAX_EMPTY_SPAN}"
    )))
}

/// Whether BYTES data is whole and has as many elements as its shape says.
fn check_strings(name: &str, data: &Chunks, elements: usize) -> Result<(), InvalidRequest> {
    let mut prefix = [0u8; 4];
    let mut have = 0;
    let mut skip = 0usize;
    let mut count = 0usize;
    for part in data.iter() {
        let mut rest = &part[..];
        while !rest.is_empty() {
            if skip > 0 {
                let step = skip.min(rest.len());
                skip -= step;
                rest = &rest[step..];
                continue;
            }
            let step = (prefix.len() - have).min(rest.len());
            prefix[have..have + step].copy_from_slice(&rest[..step]);
            have += step;
            rest = &rest[step..];
            if have == prefix.len() {
                have = 0;
                count += 1;
                skip = u32::from_le_bytes(prefix) as usize;
            }
        }
    }
    if have > 0 || skip > 0 {
        return Err(InvalidRequest::new(format!(
            "input '{name}': element {} of its {} data ends early; each element is a 4-byte little-endian length and that \
             many bytes",
            count.saturating_sub(usize::from(skip > 0)),
            DataType::Bytes
        )));
    }
    if count != elements {
        return Err(InvalidRequest::new(format!(
            "input '{name}' has {count} elements, but its shape needs {elements}"
        )));
    }
    Ok(())
}

/// Equal names mean equal sizes. The batch axis is left out: rows are compared on their own, and batches change them.
fn bind_symbols<'a>(
    model: &ModelSpec,
    spec: &'a TensorSpec,
    tensor: &Tensor,
    sizes: &mut Vec<(&'a str, usize, &'a str)>,
) -> Result<(), InvalidRequest> {
    for (axis, (dim, &size)) in spec.shape.iter().zip(&tensor.shape).enumerate() {
        let Dim::Symbol(symbol) = dim else { continue };
        if model.batch_axis == Some(axis) {
            continue;
        }
        match sizes.iter().find(|(known, _, _)| known == symbol) {
            None => sizes.push((symbol, size, &spec.name)),
            Some((_, known, _)) if *known == size => {}
            Some((_, known, first)) => {
                return Err(InvalidRequest::new(format!(
                    "input '{}' has size {size} on axis {axis} ('{symbol}'), but input '{first}' gave '{symbol}' the size \
                     {known}; make them equal",
                    spec.name
                )));
            }
        }
    }
    Ok(())
}

/// Every input has the same number of rows.
fn agree_on_rows<'a>(
    model: &ModelSpec,
    spec: &'a TensorSpec,
    size: usize,
    rows: &mut Option<(usize, &'a str)>,
) -> Result<(), InvalidRequest> {
    match *rows {
        None => *rows = Some((size, &spec.name)),
        Some((known, _)) if known == size => {}
        Some((known, first)) => {
            return Err(InvalidRequest::new(format!(
                "input '{}' has {size} rows, but input '{first}' of model '{}' has {known}; make them equal",
                spec.name, model.name
            )));
        }
    }
    Ok(())
}

/// At least one row, and no more than the limit.
fn check_rows(model: &ModelSpec, rows: usize, max_rows: Rows) -> Result<Rows, InvalidRequest> {
    match Rows::try_from(rows) {
        Ok(0) => {
            Err(InvalidRequest::new(format!("the request for model '{}' has no rows; send at least 1", model.name)))
        }
        Ok(rows) if rows <= max_rows => Ok(rows),
        _ => Err(InvalidRequest::new(format!(
            "the request for model '{}' has {rows} rows; send at most {max_rows} in one request",
            model.name
        ))),
    }
}

/// The positions of the wanted outputs; all of them if none is named.
fn place_outputs(model: &ModelSpec, wanted: &[String]) -> Result<Vec<usize>, InvalidRequest> {
    if wanted.is_empty() {
        return Ok((0..model.outputs.len()).collect());
    }
    let mut outputs = Vec::with_capacity(wanted.len().min(model.outputs.len()));
    for (position, name) in wanted.iter().enumerate() {
        let Some((index, _)) = model.output(name) else {
            return Err(InvalidRequest::new(format!(
                "outputs[{position}]: model '{}' has no output '{name}'; its outputs are {}",
                model.name,
                names(&model.outputs)
            )));
        };
        if outputs.contains(&index) {
            return Err(InvalidRequest::new(format!(
                "outputs[{position}]: output '{name}' is listed twice; list it once"
            )));
        }
        outputs.push(index);
    }
    Ok(outputs)
}

fn names(specs: &[TensorSpec]) -> String {
    let names: Vec<&str> = specs.iter().map(|spec| &*spec.name).collect();
    format!("'{}'", names.join("', '"))
}

/// One output tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct OutputTensor {
    /// The output's position in the model.
    pub index: usize,
    /// Its datatype, shape and data.
    pub tensor: Tensor,
}

/// The answer to a [`ValidRequest`]: the wanted outputs in the wanted order.
#[derive(Clone, Debug, PartialEq)]
pub struct InferResponse {
    /// The outputs.
    pub outputs: Vec<OutputTensor>,
}

/// Why a request does not fit; the text names the field and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidRequest {
    /// What is wrong and what would be right.
    pub message: String,
}

impl InvalidRequest {
    /// A fault with this text.
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into() }
    }
}

#[cfg(test)]
mod tests;
