//! Inputs of the models that are measured: the same for ONNX Runtime alone and for the server.
#![allow(dead_code, reason = "shared by several measuring programs, each of which uses a part")]

use std::str::FromStr;

/// A model and the shape of its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Case {
    /// The sentence encoder at this many tokens.
    Minilm(usize),
    /// The file classifier.
    Magika,
    /// The model that cost_model.py writes, at this many tokens: its memory grows with the square of them.
    Pairs(usize),
    /// The affine test model: four floats in, `2x + 1` out.
    Affine,
    /// The test model with large activations.
    Wide,
}

impl FromStr for Case {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("minilm", tokens)) => tokens.parse().map(Self::Minilm).map_err(|error| format!("{error}")),
            Some(("pairs", tokens)) => tokens.parse().map(Self::Pairs).map_err(|error| format!("{error}")),
            _ if text == "magika" => Ok(Self::Magika),
            _ if text == "affine" => Ok(Self::Affine),
            _ if text == "wide" => Ok(Self::Wide),
            _ => Err("a case is minilm:TOKENS, pairs:TOKENS, magika, affine or wide".to_owned()),
        }
    }
}

/// Elements of one input.
pub(crate) enum Data {
    /// INT64.
    I64(Vec<i64>),
    /// INT32.
    I32(Vec<i32>),
    /// FP32.
    F32(Vec<f32>),
}

/// One input of a case.
pub(crate) struct CaseInput {
    /// Its name.
    pub name: &'static str,
    /// Its dimensions.
    pub shape: Vec<usize>,
    /// Its elements.
    pub data: Data,
}

impl CaseInput {
    /// The datatype's name on the wire.
    pub(crate) fn datatype(&self) -> &'static str {
        match self.data {
            Data::I64(_) => "INT64",
            Data::I32(_) => "INT32",
            Data::F32(_) => "FP32",
        }
    }

    /// The elements in binary form.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        match &self.data {
            Data::I64(data) => data.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Data::I32(data) => data.iter().flat_map(|value| value.to_le_bytes()).collect(),
            Data::F32(data) => data.iter().flat_map(|value| value.to_le_bytes()).collect(),
        }
    }
}

impl Case {
    /// The model's name in the repository.
    pub(crate) fn model(self) -> &'static str {
        match self {
            Self::Minilm(_) => "minilm",
            Self::Magika => "magika",
            Self::Pairs(_) => "pairs",
            Self::Affine => "affine",
            Self::Wide => "wide",
        }
    }

    /// The same with rows of another length, where rows have one.
    pub(crate) fn of_length(self, length: usize) -> Self {
        match self {
            Self::Minilm(_) => Self::Minilm(length),
            Self::Pairs(_) => Self::Pairs(length),
            other => other,
        }
    }

    /// Pseudo-random rows; other seeds give other rows.
    pub(crate) fn inputs(self, rows: usize, seed: u64) -> Vec<CaseInput> {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1));
        match self {
            Self::Minilm(tokens) => {
                let shape = vec![rows, tokens];
                let ids = (0..rows * tokens).map(|_| 1000 + (random.next() % 19_000) as i64).collect();
                vec![
                    CaseInput { name: "input_ids", shape: shape.clone(), data: Data::I64(ids) },
                    CaseInput { name: "attention_mask", shape: shape.clone(), data: Data::I64(vec![1; rows * tokens]) },
                    CaseInput { name: "token_type_ids", shape, data: Data::I64(vec![0; rows * tokens]) },
                ]
            }
            Self::Pairs(tokens) => {
                let shape = vec![rows, tokens];
                let ids = (0..rows * tokens).map(|_| 1 + (random.next() % 1000) as i64).collect();
                let mask = CaseInput { name: "mask", shape: shape.clone(), data: Data::I64(vec![1; rows * tokens]) };
                vec![CaseInput { name: "ids", shape, data: Data::I64(ids) }, mask]
            }
            Self::Magika => {
                let bytes = (0..rows * 2048).map(|_| (random.next() % 256) as i32).collect();
                vec![CaseInput { name: "bytes", shape: vec![rows, 2048], data: Data::I32(bytes) }]
            }
            Self::Affine | Self::Wide => {
                let width = if self == Self::Affine { 4 } else { 1 };
                let floats = (0..rows * width).map(|_| (random.next() % 1000) as f32 / 1000.0).collect();
                vec![CaseInput { name: "x", shape: vec![rows, width], data: Data::F32(floats) }]
            }
        }
    }
}

/// A small generator, good enough to make rows differ.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 16
    }
}

/// CPU seconds of this process, user and system, all threads.
pub(crate) fn own_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The fields behind the command's closing parenthesis; 14 and 15 of the whole line are user and system ticks.
    let fields: Vec<&str> = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks: f64 = fields.iter().skip(11).take(2).filter_map(|field| field.parse::<f64>().ok()).sum();
    // Linux reports in hundredths of a second on every architecture that is served.
    ticks / 100.0
}
