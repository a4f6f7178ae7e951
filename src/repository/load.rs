//! Loading one model: session, axes, calibration, the layout of instances and threads, workers. Blocking.

use super::Candidate;
use crate::batcher::{ModelLoad, Sample};
use crate::clock::Clock;
use crate::memory::Device;
use crate::model::derive::{Derived, derive};
use crate::model::settings::BatchAxis;
use crate::model::{ModelSpec, Settings};
use crate::runtime::calibrate::{self, Calibration, CalibrationError};
use crate::runtime::{Arenas, Completion, Runtime, Session, SessionOptions, Worker, WorkerHandle};
use crate::scheduler::{ModelPlan, Observation};
use crate::units::{DeviceId, InstanceId, ModelId, Rows};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::sync::mpsc;

/// The ladder's top for a model that cannot be measured, where the configuration says `auto`.
const UNMEASURED_MAX_BATCH_SIZE: Rows = 32;
/// More instances than one must be this much faster, since each holds the weights once more.
const INSTANCES_MUST_GAIN: f64 = 1.05;
/// A file larger than this is not loaded several times just to find out whether that pays.
const MAX_FILE_TO_TRY_INSTANCES: u64 = 1 << 30;

/// What loading needs.
#[derive(Clone, Debug)]
pub struct Loader {
    /// The library.
    pub runtime: Runtime,
    /// Whose memory models live in.
    pub device: Device,
    /// Times the calibration.
    pub clock: Clock,
    /// Where workers report.
    pub completions: mpsc::Sender<Completion>,
    /// Cores that models may compute on.
    pub cores: usize,
    /// Numbers for models and instances, never used twice.
    pub ids: Arc<Ids>,
}

/// See [`Loader::ids`].
#[derive(Debug, Default)]
pub struct Ids {
    models: AtomicU32,
    instances: AtomicU32,
    sessions: AtomicU32,
}

/// How a model uses the cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Sessions, each with a thread of its own.
    pub instances: usize,
    /// Threads that compute one run.
    pub threads: usize,
}

/// A layout with its sessions and what they measured.
struct Measured {
    layout: Layout,
    sessions: Vec<Session>,
    calibration: Option<Calibration>,
}

impl Loader {
    /// Loads a candidate up to running workers.
    ///
    /// # Errors
    /// Why it cannot be served, in words for the operator.
    pub fn load(&self, candidate: &Candidate) -> Result<ModelLoad, String> {
        let settings = &candidate.settings;
        let layouts = layouts(settings, self.cores);
        let first = self.session(candidate, layouts[0])?;
        let derived = derive(&candidate.name, first.graph(), settings).map_err(|faults| faults.join("; "))?;
        let spec = self.spec(candidate, &first, derived);
        let (spec, first) = self.measure_first(candidate, spec, layouts[0], first)?;
        let mut best = first;
        for &layout in &layouts[1..] {
            if std::fs::metadata(&candidate.file).is_ok_and(|file| file.len() <= MAX_FILE_TO_TRY_INSTANCES)
                && let Some(other) = self.measure_other(candidate, &spec, layout)
                && rate(&other) > INSTANCES_MUST_GAIN * rate(&best)
            {
                best = other;
            }
        }
        self.finish(spec, best)
    }

    fn session(&self, candidate: &Candidate, layout: Layout) -> Result<Session, String> {
        let options = SessionOptions { intra_op_threads: layout.threads, optimize: true };
        let label =
            format!("{}/{}/{}", candidate.name, candidate.version, self.ids.sessions.fetch_add(1, Ordering::Relaxed));
        let arenas = Arenas::new(&self.device, &label, candidate.settings.default_priority);
        let arenas = arenas.map_err(|error| error.to_string())?;
        Session::load(&self.runtime, &candidate.file, options, arenas)
    }

