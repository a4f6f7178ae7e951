//! Texts to requests, and outputs back to one row of numbers for each text.

use super::{Role, TextModel};
use crate::model::{InferRequest, InputTensor, InvalidRequest, ModelSpec, ValidRequest};
use crate::tensor::{DataType, Tensor};
use crate::text::{Pooling, Tokens};
use crate::units::Rows;
use half::{bf16, f16};
use smallvec::smallvec;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The texts of a request that run together: those that have the same length once they are padded.
#[derive(Debug)]
pub struct Part {
    /// Which texts, in the order of its rows.
    pub rows: Vec<usize>,
    /// Their tokens.
    pub request: ValidRequest,
}

impl TextModel {
    /// The length to which a text of so many tokens is padded: texts of the same one are one request. Where batches are padded
    /// anyway, it is the length that the batcher pads to, and which of them share a batch is left to it.
    fn padded(&self, model: &ModelSpec, tokens: usize) -> usize {
        let ids = self.roles.iter().position(|role| *role == Role::Ids);
        if let Some((plan, ids)) = model.padding.as_ref().zip(ids) {
            return plan.padded(ids, 1, tokens);
        }
        self.lengths.iter().copied().find(|length| *length >= tokens).unwrap_or(tokens)
    }

    /// Tokens as requests of at most `max_rows` rows to a model, whose one answer is this output.
    ///
    /// # Errors
    /// If they do not fit the model.
    pub fn parts(
        &self,
        model: &Arc<ModelSpec>,
        texts: &[Tokens],
        output: usize,
        max_rows: Rows,
    ) -> Result<Vec<Part>, InvalidRequest> {
        let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, tokens) in texts.iter().enumerate() {
            by_length.entry(self.padded(model, tokens.ids.len())).or_default().push(at);
        }
        // Without a batch axis each text is a request of its own.
        let most = model.batch_axis.map_or(1, |_| (max_rows as usize).max(1));
        let mut parts = Vec::new();
        for (length, rows) in by_length {
            // Where batches are padded anyway, no more is filled up than the longest of them needs.
            let longest = rows.iter().map(|row| texts[*row].ids.len()).max().unwrap_or(length);
            let length = if model.padding.is_some() { longest } else { length };
            for rows in rows.chunks(most) {
                let outputs = vec![model.outputs[output].name.clone()];
                let inputs = self.inputs(model, texts, rows, length);
                let request = InferRequest { inputs, outputs, ..InferRequest::default() };
                let request = ValidRequest::new(Arc::clone(model), request, max_rows)?;
                parts.push(Part { rows: rows.to_vec(), request });
            }
        }
        Ok(parts)
    }

    fn inputs(&self, model: &ModelSpec, texts: &[Tokens], rows: &[usize], length: usize) -> Vec<InputTensor> {
        let inputs = model.inputs.iter().zip(&self.roles).map(|(spec, role)| {
            let mut data = Vec::with_capacity(rows.len() * length * spec.datatype.size().unwrap_or_default());
            for tokens in rows.iter().map(|row| &texts[*row]) {
                for at in 0..length {
                    let value = match role {
                        Role::Ids => tokens.ids.get(at).copied().unwrap_or(self.pad),
                        Role::Mask => u32::from(at < tokens.ids.len()),
                        Role::Types => tokens.types.get(at).copied().unwrap_or_default(),
                        Role::Positions => u32::try_from(at).unwrap_or_default(),
                    };
                    match spec.datatype {
                        DataType::Int32 => data.extend_from_slice(&value.to_le_bytes()),
                        _ => data.extend_from_slice(&u64::from(value).to_le_bytes()),
                    }
                }
            }
            let tensor = Tensor { datatype: spec.datatype, shape: smallvec![rows.len(), length], data: data.into() };
            InputTensor { name: spec.name.clone(), tensor }
        });
        inputs.collect()
    }
}

/// One vector for each of the texts that have so many tokens.
///
/// # Errors
/// If the output has another shape than it should, in words for the client.
pub fn vectors(tensor: &Tensor, tokens: &[usize], pooling: Pooling) -> Result<Vec<Vec<f32>>, String> {
    let values = floats(tensor)?;
    match (&tensor.shape[..], pooling) {
        ([rows, width], Pooling::None) if *rows == tokens.len() => finite(split(&values, *width)),
        ([rows, length, width], pooling)
            if *rows == tokens.len() && *length > 0 && tokens.iter().all(|tokens| (1..=*length).contains(tokens)) =>
        {
            let each = values.chunks((length * width).max(1)).zip(tokens);
            finite(each.map(|(vectors, tokens)| pooling.pool(vectors, *width, *tokens)).collect())
        }
        (shape, _) => Err(format!("its output has the shape {shape:?} for {} texts", tokens.len())),
    }
}

/// The vectors of all tokens for each of the texts that have so many.
///
/// # Errors
/// As for [`vectors`].
pub fn token_vectors(tensor: &Tensor, tokens: &[usize]) -> Result<Vec<Vec<Vec<f32>>>, String> {
    let values = floats(tensor)?;
    match tensor.shape[..] {
        [rows, length, width] if rows == tokens.len() && tokens.iter().all(|tokens| *tokens <= length) => {
            let each = values.chunks((length * width).max(1)).zip(tokens);
            each.map(|(vectors, tokens)| finite(split(&vectors[..tokens * width], width))).collect()
        }
        _ => Err(format!("its output has the shape {:?} for {} texts", tensor.shape, tokens.len())),
    }
}

fn split(values: &[f32], width: usize) -> Vec<Vec<f32>> {
    values.chunks(width.max(1)).map(<[f32]>::to_vec).collect()
}

/// The same, if all of it can be written as a number. What stands behind a text, in padding, does not matter.
fn finite(rows: Vec<Vec<f32>>) -> Result<Vec<Vec<f32>>, String> {
    if rows.iter().flatten().all(|value| value.is_finite()) {
        Ok(rows)
    } else {
        Err("its output has an element that is not a number, or infinite".to_owned())
    }
}

/// The elements of a tensor.
fn floats(tensor: &Tensor) -> Result<Vec<f32>, String> {
    let data = tensor.data.to_contiguous();
    macro_rules! read {
        ($to:expr) => {{
            let (elements, _) = data.as_chunks();
            elements.iter().map(|bytes| $to(*bytes)).collect::<Vec<f32>>()
        }};
    }
    match tensor.datatype {
        DataType::Fp32 => Ok(read!(f32::from_le_bytes)),
        DataType::Fp16 => Ok(read!(|bytes| f16::from_le_bytes(bytes).to_f32())),
        DataType::Bf16 => Ok(read!(|bytes| bf16::from_le_bytes(bytes).to_f32())),
        DataType::Fp64 => Ok(read!(|bytes| f64::from_le_bytes(bytes) as f32)),
        other => Err(format!("its output has the datatype {other}")),
    }
}
