//! A model that reads tokens, as the text routes use it: which input takes what, which output holds vectors or scores, and how
//! texts become requests and outputs vectors. Derived from the graph, the files beside it and `[text]` in model.toml. Pure.

mod heads;
mod parts;

pub use heads::{Scores, Vectors};
pub use parts::{Part, token_vectors, vectors};

use super::{Dim, Settings, TensorSpec};
use crate::tensor::DataType;
use crate::text::{Cut, Folder, Keep, Tokenizer};
use std::collections::BTreeMap;

/// The most tokens of a text where nobody says anything.
const MOST_TOKENS: usize = 512;
/// Lengths that texts are padded to where model.toml does not declare them; from the last one on they double.
const LENGTHS: [usize; 10] = [8, 16, 24, 32, 48, 64, 96, 128, 192, 256];

/// What an input takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The tokens.
    Ids,
    /// 1 for a token, 0 for padding.
    Mask,
    /// Which text of a pair a token belongs to.
    Types,
    /// Where in the text a token stands.
    Positions,
}

impl Role {
    const NAMES: [(&str, Self); 4] = [
        ("input_ids", Self::Ids),
        ("attention_mask", Self::Mask),
        ("token_type_ids", Self::Types),
        ("position_ids", Self::Positions),
    ];
}

/// What makes tensors of texts and vectors of tensors for one model.
#[derive(Debug)]
pub struct TextModel {
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The most tokens of a text, special ones included.
    pub max_tokens: usize,
    /// Whether vectors are brought to unit length where the request does not say so itself.
    pub normalize: bool,
    /// Where vectors for texts are; `None`: the model has none.
    pub vectors: Option<Vectors>,
    /// The output with a vector for each token.
    pub tokens: Option<usize>,
    /// Where scores are; `None`: the model gives none.
    pub scores: Option<Scores>,
    roles: Vec<Role>,
    pad: u32,
    /// Ascending; empty: texts run at their own length, since nothing says how to pad them.
    lengths: Vec<usize>,
    truncate: Option<bool>,
    keep: Keep,
    dimensions: Vec<usize>,
    prompts: BTreeMap<String, String>,
    default_prompt: Option<String>,
}

/// The two ends of a model and its settings.
#[derive(Clone, Copy, Debug)]
pub struct Ends<'a> {
    /// The inputs, in the graph's order.
    pub inputs: &'a [TensorSpec],
    /// The outputs, in the graph's order.
    pub outputs: &'a [TensorSpec],
    /// The axis that is the batch.
    pub batch_axis: Option<usize>,
    /// What model.toml says.
    pub settings: &'a Settings,
}

impl TextModel {
    /// Puts together what the graph, the folder and model.toml say.
    ///
    /// # Errors
    /// Why the model takes no texts, in words for the operator.
    pub fn derive(ends: Ends<'_>, folder: &Folder, tokenizer: Tokenizer) -> Result<Self, String> {
        if ends.batch_axis.is_some_and(|axis| axis != 0) {
            return Err("the batch is not the first dimension of its inputs".to_owned());
        }
        let settings = &ends.settings.text;
        let roles = ends.inputs.iter().map(role).collect::<Result<Vec<_>, _>>()?;
        let Some(ids) = roles.iter().position(|role| *role == Role::Ids).map(|at| &ends.inputs[at]) else {
            return Err("it has no input called input_ids".to_owned());
        };
        let fixed = match ids.shape[1] {
            Dim::Fixed(size) => Some(size),
            Dim::Symbol(_) | Dim::Any => None,
        };
        let author = folder.max_tokens.or(tokenizer.limit());
        let limits = [settings.max_tokens.or(author), folder.positions, fixed];
        let max_tokens = limits.into_iter().flatten().min().unwrap_or(MOST_TOKENS);
        let heads = heads::find(ends, folder)?;
        let prompts: BTreeMap<_, _> = folder.prompts.clone().into_iter().chain(settings.prompts.clone()).collect();
        let default_prompt = settings.default_prompt.clone().or_else(|| folder.default_prompt.clone());
        if let Some(name) = default_prompt.as_ref().filter(|name| !prompts.contains_key(*name)) {
            return Err(format!("the default prompt '{name}' is not among its prompts"));
        }
        let declared = ends.settings.padding.inputs.get(&ids.name).map(|pad| *pad as u32);
        Ok(Self {
            pad: declared.or(folder.pad).or(tokenizer.pad()).unwrap_or_default(),
            lengths: lengths(ends.settings, ids, &roles, max_tokens),
            tokenizer,
            max_tokens,
            normalize: settings.normalize.unwrap_or(true),
            vectors: heads.vectors,
            tokens: heads.tokens,
            scores: heads.scores,
            roles,
            truncate: settings.truncate,
            keep: settings.keep.unwrap_or_default(),
            dimensions: settings.dimensions.clone(),
            prompts,
            default_prompt,
        })
    }

