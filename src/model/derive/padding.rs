//! Whether the names in `[padding]` and `[warmup]` exist in the graph and fit it, and what `[padding]` makes of it.

use crate::model::pad::{PadPlan, PaddedAxis, PaddedDim, PaddedInput};
use crate::model::settings::Packing;
use crate::model::{Dim, Graph, Settings, TensorSpec};
use crate::tensor::DataType;

/// Everything that the settings say of tensors and dimensions that the graph contradicts.
pub(super) fn compare(graph: &Graph, settings: &Settings, batch_axis: Option<usize>) -> Vec<String> {
    let mut faults = Vec::new();
    for dim in settings.warmup.dims.keys().filter(|dim| !has_dim(&graph.inputs, dim)) {
        faults.push(format!("warmup.dims.{dim}: {}", no_dim(graph)));
    }
    for name in settings.warmup.inputs.keys().filter(|name| named(&graph.inputs, name).is_none()) {
        faults.push(format!("warmup.inputs.{name}: {}", no_tensor("input", &graph.inputs)));
    }
    lengths(graph, settings, batch_axis, &mut faults);
    values(graph, settings, &mut faults);
    cuts(graph, settings, &mut faults);
    faults
}

/// What is padded and cut back, of settings that fit the graph; `None` if nothing is. An output axis that has a padded
/// dimension's name is cut back, and so are those that the settings name.
pub(super) fn plan(graph: &Graph, settings: &Settings, batch_axis: usize) -> Option<PadPlan> {
    let padding = &settings.padding;
    if settings.packing == Packing::Off {
        return None;
    }
    let said = padding.lengths.iter().map(|(name, lengths)| PaddedDim { name: name.clone(), lengths: lengths.clone() });
    let mut dims: Vec<PaddedDim> = said.collect();
    if let Some(name) = sequence(graph, batch_axis).filter(|_| dims.is_empty()) {
        dims.push(PaddedDim { name: name.to_owned(), lengths: lengths_of_text() });
    }
    let axes = |tensor: &TensorSpec| -> Vec<PaddedAxis> {
        let named = padding.outputs.get(&tensor.name);
        let of = |(axis, dim): (usize, &Dim)| {
            let said = named.and_then(|axes| axes.get(&axis));
            let dim = dims.iter().position(|padded| said == Some(&padded.name) || is_dim(Some(dim), &padded.name))?;
            Some(PaddedAxis { axis, dim }).filter(|_| axis != batch_axis)
        };
        tensor.shape.iter().enumerate().filter_map(of).collect()
    };
    let value = |name: &str| padding.inputs.get(name).copied().unwrap_or(0.0);
    let input = |input: &TensorSpec| PaddedInput { axes: axes(input), value: value(&input.name) };
    let (inputs, outputs) = (graph.inputs.iter().map(input).collect(), graph.outputs.iter().map(axes).collect());
    (!dims.is_empty()).then_some(PadPlan { dims, inputs, outputs })
}

/// What the inputs of encoders of text are called; the first two are always there.
const TEXT_INPUTS: [&str; 3] = ["input_ids", "attention_mask", "token_type_ids"];
/// The longest that text is padded to where model.toml does not say otherwise. What does not run is left out while loading.
const LONGEST_TEXT: usize = 512;

/// The dimension of the tokens, if this is an encoder of text: its inputs are [`TEXT_INPUTS`], rows of integers of one varying
/// length each. Whether its mask works is found out while loading.
fn sequence(graph: &Graph, batch_axis: usize) -> Option<&str> {
    let is_text = TEXT_INPUTS[..2].iter().all(|name| named(&graph.inputs, name).is_some());
    if !is_text || batch_axis != 0 {
        return None;
    }
    let mut found = None;
    for input in &graph.inputs {
        let is_integer = matches!(input.datatype, DataType::Int32 | DataType::Int64);
        let [_, Dim::Symbol(name)] = input.shape.as_slice() else { return None };
        if !is_integer || !TEXT_INPUTS.contains(&input.name.as_str()) || found.is_some_and(|other| other != name) {
            return None;
        }
        found = Some(name);
    }
    found.map(String::as_str)
}

/// Few enough to be known soon, near enough to each other that little is padded: steps of 4 up to 64 tokens, from there on of an
/// eighth of a power of two.
fn lengths_of_text() -> Vec<usize> {
    let step = |length: &usize| {
        Some(length + (length.next_power_of_two() / if length.is_power_of_two() { 8 } else { 16 }).max(4))
    };
    std::iter::successors(Some(8), step).take_while(|length| *length <= LONGEST_TEXT).collect()
}

