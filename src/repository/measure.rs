//! Measuring one model before it serves: session, axes, calibration, the layout of instances and threads. Blocking.

use super::Candidate;
use super::layouts::{Contest, Layout, best, rate};
use super::load::Loader;
use super::room::on_disk;
use crate::model::ModelSpec;
use crate::model::derive::derive;
use crate::model::settings::BatchAxis;
use crate::runtime::Session;
use crate::runtime::calibrate::{self, Calibration, CalibrationError};
use crate::runtime::lengths::{self, Length};
use crate::runtime::padding::{self, Confirmed};
use crate::units::{ByteSize, Instant, Rows};
use std::sync::{Arc, Barrier};
use std::time::Duration;

/// A model larger than this is not loaded several times just to find out whether that pays.
const MOST_TO_TRY_INSTANCES: ByteSize = ByteSize(1 << 30);
/// One round of a contest between two layouts takes about so long for each, or one run.
const ROUND: Duration = Duration::from_millis(50);
/// The most runs in a round.
const MAX_RUNS_PER_ROUND: u32 = 64;

/// A model that could run, in the layout that was chosen for it.
#[derive(Debug)]
pub struct Measured {
    /// What it is. The batch axis is confirmed, the largest batch size not settled yet.
    pub spec: ModelSpec,
    /// How it uses the cores.
    pub layout: Layout,
    /// One session for each instance.
    pub sessions: Vec<Session>,
    /// What was measured, or why the model does not run on synthetic rows.
    pub calibration: Result<Calibration, CalibrationError>,
    /// The same for other lengths of rows, where rows of different lengths share a batch.
    pub lengths: Vec<Length>,
    /// How much padding changes answers, as a part of the largest value; `None`: rows are not padded.
    pub difference: Option<f64>,
}

impl Measured {
    /// Rows per second of all its sessions at their best batch size; zero if that is not known.
    #[must_use]
    pub fn rows_per_second(&self) -> f64 {
        self.calibration.as_ref().map_or(0.0, |calibration| rate(self.layout, calibration))
    }
}

impl Loader {
    /// Loads a candidate, measures it, and chooses its layout.
    ///
    /// # Errors
    /// Why it cannot be served, in words for the operator.
    pub fn measure(&self, candidate: &Candidate) -> Result<Measured, String> {
        let layouts = self.layouts(candidate)?;
        let mut fewer = self.measure_first(candidate, layouts[0])?;
        let small = on_disk(&candidate.file) <= MOST_TO_TRY_INSTANCES;
        // Contests may take as long as one calibration, all of them together.
        let mut left = candidate.settings.warmup.seconds;
        for &layout in layouts[1..].iter().filter(|_| small) {
            let Some(mut more) = self.measure_other(candidate, &fewer, layout) else { continue };
            let started = self.clock.now();
            if self.more_pays(&mut more, &mut fewer, started + left) {
                fewer = more;
            }
            left = left.saturating_sub(self.clock.now().since(started));
        }
        self.measure_lengths(&mut fewer);
        Ok(fewer)
    }

    /// Measures rows of other lengths than the calibration's, with all sessions at once.
    pub(super) fn measure_lengths(&self, measured: &mut Measured) {
        let Ok(calibration) = &measured.calibration else { return };
        let spec = Arc::new(measured.spec.clone());
        let known = (calibration.ladder.as_slice(), calibration.integers);
        let found = at_once(&mut measured.sessions, |session| {
            session.set_spec(Arc::clone(&spec));
            lengths::measure_lengths(session, &spec, known, self.clock)
        });
        measured.lengths = found.into_iter().reduce(slower).unwrap_or_default();
    }

    /// Keeps of the padding what runs confirm: a model whose answers depend on it gets none. Answers how much they do.
    pub(super) fn confirm_padding(
        &self,
        candidate: &Candidate,
        session: &mut Session,
        spec: &mut ModelSpec,
    ) -> Option<f64> {
        spec.padding.as_ref()?;
        let (model, version) = (&candidate.name, candidate.version);
        match padding::confirm_padding(session, spec, self.clock) {
            Ok(Confirmed { plan, difference }) => {
                let dims: Vec<String> =
                    plan.dims.iter().map(|dim| format!("{} to {:?}", dim.name, dim.lengths)).collect();
                tracing::info!(
                    model,
                    version,
                    padded = dims.join(", "),
                    difference,
                    "rows of different lengths share a batch"
                );
                spec.padding = Some(plan);
                Some(difference)
            }
            Err(reason) => {
                tracing::warn!(
                    model,
                    version,
                    reason,
                    "the model's rows are not padded: only equal shapes share a batch"
                );
                spec.padding = None;
                None
            }
        }
    }

    /// Lets two layouts run their best batch in turn.
    fn more_pays(&self, more: &mut Measured, fewer: &mut Measured, until: Instant) -> bool {
        let mut contest = Contest::new(more.rows_per_second(), fewer.rows_per_second());
        while contest.is_open() && self.clock.now() < until {
            let rates = if contest.more_goes_first() {
                let first = self.round(more);
                (first, self.round(fewer))
            } else {
                let first = self.round(fewer);
                (self.round(more), first)
            };
            let (Some(more), Some(fewer)) = rates else { break };
            contest.add(more, fewer);
        }
        let pays = contest.more_pays();
        tracing::debug!(more = ?more.layout, fewer = ?fewer.layout, ?contest, pays, "layouts are compared");
        pays
    }

