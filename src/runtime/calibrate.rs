//! Measuring a model while it loads: is the batch axis what it seems, and how long does each ladder size take?
//!
//! Synthetic requests go the same way as real ones, so what is measured is what will be run. Floats are small pseudo-random
//! numbers, since some kernels are faster on zeros; integers are ones, since they are often indices, or zeros where the
//! model does not bear ones.

use super::synthetic::{is_float, synthetic};
use super::{Batch, BatchPart, Ran, RunError, Session};
use crate::clock::Clock;
use crate::model::settings::Fill;
use crate::model::{Dim, InferRequest, InputTensor, ModelSpec, Settings, ValidRequest};
use crate::tensor::Shape;
use crate::units::{BatchId, ByteSize, Rows};
use std::sync::Arc;
use std::time::Duration;

/// The largest size that is tried where the configuration says `auto`.
pub const AUTO_MAX_BATCH_SIZE: Rows = 256;
/// A single run longer than this ends the ladder: larger ones would hold a queue up for too long.
const MAX_RUN: Duration = Duration::from_secs(1);
/// Runs per ladder size: the first is warm-up, the fastest of the others counts (a busy machine only ever adds time).
pub(super) const RUNS: usize = 3;
/// The ladder ends after this many sizes in a row that are slower per row than the best by more than `SLOWER`.
const PATIENCE: usize = 2;
/// See `PATIENCE`.
const SLOWER: f64 = 0.9;

/// One measured ladder size.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// Rows of the batch.
    pub rows: Rows,
    /// The fastest run: how long it kept the instance from other batches.
    pub duration: Duration,
    /// Peak bytes of run memory.
    pub bytes: ByteSize,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Calibration {
    /// Batch sizes, ascending; the last is the largest that will be formed.
    pub ladder: Vec<Rows>,
    /// One entry per size that was measured, ascending.
    pub measured: Vec<Measured>,
    /// The non-batch dimensions of the synthetic rows.
    pub class_dims: Vec<usize>,
    /// Elements per row over all inputs.
    pub units: u64,
    /// What integers were that the settings do not speak of.
    pub integers: Fill,
    /// Why the first size that is missing did not run, if that is what ended the ladder: another time it may run.
    pub cut_short: Option<String>,
    /// Whether an earlier start has measured it.
    pub from_cache: bool,
}

impl Calibration {
    /// Takes note that a size is recorded and runs so long now.
    pub fn note_recorded(&mut self, rows: Rows, took: Duration) {
        self.measured.iter_mut().filter(|entry| entry.rows == rows).for_each(|entry| entry.duration = took);
    }
}

/// Why a model cannot be calibrated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CalibrationError {
    /// The supposed batch axis is not one: the text says what was seen.
    #[error("{0}")]
    NotABatchAxis(String),
    /// The model does not run on synthetic rows; it may still run on real ones.
    #[error("{0}")]
    DoesNotRun(String),
}

/// Why something that was measured earlier does not hold now.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unconfirmed {
    /// Run memory is exact, so something is not as it was.
    #[error("{rows} rows took {now} where they had taken {before}")]
    Bytes {
        /// The size.
        rows: Rows,
        /// What was known.
        before: ByteSize,
        /// What was seen.
        now: ByteSize,
    },
    /// A size does not run that did.
    #[error("{rows} rows do not run: {error}")]
    DoesNotRun {
        /// The size.
        rows: Rows,
        /// Why.
        error: RunError,
    },
}

/// Runs the ladder. The session's spec must be set.
///
/// # Errors
/// See [`CalibrationError`].
pub fn calibrate(session: &mut Session, spec: &Arc<ModelSpec>, clock: Clock) -> Result<Calibration, CalibrationError> {
    let settings = &spec.settings;
    let mut run = Runner { session, spec, clock, integers: Fill::One };
    run.settle()?;
    let started = clock.now();
    let cap = if spec.batch_axis.is_none() { 1 } else { settings.max_batch_size.unwrap_or(AUTO_MAX_BATCH_SIZE) };
    let mut calibration = run.climb(&ladder(cap), |measured| stop(measured, clock.now().since(started), settings))?;
    if settings.max_batch_size.is_some() {
        calibration.ladder = ladder(cap);
    }
    Ok(calibration)
}

