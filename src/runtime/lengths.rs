//! What rows of other lengths cost: some of the lengths that rows are padded to are measured while a model loads, the others run
//! once. Between the measured ones the scheduler draws lines, and it learns from every run.

use super::calibrate::{Calibration, Measured, Unconfirmed, confirm, measure_one, recalled};
use super::{RunError, Session};
use crate::clock::Clock;
use crate::model::ModelSpec;
use crate::model::pad::PaddedDim;
use crate::model::settings::Fill;
use crate::units::{Instant, Rows};
use std::sync::Arc;

/// A measured length is at least so many times the one before.
const STEP: usize = 2;
/// Sizes that are measured of each length, however long that takes: two points make a line.
const LEAST_SIZES: usize = 2;

/// What rows of one length cost.
#[derive(Clone, Debug, PartialEq)]
pub struct Length {
    /// The length.
    pub size: usize,
    /// What was measured of it.
    pub calibration: Calibration,
}

/// The lengths of a model that are measured, ascending. Empty for a model that has not exactly one padded dimension.
#[must_use]
pub fn measured_lengths(spec: &ModelSpec) -> Vec<usize> {
    padded_dim(spec).map(|dim| split(&dim.lengths).0).unwrap_or_default()
}

/// Measures some lengths of the model's padded dimension, and runs the others once, within about `warmup.seconds`. The session's
/// spec must be set. Empty for a model that has not exactly one such dimension.
pub fn measure_lengths(
    session: &mut Session,
    spec: &ModelSpec,
    (ladder, integers): (&[Rows], Fill),
    clock: Clock,
) -> Vec<Length> {
    let Some(dim) = padded_dim(spec) else { return Vec::new() };
    let (chosen, others) = split(&dim.lengths);
    let end = clock.now() + spec.settings.warmup.seconds;
    let mut found = Vec::new();
    for (index, &size) in chosen.iter().enumerate() {
        let spec = at(spec, dim, size);
        let left = end.since(clock.now()) / u32::try_from(chosen.len() - index).unwrap_or(1);
        let measured = climb(session, &spec, (ladder, integers), (clock.now() + left, clock));
        let known = Length::recalled(&spec, size, measured, integers).ok();
        found.extend(
            known.map(|known| Length { calibration: Calibration { from_cache: false, ..known.calibration }, ..known }),
        );
    }
    warm(session, spec, &others, (integers, end, clock));
    found
}

/// Takes over what an earlier start has measured, if runs of one row of the shortest and of the longest need the bytes that
/// they needed then, and runs the other lengths once where a new shape is slow at first. The session's spec must be set.
///
/// # Errors
/// What is not as it was.
pub fn confirm_lengths(
    session: &mut Session,
    spec: &ModelSpec,
    known: &[Length],
    (integers, clock): (Fill, Clock),
) -> Result<(), Unconfirmed> {
    let Some(dim) = padded_dim(spec) else { return Ok(()) };
    let ends = known.first().into_iter().chain(known.last().filter(|_| known.len() > 1));
    for Length { size, calibration } in ends {
        let one = Calibration { measured: calibration.measured[..1].to_vec(), ..calibration.clone() };
        confirm(session, &at(spec, dim, *size), &one, clock)?;
    }
    if session.overlaps() {
        warm(session, spec, &dim.lengths, (integers, clock.now() + spec.settings.warmup.seconds, clock));
    }
    Ok(())
}

impl Length {
    /// What an earlier run has measured of a length, if there is a request of it. Nothing runs.
    ///
    /// # Errors
    /// Why there is none, in words for the operator.
    pub fn of(spec: &ModelSpec, size: usize, measured: Vec<Measured>, integers: Fill) -> Result<Self, String> {
        let dim = padded_dim(spec).ok_or("no dimension is padded")?;
        Self::recalled(&at(spec, dim, size), size, measured, integers)
    }

    fn recalled(spec: &Arc<ModelSpec>, size: usize, measured: Vec<Measured>, integers: Fill) -> Result<Self, String> {
        if measured.is_empty() {
            return Err("nothing was measured".to_owned());
        }
        let sizes = measured.iter().map(|entry| entry.rows).collect();
        let calibration = recalled(spec, sizes, measured, integers).map_err(|error| error.to_string())?;
        Ok(Self { size, calibration })
    }
}

/// The only padded dimension of a model.
fn padded_dim(spec: &ModelSpec) -> Option<&PaddedDim> {
    match spec.padding.as_ref()?.dims.as_slice() {
        [dim] => Some(dim),
        _ => None,
    }
}

/// The model with synthetic rows of this length.
fn at(spec: &ModelSpec, dim: &PaddedDim, size: usize) -> Arc<ModelSpec> {
    let mut spec = spec.clone();
    spec.settings.warmup.dims.insert(dim.name.clone(), size);
    Arc::new(spec)
}

/// Runs lengths once, until the time is over: a new shape is slow once on a GPU, and better now than for a client.
fn warm(session: &mut Session, spec: &ModelSpec, sizes: &[usize], (integers, end, clock): (Fill, Instant, Clock)) {
    let Some(dim) = padded_dim(spec) else { return };
    for &size in sizes {
        if clock.now() >= end || measure_one(session, &at(spec, dim, size), (1, 1), (integers, clock)).is_err() {
            break;
        }
    }
}

/// Measures one size after the other until the time is over or one does not run.
fn climb(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    (ladder, integers): (&[Rows], Fill),
    (until, clock): (Instant, Clock),
) -> Vec<Measured> {
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
