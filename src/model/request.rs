//! Requests and responses of the Open Inference Protocol, whatever wire they came by.

use super::ModelSpec;
use crate::tensor::Tensor;
use crate::units::{ByteSize, Rows};
use std::sync::Arc;
use std::time::Duration;

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
    /// The non-batch dimensions of all inputs, in the model's order: only requests that agree in them share a batch.
    pub class_dims: Vec<usize>,
    /// Elements per row over all inputs.
    pub units: u64,
    /// A priority level of the model, 1 is the most urgent.
    pub priority: u32,
    /// How long the request may take, from its arrival.
    pub timeout: Option<Duration>,
}

impl ValidRequest {
    /// A request that the server makes itself, to measure a model: all outputs, the model's default priority.
    #[must_use]
    pub fn synthetic(model: Arc<ModelSpec>, inputs: Vec<Tensor>, rows: Rows) -> Self {
        todo!("{model:?} {inputs:?} {rows}")
    }
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
