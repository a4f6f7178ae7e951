//! A model as the server sees it: names, datatypes, dimensions, and the axis that is the batch.

use super::{PadPlan, Settings, TextModel};
use crate::tensor::DataType;
use crate::units::{ModelId, Rows};
use std::sync::Arc;

/// One dimension of an input or output as the graph declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Dim {
    /// Always this size.
    Fixed(usize),
    /// Any size; equal names within one model mean equal sizes.
    Symbol(String),
    /// Any size, unnamed.
    Any,
}

/// One input or output: shapes include the batch axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name in the graph.
    pub name: String,
    /// The element type.
    pub datatype: DataType,
    /// Dimensions, outermost first.
    pub shape: Vec<Dim>,
}

impl TensorSpec {
    /// The shape as metadata shows it: −1 for what varies.
    #[must_use]
    pub fn wire_shape(&self) -> Vec<i64> {
        self.shape
            .iter()
            .map(|dim| match dim {
                Dim::Fixed(size) => i64::try_from(*size).unwrap_or(i64::MAX),
                Dim::Symbol(_) | Dim::Any => -1,
            })
            .collect()
    }
}

/// One loaded version of a model.
#[derive(Clone, Debug)]
pub struct ModelSpec {
    /// Identity inside the server.
    pub id: ModelId,
    /// The name of its folder or file.
    pub name: String,
    /// The version, a positive number; 1 for a model without version folders.
    pub version: u64,
    /// The inputs, in the graph's order.
    pub inputs: Vec<TensorSpec>,
    /// The outputs, in the graph's order.
    pub outputs: Vec<TensorSpec>,
    /// The axis of every input and output that is the batch. `None`: requests run one by one, each as it is.
    pub batch_axis: Option<usize>,
    /// Why there is no batch axis, in words for the operator; `None` where there is one.
    pub unbatched_reason: Option<String>,
    /// The largest number of rows in one batch; 1 without a batch axis.
    pub max_batch_size: Rows,
    /// How rows of different lengths share a batch; `None`: only equal shapes do.
    pub padding: Option<PadPlan>,
    /// The settings that hold for it: model.toml over the server's defaults.
    pub settings: Settings,
    /// What makes its tensors of texts; `None` if it takes none.
    pub text: Option<Arc<TextModel>>,
}

impl ModelSpec {
    /// The input with this name and its position.
    #[must_use]
    pub fn input(&self, name: &str) -> Option<(usize, &TensorSpec)> {
        self.inputs.iter().enumerate().find(|(_, input)| input.name == name)
    }

    /// The output with this name and its position.
    #[must_use]
    pub fn output(&self, name: &str) -> Option<(usize, &TensorSpec)> {
        self.outputs.iter().enumerate().find(|(_, output)| output.name == name)
    }

    /// A model `m` with neither inputs nor outputs.
    #[cfg(test)]
    pub(crate) fn of_nothing() -> Self {
        Self {
            id: ModelId(0),
            name: "m".to_owned(),
            version: 1,
            inputs: Vec::new(),
            outputs: Vec::new(),
            batch_axis: Some(0),
            unbatched_reason: None,
            max_batch_size: 1,
            padding: None,
            settings: Settings::default(),
            text: None,
        }
    }

    /// The most bytes that an element of an input has. Strings, which have no size of their own, do not count.
    #[must_use]
    pub fn widest_element(&self) -> usize {
        self.inputs.iter().filter_map(|input| input.datatype.size()).max().unwrap_or(0)
    }
}

/// What the ONNX file says of itself: the source from which a [`ModelSpec`] is derived.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Graph {
    /// The inputs, in the graph's order.
    pub inputs: Vec<TensorSpec>,
    /// The outputs, in the graph's order.
    pub outputs: Vec<TensorSpec>,
    /// Inputs and outputs that the protocol has no tensor for; a model that has any is refused.
    pub unsupported: Vec<Unsupported>,
}

/// An input or output that is a sequence, a map or an optional, or whose elements the protocol does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unsupported {
    /// Whether it is an input or an output.
    pub side: Side,
    /// The name in the graph.
    pub name: String,
    /// Its type in ONNX's words, such as `sequence(map(int64, float))`.
    pub kind: String,
}

/// Which end of a model a tensor is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// What a request brings.
    Input,
    /// What an answer holds.
    Output,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Input => "input",
            Self::Output => "output",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_widest_element_is_that_of_an_input_whose_elements_have_a_size() {
        let input = |datatype: &DataType| TensorSpec { name: "x".to_owned(), datatype: *datatype, shape: Vec::new() };
        let table: [(&[DataType], usize); 4] = [
            (&[DataType::Fp32], 4),
            (&[DataType::Fp16, DataType::Int64, DataType::Bool], 8),
            (&[DataType::Uint8, DataType::Bytes], 1),
            (&[DataType::Bytes], 0),
        ];
        for (inputs, bytes) in table {
            let inputs = inputs.iter().map(input).collect();
            let spec = ModelSpec { inputs, outputs: vec![input(&DataType::Fp64)], ..ModelSpec::of_nothing() };
            assert_eq!(spec.widest_element(), bytes, "{:?}", spec.inputs);
        }
    }
}
