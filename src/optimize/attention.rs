//! Attention as exports spell it out, and the same as one operator.
//!
//! From queries, keys and values of the shape [batch, tokens, heads × size] each:
//!
//! ```text
//! scores = MatMul(heads(query), transposed(heads(key))) × scale + mask
//! output = together(MatMul(Softmax(scores), heads(value)))
//! ```
//!
//! where `heads` is Reshape and Transpose, `together` the other way round, and the scale may stand in several places.

use super::graph::{Graph, INITIALIZER, NODE, Node};
use super::wire::{put_bytes, put_float, put_number};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The heads next to the batch: from [batch, tokens, heads, size], and back.
const HEADS: [i64; 4] = [0, 2, 1, 3];
/// The same with the keys transposed, in one step.
const KEYS: [i64; 4] = [0, 2, 3, 1];
/// Keys transposed whose heads are next to the batch already.
const TRANSPOSED: [i64; 4] = [0, 1, 3, 2];
/// Names of what is added begin so.
const PREFIX: &str = "concertina/";

/// One attention.
#[derive(Debug)]
pub(super) struct Attention<'a> {
    /// The position of the field of its last node.
    at: usize,
    query: &'a str,
    key: &'a str,
    value: &'a str,
    /// What is added to the scores.
    mask: Option<&'a str>,
    heads: i64,
    scale: f64,
    output: &'a str,
}

/// Every attention in a graph, and how many softmaxes are none, by the reason; `default_axis` is that of a softmax that names none.
pub(super) fn find<'a>(graph: &Graph<'a>, default_axis: i64) -> (Vec<Attention<'a>>, BTreeMap<&'static str, usize>) {
    let (mut found, mut left) = (Vec::new(), BTreeMap::new());
    for (_, node) in graph.nodes.iter().filter(|(_, node)| node.op == "Softmax") {
        match attention(graph, node, default_axis) {
            Ok(attention) => found.push(attention),
            Err(reason) => *left.entry(reason).or_default() += 1,
        }
    }
    (found, left)
}

fn attention<'a>(graph: &Graph<'a>, softmax: &Node<'a>, default_axis: i64) -> Result<Attention<'a>, &'static str> {
    if !matches!(softmax.integer("axis").unwrap_or(default_axis), -1 | 3) {
        return Err("its softmax is not over the last axis");
    }
    let (at, value, output) = below(graph, softmax).ok_or("what follows its softmax is not what attention is")?;
    let (value, heads) = apart(graph, value).ok_or("the heads of its values are not found")?;
    let (scores, mut scale, mask) =
        above(graph, softmax.inputs.first().copied().unwrap_or_default()).ok_or("its scores are not found")?;
    let product = graph.made_by(scores, "MatMul").ok_or("its scores are no product")?;
    let [query, key] = product.inputs[..] else { return Err("its scores are no product") };
    let query = apart(graph, unscaled(graph, query, &mut scale)).ok_or("the heads of its queries are not found")?;
    let key = keys(graph, unscaled(graph, key, &mut scale), &mut scale).ok_or("the heads of its keys are not found")?;
    if query.1 != heads || key.1 != heads {
        return Err("its queries, keys and values have different numbers of heads");
    }
    Ok(Attention { at, query: query.0, key: key.0, value, mask, heads, scale, output })
}

/// From the softmax down: the position of the last node, the values, and what comes out.
fn below<'a>(graph: &Graph<'a>, softmax: &Node<'a>) -> Option<(usize, &'a str, &'a str)> {
    let mut weights = *softmax.outputs.first()?;
    let (_, mut node) = graph.only_user(weights)?;
    while matches!(node.op, "Cast" | "Dropout" | "Identity") {
        weights = node.outputs.first()?;
        (_, node) = graph.only_user(weights)?;
    }
    let &[left, value] = node.inputs.as_slice() else { return None };
    let (_, transpose) = graph.only_user(node.outputs.first()?)?;
    let (at, reshape) = graph.only_user(transpose.outputs.first()?)?;
    let fits = node.op == "MatMul" && left == weights && transpose.op == "Transpose" && reshape.op == "Reshape";
    let fits = fits && transpose.integers("perm") == HEADS && three(graph, reshape);
    fits.then_some((at, value, reshape.outputs.first()?))
}

/// Whether it reshapes to three dimensions, which are those of the operator; what is not seen is left to whoever compares answers.
fn three(graph: &Graph<'_>, reshape: &Node<'_>) -> bool {
    let Some(shape) = reshape.inputs.get(1) else { return false };
    let parts = graph.made_by(shape, "Concat").map_or(0, |concat| concat.inputs.len());
    graph.numbers(shape).map_or(parts <= 3, |shape| shape.len() == 3)
}

