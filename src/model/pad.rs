//! How rows of different lengths share a batch: which dimensions are padded to which lengths and with what, and which
//! dimensions of outputs are cut back. Pure.

use crate::tensor::{DataType, Tensor};
use smallvec::SmallVec;

/// What may be padded in a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PadPlan {
    /// The dimensions that vary from row to row. Never empty.
    pub dims: Vec<PaddedDim>,
    /// For each input, in the model's order, what of it is padded.
    pub inputs: Vec<PaddedInput>,
    /// For each output, in the model's order, the axes that are cut back to what the row had.
    pub outputs: Vec<Vec<PaddedAxis>>,
}

/// One dimension that may be padded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PaddedDim {
    /// Its name in the graph.
    pub name: String,
    /// The sizes that it is padded to, ascending. A row that is longer than all of them, or has none of it, stays as it is.
    pub lengths: Vec<usize>,
}

impl PaddedDim {
    /// The size that a row of this size runs with.
    #[must_use]
    pub fn padded(&self, size: usize) -> usize {
        let at = self.lengths.partition_point(|length| *length < size);
        self.lengths.get(at).copied().filter(|_| size > 0).unwrap_or(size)
    }
}

/// What of an input is padded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PaddedInput {
    /// The axes; none: it has the same shape in every row.
    pub axes: Vec<PaddedAxis>,
    /// The value that fills up.
    pub value: f64,
}

/// An axis of a tensor whose size is that of a padded dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PaddedAxis {
    /// The axis.
    pub axis: usize,
    /// The position of its dimension in [`PadPlan::dims`].
    pub dim: usize,
}

impl PadPlan {
    /// The size that an axis of an input runs with whose size in a request is `size`.
    #[must_use]
    pub fn padded(&self, input: usize, axis: usize, size: usize) -> usize {
        let found = self.inputs[input].axes.iter().find(|padded| padded.axis == axis);
        found.map_or(size, |padded| self.dims[padded.dim].padded(size))
    }

    /// The size that a dimension has in a request with these inputs; `None` if no input has it, which `derive` refuses.
    #[must_use]
    pub fn size_of(&self, dim: usize, inputs: &[Tensor]) -> Option<usize> {
        let axis = |(input, tensor): (&PaddedInput, &Tensor)| {
            let padded = input.axes.iter().find(|padded| padded.dim == dim)?;
            tensor.shape.get(padded.axis).copied()
        };
        self.inputs.iter().zip(inputs).find_map(axis)
    }
}

/// One element of this value in binary form; empty for texts, which cannot be padded. Values that the type does not hold are
/// refused by `derive`.
#[must_use]
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "derive has checked that the type holds it")]
pub fn element(datatype: DataType, value: f64) -> SmallVec<[u8; 8]> {
    match datatype {
        DataType::Bool | DataType::Uint8 => SmallVec::from_slice(&[value as u8]),
        DataType::Int8 => SmallVec::from_slice(&(value as i8).to_le_bytes()),
        DataType::Uint16 => SmallVec::from_slice(&(value as u16).to_le_bytes()),
        DataType::Int16 => SmallVec::from_slice(&(value as i16).to_le_bytes()),
        DataType::Uint32 => SmallVec::from_slice(&(value as u32).to_le_bytes()),
        DataType::Int32 => SmallVec::from_slice(&(value as i32).to_le_bytes()),
        DataType::Uint64 => SmallVec::from_slice(&(value as u64).to_le_bytes()),
        DataType::Int64 => SmallVec::from_slice(&(value as i64).to_le_bytes()),
        DataType::Fp16 => SmallVec::from_slice(&half::f16::from_f64(value).to_le_bytes()),
        DataType::Bf16 => SmallVec::from_slice(&half::bf16::from_f64(value).to_le_bytes()),
        DataType::Fp32 => SmallVec::from_slice(&(value as f32).to_le_bytes()),
        DataType::Fp64 => SmallVec::from_slice(&value.to_le_bytes()),
        DataType::Bytes => SmallVec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_padded_to_the_next_length_or_stay() {
        let dim = PaddedDim { name: "s".to_owned(), lengths: vec![4, 8, 12] };
        let padded = [0, 1, 4, 5, 8, 12, 13, 99].map(|size| dim.padded(size));
        assert_eq!(padded, [0, 4, 4, 8, 8, 12, 13, 99]);
    }

    #[test]
    fn a_value_has_the_size_of_its_type_and_reads_back() {
        for datatype in DataType::ALL {
            assert_eq!(element(datatype, 1.0).len(), datatype.size().unwrap_or(0), "{datatype}");
        }
        assert_eq!(element(DataType::Int64, -7.0).as_slice(), (-7_i64).to_le_bytes());
        assert_eq!(element(DataType::Fp32, 0.5).as_slice(), 0.5_f32.to_le_bytes());
        assert_eq!(element(DataType::Int8, -1.0).as_slice(), [0xFF]);
    }
}
