//! Two forms of a model side by side: whether they answer alike, and how fast each is.

use super::loader;
use crate::clock::Clock;
use crate::config::Config;
use crate::model::ModelSpec;
use crate::repository::Candidate;
use crate::repository::measure::Measured;
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
    let (spec, before, answers) = {
        let loader = loader(config)?;
        let mut measured = loader.measure(first)?;
        let spec = measured.spec.clone();
        let answers = ask(&mut measured, &spec, loader.clock)?;
        (spec, measured.rows_per_second(), answers)
    };
    let loader = loader(config)?;
    let mut measured = loader.measure(second)?;
    // Asked as what the first is: whatever the second says of itself, it takes its place.
    let others = ask(&mut measured, &spec, loader.clock)?;
    Ok(Comparison { difference: apart(&answers, &others), rows_per_second: [before, measured.rows_per_second()] })
}

fn ask(measured: &mut Measured, spec: &ModelSpec, clock: Clock) -> Result<Vec<Vec<Tensor>>, String> {
    let session = measured.sessions.first_mut().ok_or("it has no instance")?;
    sample(session, spec, clock)
}

/// The largest difference between answers to the same rows; infinite if one form has not answered all that the other has.
fn apart(one: &[Vec<Tensor>], other: &[Vec<Tensor>]) -> f64 {
    if !one.iter().map(Vec::len).eq(other.iter().map(Vec::len)) {
        return f64::INFINITY;
    }
    one.iter().flatten().zip(other.iter().flatten()).map(|(a, b)| difference(a, b)).fold(0.0, f64::max)
}