/// Runs these sizes, ascending, however long that takes. The session's spec must be set.
///
/// # Errors
/// See [`CalibrationError`].
pub fn measure_sizes(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    sizes: &[Rows],
    clock: Clock,
) -> Result<Calibration, CalibrationError> {
    let mut run = Runner { session, spec, clock, integers: Fill::One };
    run.settle()?;
    let sizes = if spec.batch_axis.is_none() { &[1] } else { sizes };
    run.climb(sizes, |_| false)
}

/// What an earlier start has measured, if the model may still be run in the same way. Nothing runs.
///
/// # Errors
/// If there is no synthetic request of this model.
pub fn recalled(
    spec: &Arc<ModelSpec>,
    ladder: Vec<Rows>,
    measured: Vec<Measured>,
    integers: Fill,
) -> Result<Calibration, CalibrationError> {
    let one = request(spec, 1, integers).map_err(|error| CalibrationError::DoesNotRun(error.to_string()))?;
    let (class_dims, units) = (one.class_dims, one.units);
    Ok(Calibration { ladder, measured, class_dims, units, integers, cut_short: None, from_cache: true })
}

/// Runs the smallest and the largest size once: their bytes must be what was measured, to the byte.
///
/// # Errors
/// What is not as it was.
pub fn confirm(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    known: &Calibration,
    clock: Clock,
) -> Result<(), Unconfirmed> {
    let mut run = Runner { session, spec, clock, integers: known.integers };
    let (first, last) = (known.measured.first(), known.measured.last().filter(|_| known.measured.len() > 1));
    for &Measured { rows, bytes: before, .. } in first.into_iter().chain(last) {
        let trial = run.run(rows).map_err(|error| Unconfirmed::DoesNotRun { rows, error })?;
        if trial.bytes != before {
            return Err(Unconfirmed::Bytes { rows, before, now: trial.bytes });
        }
    }
    Ok(())
}

/// Runs one size so many times and answers how long they took altogether.
///
/// # Errors
/// If one of them fails.
pub fn repeat(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    (size, times): (Rows, u32),
    (integers, clock): (Fill, Clock),
) -> Result<Duration, RunError> {
    let mut run = Runner { session, spec, clock, integers };
    (0..times).map(|_| run.run(size).map(|trial| trial.took)).sum()
}

/// Runs one size so many times and answers the fastest.
///
/// # Errors
/// If one of them fails.
pub(super) fn fastest(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    (size, times): (Rows, u32),
    (integers, clock): (Fill, Clock),
) -> Result<Trial, RunError> {
    let mut run = Runner { session, spec, clock, integers };
    let mut best = run.run(size)?;
    for _ in 1..times {
        best = run.run(size)?.or_faster(best);
    }
    Ok(best)
}

/// One run of synthetic rows.
#[derive(Clone, Copy, Debug)]
pub(super) struct Trial {
    /// From the first row gathered to the last one given out, as far as they do not overlap; see [`Stages::total`].
    ///
    /// [`Stages::total`]: super::batch::Stages::total
    pub(super) took: Duration,
    /// Of that, how long no other batch could be computed; see [`Stages::occupied`].
    ///
    /// [`Stages::occupied`]: super::batch::Stages::occupied
    pub(super) occupied: Duration,
    /// Of that, what the device times itself; zero on the host.
    pub(super) device: Duration,
    /// Run memory.
    pub(super) bytes: ByteSize,
}

impl Trial {
    /// The least of each time, with the bytes of this one: what delays the host need not delay the device.
    fn or_faster(self, other: Self) -> Self {
        let Self { occupied, device, .. } = if other.occupied < self.occupied { other } else { self };
        Self { took: self.took.min(other.took), occupied, device, bytes: self.bytes }
    }
}

/// Measures one size by so many runs; see [`RUNS`].
///
/// # Errors
/// If one of them fails.
pub(super) fn measure_one(
    session: &mut Session,
    spec: &Arc<ModelSpec>,
    (rows, runs): (Rows, usize),
    (integers, clock): (Fill, Clock),
) -> Result<Measured, RunError> {
    Runner { session, spec, clock, integers }.measure(rows, runs).map(|(measured, _)| measured)
}