    fn spec(&self, candidate: &Candidate, session: &Session, derived: Derived) -> ModelSpec {
        ModelSpec {
            id: ModelId(self.ids.models.fetch_add(1, Ordering::Relaxed)),
            name: candidate.name.clone(),
            version: candidate.version,
            inputs: session.graph().inputs.clone(),
            outputs: session.graph().outputs.clone(),
            max_batch_size: derived.batch_axis.map_or(1, |_| UNMEASURED_MAX_BATCH_SIZE),
            batch_axis: derived.batch_axis,
            unbatched_reason: derived.unbatched_reason,
            settings: candidate.settings.clone(),
        }
    }

    /// Measures the first layout; a batch axis that turns out not to be one is given up, unless somebody insists on it.
    fn measure_first(
        &self,
        candidate: &Candidate,
        mut spec: ModelSpec,
        layout: Layout,
        mut session: Session,
    ) -> Result<(ModelSpec, Measured), String> {
        let calibration = loop {
            let shared = Arc::new(spec.clone());
            session.set_spec(Arc::clone(&shared));
            match calibrate::calibrate(&mut session, &shared, self.clock) {
                Ok(calibration) => break Some(calibration),
                Err(CalibrationError::NotABatchAxis(fault)) if spec.batch_axis.is_some() => {
                    if matches!(spec.settings.batch_axis, BatchAxis::Axis(_)) {
                        return Err(format!("batch_axis in model.toml does not fit: {fault}"));
                    }
                    spec.batch_axis = None;
                    spec.max_batch_size = 1;
                    spec.unbatched_reason = Some(format!("{fault}, so rows could not be given back to their requests"));
                }
                Err(error) => {
                    tracing::warn!(
                        model = candidate.name, version = candidate.version, %error,
                        "the model does not run on synthetic rows, so its speed is unknown; [warmup] in model.toml can help"
                    );
                    break None;
                }
            }
        };
        let mut sessions = vec![session];
        for _ in 1..layout.instances {
            sessions.push(self.session(candidate, layout)?);
        }
        Ok((spec, Measured { layout, sessions, calibration }))
    }

    /// Measures another layout with all its sessions at work at once. `None` if it does not run.
    fn measure_other(&self, candidate: &Candidate, spec: &ModelSpec, layout: Layout) -> Option<Measured> {
        let shared = Arc::new(spec.clone());
        let mut sessions = Vec::new();
        for _ in 0..layout.instances {
            let mut session = self.session(candidate, layout).ok()?;
            session.set_spec(Arc::clone(&shared));
            sessions.push(session);
        }
        let clock = self.clock;
        let results: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = sessions
                .iter_mut()
                .map(|session| scope.spawn(|| calibrate::calibrate(session, &shared, clock)))
                .collect();
            threads.into_iter().map(std::thread::ScopedJoinHandle::join).collect()
        });
        let mut slowest: Option<Calibration> = None;
        for result in results {
            let calibration = result.ok()?.ok()?;
            slowest = Some(match slowest {
                Some(other) => calibrate::slower(other, calibration),
                None => calibration,
            });
        }
        Some(Measured { layout, sessions, calibration: slowest })
    }

    fn finish(&self, mut spec: ModelSpec, measured: Measured) -> Result<ModelLoad, String> {
        let Measured { layout, sessions, calibration } = measured;
        let ladder = match &calibration {
            Some(calibration) => calibration.ladder.clone(),
            None if spec.batch_axis.is_none() => vec![1],
            None => calibrate::ladder(spec.settings.max_batch_size.unwrap_or(UNMEASURED_MAX_BATCH_SIZE)),
        };
        spec.max_batch_size = ladder.last().copied().unwrap_or(1);
        let spec = Arc::new(spec);
        let mut workers = Vec::new();
        for mut session in sessions {
            session.set_spec(Arc::clone(&spec));
            workers.push(self.worker(session, spec.settings.pipeline)?);
        }
        tracing::info!(
            model = spec.name,
            version = spec.version,
            instances = layout.instances,
            threads = layout.threads,
            max_batch_size = spec.max_batch_size,
            batch_axis = spec.batch_axis,
            unbatched_reason = spec.unbatched_reason,
            "model is loaded"
        );
        let plan = plan(&spec, &workers, ladder);
        Ok(ModelLoad { plan, workers, samples: samples(calibration), spec })
    }

    fn worker(&self, session: Session, pipeline: u32) -> Result<WorkerHandle, String> {
        let instance = InstanceId(self.ids.instances.fetch_add(1, Ordering::Relaxed));
        let worker = Worker { instance, session, completions: self.completions.clone(), clock: self.clock };
        worker.spawn(pipeline as usize).map_err(|error| format!("its thread cannot be started: {error}"))
    }
}

