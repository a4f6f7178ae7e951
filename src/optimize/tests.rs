use super::*;
use prost::Message;

/// A node as the ONNX format has it, read by another implementation than the one under test.
#[derive(Clone, PartialEq, Message)]
struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    output: Vec<String>,
    #[prost(string, tag = "4")]
    op_type: String,
    #[prost(message, repeated, tag = "5")]
    attribute: Vec<AttributeProto>,
    #[prost(string, tag = "7")]
    domain: String,
}

#[derive(Clone, PartialEq, Message)]
struct AttributeProto {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(float, tag = "2")]
    f: f32,
    #[prost(int64, tag = "3")]
    i: i64,
    #[prost(message, optional, tag = "5")]
    t: Option<TensorProto>,
    #[prost(message, optional, tag = "6")]
    g: Option<GraphProto>,
    #[prost(int64, repeated, tag = "8")]
    ints: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct TensorProto {
    #[prost(int64, repeated, tag = "1")]
    dims: Vec<i64>,
    #[prost(int32, tag = "2")]
    data_type: i32,
    #[prost(float, repeated, tag = "4")]
    float_data: Vec<f32>,
    #[prost(int64, repeated, tag = "7")]
    int64_data: Vec<i64>,
    #[prost(string, tag = "8")]
    name: String,
    #[prost(bytes = "vec", tag = "9")]
    raw_data: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct ValueInfoProto {
    #[prost(string, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    node: Vec<NodeProto>,
    #[prost(message, repeated, tag = "5")]
    initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    output: Vec<ValueInfoProto>,
}

#[derive(Clone, PartialEq, Message)]
struct OpsetProto {
    #[prost(string, tag = "1")]
    domain: String,
    #[prost(int64, tag = "2")]
    version: i64,
}

#[derive(Clone, PartialEq, Message)]
struct ModelProto {
    #[prost(int64, tag = "1")]
    ir_version: i64,
    #[prost(string, tag = "2")]
    producer: String,
    #[prost(message, optional, tag = "7")]
    graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    opset: Vec<OpsetProto>,
}

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    let input = inputs.iter().map(ToString::to_string).collect();
    NodeProto { input, output: vec![output.to_owned()], op_type: op.to_owned(), ..NodeProto::default() }
}

fn with_ints(node: NodeProto, name: &str, ints: &[i64]) -> NodeProto {
    let attribute = AttributeProto { name: name.to_owned(), ints: ints.to_vec(), ..AttributeProto::default() };
    NodeProto { attribute: vec![attribute], ..node }
}

fn floats(name: &str, dims: &[i64], data: &[f32]) -> TensorProto {
    let (name, dims, float_data) = (name.to_owned(), dims.to_vec(), data.to_vec());
    TensorProto { name, dims, data_type: 1, float_data, ..TensorProto::default() }
}

fn integers(name: &str, data: &[i64]) -> TensorProto {
    let raw_data = data.iter().flat_map(|value| value.to_le_bytes()).collect();
    let dims = vec![i64::try_from(data.len()).expect("few")];
    TensorProto { name: name.to_owned(), dims, data_type: 7, raw_data, ..TensorProto::default() }
}

/// How an exporter writes attention.
#[derive(Clone, Copy, PartialEq)]
enum Style {
    /// Heads written down, keys transposed in one step, the scores divided, a mask added.
    Divided,
    /// Heads left open, keys transposed in two steps, queries and keys multiplied, no mask.
    Multiplied,
}