/// What holds for two sessions that were measured at once: the sizes that both reached, each as slow as the slower one.
#[must_use]
pub fn slower(a: Calibration, b: Calibration) -> Calibration {
    let (mut shorter, longer) = if a.measured.len() <= b.measured.len() { (a, b) } else { (b, a) };
    for (entry, other) in shorter.measured.iter_mut().zip(&longer.measured) {
        entry.duration = entry.duration.max(other.duration);
        entry.bytes = ByteSize(entry.bytes.0.max(other.bytes.0));
    }
    shorter
}

/// Powers of two up to `max`, and `max` itself.
#[must_use]
pub fn ladder(max: Rows) -> Vec<Rows> {
    let powers = std::iter::successors(Some(1), |rows: &Rows| rows.checked_mul(2)).take_while(|&rows| rows < max);
    powers.chain(std::iter::once(max.max(1))).collect()
}

fn stop(measured: &[Measured], spent: Duration, settings: &Settings) -> bool {
    let rate = |entry: &Measured| f64::from(entry.rows) / entry.duration.as_secs_f64().max(1e-9);
    let best = measured.iter().map(rate).fold(0.0, f64::max);
    let slower = measured.iter().rev().take_while(|entry| rate(entry) < SLOWER * best).count();
    let last = measured.last().map_or(Duration::ZERO, |entry| entry.duration);
    slower >= PATIENCE || last > MAX_RUN || spent > settings.warmup.seconds
}

struct Runner<'a> {
    session: &'a mut Session,
    spec: &'a Arc<ModelSpec>,
    clock: Clock,
    /// What integers are that the settings do not speak of.
    integers: Fill,
}

impl Runner<'_> {
    /// Finds out how the model runs at all.
    fn settle(&mut self) -> Result<(), CalibrationError> {
        self.settle_fill()?;
        if self.spec.batch_axis.is_some() { self.confirm_batch_axis() } else { Ok(()) }
    }

    /// Measures one size after the other until one does not run or `enough` says so.
    fn climb(&mut self, sizes: &[Rows], enough: impl Fn(&[Measured]) -> bool) -> Result<Calibration, CalibrationError> {
        let mut measured: Vec<Measured> = Vec::new();
        let mut cut_short = None;
        for &rows in sizes {
            if !measured.is_empty() && enough(&measured) {
                break;
            }
            match self.measure(rows, RUNS) {
                Ok((entry, device)) => {
                    self.session.note_device_time(rows, device);
                    measured.push(entry);
                }
                Err(error) if measured.is_empty() => return Err(CalibrationError::DoesNotRun(error.to_string())),
                Err(error) => {
                    cut_short = Some(format!("{rows} rows: {error}"));
                    break;
                }
            }
        }
        let ladder = measured.iter().map(|entry| entry.rows).collect();
        let one = request(self.spec, 1, self.integers);
        let one = one.map_err(|error| CalibrationError::DoesNotRun(error.to_string()))?;
        let (class_dims, units, integers) = (one.class_dims, one.units, self.integers);
        Ok(Calibration { ladder, measured, class_dims, units, integers, cut_short, from_cache: false })
    }

    /// Finds integers that the model bears.
    fn settle_fill(&mut self) -> Result<(), CalibrationError> {
        let mut fault = String::new();
        for integers in [Fill::One, Fill::Zero] {
            self.integers = integers;
            match self.run(1) {
                Ok(_) => return Ok(()),
                Err(RunError::Model(text)) if is_shape_fault(&text) => {
                    return Err(CalibrationError::NotABatchAxis(text));
                }
                Err(error) => fault = error.to_string(),
            }
        }
        Err(CalibrationError::DoesNotRun(fault))
    }

    /// Runs two and three rows: a real batch axis gives as many rows as went in.
    fn confirm_batch_axis(&mut self) -> Result<(), CalibrationError> {
        for rows in [2, 3] {
            match self.run(rows) {
                Ok(_) | Err(RunError::OutOfMemory { .. }) => {}
                Err(error) => return Err(CalibrationError::NotABatchAxis(error.to_string())),
            }
        }
        Ok(())
    }

    /// What counts of so many runs, and how long the device took in it.
    fn measure(&mut self, rows: Rows, runs: usize) -> Result<(Measured, Duration), RunError> {
        let mut best: Option<Trial> = None;
        let mut bytes = ByteSize::ZERO;
        for run in 0..runs {
            let trial = self.run(rows)?;
            bytes = ByteSize(bytes.0.max(trial.bytes.0));
            if run > 0 || runs == 1 || trial.took > MAX_RUN {
                best = Some(best.map_or(trial, |best| trial.or_faster(best)));
            }
            if trial.took > MAX_RUN {
                break;
            }
        }
        let (duration, device) = best.map_or((Duration::MAX, Duration::ZERO), |best| (best.occupied, best.device));
        Ok((Measured { rows, duration, bytes }, device))
    }

    fn run(&mut self, rows: Rows) -> Result<Trial, RunError> {
        let request = Arc::new(request(self.spec, rows, self.integers)?);
        let rows = request.rows;
        let parts = vec![BatchPart { request, start: 0, rows }];
        let batch = Batch { id: BatchId::default(), parts, bytes: ByteSize::ZERO, padded_rows: rows };
        let short = |ran: &Ran| matches!(ran.result, Err(RunError::OutOfMemory { .. }));
        let mut ran = self.session.run(&batch, self.clock);
        // What finds no room may have it once inputs of other sizes have no places any more, and must not leave its own behind.
        if short(&ran) && self.session.let_go_inputs() {
            ran = self.session.run(&batch, self.clock);
            if short(&ran) {
                self.session.let_go_inputs();
            }
        }
        let Ran { result, stages, bytes } = ran;
        result.map(|_| Trial { took: stages.total(), occupied: stages.occupied(), device: stages.device, bytes })
    }
}

