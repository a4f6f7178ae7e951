//! What rows of other lengths cost: some of the lengths that rows are padded to are measured while a model loads, the others run
//! once. Between the measured ones the scheduler draws lines, and it learns from every run.

use super::calibrate::{Calibration, measure_one, recalled};
use super::{RunError, Session};
use crate::clock::Clock;
use crate::model::ModelSpec;
use crate::model::settings::Fill;
use crate::units::{Instant, Rows};
use std::sync::Arc;

/// A measured length is at least so many times the one before.
const STEP: usize = 2;
/// Sizes that are measured of each length, however long that takes: two points make a line.
const LEAST_SIZES: usize = 2;

/// Measures some lengths of the model's padded dimension, and runs the others once, within about `warmup.seconds`. The session's
/// spec must be set. Empty for a model that has not exactly one such dimension.
pub fn measure_lengths(
    session: &mut Session,
    spec: &ModelSpec,
    (ladder, integers): (&[Rows], Fill),
    clock: Clock,
) -> Vec<Calibration> {
    let Some([dim]) = spec.padding.as_ref().map(|plan| plan.dims.as_slice()) else { return Vec::new() };
    let (chosen, others) = split(&dim.lengths);
    let at = |length: usize| {
        let mut spec = spec.clone();
        spec.settings.warmup.dims.insert(dim.name.clone(), length);
        Arc::new(spec)
    };
    let end = clock.now() + spec.settings.warmup.seconds;
    let mut found = Vec::new();
    for (index, &length) in chosen.iter().enumerate() {
        let left = end.since(clock.now()) / u32::try_from(chosen.len() - index).unwrap_or(1);
        let measured = climb(session, &at(length), (ladder, integers), (clock.now() + left, clock));
        let sizes = measured.iter().map(|entry| entry.rows).collect();
        if let (false, Ok(found_here)) = (measured.is_empty(), recalled(&at(length), sizes, measured, integers)) {
            found.push(Calibration { from_cache: false, ..found_here });
        }
    }
    // A new shape is slow once on a GPU: better now than for a client.
    for length in others {
        if clock.now() >= end || measure_one(session, &at(length), (1, 1), (integers, clock)).is_err() {
            break;
        }
    }
    found
}

/// Measures one size after the other until the time is over or one does not run.
fn climb(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    (ladder, integers): (&[Rows], Fill),
    (until, clock): (Instant, Clock),
) -> Vec<super::calibrate::Measured> {
    let mut measured = Vec::new();
    for &rows in ladder {
        if measured.len() >= LEAST_SIZES && clock.now() >= until {
            break;
        }
        match measure_one(session, spec, (rows, super::calibrate::RUNS), (integers, clock)) {
            Ok(entry) => measured.push(entry),
            Err(RunError::OutOfMemory { .. } | RunError::Model(_) | RunError::Lost(_)) => break,
        }
    }
    measured
}

/// Lengths to be measured, and the others.
fn split(lengths: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let mut last = 0;
    let is_chosen = |length: &usize| {
        let chosen = *length >= STEP * last || lengths.last() == Some(length);
        if chosen {
            last = *length;
        }
        chosen
    };
    lengths.iter().copied().partition(is_chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measured_lengths_double_and_hold_both_ends() {
        assert_eq!(split(&[8, 12, 16, 24, 32, 40]), (vec![8, 16, 32, 40], vec![12, 24]));
        assert_eq!(split(&[5]), (vec![5], vec![]));
    }
}
