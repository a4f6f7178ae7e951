//! A graph of an ONNX file: its nodes by what they make and use, and its small constants.

use super::wire::{Field, fields};
use std::collections::{HashMap, HashSet};

/// Fields of `GraphProto`.
pub(super) const NODE: u32 = 1;
/// See [`NODE`].
pub(super) const INITIALIZER: u32 = 5;
const INPUT: u32 = 11;
const OUTPUT: u32 = 12;

/// Constants of more elements are weights, and not looked into.
const MOST_ELEMENTS: usize = 16;

/// One node.
#[derive(Debug)]
pub(super) struct Node<'a> {
    pub(super) op: &'a str,
    pub(super) inputs: Vec<&'a str>,
    pub(super) outputs: Vec<&'a str>,
    attributes: Vec<Vec<Field<'a>>>,
}

impl<'a> Node<'a> {
    fn read(raw: &'a [u8]) -> Option<Self> {
        let fields_of = fields(raw)?;
        let texts = |number| fields_of.iter().filter_map(move |field| field.text(number));
        // A standard operator, or one that is none of those that are looked for.
        let standard = texts(7).all(|domain| domain.is_empty() || domain == "ai.onnx");
        let op = texts(4).next().filter(|_| standard).unwrap_or_default();
        let attributes = fields_of.iter().filter(|field| field.number == 5).filter_map(Field::bytes);
        let attributes = attributes.map(fields).collect::<Option<_>>()?;
        Some(Self { op, inputs: texts(1).collect(), outputs: texts(2).collect(), attributes })
    }

    fn attribute(&self, name: &str) -> impl Iterator<Item = &Field<'a>> {
        let named = |fields: &&Vec<Field<'a>>| fields.iter().any(|field| field.text(1) == Some(name));
        self.attributes.iter().find(named).into_iter().flatten()
    }

    /// An attribute that is one integer.
    pub(super) fn integer(&self, name: &str) -> Option<i64> {
        self.attribute(name).find_map(|field| field.integers(3).first().copied())
    }

    /// An attribute that is a list of integers.
    pub(super) fn integers(&self, name: &str) -> Vec<i64> {
        self.attribute(name).flat_map(|field| field.integers(8)).collect()
    }

    /// Whether it holds a graph of its own, which may use any value from outside.
    fn has_graph(&self) -> bool {
        self.attributes.iter().flatten().any(|field| matches!(field.number, 6 | 11) && field.bytes().is_some())
    }
}

/// A graph.
#[derive(Debug)]
pub(super) struct Graph<'a> {
    /// All of it.
    pub(super) fields: Vec<Field<'a>>,
    /// Its nodes, by the position of their field.
    pub(super) nodes: Vec<(usize, Node<'a>)>,
    makers: HashMap<&'a str, usize>,
    users: HashMap<&'a str, Vec<usize>>,
    constants: HashMap<&'a str, Vec<Field<'a>>>,
    /// The names of inputs and outputs.
    pub(super) ends: HashSet<&'a str>,
    /// The names of outputs.
    pub(super) outputs: HashSet<&'a str>,
}

impl<'a> Graph<'a> {
    /// Reads a `GraphProto`.
    pub(super) fn read(graph: &'a [u8]) -> Result<Self, String> {
        let broken = || "the graph of this ONNX file is broken".to_owned();
        let fields_of = fields(graph).ok_or_else(broken)?;
        let mut this = Self {
            nodes: Vec::new(),
            makers: HashMap::new(),
            users: HashMap::new(),
            constants: HashMap::new(),
            ends: HashSet::new(),
            outputs: HashSet::new(),
            fields: Vec::new(),
        };
        for (at, field) in fields_of.iter().enumerate() {
            let Some(bytes) = field.bytes() else { continue };
            match field.number {
                NODE => this.add(at, Node::read(bytes).ok_or_else(broken)?)?,
                INITIALIZER => {
                    let tensor = fields(bytes).ok_or_else(broken)?;
                    let name = name_of(&tensor, 8).ok_or_else(broken)?;
                    this.constants.insert(name, tensor);
                }
                INPUT | OUTPUT => {
                    let name = fields(bytes).and_then(|value| name_of(&value, 1)).ok_or_else(broken)?;
                    this.ends.insert(name);
                    if field.number == OUTPUT {
                        this.outputs.insert(name);
                    }
                }
                _ => {}
            }
        }
        Ok(Self { fields: fields_of, ..this })
    }