/// An attention with 4 heads of 8 on `x` [batch, tokens, 32], whose scale is 1/4.
fn model(style: Style, axis: i64) -> ModelProto {
    let perm = |input: &str, output: &str, perm: &[i64]| with_ints(node("Transpose", &[input], output), "perm", perm);
    let mut nodes = Vec::new();
    let mut initializers = vec![integers("back", &[0, 0, 32]), floats("weights", &[32, 32], &[0.5; 1024])];
    for name in ["q", "k", "v"] {
        nodes.push(node("MatMul", &["x", "weights"], name));
        nodes.push(node("Reshape", &[name, "heads"], &format!("{name}4")));
    }
    nodes.extend([perm("q4", "qh", &[0, 2, 1, 3]), perm("v4", "vh", &[0, 2, 1, 3])]);
    if style == Style::Divided {
        initializers.extend([integers("heads", &[0, 0, 4, 8]), floats("four", &[], &[4.0])]);
        nodes.push(perm("k4", "kt", &[0, 2, 3, 1]));
        nodes.extend([node("MatMul", &["qh", "kt"], "products"), node("Div", &["products", "four"], "scaled")]);
        nodes.push(node("Add", &["mask", "scaled"], "scores"));
    } else {
        initializers.extend([integers("heads", &[0, 0, -1, 8]), floats("half", &[1], &[0.5])]);
        nodes.extend([perm("k4", "kh", &[0, 2, 1, 3]), node("Mul", &["half", "kh"], "k2")]);
        nodes.extend([perm("k2", "kt", &[0, 1, 3, 2]), node("Mul", &["qh", "half"], "q2")]);
        nodes.push(node("MatMul", &["q2", "kt"], "scores"));
    }
    let softmax = AttributeProto { name: "axis".to_owned(), i: axis, ..AttributeProto::default() };
    nodes.push(NodeProto { attribute: vec![softmax], ..node("Softmax", &["scores"], "probabilities") });
    nodes.extend([node("MatMul", &["probabilities", "vh"], "mixed"), perm("mixed", "merged", &[0, 2, 1, 3])]);
    nodes.extend([node("Reshape", &["merged", "back"], "attended"), node("Relu", &["attended"], "y")]);
    let named = |names: &[&str]| names.iter().map(|name| ValueInfoProto { name: (*name).to_owned() }).collect();
    let graph =
        GraphProto { node: nodes, initializer: initializers, input: named(&["x", "mask"]), output: named(&["y"]) };
    let opset = vec![OpsetProto { domain: String::new(), version: 17 }];
    ModelProto { ir_version: 8, producer: "a test".to_owned(), graph: Some(graph), opset }
}

fn fused(model: &ModelProto) -> (ModelProto, Rewritten) {
    let rewritten = fuse_attention(&model.encode_to_vec()).expect("a model");
    (ModelProto::decode(rewritten.bytes.as_slice()).expect("a model"), rewritten)
}

#[test]
fn attention_becomes_one_operator_and_what_only_it_has_used_goes() {
    for (style, added) in [(Style::Divided, 5), (Style::Multiplied, 0)] {
        let (model, rewritten) = fused(&model(style, -1));
        assert_eq!((rewritten.fused, rewritten.left.len()), (1, 0));
        let graph = model.graph.expect("a graph");
        let ops: Vec<&str> = graph.node.iter().map(|node| node.op_type.as_str()).collect();
        assert_eq!(ops.len(), 5 + added, "{ops:?}");
        assert_eq!(ops.iter().filter(|op| **op == "MatMul").count(), 3, "{ops:?}");
        let attention = graph.node.iter().find(|node| node.op_type == "MultiHeadAttention").expect("it");
        assert_eq!(attention.domain, "com.microsoft");
        assert_eq!(attention.input[..3], ["q", "k", "v"]);
        assert_eq!(attention.output, ["attended"]);
        let attribute = |name: &str| attention.attribute.iter().find(|attribute| attribute.name == name).expect("it");
        assert_eq!((attribute("num_heads").i, attribute("scale").f), (4, 0.25));
        assert_eq!(graph.initializer.len(), 1, "the weights: {:?}", graph.initializer);
        assert_eq!(graph.node.last().expect("a node").op_type, "Relu");
        assert_eq!(model.opset[1], OpsetProto { domain: "com.microsoft".to_owned(), version: 1 });
        assert_eq!((model.ir_version, model.producer.as_str()), (8, "a test"));
    }
}

