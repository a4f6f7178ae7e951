//! Recorded runs: for some small batch sizes a session of its own, whose varying dimensions are fixed, records what it puts
//! into the stream, and from then on one call plays all of it back. What is fixed needs no arithmetic on shapes, which is
//! what keeps many models from being recorded.
//!
//! A recording remembers addresses: its inputs, its outputs, and all that it allocated on the way. So its run memory is an
//! arena that gives nothing back; the recordings of one instance share it, for they play one after the other. Under pressure
//! they are dropped first, all of an instance at once.

use super::allocator::{Arenas, SessionAllocator};
use super::bound::{self, DeviceTensor, Place};
use super::cuda::{self, CudaOptions};
use super::lanes::Recorded;
use super::weights::Weights;
use super::{RunError, Runtime};
use crate::clock::Clock;
use crate::memory::cuda::Stream;
use crate::memory::{Arena, ArenaKind, ArenaOptions, Block, Device};
use crate::model::{Dim, ModelSpec};
use crate::tensor::Shape;
use crate::units::{ByteSize, Rows};
use ort::memory::MemoryInfo;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{IoBinding, Session};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// While one records, no other thread of this process may begin to.
static RECORDING: Mutex<()> = Mutex::new(());

/// What it takes to record runs of a model.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The library.
    pub runtime: Runtime,
    /// The model file.
    pub file: PathBuf,
    /// Options of the provider, and the weights that all sessions of the model share.
    pub cuda: CudaOptions,
    /// Where what a recording keeps lies: inputs, outputs, constants.
    pub kept: Arena,
    /// Where its run memory lies, which all recordings of an instance share, and which nobody else may use.
    pub scratch: Arena,
}

impl Recipe {
    /// A recipe with arenas of its own.
    ///
    /// # Errors
    /// If the device has no addresses left.
    pub fn new(
        runtime: &Runtime,
        file: &Path,
        cuda: CudaOptions,
        (device, label, priority): (&Device, &str, u32),
    ) -> Result<Self, String> {
        let address_space = usize::try_from(device.stats().total.0).unwrap_or(usize::MAX >> 8);
        let arena = |name: &str| {
            let (label, kind) = (format!("{label}/{name}"), ArenaKind::Buffers);
            let made = device.arena(ArenaOptions { label, kind, priority, address_space });
            made.map_err(|error| error.to_string())
        };
        let (kept, scratch) = (arena("recorded")?, arena("recorded-run")?);
        Ok(Self { runtime: runtime.clone(), file: file.to_owned(), cuda, kept, scratch })
    }
}

/// The recordings of one instance.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    state: Mutex<State>,
    /// The device plays one of them: nobody may drop it.
    busy: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    recordings: Vec<Recording>,
    /// Lies over all run memory that recordings remember, so that the arena gives none of it back or to anyone.
    guard: Option<Block>,
}

/// Plays a recording, behind what is in the stream already.
pub(super) type Launch<'a> = &'a mut dyn FnMut() -> Result<(), RunError>;

/// One recorded run.
struct Recording {
    rows: Rows,
    /// The shape of each input.
    inputs: Vec<Shape>,
    bytes: ByteSize,
    session: Session,
    binding: IoBinding,
    recorded: Recorded,
    _weights: Option<Arc<Weights>>,
    // After the session, which frees into it.
    _allocator: SessionAllocator,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("rows", &self.rows).field("inputs", &self.inputs).finish_non_exhaustive()
    }
}

impl Graphs {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The rows of the smallest recording for a batch of so many rows with these shapes, whose batch axis does not count.
    pub(super) fn rows_for(&self, spec: &ModelSpec, rows: Rows, shapes: &[&Shape]) -> Option<Rows> {
        let fits = |recording: &&Recording| {
            recording.rows >= rows && recording.inputs.iter().zip(shapes).all(|(own, other)| same(spec, own, other))
        };
        self.lock().recordings.iter().filter(fits).map(|recording| recording.rows).min()
    }

