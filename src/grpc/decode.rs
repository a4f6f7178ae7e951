//! A `ModelInferRequest` as [`InferRequest`]: raw contents, typed contents, and parameters.

use super::proto::infer_parameter::ParameterChoice;
use super::proto::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
use super::proto::{InferParameter, ModelInferRequest};
use crate::http::{ApiError, normalised};
use crate::model::{InferRequest, InputTensor};
use crate::tensor::{DataType, MAX_RANK, Shape, Tensor, element_count};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::time::Duration;

type Parameters = BTreeMap<String, InferParameter>;

/// The request without the name and version of its model, and for each output that it lists how many of the largest elements
/// it wants in its place, 0 being the tensor. `budget` is how long the client waits at all. Typed contents are larger
/// in memory than on the wire: `grow` is told of so many bytes more before they are there, and may refuse.
pub(super) fn request(
    message: ModelInferRequest,
    budget: Option<Duration>,
    mut grow: impl FnMut(u64) -> Result<(), ApiError>,
) -> Result<(InferRequest, Vec<u64>), ApiError> {
    let ModelInferRequest { id, parameters, inputs, outputs, raw_input_contents, .. } = message;
    let timeout = uint(&parameters, "timeout")?.map(Duration::from_micros).filter(|timeout| !timeout.is_zero());
    let outputs: Vec<(String, u64)> = outputs.into_iter().enumerate().map(output).collect::<Result<_, _>>()?;
    let (outputs, classes) = outputs.into_iter().unzip();
    let request = InferRequest {
        id,
        priority: uint(&parameters, "priority")?.unwrap_or(0),
        timeout: timeout.into_iter().chain(budget).min(),
        inputs: self::inputs(inputs, raw_input_contents, &mut grow)?,
        outputs,
    };
    Ok((request, classes))
}

fn inputs(
    inputs: Vec<InferInputTensor>,
    raw: Vec<Bytes>,
    grow: &mut impl FnMut(u64) -> Result<(), ApiError>,
) -> Result<Vec<InputTensor>, ApiError> {
    if !raw.is_empty() && raw.len() != inputs.len() {
        return Err(ApiError::invalid(format!(
            "raw_input_contents has {} tensors, but there are {} inputs; send one for each input, or none at all",
            raw.len(),
            inputs.len()
        )));
    }
    let mut raw = raw.into_iter();
    inputs.into_iter().enumerate().map(|(index, tensor)| input(tensor, raw.next(), index, grow)).collect()
}

fn input(
    tensor: InferInputTensor,
    raw: Option<Bytes>,
    index: usize,
    grow: &mut impl FnMut(u64) -> Result<(), ApiError>,
) -> Result<InputTensor, ApiError> {
    let InferInputTensor { name, datatype, shape, parameters, contents } = tensor;
    refuse_shared_memory(&parameters)?;
    let at = || format!("inputs[{index}] ('{name}')");
    let datatype = DataType::from_name(&datatype).ok_or_else(|| {
        let known: Vec<&str> = DataType::ALL.iter().map(|datatype| datatype.name()).collect();
        ApiError::invalid(format!("{}.datatype must be one of {}; '{datatype}' is not known", at(), known.join(", ")))
    })?;
    if shape.len() > MAX_RANK {
        return Err(ApiError::invalid(format!("{}.shape has more than {MAX_RANK} dimensions", at())));
    }
    let negative = || ApiError::invalid(format!("{}.shape must be integers of at least 0", at()));
    let shape: Shape = shape.into_iter().map(usize::try_from).collect::<Result<_, _>>().map_err(|_| negative())?;
    let data = match (raw, contents) {
        (Some(raw), None) => normalised(datatype, raw.into()),
        (None, Some(contents)) => {
            let elements = element_count(&shape)
                .ok_or_else(|| ApiError::invalid(format!("{}.shape has too many elements to count", at())))?;
            grow(contents.bytes_in_memory(datatype, elements))?;
            contents.into_data(datatype, elements, &format!("{}.contents", at()))?
        }
        (None, None) if element_count(&shape) == Some(0) => Bytes::new().into(),
        (None, None) => {
            return Err(ApiError::invalid(format!("{} has no data; send raw_input_contents or contents", at())));
        }
        (Some(_), Some(_)) => {
            return Err(ApiError::invalid(format!(
                "{} has contents although there are raw_input_contents; send one of them",
                at()
            )));
        }
    };
    Ok(InputTensor { name, tensor: Tensor { datatype, shape, data } })
}

