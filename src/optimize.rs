//! Rewriting an ONNX file for kernels that ONNX Runtime has and its own optimisations do not reach. Pure.
//!
//! Exports spell attention out: two products, a scale, a mask, a softmax, and what puts the heads apart and together again. With the
//! CUDA provider ONNX Runtime leaves all of it as it is; written as one `MultiHeadAttention` of its `com.microsoft` operators it
//! runs in one fused kernel where there is one. What is not rewritten is copied byte by byte.

mod attention;
mod graph;
mod wire;

use graph::Graph;
use std::collections::BTreeMap;
use wire::{Field, fields, put_bytes, put_number};

/// The domain of ONNX Runtime's own operators.
const DOMAIN: &str = "com.microsoft";
/// The field of a model that is its graph.
const GRAPH: u32 = 7;
/// The field of a model that names a set of operators and its version.
const OPSET: u32 = 8;

/// A rewritten file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rewritten {
    /// The file.
    pub bytes: Vec<u8>,
    /// Attentions that are one operator now.
    pub fused: usize,
    /// Softmaxes that were left alone, by the reason.
    pub left: BTreeMap<&'static str, usize>,
}

/// Rewrites each attention in an ONNX file that is found. What is found is taken to be what it looks like: whoever serves the
/// result compares its answers first.
///
/// # Errors
/// If the file is no ONNX model or holds what cannot be rewritten.
pub fn fuse_attention(model: &[u8]) -> Result<Rewritten, String> {
    let model = fields(model).ok_or("this is not an ONNX file")?;
    let graph = model.iter().find(|field| field.number == GRAPH).and_then(Field::bytes);
    let graph = Graph::read(graph.ok_or("this is not an ONNX file: it has no graph")?)?;
    let (found, left) = attention::find(&graph, if opset(&model) < 13 { 1 } else { -1 });
    let rewritten = attention::rewrite(&graph, &found);
    let mut bytes = Vec::new();
    let mut knows_domain = false;
    for field in &model {
        match field.bytes() {
            Some(_) if field.number == GRAPH => put_bytes(&mut bytes, GRAPH, &rewritten),
            Some(opset) if field.number == OPSET => {
                knows_domain |=
                    fields(opset).is_some_and(|parts| parts.iter().any(|part| part.text(1) == Some(DOMAIN)));
                bytes.extend_from_slice(field.raw);
            }
            _ => bytes.extend_from_slice(field.raw),
        }
    }
    if !knows_domain {
        let mut opset = Vec::new();
        put_bytes(&mut opset, 1, DOMAIN.as_bytes());
        put_number(&mut opset, 2, 1);
        put_bytes(&mut bytes, OPSET, &opset);
    }
    Ok(Rewritten { bytes, fused: found.len(), left })
}

/// The version of the standard operators; zero if it is not said.
fn opset(model: &[Field<'_>]) -> i64 {
    let named = |opset: &Vec<Field<'_>>| opset.iter().all(|part| matches!(part.text(1), None | Some("" | "ai.onnx")));
    let opsets = model.iter().filter(|field| field.number == OPSET).filter_map(Field::bytes).filter_map(fields);
    let versions = opsets.filter(named).flatten().flat_map(|part| part.integers(2));
    versions.max().unwrap_or_default()
}

#[cfg(test)]
mod tests;
