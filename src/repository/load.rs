//! Loading one model: what was measured becomes a plan and workers. Blocking.

use super::Candidate;
use super::devices::Devices;
use super::layouts::{Layout, layouts};
use super::measure::Measured;
use super::store::Store;
use crate::batcher::{DeviceLoad, ModelLoad, Sample};
use crate::clock::Clock;
use crate::memory::Device;
use crate::model::ModelSpec;
use crate::model::derive::Derived;
use crate::model::settings::{CudaGraph, Group, Packing, Place};
use crate::runtime::calibrate::{self, Calibration};
use crate::runtime::worker::Recorded;
use crate::runtime::{Arenas, Completion, Plan, Recipe, Runtime, Session, SessionOptions, Worker, WorkerHandle};
use crate::scheduler::{self, ModelPlan, Observation, Rounding};
use crate::units::{ByteSize, ClassId, InstanceId, ModelId, Rows};
use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::sync::mpsc;

/// The ladder's top for a model that cannot be measured, where the configuration says `auto`.
const UNMEASURED_MAX_BATCH_SIZE: Rows = 32;

/// What loading needs.
#[derive(Clone, Debug)]
pub struct Loader {
    /// The library.
    pub runtime: Runtime,
    /// Whose memory models live in.
    pub devices: Devices,
    /// Times the calibration.
    pub clock: Clock,
    /// Where workers report.
    pub completions: mpsc::Sender<Completion>,
    /// Cores that models may compute on.
    pub cores: usize,
    /// Numbers for models and instances, never used twice.
    pub ids: Arc<Ids>,
    /// Where what was measured is kept.
    pub store: Store,
}

/// See [`Loader::ids`].
#[derive(Debug, Default)]
pub struct Ids {
    models: AtomicU32,
    instances: AtomicU32,
    sessions: AtomicU32,
}

impl Loader {
    /// Loads a candidate up to running workers.
    ///
    /// # Errors
    /// Why it cannot be served, in words for the operator.
    pub fn load(&self, candidate: &Candidate) -> Result<ModelLoad, String> {
        let on = |settings| Candidate { settings, ..candidate.clone() };
        let parts: Vec<Candidate> = candidate.settings.on_each_device().into_iter().map(on).collect();
        // All are looked for before the first one is measured.
        parts.iter().try_for_each(|part| self.devices.of(&part.settings).map(drop))?;
        let mut measured = Vec::with_capacity(parts.len());
        for part in parts {
            let device = self.devices.of(&part.settings)?;
            if device.gpu().is_some() {
                // Once for all its sessions: they share the weights.
                super::room::check(&part.file, device, self.devices.shared_weights(device, &part.file))?;
            }
            let found = self.recall(&part)?;
            measured.push((part, found));
        }
        let spec = Arc::new(self.settle(candidate, &measured)?);
        let finish = |(part, measured): (Candidate, Measured)| self.finish(&part, measured, &spec);
        let devices = measured.into_iter().map(finish).collect::<Result<Vec<DeviceLoad>, String>>()?;
        Ok(ModelLoad { spec, devices })
    }

    /// What clients are shown of a model, with what was chosen where the settings left the choice.
    fn settle(&self, candidate: &Candidate, measured: &[(Candidate, Measured)]) -> Result<ModelSpec, String> {
        let mut groups = Vec::with_capacity(measured.len());
        let Some((_, first)) = measured.first() else { return Err("it has no device".to_owned()) };
        for (part, other) in measured {
            let (one, other_spec) = (&first.spec, &other.spec);
            if one.batch_axis != other_spec.batch_axis || one.padding != other_spec.padding {
                return Err(
                    "instances: its devices do not agree on which rows may share a batch: give it one of them, or \
                            settle batch_axis and padding"
                        .to_owned(),
                );
            }
            let count = NonZeroU32::new(u32::try_from(other.sessions.len()).unwrap_or(1));
            groups.push(Group { place: Place::of(self.devices.of(&part.settings)?.id()), count });
        }
        let mut spec = first.spec.clone();
        let largest = measured.iter().filter_map(|(_, measured)| ladder(measured).last().copied()).max();
        spec.max_batch_size = largest.unwrap_or(1);
        spec.settings = candidate.settings.clone();
        (spec.settings.place, spec.settings.instances) = (Some(groups[0].place), groups[0].count);
        spec.settings.beside = groups.split_off(1);
        spec.settings.intra_op_threads = u32::try_from(first.layout.threads).ok().and_then(NonZeroU32::new);
        spec.text = super::texts::text_model(candidate, &spec)?;
        Ok(spec)
    }