fn output((index, output): (usize, InferRequestedOutputTensor)) -> Result<(String, u64), ApiError> {
    refuse_shared_memory(&output.parameters)?;
    let classes = uint(&output.parameters, "classification").map_err(|_| {
        ApiError::invalid(format!("outputs[{index}]: parameter classification must be an integer of at least 0"))
    })?;
    Ok((output.name, classes.unwrap_or(0)))
}

fn refuse_shared_memory(parameters: &Parameters) -> Result<(), ApiError> {
    match parameters.get("shared_memory_region").and_then(|parameter| parameter.parameter_choice.as_ref()) {
        Some(ParameterChoice::StringParam(region)) => Err(ApiError::SharedMemory(region.clone())),
        Some(_) => Err(ApiError::invalid("parameter shared_memory_region must be a string")),
        None => Ok(()),
    }
}

/// An integer that is not negative, under whichever integer type its client has put it.
fn uint(parameters: &Parameters, key: &str) -> Result<Option<u64>, ApiError> {
    let value = match parameters.get(key).and_then(|parameter| parameter.parameter_choice.as_ref()) {
        None => return Ok(None),
        Some(ParameterChoice::Uint64Param(value)) => Some(*value),
        Some(ParameterChoice::Int64Param(value)) => u64::try_from(*value).ok(),
        Some(_) => None,
    };
    let fault = || ApiError::invalid(format!("parameter {key} must be an integer of at least 0"));
    value.ok_or_else(fault).map(Some)
}

/// How long the client waits at all, from the header `grpc-timeout`; `None` if it does not say, or says nothing sensible.
pub(super) fn budget(header: Option<&str>) -> Option<Duration> {
    let (digits, unit) = header?.split_at_checked(header?.len().checked_sub(1)?)?;
    if !(1..=8).contains(&digits.len()) || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_have_a_unit() {
        for (header, expected) in [
            ("1H", Some(Duration::from_secs(3600))),
            ("2M", Some(Duration::from_secs(120))),
            ("99999999S", Some(Duration::from_secs(99_999_999))),
            ("250m", Some(Duration::from_millis(250))),
            ("7u", Some(Duration::from_micros(7))),
            ("0n", Some(Duration::ZERO)),
            ("123456789m", None),
            ("m", None),
            ("", None),
            ("1", None),
            ("-1m", None),
            ("1ü", None),
        ] {
            assert_eq!(budget(Some(header)), expected, "{header}");
        }
        assert_eq!(budget(None), None);
    }

    #[test]
    fn the_shorter_of_timeout_and_budget_holds() {
        let with = |timeout: Option<i64>, budget| {
            let choice = timeout.map(ParameterChoice::Int64Param);
            let parameters = BTreeMap::from([("timeout".to_owned(), InferParameter { parameter_choice: choice })]);
            request(ModelInferRequest { parameters, ..ModelInferRequest::default() }, budget, |_| Ok(()))
                .map(|(it, _)| it.timeout)
        };
        let millis = Duration::from_millis;
        assert_eq!(with(Some(1000), None), Ok(Some(millis(1))));
        assert_eq!(with(Some(5000), Some(millis(2))), Ok(Some(millis(2))));
        assert_eq!(with(None, Some(millis(2))), Ok(Some(millis(2))));
        assert_eq!(with(Some(0), None), Ok(None));
        assert!(with(Some(-1), None).is_err());
    }
}