    /// Rows per second of all sessions together at the best batch size of the contest, for about [`ROUND`].
    fn round(&self, measured: &mut Measured) -> Option<f64> {
        let calibration = measured.calibration.as_ref().ok()?;
        let (best, integers) = (best(measured.layout, calibration)?, calibration.integers);
        let runs = (ROUND.as_secs_f64() / best.duration.as_secs_f64().max(1e-9)).clamp(1.0, MAX_RUNS_PER_ROUND.into());
        let (rows, runs) = (best.rows, runs as u32);
        let spec = Arc::new(measured.spec.clone());
        // All begin together, or the first would run alone for a while.
        let start = Barrier::new(measured.sessions.len());
        let took = at_once(&mut measured.sessions, |session| {
            start.wait();
            calibrate::repeat(session, &spec, (rows, runs), (integers, self.clock))
        });
        let took: Vec<Duration> = took.into_iter().collect::<Result<_, _>>().ok()?;
        let slowest = took.iter().max()?.as_secs_f64();
        Some(took.len() as f64 * f64::from(rows) * f64::from(runs) / slowest.max(1e-9))
    }

    /// Measures these sizes, ascending, in the layout that was chosen. Those that do not run are left out.
    ///
    /// # Errors
    /// If not even the first of them runs.
    pub fn measure_sizes(&self, measured: &mut Measured, sizes: &[Rows]) -> Result<(), CalibrationError> {
        let spec = Arc::new(measured.spec.clone());
        let measure = |session: &mut Session| calibrate::measure_sizes(session, &spec, sizes, self.clock);
        measured.calibration = Ok(together(&mut measured.sessions, measure)?);
        Ok(())
    }

    /// Measures the first layout; a batch axis that turns out not to be one is given up, unless somebody insists on it.
    fn measure_first(&self, candidate: &Candidate, layout: Layout) -> Result<Measured, String> {
        let mut session = self.session(candidate, layout)?;
        let derived =
            derive(&candidate.name, session.graph(), &candidate.settings).map_err(|faults| faults.join("; "))?;
        let mut spec = self.spec(candidate, &session, derived);
        let mut difference = self.confirm_padding(candidate, &mut session, &mut spec);
        let mut sessions = vec![session];
        for _ in 1..layout.instances {
            sessions.push(self.session(candidate, layout)?);
        }
        loop {
            let calibration = self.calibrate(&mut sessions, &spec);
            match &calibration {
                Err(CalibrationError::NotABatchAxis(fault)) if spec.batch_axis.is_some() => {
                    if matches!(spec.settings.batch_axis, BatchAxis::Axis(_)) {
                        return Err(format!("batch_axis in model.toml does not fit: {fault}"));
                    }
                    (spec.batch_axis, spec.padding, difference) = (None, None, None);
                    spec.max_batch_size = 1;
                    spec.unbatched_reason = Some(format!("{fault}, so rows could not be given back to their requests"));
                }
                Err(error) => {
                    tracing::warn!(
                        model = candidate.name, version = candidate.version, %error,
                        "the model does not run on synthetic rows, so its speed is unknown; [warmup] in model.toml can help"
                    );
                    return Ok(Measured { spec, layout, sessions, calibration, lengths: Vec::new(), difference });
                }
                Ok(_) => return Ok(Measured { spec, layout, sessions, calibration, lengths: Vec::new(), difference }),
            }
        }
    }

    /// Measures another layout. `None` if it does not run.
    fn measure_other(&self, candidate: &Candidate, known: &Measured, layout: Layout) -> Option<Measured> {
        let spec = &known.spec;
        let sessions: Result<Vec<Session>, String> =
            (0..layout.instances).map(|_| self.session(candidate, layout)).collect();
        let mut sessions = sessions
            .inspect_err(|reason| tracing::info!(model = candidate.name, ?layout, reason, "a layout is not tried"))
            .ok()?;
        let calibration = self.calibrate(&mut sessions, spec).ok()?;
        Some(Measured {
            spec: spec.clone(),
            layout,
            sessions,
            calibration: Ok(calibration),
            lengths: Vec::new(),
            difference: known.difference,
        })
    }

    /// Runs the ladder on all sessions at once.
    fn calibrate(&self, sessions: &mut [Session], spec: &ModelSpec) -> Result<Calibration, CalibrationError> {
        let spec = Arc::new(spec.clone());
        sessions.iter_mut().for_each(|session| session.set_spec(Arc::clone(&spec)));
        together(sessions, |session| calibrate::calibrate(session, &spec, self.clock))
    }
}

/// The lengths that two sessions have measured, each as slow as in the slower one.
fn slower(a: Vec<Length>, mut b: Vec<Length>) -> Vec<Length> {
    let both = a.into_iter().filter_map(|a| {
        let at = b.iter().position(|b| b.size == a.size)?;
        let calibration = calibrate::slower(a.calibration, b.swap_remove(at).calibration);
        Some(Length { size: a.size, calibration })
    });
    both.collect()
}

/// Measures all sessions at once, as they will run: what holds for the slowest of them.
fn together(
    sessions: &mut [Session],
    measure: impl Fn(&mut Session) -> Result<Calibration, CalibrationError> + Sync,
) -> Result<Calibration, CalibrationError> {
    let results = at_once(sessions, measure);
    let slower = |a: Calibration, b| Ok(calibrate::slower(a, b?));
    let mut results = results.into_iter();
    let first = results.next().unwrap_or_else(|| Err(CalibrationError::DoesNotRun("there is no session".to_owned())));
    results.try_fold(first?, slower)
}

/// Does the same with every session, each on a thread of its own.
pub(super) fn at_once<T: Send>(sessions: &mut [Session], work: impl Fn(&mut Session) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = sessions.iter_mut().map(|session| scope.spawn(move || work(session))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, T>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}