/// From the softmax up: the product, what it is multiplied with, and what is added.
fn above<'a>(graph: &Graph<'a>, input: &'a str) -> Option<(&'a str, f64, Option<&'a str>)> {
    let input = uncast(graph, input);
    if let Some(add) = graph.made_by(input, "Add") {
        let &[a, b] = add.inputs.as_slice() else { return None };
        return [(a, b), (b, a)].into_iter().find_map(|(scores, mask)| {
            let mut scale = 1.0;
            let scores = unscaled(graph, scores, &mut scale);
            graph.made_by(scores, "MatMul").map(|_| (scores, scale, Some(mask)))
        });
    }
    let mut scale = 1.0;
    let scores = unscaled(graph, input, &mut scale);
    Some((scores, scale, None))
}

fn uncast<'a>(graph: &Graph<'a>, mut value: &'a str) -> &'a str {
    while let Some(cast) = graph.made_by(value, "Cast") {
        value = cast.inputs.first().copied().unwrap_or_default();
    }
    value
}

/// What is multiplied by constants, which go into `scale`.
fn unscaled<'a>(graph: &Graph<'a>, mut value: &'a str, scale: &mut f64) -> &'a str {
    loop {
        value = uncast(graph, value);
        let Some(node) = graph.maker(value).filter(|node| matches!(node.op, "Mul" | "Div")) else { return value };
        let &[a, b] = node.inputs.as_slice() else { return value };
        match (graph.number(a), graph.number(b)) {
            (None, Some(factor)) if node.op == "Mul" => (*scale, value) = (*scale * factor, a),
            (None, Some(factor)) if factor != 0.0 => (*scale, value) = (*scale / factor, a),
            (Some(factor), None) if node.op == "Mul" => (*scale, value) = (*scale * factor, b),
            _ => return value,
        }
    }
}

/// What heads were made of, and how many they are.
fn apart<'a>(graph: &Graph<'a>, value: &'a str) -> Option<(&'a str, i64)> {
    let transpose = graph.made_by(value, "Transpose").filter(|node| node.integers("perm") == HEADS)?;
    split(graph, transpose.inputs.first()?)
}

/// The same of keys, which are transposed besides.
fn keys<'a>(graph: &Graph<'a>, value: &'a str, scale: &mut f64) -> Option<(&'a str, i64)> {
    let transpose = graph.made_by(value, "Transpose")?;
    let input = transpose.inputs.first()?;
    match transpose.integers("perm") {
        perm if perm == KEYS => split(graph, input),
        perm if perm == TRANSPOSED => apart(graph, unscaled(graph, input, scale)),
        _ => None,
    }
}

/// What is reshaped to [batch, tokens, heads, size], and the number of heads.
fn split<'a>(graph: &Graph<'a>, value: &'a str) -> Option<(&'a str, i64)> {
    let reshape = graph.made_by(value, "Reshape")?;
    let &[input, shape] = reshape.inputs.as_slice() else { return None };
    let last =
        |values: &[f64]| if let &[_, _, heads, size] = values { Some((heads as i64, size as i64)) } else { None };
    let (heads, size) = match graph.numbers(shape) {
        Some(shape) => last(&shape)?,
        None => {
            let concat = graph.made_by(shape, "Concat").filter(|concat| concat.inputs.len() == 4)?;
            let part = |at: usize| graph.number(concat.inputs[at]).map(|number| number as i64);
            (part(2)?, part(3)?)
        }
    };
    let heads = if heads < 1 && size > 0 { width(graph, input)? / size } else { heads };
    (heads > 0).then_some((input, heads))
}

/// The last dimension of a product with weights, with or without a bias.
fn width(graph: &Graph<'_>, value: &str) -> Option<i64> {
    let of_weights = |node: &Node<'_>| node.inputs.iter().find_map(|input| graph.shape(input)?.last().copied());
    let product = |value: &&str| graph.made_by(value, "MatMul").and_then(of_weights);
    let node = graph.maker(value).filter(|node| matches!(node.op, "Add" | "MatMul"))?;
    of_weights(node).or_else(|| node.inputs.iter().filter(|_| node.op == "Add").find_map(product))
}

/// The graph with each of these as one operator, and without what nobody uses any more.
pub(super) fn rewrite(graph: &Graph<'_>, found: &[Attention<'_>]) -> Vec<u8> {
    let last: HashMap<usize, &Attention<'_>> = found.iter().map(|attention| (attention.at, attention)).collect();
    let alive = alive(graph, &last);
    let (mut out, mut masks) = (Vec::new(), HashMap::new());
    for (at, field) in graph.fields.iter().enumerate() {
        match last.get(&at) {
            Some(attention) => put_attention(&mut out, attention, &mut masks),
            None if alive.contains(&at) => out.extend_from_slice(field.raw),
            None => {}
        }
    }
    out
}