#[test]
fn a_mask_is_made_as_large_as_the_scores() {
    let graph = fused(&model(Style::Divided, 3)).0.graph.expect("a graph");
    let made = |name: &str| graph.node.iter().find(|node| node.output[0] == name).expect("it is made");
    let attention = made("attended");
    assert_eq!(attention.input[3..5], ["", ""]);
    let expand = made(&attention.input[5]);
    assert_eq!((expand.op_type.as_str(), expand.input[0].as_str()), ("Expand", "mask"));
    let target = made(&expand.input[1]);
    let tokens = made(&target.input[2]);
    assert_eq!((tokens.op_type.as_str(), made(&tokens.input[0]).input[0].as_str()), ("Gather", "q"));
    let one = made(&target.input[0]).attribute[0].t.clone().expect("a tensor");
    assert_eq!((one.data_type, one.dims, one.raw_data), (7, vec![1], 1_i64.to_le_bytes().to_vec()));
    // Nothing is used before it is made.
    for (at, node) in graph.node.iter().enumerate() {
        let later = |name: &String| graph.node[at..].iter().any(|other| other.output.contains(name));
        assert!(!node.input.iter().any(later), "{node:?}");
    }
}

#[test]
fn what_is_no_attention_stays_byte_by_byte_and_says_why() {
    let reason = |change: &dyn Fn(&mut ModelProto)| {
        let mut model = model(Style::Divided, -1);
        change(&mut model);
        let (after, rewritten) = fused(&model);
        assert_eq!((rewritten.fused, &after.graph), (0, &model.graph), "nothing changes");
        assert!(rewritten.bytes.starts_with(&model.encode_to_vec()), "but for what is added at the end");
        rewritten.left.into_keys().next().expect("a reason")
    };
    let edit = |op: &'static str, edit: &'static dyn Fn(&mut NodeProto)| {
        reason(&move |model| {
            let nodes = &mut model.graph.as_mut().expect("a graph").node;
            edit(nodes.iter_mut().rfind(|node| node.op_type == op).expect("it"));
        })
    };
    assert_eq!(edit("Softmax", &|node| node.attribute[0].i = 1), "its softmax is not over the last axis");
    assert_eq!(edit("Add", &|node| node.op_type = "Sub".to_owned()), "its scores are no product");
    assert_eq!(
        edit("Relu", &|node| node.input.push("mixed".to_owned())),
        "what follows its softmax is not what attention is"
    );
    assert_eq!(edit("Div", &|node| node.op_type = "Pow".to_owned()), "its scores are not found");
    let heads = |model: &mut ModelProto| {
        let graph = model.graph.as_mut().expect("a graph");
        graph.initializer.push(integers("two", &[0, 0, 2, 16]));
        graph.node[1].input[1] = "two".to_owned();
    };
    assert_eq!(reason(&heads), "its queries, keys and values have different numbers of heads");
    let output = |model: &mut ModelProto| {
        model.graph.as_mut().expect("a graph").output.push(ValueInfoProto { name: "probabilities".to_owned() });
    };
    assert_eq!(
        reason(&output),
        "what follows its softmax is not what attention is",
        "somebody wants the probabilities"
    );
}

#[test]
fn no_file_panics_and_graphs_within_graphs_are_refused() {
    let whole = model(Style::Divided, -1).encode_to_vec();
    for end in 0..whole.len() {
        let _ = fuse_attention(&whole[..end]);
        let mut broken = whole.clone();
        broken[end] = broken[end].wrapping_add(0x55);
        let _ = fuse_attention(&broken);
    }
    assert!(fuse_attention(b"hello").is_err() && fuse_attention(b"").is_err());
    let mut nested = model(Style::Divided, -1);
    let inner = AttributeProto { name: "then_branch".to_owned(), g: Some(GraphProto::default()), ..Default::default() };
    let last = nested.graph.as_mut().and_then(|graph| graph.node.last_mut()).expect("a node");
    (last.op_type, last.attribute) = ("If".to_owned(), vec![inner]);
    let fault = fuse_attention(&nested.encode_to_vec()).expect_err("it is refused");
    assert!(fault.contains("operator If"), "{fault}");
}