    fn add(&mut self, at: usize, node: Node<'a>) -> Result<(), String> {
        if node.has_graph() {
            return Err(format!("operator {} holds a graph of its own: such models are not rewritten", node.op));
        }
        let index = self.nodes.len();
        // As ONNX demands it: each value is made once, and before it is used. So no walk along values goes in circles.
        let known = |name: &&str| self.makers.contains_key(name) || self.users.contains_key(name);
        if let Some(name) =
            node.outputs.iter().filter(|name| !name.is_empty()).find(|name| known(name) || node.inputs.contains(name))
        {
            return Err(format!("value '{name}' is made twice, or after it is used"));
        }
        self.makers.extend(node.outputs.iter().map(|name| (*name, index)));
        node.inputs.iter().for_each(|name| self.users.entry(name).or_default().push(index));
        if let ("Constant", Some(name)) = (node.op, node.outputs.first()) {
            let tensor = node.attribute("value").find(|field| field.number == 5).and_then(Field::bytes);
            if let Some(tensor) = tensor.and_then(fields) {
                self.constants.insert(name, tensor);
            }
        }
        self.nodes.push((at, node));
        Ok(())
    }

    /// The node that makes a value.
    pub(super) fn maker(&self, value: &str) -> Option<&Node<'a>> {
        self.makers.get(value).map(|index| &self.nodes[*index].1)
    }

    /// The same, if it is one of this operator.
    pub(super) fn made_by(&self, value: &str, op: &str) -> Option<&Node<'a>> {
        self.maker(value).filter(|node| node.op == op)
    }

    /// The one node that uses a value, with the position of its field; `None` if several do, or somebody outside.
    pub(super) fn only_user(&self, value: &str) -> Option<(usize, &Node<'a>)> {
        let users = self.users.get(value).filter(|_| !self.outputs.contains(value))?;
        let [index] = users.as_slice() else { return None };
        let (at, node) = &self.nodes[*index];
        Some((*at, node))
    }

    /// A constant, also behind operators that change nothing but its type.
    fn constant(&self, value: &str) -> Option<&[Field<'a>]> {
        if let Some(tensor) = self.constants.get(value) {
            return Some(tensor);
        }
        let node = self.maker(value).filter(|node| matches!(node.op, "Identity" | "Cast"))?;
        self.constants.get(*node.inputs.first()?).map(Vec::as_slice)
    }

    /// The dimensions of a constant.
    pub(super) fn shape(&self, value: &str) -> Option<Vec<i64>> {
        Some(self.constant(value)?.iter().flat_map(|field| field.integers(1)).collect())
    }

    /// The elements of a small constant.
    pub(super) fn numbers(&self, value: &str) -> Option<Vec<f64>> {
        let tensor = self.constant(value)?;
        let count = tensor.iter().flat_map(|field| field.integers(1)).try_fold(1_usize, |product, dim| {
            product.checked_mul(usize::try_from(dim).ok()?).filter(|count| *count <= MOST_ELEMENTS)
        })?;
        let kind = tensor.iter().find_map(|field| field.integers(2).first().copied())?;
        let found = match tensor.iter().find(|field| field.number == 9).and_then(Field::bytes) {
            Some(raw) => numbers(kind, raw, count)?,
            None if kind == 1 => numbers(kind, tensor.iter().find(|field| field.number == 4)?.bytes()?, count)?,
            None if kind == 7 => tensor.iter().flat_map(|field| field.integers(7)).map(|value| value as f64).collect(),
            None => return None,
        };
        (found.len() == count).then_some(found)
    }

    /// The element of a constant that has only one.
    pub(super) fn number(&self, value: &str) -> Option<f64> {
        let numbers = self.numbers(value)?;
        if let [number] = numbers.as_slice() { Some(*number) } else { None }
    }
}

fn name_of<'a>(message: &[Field<'a>], number: u32) -> Option<&'a str> {
    message.iter().find_map(|field| field.text(number))
}

/// So many elements of one of ONNX's types that scales and shapes have.
fn numbers(kind: i64, raw: &[u8], count: usize) -> Option<Vec<f64>> {
    if raw.len() > count * size_of::<f64>() {
        return None;
    }
    Some(match kind {
        1 => raw.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes).into()).collect(),
        7 => raw.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes) as f64).collect(),
        10 => raw.as_chunks().0.iter().map(|bytes| half::f16::from_le_bytes(*bytes).to_f64()).collect(),
        11 => raw.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect(),
        _ => return None,
    })
}