    pub(super) fn session(&self, candidate: &Candidate, layout: Layout) -> Result<Session, String> {
        let options = SessionOptions { intra_op_threads: layout.threads, optimize: true };
        let label =
            format!("{}/{}/{}", candidate.name, candidate.version, self.ids.sessions.fetch_add(1, Ordering::Relaxed));
        let device = self.devices.of(&candidate.settings)?;
        if let Some(reason) = device.lost() {
            return Err(format!("its device is lost: {reason}"));
        }
        if device.gpu().is_none() {
            super::room::check(&candidate.file, device, ByteSize::ZERO)?;
        }
        let arenas = Arenas::new(device, &label, candidate.settings.default_priority);
        let arenas = arenas.map_err(|error| error.to_string())?;
        let cuda = self.devices.cuda_options(device, candidate)?;
        Session::load_with(&self.runtime, &candidate.file, options, (arenas, &cuda))
    }

    /// What is to be recorded of a model, for a session that has a GPU.
    fn recording(&self, candidate: &Candidate, calibration: &Calibration) -> Result<Option<Plan>, String> {
        let settings = &candidate.settings;
        let device = self.devices.of(settings)?;
        if device.gpu().is_none() || settings.cuda_graph == CudaGraph::Off {
            return Ok(None);
        }
        let number = self.ids.sessions.fetch_add(1, Ordering::Relaxed);
        let label = format!("{}/{}/{number}", candidate.name, candidate.version);
        let cuda = self.devices.cuda_options(device, candidate)?;
        let recipe = Recipe::new(&self.runtime, &candidate.file, cuda, (device, &label, settings.default_priority))?;
        let (sizes, integers) = (calibration.ladder.clone(), calibration.integers);
        Ok(Some(Plan { recipe, sizes, mode: settings.cuda_graph, integers }))
    }

    /// The layouts of a model to choose from, the preferred one first. A GPU computes one run at a time well enough.
    pub(super) fn layouts(&self, candidate: &Candidate) -> Result<Vec<Layout>, String> {
        let settings = &candidate.settings;
        if self.devices.of(settings)?.gpu().is_none() {
            return Ok(layouts(settings, self.cores));
        }
        let whole = |value: Option<std::num::NonZeroU32>| value.map_or(1, |value| value.get() as usize);
        Ok(vec![Layout { instances: whole(settings.instances), threads: whole(settings.intra_op_threads) }])
    }

    /// Records what the server would, with the first session of a measured model, on this thread. Answers the sizes, and why
    /// there are no more.
    ///
    /// # Errors
    /// If the device has no room for it at all.
    pub fn record(
        &self,
        candidate: &Candidate,
        measured: &mut Measured,
    ) -> Result<(Vec<Rows>, Option<String>), String> {
        let (Ok(calibration), Some(session)) = (&mut measured.calibration, measured.sessions.first_mut()) else {
            return Ok(Default::default());
        };
        let Some(plan) = self.recording(candidate, calibration)? else { return Ok(Default::default()) };
        session.set_spec(Arc::new(measured.spec.clone()));
        session.plan_recording(plan);
        for (rows, took) in session.record(self.clock) {
            calibration.note_recorded(rows, took);
        }
        Ok((session.recorded(), session.unrecorded().map(str::to_owned)))
    }

    pub(super) fn spec(&self, candidate: &Candidate, session: &Session, derived: Derived) -> ModelSpec {
        ModelSpec {
            id: ModelId(self.ids.models.fetch_add(1, Ordering::Relaxed)),
            name: candidate.name.clone(),
            version: candidate.version,
            inputs: session.graph().inputs.clone(),
            outputs: session.graph().outputs.clone(),
            max_batch_size: derived.batch_axis.map_or(1, |_| UNMEASURED_MAX_BATCH_SIZE),
            batch_axis: derived.batch_axis,
            unbatched_reason: derived.unbatched_reason,
            padding: derived.padding,
            settings: candidate.settings.clone(),
            text: None,
        }
    }