/// The same attention a second time, beside the first: of other queries, under the same mask.
fn twice() -> ModelProto {
    let mut model = model(Style::Divided, -1);
    let graph = model.graph.as_mut().expect("a graph");
    let shared = ["x", "mask", "weights", "heads", "back", "four"];
    let other = |name: &String| if shared.contains(&name.as_str()) { name.clone() } else { format!("other_{name}") };
    let again = |node: &NodeProto| NodeProto {
        input: node.input.iter().map(other).collect(),
        output: node.output.iter().map(other).collect(),
        ..node.clone()
    };
    let nodes: Vec<NodeProto> = graph.node.iter().map(again).collect();
    graph.node.extend(nodes);
    graph.output.push(ValueInfoProto { name: "other_y".to_owned() });
    model
}

#[test]
fn a_mask_of_two_attentions_is_as_large_as_the_scores_of_each() {
    let graph = fused(&twice()).0.graph.expect("a graph");
    let ops = |op: &'static str| graph.node.iter().filter(move |node| node.op_type == op);
    let measured: Vec<&str> = ops("Shape").map(|node| node.input[0].as_str()).collect();
    assert_eq!((measured, ops("Expand").count()), (vec!["q", "other_q"], 2));
    let masks: Vec<&String> = ops("MultiHeadAttention").map(|node| &node.input[5]).collect();
    assert_ne!(masks[0], masks[1]);
}

#[test]
fn an_output_that_nobody_wants_keeps_nothing_alive() {
    for unwanted in ["", "dropped"] {
        let mut model = model(Style::Divided, -1);
        let nodes = &mut model.graph.as_mut().expect("a graph").node;
        let at = nodes.iter().position(|node| node.op_type == "Softmax").expect("it");
        let mut dropout = node("Dropout", &["probabilities"], "kept");
        dropout.output.push(unwanted.to_owned());
        nodes.insert(at + 1, dropout);
        nodes[at + 2].input[0] = "kept".to_owned();
        let graph = fused(&model).0.graph.expect("a graph");
        let left: Vec<&NodeProto> =
            graph.node.iter().filter(|node| matches!(node.op_type.as_str(), "Dropout" | "Softmax")).collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn what_is_not_said_is_what_the_format_says() {
    // Before the 13th set of operators a softmax that names no axis is over the second one.
    for (version, found) in [(13, 1), (12, 0)] {
        let mut model = model(Style::Divided, -1);
        model.opset[0].version = version;
        let nodes = &mut model.graph.as_mut().expect("a graph").node;
        nodes.iter_mut().find(|node| node.op_type == "Softmax").expect("it").attribute.clear();
        assert_eq!(fused(&model).1.fused, found, "{version}");
    }
    // What comes together in two dimensions is not what the operator gives.
    let mut flat = model(Style::Divided, -1);
    flat.graph.as_mut().expect("a graph").initializer[0] = integers("back", &[-1, 32]);
    assert_eq!(fused(&flat).1.fused, 0);
}

#[test]
fn graphs_that_go_in_circles_are_refused() {
    for (op, inputs) in [("Cast", ["scaled", ""]), ("Add", ["scores", "scores"]), ("Mul", ["scores", "four"])] {
        let mut model = model(Style::Divided, -1);
        let nodes = &mut model.graph.as_mut().expect("a graph").node;
        let at = nodes.iter().position(|node| node.op_type == "Softmax").expect("it");
        nodes.insert(at, node(op, &inputs[..1 + usize::from(!inputs[1].is_empty())], inputs[0]));
        let fault = fuse_attention(&model.encode_to_vec()).expect_err("it is refused");
        assert!(fault.contains(inputs[0]) && fault.contains("made twice"), "{fault}");
    }
}