/// The layouts to choose from, the preferred one first.
fn layouts(settings: &Settings, cores: usize) -> Vec<Layout> {
    let whole = |value: Option<std::num::NonZeroU32>| value.map(|value| value.get() as usize);
    match (whole(settings.instances), whole(settings.intra_op_threads)) {
        (Some(instances), Some(threads)) => vec![Layout { instances, threads }],
        (Some(instances), None) => vec![Layout { instances, threads: (cores / instances).max(1) }],
        (None, Some(threads)) => vec![Layout { instances: (cores / threads).max(1), threads }],
        (None, None) => {
            let mut layouts = vec![Layout { instances: 1, threads: cores }];
            let mut instances = 2;
            while instances <= cores {
                layouts.push(Layout { instances, threads: cores / instances });
                instances *= 2;
            }
            layouts
        }
    }
}

/// Rows per second of all instances together at the best batch size; zero if unknown.
fn rate(measured: &Measured) -> f64 {
    let Some(calibration) = &measured.calibration else { return 0.0 };
    let rates = calibration.measured.iter().map(|entry| f64::from(entry.rows) / entry.duration.as_secs_f64().max(1e-9));
    measured.layout.instances as f64 * rates.fold(0.0, f64::max)
}

fn plan(spec: &ModelSpec, workers: &[WorkerHandle], ladder: Vec<Rows>) -> ModelPlan {
    let settings = &spec.settings;
    ModelPlan {
        model: spec.id,
        device: DeviceId(0),
        instances: workers.iter().map(|worker| worker.instance).collect(),
        ladder,
        round_up: false,
        pipeline: settings.pipeline,
        max_queue_delay: settings.max_queue_delay,
        max_queue_rows: settings.max_queue_rows,
        max_queue_bytes: settings.max_queue_bytes,
        priority_levels: settings.priority_levels,
        knee_tolerance: settings.knee_tolerance,
        observations: Vec::new(),
    }
}

fn samples(calibration: Option<Calibration>) -> Vec<Sample> {
    let Some(calibration) = calibration else { return Vec::new() };
    let sample = |entry: &calibrate::Measured| Sample {
        dims: calibration.class_dims.clone(),
        observation: Observation {
            class: crate::units::ClassId::default(),
            units: calibration.units,
            rows: entry.rows,
            duration: entry.duration,
            bytes: entry.bytes,
        },
    };
    calibration.measured.iter().map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroU32;

    #[test]
    fn what_is_configured_leaves_nothing_to_choose() {
        let settings = |instances, threads| Settings {
            instances: NonZeroU32::new(instances),
            intra_op_threads: NonZeroU32::new(threads),
            ..Settings::default()
        };
        assert_eq!(layouts(&settings(3, 2), 8), [Layout { instances: 3, threads: 2 }]);
        assert_eq!(layouts(&settings(3, 0), 8), [Layout { instances: 3, threads: 2 }]);
        assert_eq!(layouts(&settings(0, 16), 8), [Layout { instances: 1, threads: 16 }]);
        let open: Vec<(usize, usize)> = layouts(&settings(0, 0), 4).iter().map(|l| (l.instances, l.threads)).collect();
        assert_eq!(open, [(1, 4), (2, 2), (4, 1)]);
        assert_eq!(layouts(&settings(0, 0), 1), [Layout { instances: 1, threads: 1 }]);
    }
}
