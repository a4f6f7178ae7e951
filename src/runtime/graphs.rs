//! Recorded runs: for some small batch sizes we record what a session of its own, whose varying dimensions are fixed, puts into the
//! stream, and from then on one call plays all of it back. What is fixed needs no arithmetic on shapes, which is what keeps
//! many models from being recorded.
//!
//! ONNX Runtime can record by itself, but then each playback is a run of its session, during whose first 20 to 60 microseconds the
//! device has nothing to do. What we record is launched by the driver alone; the session is kept for the memory that it has.
//!
//! A recording remembers addresses: its inputs, its outputs, and all that it allocated on the way. So its run memory is an
//! arena that gives nothing back; the recordings of one instance share it, for they play one after the other. Under pressure
//! they are dropped first, all of an instance at once.
#![allow(unsafe_code)]

use super::allocator::{self, Arenas, SessionAllocator, memory_info};
use super::bound::{self, DeviceTensor, Place};
use super::cuda::{self, CudaOptions};
use super::inputs::packed;
use super::lanes::{Recorded, device_error};
use super::locks::Locks;
use super::shelf::{Kept, Shelf, Unrecorded};
use super::staging::Packed;
use super::weights::Weights;
use super::{RunError, Runtime};
use crate::clock::Clock;
use crate::memory::cuda::{Graph, Stream};
use crate::memory::{Arena, ArenaKind, ArenaOptions, Device};
use crate::model::{Dim, ModelSpec};
use crate::tensor::Shape;
use crate::units::{ByteSize, Rows};
use ort::memory::MemoryInfo;
use ort::session::builder::GraphOptimizationLevel;
use ort::session::{IoBinding, RunOptions, Session};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Runs before the one that is recorded.
const RUNS_BEFORE: usize = 2;

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
        let address_space = device.address_space();
        let arena = |name: &str| {
            let (label, kind) = (format!("{label}/{name}"), ArenaKind::Buffers);
            let made = device.arena(ArenaOptions { label, kind, priority, address_space });
            made.map_err(|error| error.to_string())
        };
        let (kept, scratch) = (arena("recorded")?, arena("recorded-run")?);
        Ok(Self { runtime: runtime.clone(), file: file.to_owned(), cuda, kept, scratch })
    }

    /// Bytes that all recordings together once took and do not hold now. Weights that they share are not among them: these
    /// stay where they are.
    pub(super) fn missing(&self) -> ByteSize {
        let missing = |arena: &Arena| {
            let stats = arena.stats();
            stats.peak_active.saturating_sub(stats.active)
        };
        missing(&self.kept) + missing(&self.scratch)
    }
}

/// The recordings of one instance.
pub(super) type Graphs = Shelf<Recording>;

/// Plays a recording, behind what is in the stream already.
pub(super) type Launch<'a> = &'a mut dyn FnMut() -> Result<(), RunError>;

/// One recorded run. What comes first is dropped first.
pub(super) struct Recording {
    graph: Graph,
    recorded: Recorded,
    source: Source,
}

/// What is recorded, and is held as long as there is a recording, which uses its memory. What comes first is dropped first.
struct Source {
    session: Session,
    binding: IoBinding,
    _weights: Option<Arc<Weights>>,
    // After the session, which frees into it.
    allocator: SessionAllocator,
    // Last: the session was made for this stream, and may outlive the ways of the instance, which hold it too.
    stream: Arc<Stream>,
}

impl std::fmt::Debug for Recording {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Recording").field("recorded", &self.recorded).finish_non_exhaustive()
    }
}