    /// Starts the workers of one device.
    fn finish(&self, candidate: &Candidate, measured: Measured, spec: &Arc<ModelSpec>) -> Result<DeviceLoad, String> {
        let ladder = ladder(&measured);
        let Measured { spec: own, layout, sessions, mut calibration, lengths, difference } = measured;
        let device = self.devices.of(&candidate.settings)?;
        // What memory leaves changes by a few rows all the time.
        let rounding = if sessions.iter().any(Session::plans_by_shape) { Rounding::Down } else { Rounding::Off };
        let (mut workers, mut recorded) = (Vec::new(), Vec::new());
        for mut session in sessions {
            session.set_spec(Arc::clone(spec));
            if let Ok(calibration) = &calibration
                && let Some(plan) = self.recording(candidate, calibration)?
            {
                session.plan_recording(plan);
            }
            let (worker, recording) = self.worker(session, spec.settings.pipeline)?;
            workers.push(worker);
            recorded.push(recording);
        }
        // Recorded by the threads that will play; nothing is served before they are through.
        for (rows, took) in recorded.into_iter().filter_map(|recorded| recorded.recv().ok()).flatten() {
            calibration.iter_mut().for_each(|calibration| calibration.note_recorded(rows, took));
        }
        tracing::info!(
            model = spec.name,
            version = spec.version,
            device = %Place::of(device.id()),
            instances = layout.instances,
            threads = layout.threads,
            max_batch_size = ladder.last().copied().unwrap_or(1),
            batch_axis = spec.batch_axis,
            unbatched_reason = spec.unbatched_reason,
            padding_difference = difference,
            from_cache = calibration.as_ref().is_ok_and(|calibration| calibration.from_cache),
            "model is loaded"
        );
        // Each device's own number, of which the first is the model's.
        let plan = plan((own.id, spec), (&workers, device), (ladder, rounding));
        let lengths = lengths.iter().map(|length| &length.calibration);
        let samples = calibration.iter().chain(lengths).flat_map(samples).collect();
        Ok(DeviceLoad { plan, workers, samples })
    }

    fn worker(&self, session: Session, pipeline: u32) -> Result<(WorkerHandle, Recorded), String> {
        let instance = InstanceId(self.ids.instances.fetch_add(1, Ordering::Relaxed));
        let worker = Worker { instance, session, completions: self.completions.clone(), clock: self.clock };
        worker.spawn_recording(pipeline as usize).map_err(|error| format!("its thread cannot be started: {error}"))
    }
}

/// The batch sizes of a measured model.
fn ladder(measured: &Measured) -> Vec<Rows> {
    let Measured { spec, calibration, .. } = measured;
    match calibration {
        Ok(calibration) => calibration.ladder.clone(),
        Err(_) if spec.batch_axis.is_none() => vec![1],
        Err(_) => calibrate::ladder(spec.settings.max_batch_size.unwrap_or(UNMEASURED_MAX_BATCH_SIZE)),
    }
}

fn plan(
    (model, spec): (ModelId, &ModelSpec),
    (workers, device): (&[WorkerHandle], &Device),
    (ladder, rounding): (Vec<Rows>, Rounding),
) -> ModelPlan {
    let settings = &spec.settings;
    ModelPlan {
        model,
        device: device.id(),
        instances: workers.iter().map(|worker| worker.instance).collect(),
        ladder,
        rounding,
        pipeline: settings.pipeline,
        // On a GPU the inputs of the next batch are copied while one runs. On the host nothing of it is there before its turn, but
        // what the one before has put out lives on beside its run, and how much that is depends on the model: nothing is taken over.
        staged_unit: device.gpu().map(|_| ByteSize(spec.widest_element() as u64)),
        max_queue_delay: settings.max_queue_delay,
        max_gather_delay: settings.max_gather_delay,
        max_queue_rows: settings.max_queue_rows,
        max_queue_bytes: settings.max_queue_bytes,
        priority_levels: settings.priority_levels,
        knee_tolerance: settings.knee_tolerance,
        packing: if settings.packing == Packing::Fifo { scheduler::Packing::Fifo } else { scheduler::Packing::Near },
        observations: Vec::new(),
    }
}

fn samples(calibration: &Calibration) -> Vec<Sample> {
    let sample = |observation| Sample { dims: calibration.class_dims.clone(), observation };
    observations(calibration).into_iter().map(sample).collect()
}

/// What was measured, as the scheduler learns it. The class is not numbered yet.
#[must_use]
pub fn observations(calibration: &Calibration) -> Vec<Observation> {
    let observation = |entry: &calibrate::Measured| Observation {
        class: ClassId::default(),
        units: calibration.units,
        rows: entry.rows,
        duration: entry.duration,
        bytes: entry.bytes,
    };
    calibration.measured.iter().map(observation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{DeviceOptions, HOST_ALIGNMENT, Host};
    use crate::units::DeviceId;

    #[test]
    fn batches_on_the_host_take_no_run_memory_over() {
        let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
        let options = DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT };
        let device = Device::new(Box::new(Host::new()), options);
        let spec = ModelSpec::of_nothing();
        assert_eq!(plan((spec.id, &spec), (&[], &device), (vec![1], Rounding::Off)).staged_unit, None);
    }
}