    /// What becomes of long texts. `truncate` and `keep` are what a request says; `otherwise` holds where neither it nor
    /// model.toml says whether to truncate.
    #[must_use]
    pub fn cut(&self, truncate: Option<bool>, keep: Option<Keep>, otherwise: bool) -> Cut {
        let allowed = truncate.or(self.truncate).unwrap_or(otherwise);
        Cut { most: self.max_tokens, keep: allowed.then(|| keep.unwrap_or(self.keep)) }
    }

    /// Whether longer texts are cut if nobody asks for it; `otherwise` as in [`TextModel::cut`].
    #[must_use]
    pub fn truncates(&self, otherwise: bool) -> bool {
        self.truncate.unwrap_or(otherwise)
    }

    /// The lengths that texts are padded to, ascending; none: they run at their own.
    #[must_use]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// The token that fills up.
    #[must_use]
    pub fn pad(&self) -> u32 {
        self.pad
    }

    /// What is put before a text. `name` is what a request says.
    ///
    /// # Errors
    /// If there is no prompt of that name, in words for the client.
    pub fn prompt(&self, name: Option<&str>) -> Result<&str, String> {
        let Some(name) = name.or(self.default_prompt.as_deref()) else { return Ok("") };
        self.prompts.get(name).map(String::as_str).ok_or_else(|| {
            let names: Vec<&str> = self.prompts.keys().map(String::as_str).collect();
            let known = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
            format!("the model has no prompt '{name}'; its prompts are: {known}")
        })
    }

    /// The width of a vector of which so many elements are wanted.
    ///
    /// # Errors
    /// If it has no such form, in words for the client. `width` is that of the whole vector.
    pub fn width(&self, wanted: u64, width: usize) -> Result<usize, String> {
        let fits = usize::try_from(wanted).ok().filter(|wanted| (1..=width).contains(wanted));
        match fits {
            Some(wanted) if self.dimensions.is_empty() || wanted == width || self.dimensions.contains(&wanted) => {
                Ok(wanted)
            }
            _ if self.dimensions.is_empty() => {
                Err(format!("{wanted} is not from 1 to {width}, the length of the model's vectors"))
            }
            _ => Err(format!("{wanted} is none of the lengths {:?} and {width} that the model has", self.dimensions)),
        }
    }
}

/// What an input takes, by its name.
fn role(input: &TensorSpec) -> Result<Role, String> {
    let known = Role::NAMES.iter().find(|(name, _)| *name == input.name);
    let Some((_, role)) = known else {
        let names: Vec<&str> = Role::NAMES.iter().map(|(name, _)| *name).collect();
        return Err(format!("its input '{}' is none of {}", input.name, names.join(", ")));
    };
    if !matches!(input.datatype, DataType::Int64 | DataType::Int32) || input.shape.len() != 2 {
        return Err(format!("its input '{}' is no matrix of INT64 or INT32", input.name));
    }
    Ok(*role)
}

/// The lengths that texts are padded to: what model.toml declares; else, if a mask tells the model what is padding, a short
/// list, so that texts of about the same length share a batch. None if padding might change the answer.
fn lengths(settings: &Settings, ids: &TensorSpec, roles: &[Role], most: usize) -> Vec<usize> {
    let declared = match &ids.shape[1] {
        Dim::Fixed(size) => return vec![*size],
        Dim::Symbol(name) => settings.padding.lengths.get(name),
        Dim::Any => None,
    };
    if let Some(lengths) = declared {
        return lengths.clone();
    }
    if !roles.contains(&Role::Mask) {
        return Vec::new();
    }
    let doubling = std::iter::successors(LENGTHS.last().map(|last| last * 2), |last| last.checked_mul(2));
    LENGTHS.into_iter().chain(doubling).take_while(|length| *length < most).chain([most]).collect()
}

#[cfg(test)]
mod tests;
