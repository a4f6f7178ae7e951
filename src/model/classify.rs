//! The classification extension: the largest elements of an output, with their indices and names, in place of the tensor.

use super::{InvalidRequest, ModelSpec, TensorSpec};
use crate::tensor::rows::push_string;
use crate::tensor::{DataType, Tensor, element_count};
use smallvec::smallvec;
use std::cmp::Ordering;
use std::fmt::Write as _;

/// An output with more elements is not sorted.
const MAX_ELEMENTS: usize = 1_000_000;

/// Whether the elements of an output can be ranked, to be asked before anything runs.
///
/// # Errors
/// If its datatype has no order, or none that clients know.
pub fn check(output: &TensorSpec) -> Result<(), InvalidRequest> {
    match output.datatype {
        DataType::Bool | DataType::Bytes | DataType::Fp16 | DataType::Bf16 => Err(InvalidRequest::new(format!(
            "output '{}' has datatype {}, which has no classification; ask for the tensor itself",
            output.name, output.datatype
        ))),
        _ => Ok(()),
    }
}

/// The `most` largest elements of each row, or of the whole tensor where the first dimension is not the batch, as texts
/// `value:index` or `value:index:label`, the largest first. What is not a number comes last, equal values in their order.
///
/// # Errors
/// If the output cannot be ranked.
pub fn classify(model: &ModelSpec, output: usize, tensor: &Tensor, most: u64) -> Result<Tensor, InvalidRequest> {
    let spec = &model.outputs[output];
    check(spec)?;
    let elements = element_count(&tensor.shape).unwrap_or(usize::MAX);
    if elements > MAX_ELEMENTS {
        return Err(InvalidRequest::new(format!(
            "output '{}' has {elements} elements, and at most {MAX_ELEMENTS} are classified; ask for the tensor itself",
            spec.name
        )));
    }
    let batched = model.batch_axis == Some(0) && !tensor.shape.is_empty();
    let rows = if batched { tensor.shape[0] } else { 1 };
    let per_row = elements.checked_div(rows).unwrap_or(0);
    let kept = usize::try_from(most).unwrap_or(usize::MAX).min(per_row);
    let labels = model.settings.labels.get(&spec.name).map_or(&[][..], |labels| &labels.lines);
    let values = values(tensor);
    let mut data = Vec::new();
    let mut text = String::new();
    for row in values.chunks(per_row.max(1)) {
        for index in largest(row, kept) {
            text.clear();
            // Writing to a string does not fail.
            let _ = write!(text, "{}:{index}", row[index]);
            if let Some(label) = labels.get(index) {
                let _ = write!(text, ":{label}");
            }
            push_string(&mut data, text.as_bytes());
        }
    }
    let shape = if batched { smallvec![rows, kept] } else { smallvec![kept] };
    Ok(Tensor { datatype: DataType::Bytes, shape, data: data.into() })
}

/// The indices of the `most` largest values, in that order.
fn largest(row: &[Value], most: usize) -> Vec<usize> {
    let order = |&a: &usize, &b: &usize| row[b].rank(row[a]).then(a.cmp(&b));
    let mut indices: Vec<usize> = (0..row.len()).collect();
    // Only what is kept is sorted: most of a large row is not.
    if most < indices.len() {
        indices.select_nth_unstable_by(most, order);
        indices.truncate(most);
    }
    indices.sort_unstable_by(order);
    indices
}

/// An element, exactly.
#[derive(Clone, Copy)]
enum Value {
    Integer(i128),
    Float(f64),
}

impl Value {
    /// The order by size; what is not a number is the smallest.
    fn rank(self, other: Self) -> Ordering {
        match (self, other) {
            (Self::Integer(a), Self::Integer(b)) => a.cmp(&b),
            (Self::Float(a), Self::Float(b)) => a.partial_cmp(&b).unwrap_or_else(|| b.is_nan().cmp(&a.is_nan())),
            // One tensor has elements of one kind.
            _ => Ordering::Equal,
        }
    }
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Integer(value) => write!(f, "{value}"),
            Self::Float(value) if value.is_nan() => f.write_str("nan"),
            Self::Float(value) => write!(f, "{value:.6}"),
        }
    }
}