/// A synthetic request.
fn request(spec: &Arc<ModelSpec>, rows: Rows, integers: Fill) -> Result<ValidRequest, RunError> {
    let warmup = &spec.settings.warmup;
    let inputs = spec
        .inputs
        .iter()
        .map(|input| {
            let size = |(axis, dim): (usize, &Dim)| match dim {
                _ if spec.batch_axis == Some(axis) => rows as usize,
                Dim::Fixed(size) => *size,
                Dim::Symbol(name) => warmup.dims.get(name).copied().unwrap_or(warmup.default_dim),
                Dim::Any => warmup.default_dim,
            };
            let shape: Shape = input.shape.iter().enumerate().map(size).collect();
            let fill = warmup.inputs.get(&input.name).copied();
            let fill = fill.unwrap_or(if is_float(input.datatype) { Fill::Random } else { integers });
            InputTensor { name: input.name.clone(), tensor: synthetic(input.datatype, shape, fill) }
        })
        .collect();
    let request = InferRequest { inputs, ..InferRequest::default() };
    ValidRequest::new(Arc::clone(spec), request, Rows::MAX).map_err(|fault| RunError::Model(fault.message))
}

/// The run itself went well, and an output has another number of rows than went in.
fn is_shape_fault(text: &str) -> bool {
    text.starts_with("output '") && text.contains("its shape is")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ladder_is_powers_of_two_and_its_top() {
        assert_eq!(ladder(1), [1]);
        assert_eq!(ladder(8), [1, 2, 4, 8]);
        assert_eq!(ladder(12), [1, 2, 4, 8, 12]);
        assert_eq!(ladder(0), [1]);
    }

    #[test]
    fn the_ladder_ends_where_larger_batches_are_slower_per_row() {
        let settings = Settings::default();
        let entry = |rows, ms| Measured { rows, duration: Duration::from_millis(ms), bytes: ByteSize::ZERO };
        let at = |entries: &[Measured]| stop(entries, Duration::ZERO, &settings);
        assert!(!at(&[entry(1, 10), entry(2, 20), entry(4, 60)]));
        assert!(at(&[entry(1, 10), entry(2, 30), entry(4, 60)]));
        assert!(at(&[entry(1, 2000)]));
        assert!(stop(&[entry(1, 1)], Duration::from_secs(3600), &settings));
    }
}
