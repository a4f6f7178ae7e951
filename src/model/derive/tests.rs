use super::*;
use crate::model::Unsupported;
use crate::model::pad::PaddedAxis;
use crate::tensor::DataType;

/// `name[batch, 3, ?]` in the graph's own notation.
fn tensor(text: &str) -> TensorSpec {
    let (name, dims) = text.trim_end_matches(']').split_once('[').expect(text);
    let dim = |dim: &str| match dim {
        "?" => Dim::Any,
        number if number.parse::<usize>().is_ok() => Dim::Fixed(number.parse().expect(number)),
        symbol => Dim::Symbol(symbol.to_owned()),
    };
    let shape = dims.split(", ").filter(|part| !part.is_empty()).map(dim).collect();
    TensorSpec { name: name.to_owned(), datatype: DataType::Int64, shape }
}

fn graph(inputs: &[&str], outputs: &[&str]) -> Graph {
    let side = |texts: &[&str]| texts.iter().map(|text| tensor(text)).collect();
    Graph { inputs: side(inputs), outputs: side(outputs), unsupported: Vec::new() }
}

fn settings(text: &str) -> Settings {
    Settings::from_toml(text, "model.toml", &Settings::default_keys()).expect(text)
}

fn derived(graph: &Graph, text: &str) -> Derived {
    derive("m", graph, &settings(text)).expect(text)
}

fn refused(graph: &Graph, text: &str) -> Vec<String> {
    derive("m", graph, &settings(text)).expect_err(text)
}

#[test]
fn one_name_everywhere_proves_the_axis() {
    let found =
        derived(&graph(&["ids[batch, seq]", "mask[batch, seq]"], &["y[batch, seq, 384]"]), "max_batch_size = 8");
    let expected = Derived {
        batch_axis: Some(0),
        unbatched_reason: None,
        unproven: Vec::new(),
        max_batch_size: Some(8),
        padding: None,
    };
    assert_eq!(found, expected);
}

#[test]
fn unnamed_dimensions_and_names_made_up_by_exporters_wait_for_a_run() {
    for (inputs, outputs, open) in [
        (&["x[?, 4]"][..], &["y[?, 2]"][..], "input 'x' has an unnamed varying dimension at axis 0"),
        (&["x[batch, 4]"], &["y[?, 2]"], "output 'y' has an unnamed varying dimension at axis 0"),
        (
            &["x[batch, 4]"],
            &["y[Gemmy_dim_0, 2]"],
            "output 'y' has a varying dimension 'Gemmy_dim_0', named by an exporter",
        ),
        (&["x[batch, 4]"], &["y[unk__7, 2]"], "output 'y' has a varying dimension 'unk__7', named by an exporter"),
    ] {
        let found = derived(&graph(inputs, outputs), "");
        assert_eq!(found.batch_axis, Some(0), "{inputs:?} {outputs:?}");
        assert!(found.unproven.iter().any(|text| text == open), "{:?}", found.unproven);
    }
}

#[test]
fn without_an_axis_the_reason_is_precise() {
    for (inputs, outputs, reason) in [
        (
            &["x[batch, 4]"][..],
            &["y[batch, 2]", "count[1]"][..],
            "output 'count' has a fixed first dimension 1, so rows could not be scattered back: requests run one by one",
        ),
        (
            &["x[1, 3, 224, 224]"],
            &["y[1, 1000]"],
            "input 'x' has a fixed first dimension 1, so requests could not be joined: requests run one by one",
        ),
        (
            &["x[batch, 4]", "threshold[]"],
            &["y[batch]"],
            "input 'threshold' has no dimensions, so requests could not be joined: requests run one by one",
        ),
        (
            &["a[n, 4]", "b[m, 4]"],
            &["y[n]"],
            "input 'a' calls its dimension at axis 0 'n' and input 'b' calls it 'm', so they may differ (if they never do, \
             set batch_axis = 0 in model.toml): requests run one by one",
        ),
        (
            &["x[batch, 4]"],
            &["boxes[detections, 7]"],
            "input 'x' calls its dimension at axis 0 'batch' and output 'boxes' calls it 'detections', so they may differ \
             (if they never do, set batch_axis = 0 in model.toml): requests run one by one",
        ),
        (
            &["x[n, 4]"],
            &["similarity[n, n]"],
            "output 'similarity' has the dimension 'n' at axis 1 as well as at axis 0, so rows depend on each other: \
             requests run one by one",
        ),
        (&[], &["y[n]"], "the model has no inputs, so there are no rows to join: requests run one by one"),
    ] {
        let found = derived(&graph(inputs, outputs), "max_batch_size = 8");
        assert_eq!(found.unbatched_reason.as_deref(), Some(reason));
        assert_eq!((found.batch_axis, found.max_batch_size), (None, Some(1)));
    }
}

#[test]
fn settings_override_the_axis_where_the_graph_allows_it() {
    let time_major = graph(&["x[time, batch, 4]"], &["y[time, batch]"]);
    assert_eq!(derived(&time_major, "batch_axis = 1"), Derived { max_batch_size: None, ..proven_axis(1) });
    let none = derived(&time_major, "batch_axis = \"none\"");
    assert!(none.batch_axis.is_none() && none.unbatched_reason.is_some_and(|reason| reason.contains("model.toml")));
    // Names that differ are a person's to judge, but a run must agree.
    let found = derived(&graph(&["a[n]", "b[m]"], &["y[n]"]), "batch_axis = 0");
    assert_eq!((found.batch_axis, found.unproven.len()), (Some(0), 1));
}

fn proven_axis(axis: usize) -> Derived {
    Derived {
        batch_axis: Some(axis),
        unbatched_reason: None,
        unproven: Vec::new(),
        max_batch_size: None,
        padding: None,
    }
}

