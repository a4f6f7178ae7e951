//! From what the ONNX file says to what the server does: the batch axis, and whether model.toml fits the graph. Pure.
//!
//! Rows of several requests may be joined along an axis only if the graph gives every input and output a varying dimension
//! there, the same one everywhere. ONNX compares dimensions by name, and exporters are careless with names, so the answer
//! has three grades: yes, no with the reason in words, and yes if runs with several row counts confirm it.

mod padding;

use super::settings::BatchAxis;
use super::{Dim, Graph, PadPlan, Settings, Side, TensorSpec, check_name};
use crate::units::Rows;

/// What the graph and the settings make of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Derived {
    /// The axis of every input and output that is the batch; `None`: requests run one by one.
    pub batch_axis: Option<usize>,
    /// Why there is no batch axis, in words for the operator; `None` where there is one.
    pub unbatched_reason: Option<String>,
    /// What the graph's names leave open, in words; empty where they prove the axis. If there is anything, the axis may be
    /// used only after runs at several row counts gave as many rows as went in (`runtime::calibrate`).
    pub unproven: Vec<String>,
    /// The largest number of rows in one batch: 1 without a batch axis, `None` if it is to be found while loading.
    pub max_batch_size: Option<Rows>,
    /// How rows of different lengths share a batch; `None`: only equal shapes do.
    pub padding: Option<PadPlan>,
}

/// Derives how a model with this name, graph and settings is served.
///
/// # Errors
/// Everything about the model that the server cannot serve or the settings get wrong.
pub fn derive(name: &str, graph: &Graph, settings: &Settings) -> Result<Derived, Vec<String>> {
    let mut faults = Vec::new();
    if let Err(allowed) = check_name(name) {
        faults.push(format!("model '{name}': expected {allowed}"));
    }
    for tensor in &graph.unsupported {
        faults.push(format!(
            "{} '{}' is of type {}: only tensors of the protocol's datatypes can be served (export the model without it)",
            tensor.side, tensor.name, tensor.kind
        ));
    }
    if graph.outputs.is_empty() && graph.unsupported.is_empty() {
        faults.push("the model has no outputs".to_owned());
    }
    let found = match settings.batch_axis {
        BatchAxis::None => Found::No("model.toml says batch_axis = \"none\": requests run one by one".to_owned()),
        BatchAxis::Auto => find(graph),
        BatchAxis::Axis(axis) => {
            faults.extend(refuse_axis(graph, axis));
            let say = format!("batch_axis = {axis} is what model.toml says, not what the graph's names prove");
            Found::Yes { axis, unproven: if find_at(graph, axis) == proven(axis) { Vec::new() } else { vec![say] } }
        }
    };
    let batch_axis = found.axis();
    faults.extend(padding::compare(graph, settings, batch_axis));
    if !faults.is_empty() {
        return Err(faults);
    }
    Ok(match found {
        Found::Yes { axis, unproven } => Derived {
            batch_axis: Some(axis),
            unbatched_reason: None,
            unproven,
            max_batch_size: settings.max_batch_size,
            padding: padding::plan(graph, settings, axis),
        },
        Found::No(reason) => Derived {
            batch_axis: None,
            unbatched_reason: Some(reason),
            unproven: Vec::new(),
            max_batch_size: Some(1),
            padding: None,
        },
    })
}

/// What the graph says of an axis.
#[derive(Debug, PartialEq, Eq)]
enum Found {
    Yes { axis: usize, unproven: Vec<String> },
    No(String),
}

impl Found {
    fn axis(&self) -> Option<usize> {
        match self {
            Self::Yes { axis, .. } => Some(*axis),
            Self::No(_) => None,
        }
    }
}

fn proven(axis: usize) -> Found {
    Found::Yes { axis, unproven: Vec::new() }
}

/// Every tensor of the graph with the end it is at, inputs first.
fn tensors(graph: &Graph) -> impl Iterator<Item = (Side, &TensorSpec)> {
    let inputs = graph.inputs.iter().map(|input| (Side::Input, input));
    inputs.chain(graph.outputs.iter().map(|output| (Side::Output, output)))
}

fn find(graph: &Graph) -> Found {
    find_at(graph, 0)
}

