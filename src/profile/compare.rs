//! Two forms of a model side by side: whether they answer alike, and how fast each is.

use super::loader;
use crate::config::Config;
use crate::model::ModelSpec;
use crate::repository::Candidate;
use crate::runtime::padding::{difference, sample};
use crate::tensor::Tensor;

/// What two forms of a model have in common, and what not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Comparison {
    /// The largest difference between two answers, as a part of the largest value of the output; infinite where shapes differ.
    pub difference: f64,
    /// Rows per second of each at its best batch size, as measured while loading; zero if it does not run on synthetic rows.
    pub rows_per_second: [f64; 2],
}

/// Loads one after the other as the server does, has them answer the same rows, and compares the answers.
///
/// # Errors
/// Why one of them cannot be loaded or run.
pub fn compare(config: &Config, [first, second]: [&Candidate; 2]) -> Result<Comparison, String> {
    let first = answers(config, first, None)?;
    let second = answers(config, second, Some(&first.spec))?;
    let pairs = first.answers.iter().flatten().zip(second.answers.iter().flatten());
    let difference = pairs.map(|(a, b)| difference(a, b)).fold(0.0, f64::max);
    Ok(Comparison { difference, rows_per_second: [first.rows_per_second, second.rows_per_second] })
}

struct Sampled {
    answers: Vec<Vec<Tensor>>,
    /// What it was asked as.
    spec: ModelSpec,
    rows_per_second: f64,
}

/// Loads a model and asks it, as what it is or as what another one is.
fn answers(config: &Config, candidate: &Candidate, spec: Option<&ModelSpec>) -> Result<Sampled, String> {
    let loader = loader(config)?;
    let mut measured = loader.measure(candidate)?;
    let (rows_per_second, spec) = (measured.rows_per_second(), spec.unwrap_or(&measured.spec).clone());
    let session = measured.sessions.first_mut().ok_or("it has no instance")?;
    Ok(Sampled { answers: sample(session, &spec, loader.clock)?, spec, rows_per_second })
}