fn values(tensor: &Tensor) -> Vec<Value> {
    let data = tensor.data.to_contiguous();
    macro_rules! read {
        ($type:ty, $to:expr) => {{
            let (elements, _) = data.as_chunks();
            elements.iter().map(|bytes| $to(<$type>::from_le_bytes(*bytes))).collect()
        }};
    }
    macro_rules! integers {
        ($type:ty) => {
            read!($type, |value| Value::Integer(i128::from(value)))
        };
    }
    match tensor.datatype {
        DataType::Uint8 => integers!(u8),
        DataType::Uint16 => integers!(u16),
        DataType::Uint32 => integers!(u32),
        DataType::Uint64 => integers!(u64),
        DataType::Int8 => integers!(i8),
        DataType::Int16 => integers!(i16),
        DataType::Int32 => integers!(i32),
        DataType::Int64 => integers!(i64),
        DataType::Fp32 => read!(f32, |value| Value::Float(f64::from(value))),
        DataType::Fp64 => read!(f64, Value::Float),
        DataType::Bool | DataType::Bytes | DataType::Fp16 | DataType::Bf16 => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Dim, Labels, Settings};
    use crate::tensor::Shape;
    use crate::tensor::rows::string_elements;
    use crate::units::ModelId;

    fn model(datatype: DataType, batch_axis: Option<usize>, labels: &[&str]) -> ModelSpec {
        let lines = labels.iter().map(|&label| label.to_owned()).collect();
        let labels = Labels { file: "labels.txt".to_owned(), lines };
        ModelSpec {
            id: ModelId(1),
            name: "m".to_owned(),
            version: 1,
            inputs: Vec::new(),
            outputs: vec![TensorSpec { name: "y".to_owned(), datatype, shape: vec![Dim::Any, Dim::Any] }],
            batch_axis,
            unbatched_reason: None,
            max_batch_size: 8,
            padding: None,
            settings: Settings { labels: [("y".to_owned(), labels)].into(), ..Settings::default() },
            text: None,
        }
    }

    fn texts(model: &ModelSpec, shape: &[usize], data: Vec<u8>, most: u64) -> (Shape, Vec<String>) {
        let tensor = Tensor { datatype: model.outputs[0].datatype, shape: shape.into(), data: data.into() };
        let Tensor { datatype, shape, data } = classify(model, 0, &tensor, most).unwrap();
        assert_eq!(datatype, DataType::Bytes);
        let elements = string_elements(&data.to_contiguous()).unwrap();
        (shape, elements.iter().map(|text| String::from_utf8(text.to_vec()).unwrap()).collect())
    }

    fn floats(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    }

    #[test]
    fn each_row_has_its_largest_first_with_labels_where_there_are_some() {
        let data = floats(&[0.25, 4.0, -1.0, f32::NAN, 2.0, 2.0]);
        let (shape, got) = texts(&model(DataType::Fp32, Some(0), &["a", "b"]), &[2, 3], data, 2);
        assert_eq!(&shape[..], [2, 2]);
        assert_eq!(got, ["4.000000:1:b", "0.250000:0:a", "2.000000:1:b", "2.000000:2"]);
    }

    #[test]
    fn without_a_batch_the_whole_tensor_is_ranked_and_no_more_than_there_is() {
        let data = [5i64, i64::MAX, -7].iter().flat_map(|value| value.to_le_bytes()).collect();
        let (shape, got) = texts(&model(DataType::Int64, None, &[]), &[3], data, 99);
        assert_eq!(&shape[..], [3]);
        assert_eq!(got, ["9223372036854775807:1", "5:0", "-7:2"]);
        let (shape, got) = texts(&model(DataType::Fp32, Some(0), &[]), &[2, 0], Vec::new(), 3);
        assert_eq!((&shape[..], got.len()), (&[2, 0][..], 0));
    }

    proptest::proptest! {
        #[test]
        fn the_largest_are_those_of_a_whole_sort(
            row in proptest::collection::vec(-3i32..3, 1..40), most in 1u64..50,
        ) {
            let data = row.iter().flat_map(|value| value.to_le_bytes()).collect();
            let (_, got) = texts(&model(DataType::Int32, None, &[]), &[row.len()], data, most);
            let mut expected: Vec<(i32, usize)> = row.iter().copied().zip(0..).collect();
            expected.sort_by_key(|&(value, index)| (-value, index));
            let expected: Vec<String> =
                expected.iter().take(most as usize).map(|(value, index)| format!("{value}:{index}")).collect();
            proptest::prop_assert_eq!(got, expected);
        }
    }

    #[test]
    fn what_has_no_order_is_refused() {
        for datatype in [DataType::Bool, DataType::Bytes, DataType::Fp16, DataType::Bf16] {
            assert!(check(&model(datatype, Some(0), &[]).outputs[0]).is_err());
        }
    }
}