fn find_at(graph: &Graph, axis: usize) -> Found {
    if graph.inputs.is_empty() {
        return Found::No("the model has no inputs, so there are no rows to join: requests run one by one".to_owned());
    }
    if let Some(reason) = tensors(graph).find_map(|(side, tensor)| not_varying(side, tensor, axis)) {
        return Found::No(format!("{reason}: requests run one by one"));
    }
    match batch_symbol(graph, axis) {
        Err(reason) => Found::No(format!("{reason}: requests run one by one")),
        Ok((symbol, unproven)) => match symbol.and_then(|symbol| repeated(graph, axis, symbol)) {
            Some(reason) => Found::No(format!("{reason}: requests run one by one")),
            None => Found::Yes { axis, unproven },
        },
    }
}

/// Why rows cannot be joined or scattered along this axis of one tensor, whatever the names say.
fn not_varying(side: Side, tensor: &TensorSpec, axis: usize) -> Option<String> {
    let consequence = match side {
        Side::Input => "so requests could not be joined",
        Side::Output => "so rows could not be scattered back",
    };
    let fixed =
        |size| if axis == 0 { format!("first dimension {size}") } else { format!("size {size} at axis {axis}") };
    let name = &tensor.name;
    match tensor.shape.get(axis) {
        None if tensor.shape.is_empty() => Some(format!("{side} '{name}' has no dimensions, {consequence}")),
        None => {
            Some(format!("{side} '{name}' has {} dimensions, none at axis {axis}, {consequence}", tensor.shape.len()))
        }
        Some(Dim::Fixed(size)) => Some(format!("{side} '{name}' has a fixed {}, {consequence}", fixed(size))),
        Some(Dim::Symbol(_) | Dim::Any) => None,
    }
}

/// The one name that the axis has wherever it has one, and what stays open.
fn batch_symbol(graph: &Graph, axis: usize) -> Result<(Option<&str>, Vec<String>), String> {
    let mut named: Option<(Side, &TensorSpec, &str)> = None;
    let mut unproven = Vec::new();
    for (side, tensor) in tensors(graph) {
        let name = &tensor.name;
        match tensor.shape.get(axis) {
            Some(Dim::Symbol(symbol)) => match named {
                None => named = Some((side, tensor, symbol)),
                Some((_, _, first)) if first == symbol => {}
                Some(_) if side == Side::Output && made_up(symbol) => {
                    unproven.push(format!("output '{name}' has a varying dimension '{symbol}', named by an exporter"));
                }
                Some((first_side, first, first_symbol)) => {
                    return Err(format!(
                        "{first_side} '{}' calls its dimension at axis {axis} '{first_symbol}' and {side} '{name}' calls \
                         it '{symbol}', so they may differ (if they never do, set batch_axis = {axis} in model.toml)",
                        first.name
                    ));
                }
            },
            _ => unproven.push(format!("{side} '{name}' has an unnamed varying dimension at axis {axis}")),
        }
    }
    Ok((named.map(|(_, _, symbol)| symbol), unproven))
}

/// Whether an exporter made this name up for an output whose dimension nobody named: PyTorch writes `<node><output>_dim_0`,
/// shape inference `unk__3`. Such a name says nothing of equality.
fn made_up(symbol: &str) -> bool {
    let numbered = |prefix: &str| {
        symbol
            .rsplit_once(prefix)
            .is_some_and(|(_, number)| !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()))
    };
    numbered("_dim_") || numbered("unk__")
}

/// Why a batch dimension that also stands at another axis cannot be one: joining rows would change that axis, too.
fn repeated(graph: &Graph, axis: usize, symbol: &str) -> Option<String> {
    tensors(graph).find_map(|(side, tensor)| {
        let same = |dim: &Dim| matches!(dim, Dim::Symbol(name) if name == symbol);
        let (other, _) = tensor.shape.iter().enumerate().find(|(at, dim)| *at != axis && same(dim))?;
        Some(format!(
            "{side} '{}' has the dimension '{symbol}' at axis {other} as well as at axis {axis}, so rows depend on each other",
            tensor.name
        ))
    })
}

/// What contradicts an axis that model.toml names. Names that differ do not: a person may know better.
fn refuse_axis(graph: &Graph, axis: usize) -> Vec<String> {
    let mut reasons: Vec<String> =
        tensors(graph).filter_map(|(side, tensor)| not_varying(side, tensor, axis)).collect();
    if reasons.is_empty()
        && let Ok((Some(symbol), _)) = batch_symbol(graph, axis)
    {
        reasons.extend(repeated(graph, axis, symbol));
    }
    reasons.into_iter().map(|reason| format!("batch_axis = {axis}: {reason}")).collect()
}

#[cfg(test)]
mod tests;