impl Recording {
    /// Lets `play` have its places, and what plays it.
    pub(super) fn play<T>(&mut self, play: impl FnOnce(&mut Recorded, Launch<'_>) -> T) -> T {
        let Self { graph, recorded, source } = self;
        // SAFETY: all that the graph uses is held by this recording or lies below the guard of its shelf, and both stay while it is
        // played. It is in order with whatever else uses that, for all recordings of an instance are played in one stream. Breach:
        // `recorded_runs_give_the_same_answers_and_go_first_when_memory_is_short` in tests/device.
        let mut launch = || unsafe { graph.launch(&source.stream) }.map_err(|error| device_error(&error));
        play(recorded, &mut launch)
    }
}

impl Source {
    /// Runs so often that libraries have chosen and loaded what they need, and then once more to be recorded. Begins a run of the
    /// allocator and does not end it.
    fn capture(&mut self, clock: Clock) -> Result<Graph, Unrecorded> {
        let denials = self.allocator.denials();
        let text = |error: ort::Error| error.message().to_owned();
        let mut options = RunOptions::new().map_err(text)?;
        // Not to be recorded by ONNX Runtime, nor waited for, which cannot be recorded.
        options.set("gpu_graph_id", "-1").and_then(|()| options.disable_device_sync()).map_err(text)?;
        self.allocator.begin_run(clock.now(), ByteSize::ZERO)?;
        let Self { session, binding, allocator, stream, .. } = self;
        let mut run = || {
            let ran = session.run_binding_with_options(binding, &options).map(|_| ());
            ran.map_err(|error| short(allocator, denials, text(error)))
        };
        for _ in 0..RUNS_BEFORE {
            run()?;
            stream.synchronize()?;
        }
        stream.capture(run)
    }
}

/// Records runs of so many rows, in the stream that they will be played in. `example` has the shapes of one run that went well
/// without being recorded.
///
/// # Errors
/// Why there is no recording.
pub(super) fn record(
    graphs: &Graphs,
    recipe: &Recipe,
    (spec, stream): (&ModelSpec, &Arc<Stream>),
    (rows, example): (Rows, &Example),
    (locks, clock): (Locks, Clock),
) -> Result<(), Unrecorded> {
    let _one_at_a_time = locks.take(&RECORDING).ok_or(Unrecorded::Busy)?;
    let (weights, run, buffers) = (recipe.kept.clone(), recipe.scratch.clone(), recipe.kept.clone());
    let allocator = SessionAllocator::new(Arenas { weights, run, buffers })?;
    let denials = allocator.denials();
    let sizes = overrides(spec, rows, &example.inputs)?;
    let session = build(recipe, &allocator, (stream, locks), &sizes).ok_or(Unrecorded::Busy)?;
    let session = session.map_err(|reason| short(&allocator, denials, reason))?;
    let mut binding = session.create_binding().map_err(|error| error.message().to_owned())?;
    let info = memory_info(recipe.kept.device().gpu())?;
    let recorded = bind(&mut binding, spec, example, (&recipe.kept, &info))?;
    let (weights, stream) = (recipe.cuda.weights.clone(), Arc::clone(stream));
    // Whole from here on: a failure drops the session before what it uses.
    let mut source = Source { session, binding, _weights: weights, allocator, stream };
    graphs.record(&recipe.scratch, clock, move || {
        let graph = source.capture(clock);
        let ended = source.stream.synchronize();
        let footprint = usize::try_from(source.allocator.pause_run().0).unwrap_or(usize::MAX);
        let graph = graph?;
        ended?;
        let recording = Arc::new(Mutex::new(Recording { graph, recorded, source }));
        let (inputs, bytes) = (example.inputs.clone(), example.bytes);
        Ok(Kept { rows, inputs, bytes, footprint, recording })
    })
}

/// Whether nobody records or loads anything now.
pub(super) fn is_free() -> bool {
    Locks::Try.take(&RECORDING).is_some() && allocator::is_free()
}

/// What a failure means: a shortage, if anything was denied since there were so many denials, or if it says so.
fn short(allocator: &SessionAllocator, before: u64, reason: String) -> Unrecorded {
    let short = allocator.denials() > before || cuda::is_shortage(&reason);
    if short { Unrecorded::Short(reason) } else { Unrecorded::Impossible(reason) }
}

/// A session whose dimensions do not vary, and in which nothing happens that could not be recorded. `None`: another one is being loaded.
fn build(
    recipe: &Recipe,
    allocator: &SessionAllocator,
    (stream, locks): (&Stream, Locks),
    overrides: &[(String, i64)],
) -> Option<Result<Session, String>> {
    allocator.bind_if(locks, &recipe.runtime, || {
        let mut builder = Session::builder(&recipe.runtime.environment)?
            .with_optimization_level(GraphOptimizationLevel::All)?
            .with_intra_threads(1)?
            .with_inter_threads(1)?
            .with_memory_pattern(false)?
            .with_env_allocators()?
            .with_device_allocated_initializers()?;
        for (name, size) in overrides {
            builder = builder.with_dimension_override(name, *size)?;
        }
        cuda::with_providers(builder, stream, &recipe.cuda, true)?.commit_from_file(&recipe.file)
    })
}

/// A run that went well.
#[derive(Clone, Debug)]
pub(super) struct Example {
    pub(super) inputs: Vec<Shape>,
    pub(super) outputs: Vec<Shape>,
    /// Run memory that it needed.
    pub(super) bytes: ByteSize,
}

/// Whether a recording with these inputs is one for those, whose batch axis does not count.
pub(super) fn fits(spec: &ModelSpec, inputs: &[Shape], shapes: &[Shape]) -> bool {
    inputs.iter().zip(shapes).all(|(own, other)| same(spec, own, other))
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
) -> Result<Recorded, Unrecorded> {
    let strings = || "strings cannot be recorded".to_owned();
    let (ranges, bytes) = packed(spec, &example.inputs).ok_or_else(strings)?;
    let inputs = Packed::new(arena, bytes)?;
    for ((input, shape), range) in spec.inputs.iter().zip(&example.inputs).zip(ranges) {
        let place = Place { info, address: inputs.address() + range.start, bytes: range.len() };
        DeviceTensor::over(place, input.datatype, shape)?.bind_input(binding, &bound::c_name(&input.name))?;
    }
    let mut outputs = Vec::new();
    for (output, shape) in spec.outputs.iter().zip(&example.outputs) {
        let element = output.datatype.size().ok_or_else(strings)?;
        let block = arena.block(shape.iter().product::<usize>() * element)?;
        let place = Place { info, address: block.pointer().addr().get(), bytes: block.len() };
        DeviceTensor::over(place, output.datatype, shape)?.bind_output(binding, &bound::c_name(&output.name))?;
        outputs.push((block, shape.clone()));
    }
    Ok(Recorded { inputs, outputs })
}