/// The positions of fields that stay: all but nodes and initializers that only what is replaced has used.
fn alive(graph: &Graph<'_>, replaced: &HashMap<usize, &Attention<'_>>) -> HashSet<usize> {
    let used_before: HashSet<&str> = graph.nodes.iter().flat_map(|(_, node)| node.inputs.iter().copied()).collect();
    let mut nodes: Vec<&(usize, Node<'_>)> = graph.nodes.iter().collect();
    let used = loop {
        let mut used: HashSet<&str> = graph.outputs.clone();
        for (at, node) in &nodes {
            match replaced.get(at) {
                Some(new) => used.extend([new.query, new.key, new.value].into_iter().chain(new.mask)),
                None => used.extend(node.inputs.iter().copied()),
            }
        }
        let made_in_vain = |name: &&str| name.is_empty() || !used_before.contains(name);
        // What was not used before either is none of ours; one unused output beside used ones (of a Dropout) keeps nothing alive.
        let needed = |node: &Node<'_>| {
            node.outputs.iter().any(|name| used.contains(name)) || node.outputs.iter().all(made_in_vain)
        };
        let count = nodes.len();
        nodes.retain(|(at, node)| replaced.contains_key(at) || needed(node));
        if nodes.len() == count {
            break used;
        }
    };
    let nodes: HashSet<usize> = nodes.iter().map(|(at, _)| *at).collect();
    let stays = |(at, field): (usize, &super::wire::Field<'_>)| match field.number {
        NODE => nodes.contains(&at).then_some(at),
        INITIALIZER => {
            let name = field.bytes().and_then(super::wire::fields)?.iter().find_map(|part| part.text(8))?;
            let only_ours = used_before.contains(name) && !used.contains(name) && !graph.ends.contains(name);
            (!only_ours).then_some(at)
        }
        _ => Some(at),
    };
    graph.fields.iter().enumerate().filter_map(stays).collect()
}

/// Large masks by what they were and whose number of tokens they have.
type Masks<'a> = HashMap<(&'a str, &'a str), String>;

/// Writes the operator, and before the first that has this mask and as many queries what makes that as large as the scores.
fn put_attention<'a>(out: &mut Vec<u8>, attention: &Attention<'a>, masks: &mut Masks<'a>) {
    let Attention { query, key, value, output, .. } = attention;
    let mut inputs = vec![*query, key, value];
    let bias = attention.mask.map(|mask| {
        let count = masks.len();
        let large = masks.entry((mask, query));
        large.or_insert_with(|| put_mask(out, mask, query, &format!("{PREFIX}mask_{count}"))).clone()
    });
    if let Some(bias) = &bias {
        inputs.extend(["", "", bias.as_str()]);
    }
    let heads = integer("num_heads", attention.heads);
    let mut scale = Vec::new();
    put_bytes(&mut scale, 1, b"scale");
    put_float(&mut scale, 2, attention.scale as f32);
    put_number(&mut scale, 20, 1);
    put_node(out, ("MultiHeadAttention", super::DOMAIN), &inputs, output, &[heads, scale]);
}

/// The operator takes [batch or 1, heads or 1, tokens, tokens], and a mask may have one row for all tokens.
fn put_mask(out: &mut Vec<u8>, mask: &str, query: &str, name: &str) -> String {
    let [shape, one, tokens, target] = ["shape", "one", "tokens", "target"].map(|part| format!("{name}/{part}"));
    put_one(out, &one);
    put_node(out, ("Shape", ""), &[query], &shape, &[]);
    put_node(out, ("Gather", ""), &[&shape, &one], &tokens, &[integer("axis", 0)]);
    put_node(out, ("Concat", ""), &[&one, &one, &tokens, &one], &target, &[integer("axis", 0)]);
    put_node(out, ("Expand", ""), &[mask, &target], name, &[]);
    name.to_owned()
}

/// A constant that is a list of the number one, which also is the position of the tokens in the shape of the queries.
fn put_one(out: &mut Vec<u8>, name: &str) {
    let mut tensor = Vec::new();
    put_number(&mut tensor, 1, 1);
    put_number(&mut tensor, 2, 7);
    put_bytes(&mut tensor, 9, &1_i64.to_le_bytes());
    let mut value = Vec::new();
    put_bytes(&mut value, 1, b"value");
    put_bytes(&mut value, 5, &tensor);
    put_number(&mut value, 20, 4);
    put_node(out, ("Constant", ""), &[], name, &[value]);
}

fn integer(name: &str, value: i64) -> Vec<u8> {
    let mut attribute = Vec::new();
    put_bytes(&mut attribute, 1, name.as_bytes());
    put_number(&mut attribute, 3, value);
    put_number(&mut attribute, 20, 2);
    attribute
}

fn put_node(out: &mut Vec<u8>, (op, domain): (&str, &str), inputs: &[&str], output: &str, attributes: &[Vec<u8>]) {
    let mut node = Vec::new();
    inputs.iter().for_each(|input| put_bytes(&mut node, 1, input.as_bytes()));
    put_bytes(&mut node, 2, output.as_bytes());
    put_bytes(&mut node, 3, format!("{PREFIX}{output}").as_bytes());
    put_bytes(&mut node, 4, op.as_bytes());
    attributes.iter().for_each(|attribute| put_bytes(&mut node, 5, attribute));
    if !domain.is_empty() {
        put_bytes(&mut node, 7, domain.as_bytes());
    }
    put_bytes(out, NODE, &node);
}