    /// Lets `play` use the recording of so many rows; `None` if it was dropped in the meantime. It counts as playing until
    /// [`Self::played`].
    pub(super) fn play<T>(&self, rows: Rows, play: impl FnOnce(&Recorded, Launch<'_>) -> T) -> Option<(T, ByteSize)> {
        let mut state = self.lock();
        let recording = state.recordings.iter_mut().find(|recording| recording.rows == rows)?;
        self.busy.store(true, Ordering::SeqCst);
        let Recording { session, binding, recorded, bytes, .. } = recording;
        let mut launch = || {
            let ran = session.run_binding(binding);
            ran.map(|_| ()).map_err(|error| RunError::Model(error.message().to_owned()))
        };
        Some((play(recorded, &mut launch), *bytes))
    }

    /// The device is through with what it played.
    pub(super) fn played(&self) {
        self.busy.store(false, Ordering::SeqCst);
    }

    /// Drops all recordings, unless one is being played; whether there were any.
    pub(super) fn drop_all(&self) -> bool {
        // Held up by whoever plays or records: then it is asked again soon.
        let Ok(mut state) = self.state.try_lock() else { return false };
        if self.busy.load(Ordering::SeqCst) || state.recordings.is_empty() {
            return false;
        }
        tracing::info!(recordings = state.recordings.len(), "recorded runs are dropped for their memory");
        state.recordings.clear();
        state.guard = None;
        true
    }

    /// Drops the recording of so many rows.
    pub(super) fn forget(&self, rows: Rows) {
        self.lock().recordings.retain(|recording| recording.rows != rows);
    }

    /// How many are recorded.
    pub(super) fn count(&self) -> usize {
        self.lock().recordings.len()
    }

    /// The sizes that are recorded.
    pub(super) fn sizes(&self) -> Vec<Rows> {
        self.lock().recordings.iter().map(|recording| recording.rows).collect()
    }

    /// Records runs of so many rows. `example` has the shapes of one run that went well without being recorded.
    ///
    /// # Errors
    /// Why the model cannot be recorded.
    pub(super) fn record(
        &self,
        recipe: &Recipe,
        (spec, stream): (&ModelSpec, &Stream),
        (rows, example): (Rows, &Example),
        clock: Clock,
    ) -> Result<(), String> {
        let _one_at_a_time = RECORDING.lock().unwrap_or_else(PoisonError::into_inner);
        let overrides = overrides(spec, rows, &example.inputs)?;
        let (weights, run, buffers) = (recipe.kept.clone(), recipe.scratch.clone(), recipe.kept.clone());
        let allocator = SessionAllocator::new(Arenas { weights, run, buffers })?;
        let build = || -> ort::Result<Session> {
            let mut builder = Session::builder(&recipe.runtime.environment)?
                .with_optimization_level(GraphOptimizationLevel::All)?
                .with_intra_threads(1)?
                .with_inter_threads(1)?
                .with_memory_pattern(false)?
                .with_env_allocators()?
                .with_device_allocated_initializers()?;
            for (name, size) in &overrides {
                builder = builder.with_dimension_override(name, *size)?;
            }
            cuda::with_providers(builder, stream, &recipe.cuda, true)?.commit_from_file(&recipe.file)
        };
        let mut session = allocator.bind(&recipe.runtime, build)?;
        let text = |error: ort::Error| error.message().to_owned();
        let mut binding = session.create_binding().map_err(text)?;
        let info = super::allocator::memory_info(recipe.kept.device())?;
        let recorded = bind(&mut binding, spec, example, (&recipe.kept, &info))?;
        let mut state = self.lock();
        let guarded = state.guard.take().map_or(0, |guard| guard.len());
        // Two plain runs, the recording, and one playback, all in this call.
        let ensured = allocator.begin_run(clock.now(), ByteSize::ZERO);
        let ran = ensured.map_err(|denied| denied.to_string()).and_then(|()| {
            let ran = session.run_binding(&binding);
            ran.map(|_| ()).map_err(text)
        });
        let ended = stream.synchronize();
        let footprint = usize::try_from(allocator.end_run(clock.now()).footprint.0).unwrap_or(usize::MAX);
        if recipe.scratch.stats().allocated != ByteSize::ZERO {
            state.recordings.clear();
            return Err("an operator keeps run memory".to_owned());
        }
        let guard = recipe.scratch.block(footprint.max(guarded));
        let guard = guard.inspect_err(|_| state.recordings.clear()).map_err(|denied| denied.to_string())?;
        state.guard = Some(guard);
        ran?;
        ended.map_err(|error| error.to_string())?;
        let recording = Recording {
            rows,
            inputs: example.inputs.clone(),
            bytes: example.bytes,
            session,
            binding,
            recorded,
            _weights: recipe.cuda.weights.clone(),
            _allocator: allocator,
        };
        state.recordings.push(recording);
        Ok(())
    }
}

/// A run that went well.
#[derive(Clone, Debug)]
pub(super) struct Example {
    pub(super) inputs: Vec<Shape>,
    pub(super) outputs: Vec<Shape>,
    /// Run memory that it needed.
    pub(super) bytes: ByteSize,
}

/// Whether two shapes of an input differ in nothing but the batch.
fn same(spec: &ModelSpec, own: &Shape, other: &Shape) -> bool {
    own.len() == other.len()
        && own.iter().zip(other).enumerate().all(|(axis, (a, b))| spec.batch_axis == Some(axis) || a == b)
}

/// The size of each named dimension, so that none varies.
fn overrides(spec: &ModelSpec, rows: Rows, shapes: &[Shape]) -> Result<Vec<(String, i64)>, String> {
    let mut sizes: BTreeMap<String, i64> = BTreeMap::new();
    for (input, shape) in spec.inputs.iter().zip(shapes) {
        for (axis, (dim, size)) in input.shape.iter().zip(shape).enumerate() {
            let size = if spec.batch_axis == Some(axis) { rows as usize } else { *size };
            let size = i64::try_from(size).unwrap_or(i64::MAX);
            match dim {
                Dim::Fixed(_) => {}
                Dim::Any => return Err(format!("dimension {axis} of input '{}' has no name in the graph", input.name)),
                Dim::Symbol(name) => {
                    if sizes.insert(name.clone(), size).is_some_and(|other| other != size) {
                        return Err(format!("dimension '{name}' has several sizes"));
                    }
                }
            }
        }
    }
    Ok(sizes.into_iter().collect())
}

/// Gives each input and output its place for good.
fn bind(
    binding: &mut IoBinding,
    spec: &ModelSpec,
    example: &Example,
    (arena, info): (&Arena, &MemoryInfo<'static>),
) -> Result<Recorded, String> {
    let block = |shape: &Shape, element: Option<usize>| -> Result<Block, String> {
        let element = element.ok_or_else(|| "strings cannot be recorded".to_owned())?;
        arena.block(shape.iter().product::<usize>() * element).map_err(|denied| denied.to_string())
    };
    let mut inputs = Vec::new();
    for (input, shape) in spec.inputs.iter().zip(&example.inputs) {
        let block = block(shape, input.datatype.size())?;
        let place = Place { info, address: block.pointer().addr().get(), bytes: block.len() };
        DeviceTensor::over(place, input.datatype, shape)?.bind_input(binding, &bound::c_name(&input.name))?;
        inputs.push(block);
    }
    let mut outputs = Vec::new();
    for (output, shape) in spec.outputs.iter().zip(&example.outputs) {
        let block = block(shape, output.datatype.size())?;
        let place = Place { info, address: block.pointer().addr().get(), bytes: block.len() };
        DeviceTensor::over(place, output.datatype, shape)?.bind_output(binding, &bound::c_name(&output.name))?;
        outputs.push((block, shape.clone()));
    }
    Ok(Recorded { inputs, outputs })
}