#[test]
fn an_axis_that_the_graph_contradicts_is_refused_for_each_tensor() {
    let faults = refused(&graph(&["x[batch, 4]", "s[]"], &["y[batch]"]), "batch_axis = 1");
    assert_eq!(faults.len(), 3, "{faults:?}");
    for (fault, part) in faults.iter().zip(["'x' has a fixed size 4 at axis 1", "'s' has no dim", "none at axis 1"]) {
        assert!(fault.starts_with("batch_axis = 1: ") && fault.contains(part), "{fault}");
    }
    let faults = refused(&graph(&["x[n, n]"], &["y[n]"]), "batch_axis = 0");
    assert!(faults[0].contains("rows depend on each other"), "{faults:?}");
}

#[test]
fn what_the_protocol_cannot_say_is_refused_by_name() {
    let mut map = graph(&["x[batch, 4]"], &[]);
    let kind = "sequence(map(int64, float))".to_owned();
    map.unsupported.push(Unsupported { side: Side::Output, name: "probabilities".to_owned(), kind });
    let faults = derive("stats", &map, &settings("")).expect_err("two faults");
    assert_eq!(faults.len(), 2, "{faults:?}");
    assert!(faults[0].starts_with("model 'stats': "), "{faults:?}");
    assert!(faults[1].starts_with("output 'probabilities' is of type sequence(map(int64, float))"), "{faults:?}");
    assert_eq!(refused(&graph(&["x[n]"], &[]), ""), ["the model has no outputs"]);
}

#[test]
fn names_in_the_settings_must_be_names_in_the_graph() {
    let bert = graph(&["ids[batch, seq]", "mask[batch, seq]"], &["y[batch, seq, 384]", "z[batch, ?]"]);
    let good = "padding.seq.lengths = [8, 16]\npadding.inputs = { ids = 0, mask = 0 }\npadding.outputs.z.1 = \"seq\"\n\
                warmup = { dims = { seq = 8 }, inputs = { ids = { data = \"one\" } } }";
    assert_eq!(derived(&bert, good).batch_axis, Some(0));
    for (text, fault) in [
        (
            "warmup.dims.sequence = 8",
            "warmup.dims.sequence: no input has a dimension of this name; there are: batch, seq",
        ),
        ("warmup.inputs.id.data = \"one\"", "warmup.inputs.id: no input has this name; there are: ids, mask"),
        (
            "padding.sequence.lengths = [8]",
            "padding.sequence: no input has a dimension of this name; there are: batch, seq",
        ),
        ("padding.seq.lengths = [8]", "padding.inputs: 'mask' has the dimension 'seq' but no value to pad with"),
        ("padding.batch.lengths = [8]", "padding.batch: this is the batch dimension, which is not padded by value"),
        ("padding.inputs.id = 0", "padding.inputs.id: no input has this name; there are: ids, mask"),
        ("padding.inputs.ids = 0", "padding.inputs.ids: no dimension of this input has padding lengths"),
        ("padding.inputs.ids = 0.5", "padding.inputs.ids = 0.5: not a value of INT64"),
        ("padding.outputs.w.1 = \"seq\"", "padding.outputs.w: no output has this name; there are: y, z"),
        ("padding.outputs.y.2 = \"seq\"", "padding.outputs.y.2: this dimension is always 384"),
        ("padding.outputs.y.3 = \"seq\"", "padding.outputs.y.3: the output has 3 dimensions"),
        ("padding.outputs.y.1 = \"seq\"", "padding.outputs.y.1 = \"seq\": there is no [padding.seq] with lengths"),
    ] {
        let faults = refused(&bert, text);
        assert!(faults.iter().any(|found| found == fault), "{fault}: {faults:#?}");
    }
}

#[test]
fn encoders_of_text_are_recognised_by_their_inputs() {
    let inputs = |names: &[&str]| -> Vec<String> { names.iter().map(|name| format!("{name}[batch, seq]")).collect() };
    let bert = ["input_ids", "attention_mask", "token_type_ids"];
    let derive = |inputs: &[String], text: &str| {
        let inputs: Vec<&str> = inputs.iter().map(String::as_str).collect();
        derived(&graph(&inputs, &["state[batch, seq, 384]", "pooled[batch, 384]"]), text).padding
    };
    for names in [&bert[..], &bert[..2]] {
        let plan = derive(&inputs(names), "").expect("it is one");
        let [dim] = plan.dims.as_slice() else { panic!("{:?}", plan.dims) };
        assert_eq!((dim.name.as_str(), dim.lengths.len()), ("seq", 39));
        let wasted = dim.lengths.windows(2).map(|pair| pair[1] as f64 / pair[0] as f64);
        assert!(wasted.skip(14).all(|step| step < 1.13), "few tokens are padded: {:?}", dim.lengths);
        assert_eq!([8, 64, 128, 512].map(|length| dim.padded(length)), [8, 64, 128, 512]);
        assert_eq!(plan.outputs, [vec![PaddedAxis { axis: 1, dim: 0 }], vec![]]);
        assert!(plan.inputs.iter().all(|input| input.value == 0.0 && input.axes == [PaddedAxis { axis: 1, dim: 0 }]));
    }
    for (names, text) in [
        (&["input_ids", "mask"][..], ""),
        (&["input_ids"], ""),
        (&["input_ids", "attention_mask", "position_ids"], ""),
        (&bert, "packing = \"off\""),
        (&bert, "batch_axis = \"none\""),
    ] {
        assert_eq!(derive(&inputs(names), text), None, "{names:?} {text}");
    }
    let fixed: Vec<String> = bert.map(|name| format!("{name}[batch, 128]")).into();
    assert_eq!(derive(&fixed, ""), None);
}
