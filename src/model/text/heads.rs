//! Which outputs of a graph hold what the text routes answer.

use super::Ends;
use crate::model::{Dim, TensorSpec};
use crate::tensor::DataType;
use crate::text::{Folder, Pooling};

/// Names by which exporters call a vector that is pooled already, the surer ones first.
const POOLED: [&str; 5] = ["sentence_embedding", "sentence_embeddings", "text_embeds", "embeddings", "embedding"];
/// Names by which they call the vectors of all tokens.
const HIDDEN: [&str; 3] = ["last_hidden_state", "token_embeddings", "hidden_states"];
/// The name by which they call scores.
const LOGITS: &str = "logits";

/// Where a vector for a text comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vectors {
    /// The output.
    pub output: usize,
    /// How it becomes one vector; [`Pooling::None`]: it is one.
    pub pooling: Pooling,
    /// Its length, if the graph says so.
    pub width: Option<usize>,
}

/// Where scores come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scores {
    /// The output.
    pub output: usize,
    /// A name for each score.
    pub labels: Vec<String>,
}

impl Scores {
    /// Whether a single score says how well a text answers a query.
    #[must_use]
    pub fn ranks(&self) -> bool {
        self.labels.len() == 1
    }
}

/// What a model has.
#[derive(Debug, Default)]
pub(super) struct Heads {
    pub(super) vectors: Option<Vectors>,
    pub(super) tokens: Option<usize>,
    pub(super) scores: Option<Scores>,
}

/// Looks for them.
///
/// # Errors
/// If there is nothing, or if what there is cannot be used, in words for the operator.
pub(super) fn find(ends: Ends<'_>, folder: &Folder) -> Result<Heads, String> {
    let named = ends.settings.text.output.as_deref().map(|name| {
        let at = ends.outputs.iter().position(|output| output.name == name);
        at.ok_or_else(|| format!("text.output = \"{name}\": it has no output of this name"))
    });
    let named = named.transpose()?;
    let of_rank = |rank: usize| move |output: &TensorSpec| is_float(output.datatype) && output.shape.len() == rank;
    let called = |names: &[&str], rank: usize| {
        let fits = |name: &&str| {
            let is_it = |output: &TensorSpec| output.name == **name && of_rank(rank)(output);
            ends.outputs.iter().position(is_it)
        };
        names.iter().find_map(fits)
    };
    let rank = |at: usize| ends.outputs[at].shape.len();
    let tokens = named
        .filter(|at| rank(*at) == 3)
        .or_else(|| called(&HIDDEN, 3))
        .or_else(|| ends.outputs.iter().position(of_rank(3)));
    let logits = called(&[LOGITS], 2);
    if folder.classifies || (logits.is_some() && tokens.is_none() && named.is_none_or(|at| Some(at) == logits)) {
        let output = named.or(logits).or_else(|| ends.outputs.iter().position(of_rank(2)));
        let output = output.filter(|at| of_rank(2)(&ends.outputs[*at]));
        let output = output.ok_or("it classifies texts, but no output has a row of scores for each")?;
        return Ok(Heads { scores: Some(scores(&ends.outputs[output], output, folder)?), ..Heads::default() });
    }
    let pooling = ends.settings.text.pooling;
    let pooled = named.filter(|at| rank(*at) == 2).or_else(|| called(&POOLED, 2));
    let only = || {
        let all = || ends.outputs.iter().enumerate().filter(|(_, output)| of_rank(2)(output));
        (all().count() == 1 && tokens.is_none()).then(|| all().next().map(|(at, _)| at)).flatten()
    };
    let wants_tokens = named.is_some_and(|at| rank(at) == 3) || pooling.is_some_and(|pooling| pooling != Pooling::None);
    let pooled = pooled.or_else(only).filter(|_| !wants_tokens);
    let vectors = match (pooled, tokens) {
        (Some(output), _) => Vectors { output, pooling: Pooling::None, width: width(&ends.outputs[output]) },
        (None, Some(output)) => {
            Vectors { output, pooling: pooling_of(pooling, folder)?, width: width(&ends.outputs[output]) }
        }
        (None, None) => {
            return Err(
                "no output has a vector of floats for each text, or for each of its tokens; text.output names one"
                    .to_owned(),
            );
        }
    };
    Ok(Heads { vectors: Some(vectors), tokens, scores: None })
}

/// How the vectors of tokens become one: what model.toml says, else what the folder says, else their mean.
fn pooling_of(given: Option<Pooling>, folder: &Folder) -> Result<Pooling, String> {
    if !folder.layers.is_empty() {
        return Err(format!(
            "modules.json has layers after pooling ({}) that its graph does not have; export it with them",
            folder.layers.join(", ")
        ));
    }
    match (given, &folder.pooling) {
        (Some(Pooling::None), _) => {
            Err("text.pooling = \"none\", but it has no output with one vector for a text".to_owned())
        }
        (Some(pooling), _) => Ok(pooling),
        (None, Some(Ok(pooling))) => Ok(*pooling),
        (None, Some(Err(name))) => Err(format!(
            "1_Pooling/config.json asks for pooling by {name}; there are mean, cls and last, and [text] pooling chooses one"
        )),
        (None, None) => Ok(Pooling::Mean),
    }
}

fn scores(output: &TensorSpec, at: usize, folder: &Folder) -> Result<Scores, String> {
    let named = folder.labels.len();
    let count = match width(output) {
        None if named == 0 => {
            return Err("neither its graph nor config.json (id2label) says how many scores it gives".to_owned());
        }
        None => named,
        Some(width) if named == 0 || named == width => width,
        Some(width) => {
            return Err(format!("config.json names {named} labels, but output '{}' has {width} scores", output.name));
        }
    };
    let labels = (0..count).map(|at| folder.labels.get(at).cloned().unwrap_or_else(|| format!("LABEL_{at}")));
    Ok(Scores { output: at, labels: labels.collect() })
}

fn width(output: &TensorSpec) -> Option<usize> {
    match output.shape.last() {
        Some(Dim::Fixed(width)) => Some(*width),
        _ => None,
    }
}

fn is_float(datatype: DataType) -> bool {
    matches!(datatype, DataType::Fp32 | DataType::Fp16 | DataType::Bf16 | DataType::Fp64)
}