/// `[padding.DIM] lengths`: the dimension varies, is not the batch, and every input that has it has a value to pad with.
fn lengths(graph: &Graph, settings: &Settings, batch_axis: Option<usize>, faults: &mut Vec<String>) {
    for dim in settings.padding.lengths.keys() {
        if !has_dim(&graph.inputs, dim) {
            faults.push(format!("padding.{dim}: {}", no_dim(graph)));
        }
        if batch_axis.is_some_and(|axis| graph.inputs.iter().any(|input| is_dim(input.shape.get(axis), dim))) {
            faults.push(format!("padding.{dim}: this is the batch dimension, which is not padded by value"));
        }
        for input in graph.inputs.iter().filter(|input| input.shape.iter().any(|at| is_dim(Some(at), dim))) {
            if !settings.padding.inputs.contains_key(&input.name) {
                faults.push(format!(
                    "padding.inputs: '{}' has the dimension '{dim}' but no value to pad with",
                    input.name
                ));
            }
        }
    }
}

/// `[padding.inputs] NAME`: the input exists, has a padded dimension, and its datatype holds the value.
fn values(graph: &Graph, settings: &Settings, faults: &mut Vec<String>) {
    for (name, value) in &settings.padding.inputs {
        let Some(input) = named(&graph.inputs, name) else {
            faults.push(format!("padding.inputs.{name}: {}", no_tensor("input", &graph.inputs)));
            continue;
        };
        if !settings.padding.lengths.keys().any(|dim| has_dim(std::slice::from_ref(input), dim)) {
            faults.push(format!("padding.inputs.{name}: no dimension of this input has padding lengths"));
        }
        if !holds(input.datatype, *value) {
            faults.push(format!("padding.inputs.{name} = {value}: not a value of {}", input.datatype));
        }
    }
}

/// `[padding.outputs.NAME] AXIS`: the output and its axis exist, the axis varies, and the dimension has lengths.
fn cuts(graph: &Graph, settings: &Settings, faults: &mut Vec<String>) {
    for (name, axes) in &settings.padding.outputs {
        let Some(output) = named(&graph.outputs, name) else {
            faults.push(format!("padding.outputs.{name}: {}", no_tensor("output", &graph.outputs)));
            continue;
        };
        for (axis, dim) in axes {
            let key = format!("padding.outputs.{name}.{axis}");
            match output.shape.get(*axis) {
                None => faults.push(format!("{key}: the output has {} dimensions", output.shape.len())),
                Some(Dim::Fixed(size)) => faults.push(format!("{key}: this dimension is always {size}")),
                Some(Dim::Symbol(_) | Dim::Any) => {}
            }
            if !settings.padding.lengths.contains_key(dim) {
                faults.push(format!("{key} = \"{dim}\": there is no [padding.{dim}] with lengths"));
            }
        }
    }
}

fn named<'a>(tensors: &'a [TensorSpec], name: &str) -> Option<&'a TensorSpec> {
    tensors.iter().find(|tensor| tensor.name == name)
}

fn is_dim(dim: Option<&Dim>, name: &str) -> bool {
    matches!(dim, Some(Dim::Symbol(symbol)) if symbol == name)
}

fn has_dim(tensors: &[TensorSpec], name: &str) -> bool {
    tensors.iter().any(|tensor| tensor.shape.iter().any(|dim| is_dim(Some(dim), name)))
}

fn no_dim(graph: &Graph) -> String {
    let mut names: Vec<&str> = Vec::new();
    for dim in graph.inputs.iter().flat_map(|input| &input.shape) {
        match dim {
            Dim::Symbol(name) if !names.contains(&name.as_str()) => names.push(name),
            _ => {}
        }
    }
    format!("no input has a dimension of this name; there are: {}", list(&names))
}

fn no_tensor(side: &str, tensors: &[TensorSpec]) -> String {
    let names: Vec<&str> = tensors.iter().map(|tensor| tensor.name.as_str()).collect();
    format!("no {side} has this name; there are: {}", list(&names))
}

fn list(names: &[&str]) -> String {
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// Whether an element of this type can have this value.
fn holds(datatype: DataType, value: f64) -> bool {
    let integer = |least: f64, most: f64| value.fract() == 0.0 && (least..=most).contains(&value);
    match datatype {
        DataType::Bool => integer(0.0, 1.0),
        DataType::Uint8 => integer(0.0, u8::MAX.into()),
        DataType::Uint16 => integer(0.0, u16::MAX.into()),
        DataType::Uint32 => integer(0.0, u32::MAX.into()),
        DataType::Uint64 => integer(0.0, u64::MAX as f64),
        DataType::Int8 => integer(i8::MIN.into(), i8::MAX.into()),
        DataType::Int16 => integer(i16::MIN.into(), i16::MAX.into()),
        DataType::Int32 => integer(i32::MIN.into(), i32::MAX.into()),
        DataType::Int64 => integer(i64::MIN as f64, i64::MAX as f64),
        DataType::Fp16 => value.abs() <= 65_504.0,
        DataType::Bf16 | DataType::Fp32 => value.abs() <= f32::MAX.into(),
        DataType::Fp64 => true,
        DataType::Bytes => false,
    }
}
