//! One session: a model's graph ready to run, and the buffers that its batches are gathered into. How it runs on a GPU is in
//! `flight`.

use super::allocator::{Arenas, SessionAllocator};
use super::batch::Stages;
use super::cuda::{self, CudaOptions};
use super::element;
use super::graphs::Graphs;
use super::inputs::{Buffer, InArena, gather_input};
use super::lanes::Lanes;
use super::outputs::{Outputs, Wanted};
use super::recording::{Plan, Retry};
use super::twins::{self, Twins};
use super::weights::Weights;
use super::{Batch, RunError, Runtime};
use crate::clock::Clock;
use crate::memory::cuda::Stream;
use crate::memory::{Arena, Denied, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use crate::model::spec::{Side, Unsupported};
use crate::model::{Dim, Graph, ModelSpec, TensorSpec};
use crate::tensor::Tensor;
use crate::units::{ByteSize, DeviceId, Rows};
use ort::session::SessionInputValue;
use ort::session::builder::{AutoDevicePolicy, GraphOptimizationLevel, SessionBuilder};
use ort::value::ValueType;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// How a session is built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionOptions {
    /// Threads that work on one run, the caller included.
    pub intra_op_threads: usize,
    /// Whether the graph is optimised; off only where it is looked at and not run.
    pub optimize: bool,
}

/// A loaded graph. `&mut` means one run at a time.
#[derive(Debug)]
pub struct Session {
    // Declared before the allocator, so that it is dropped first.
    pub(super) inner: ort::session::Session,
    /// The ways to a GPU; `None` on the host.
    pub(super) lanes: Option<Lanes>,
    pub(super) graphs: Arc<Graphs>,
    pub(super) plan: Option<Plan>,
    pub(super) unrecorded: Option<String>,
    /// What the device needs for a size, as it times that itself.
    device_times: BTreeMap<Rows, Duration>,
    pub(super) retry: Retry,
    graph: Graph,
    pub(super) spec: Option<Arc<ModelSpec>>,
    buffers: Vec<Buffer>,
    pub(super) outputs: Outputs,
    pub(super) arena: Arena,
    pub(super) allocator: SessionAllocator,
    runs: u64,
    // After the session, which reads them.
    _weights: Option<Arc<Weights>>,
}

/// What a run gave and took.
#[derive(Debug)]
pub struct Ran {
    /// For each part the wanted outputs in the wanted order, or why there are none.
    pub result: Result<Vec<Vec<Tensor>>, RunError>,
    /// How long each stage took.
    pub stages: Stages,
    /// Bytes that the run needs to have committed: its memory, and the outputs that live on.
    pub bytes: ByteSize,
}

impl Session {
    /// Loads a model file.
    ///
    /// # Errors
    /// ONNX Runtime's text if it refuses the file.
    pub fn load(runtime: &Runtime, path: &Path, options: SessionOptions, arenas: Arenas) -> Result<Self, String> {
        Self::load_with(runtime, path, options, (arenas, &CudaOptions::default()))
    }

    /// As [`Session::load`], with the options of the provider that the device of the arenas asks for.
    ///
    /// # Errors
    /// As [`Session::load`], and if the provider cannot be had: nothing runs on the CPU instead.
    pub fn load_with(
        runtime: &Runtime,
        path: &Path,
        options: SessionOptions,
        (arenas, cuda): (Arenas, &CudaOptions),
    ) -> Result<Self, String> {
        Self::build(runtime, options, (arenas, cuda), |mut builder| builder.commit_from_file(path))
    }

    /// Loads a model from its bytes. As [`Session::load`].
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn load_bytes(
        runtime: &Runtime,
        model: &[u8],
        options: SessionOptions,
        arenas: Arenas,
    ) -> Result<Self, String> {
        Self::build(runtime, options, (arenas, &CudaOptions::default()), |mut builder| {
            builder.commit_from_memory(model)
        })
    }

    fn build(
        runtime: &Runtime,
        options: SessionOptions,
        (arenas, cuda): (Arenas, &CudaOptions),
        commit: impl Fn(SessionBuilder) -> ort::Result<ort::session::Session>,
    ) -> Result<Self, String> {
        let stream = stream_for(&arenas)?;
        let level = if options.optimize { GraphOptimizationLevel::All } else { GraphOptimizationLevel::Disable };
        let build = |cuda: &CudaOptions| -> ort::Result<ort::session::Session> {
            let builder = ort::session::Session::builder(&runtime.environment)?
                .with_optimization_level(level)?
                .with_intra_threads(options.intra_op_threads)?
                .with_inter_threads(1)?
                // An idle pool must not burn the cores that decode requests.
                .with_intra_op_spinning(false)?
                // The pattern's cache key mixes up shapes, and its blocks are larger than what a run needs.
                .with_memory_pattern(false)?
                .with_env_allocators()?
                .with_device_allocated_initializers()?;
            commit(match &stream {
                Some(stream) => cuda::with_providers(builder, stream, cuda, false)?,
                None => builder.with_auto_device(AutoDevicePolicy::PreferCPU)?,
            })
        };
        let arena = arenas.buffers.clone();
        let allocator = SessionAllocator::new(arenas)?;
        let mut weights = cuda.weights.clone();
        let mut inner = allocator.bind(runtime, || build(cuda));
        if let (Err(reason), true) = (&inner, weights.is_some() && allocator.denials() == 0) {
            tracing::warn!(reason, "the session does not take shared weights, so it gets its own");
            weights = None;
            inner = allocator.bind(runtime, || build(&CudaOptions { weights: None, ..cuda.clone() }));
        }
        let inner = inner.map_err(|text| match allocator.denied_while_loading() {
            Some(denied) => format!("its weights do not fit: {denied}"),
            None => text,
        })?;
        let graph = graph_of(&inner);
        if stream.is_some() {
            cuda::report(&arena.stats().label, &inner);
        }
        // What goes out from a GPU lies in memory of the host, which this ledger does not count.
        let outputs = Outputs::new(stream.is_none().then(|| arena.clone()));
        let lanes = stream.as_ref().map(|stream| -> Result<Lanes, String> {
            let cuda = CudaOptions { weights: weights.clone(), ..cuda.clone() };
            let count = if cuda::plans_by_shape(&inner) { twins::TWINS } else { 0 };
            // What there is no room for is done without.
            let twin = |_| allocator.bind(runtime, || build(&cuda)).ok();
            let twins = Twins::new(&inner, (0..count).map_while(twin).collect());
            Lanes::new(twins.map_err(|error| error.message().to_owned())?, &graph, Arc::clone(stream))
        });
        let lanes = lanes.transpose()?;
        Ok(Self {
            inner,
            lanes,
            graphs: Arc::default(),
            plan: None,
            unrecorded: None,
            device_times: BTreeMap::new(),
            retry: Retry::default(),
            _weights: weights,
            buffers: graph.inputs.iter().map(|_| Buffer::default()).collect(),
            graph,
            spec: None,
            outputs,
            arena,
            allocator,
            runs: 0,
        })
    }

    /// What the file says of itself.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Runs so far, those that failed included.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// How long the device needed for so many rows, copies of outputs included, in the run that counted when they were measured or
    /// recorded last. `None`: they were not, or not on a GPU.
    #[must_use]
    pub fn device_time(&self, rows: Rows) -> Option<Duration> {
        self.device_times.get(&rows).copied()
    }

    pub(super) fn note_device_time(&mut self, rows: Rows, took: Duration) {
        if self.lanes.is_some() {
            self.device_times.insert(rows, took);
        }
    }

    /// Whether a run of another size than those before costs much more than its rows do.
    #[must_use]
    pub fn plans_by_shape(&self) -> bool {
        self.lanes.as_ref().is_some_and(Lanes::has_twins)
    }

    /// Settles what the axes mean; without it nothing can run.
    pub fn set_spec(&mut self, spec: Arc<ModelSpec>) {
        self.spec = Some(spec);
    }

    /// Gathers a batch, runs it, and scatters the outputs. The batch's predicted bytes are committed before anything runs.
    pub fn run(&mut self, batch: &Batch, clock: Clock) -> Ran {
        self.runs += 1;
        if self.lanes.is_some() {
            return self.run_on_device(batch, clock);
        }
        let mut stages = Stages::default();
        let ensured = self.allocator.begin_run(clock.now(), self.outputs.begin(batch.bytes));
        let result = match ensured {
            Ok(()) => self.run_stages(batch, clock, &mut stages),
            Err(denied) => Err(out_of_memory(&denied)),
        };
        let stats = self.allocator.end_run(clock.now());
        // What our own allocator has seen counts, not what the message says.
        let result = match result {
            Err(RunError::Model(message)) if stats.denials > 0 => Err(self.shortage(batch, message)),
            other => other,
        };
        let bytes = self.outputs.end(stats.footprint);
        Ran { result, stages, bytes }
    }

    /// What a denial during a run means: a shortage passes, but not if rows that cannot be divided any further want more than
    /// the whole device. Those would only be tried again and again.
    pub(super) fn shortage(&self, batch: &Batch, message: String) -> RunError {
        let total = self.arena.device().stats().total;
        let indivisible = batch.padded_rows == 1;
        match self.allocator.last_denied().filter(|denied| indivisible && denied.wanted > total) {
            Some(Denied { wanted, .. }) => {
                RunError::Model(format!("the model wants {wanted} for this input, more than the device has ({total})"))
            }
            None => RunError::OutOfMemory { message },
        }
    }

    fn run_stages(&mut self, batch: &Batch, clock: Clock, stages: &mut Stages) -> Result<Vec<Vec<Tensor>>, RunError> {
        let spec = self.spec.clone().ok_or_else(|| RunError::Lost("the session has no model".to_owned()))?;
        let started = clock.now();
        stages.begun[0] = started;
        let mut shapes = Vec::with_capacity(spec.inputs.len());
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            let mut target = InArena { buffer, arena: &self.arena };
            shapes.push(gather_input(&spec, (batch, batch.padded_rows), index, &mut target)?);
        }
        let gathered = clock.now();
        stages.gather = gathered.since(started);
        stages.begun[1] = gathered;

        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> = Vec::with_capacity(spec.inputs.len());
        for ((input, shape), buffer) in spec.inputs.iter().zip(&shapes).zip(&self.buffers) {
            let value = element::input_value(input.datatype, shape, buffer.bytes())
                .map_err(|text| RunError::Model(format!("input '{}': {text}", input.name)))?;
            inputs.push((Cow::Borrowed(input.name.as_str()), value));
        }
        let outputs = self.inner.run(inputs).map_err(|error| RunError::Model(without_paths(error.message())))?;
        let computed = clock.now();
        stages.compute = computed.since(gathered);
        stages.begun[2] = computed;

        let wanted = Wanted::of(&spec, batch, batch.padded_rows);
        let scattered = self.outputs.scatter((&spec, batch), &wanted, &outputs)?;
        stages.scatter = clock.now().since(computed);
        Ok(scattered)
    }
}

/// What a model file says of itself, without making it ready to run. `library` is the configured path of ONNX Runtime.
///
/// # Errors
/// Why the library or the file cannot be loaded.
pub fn describe(library: Option<&Path>, file: &Path) -> Result<Graph, String> {
    let runtime = Runtime::load(library).map_err(|error| error.to_string())?;
    let options = DeviceOptions {
        id: DeviceId::default(),
        limit: ByteSize::MAX,
        headroom: ByteSize::ZERO,
        alignment: HOST_ALIGNMENT,
    };
    let device = Device::new(Box::new(Host::new()), options);
    let arenas = Arenas::new(&device, "describe", 1).map_err(|error| error.to_string())?;
    let session = Session::load(&runtime, file, SessionOptions { intra_op_threads: 1, optimize: false }, arenas)?;
    Ok(session.graph)
}

/// ONNX Runtime's text without the words that only its developers understand: paths of its sources and of its build.
pub(super) fn without_paths(message: &str) -> String {
    let inner = |word: &&str| word.starts_with('/') && (word.contains(".cc:") || word.contains(".h:"));
    message.split_whitespace().filter(|word| !inner(word)).collect::<Vec<_>>().join(" ")
}

/// The stream of a session on a GPU, which becomes the device of this thread.
fn stream_for(arenas: &Arenas) -> Result<Option<Arc<Stream>>, String> {
    let stream = arenas.run.device().gpu().map(Stream::new).transpose();
    Ok(stream.map_err(|error| error.to_string())?.map(Arc::new))
}

pub(super) fn out_of_memory(denied: &Denied) -> RunError {
    RunError::OutOfMemory { message: denied.to_string() }
}

fn graph_of(session: &ort::session::Session) -> Graph {
    let mut graph = Graph::default();
    for (outlets, side) in [(session.inputs(), Side::Input), (session.outputs(), Side::Output)] {
        for outlet in outlets {
            match tensor_spec(outlet.name(), outlet.dtype()) {
                Ok(spec) if side == Side::Input => graph.inputs.push(spec),
                Ok(spec) => graph.outputs.push(spec),
                Err(kind) => graph.unsupported.push(Unsupported { side, name: outlet.name().to_owned(), kind }),
            }
        }
    }
    graph
}

/// The tensor that an outlet is, or what else it is.
fn tensor_spec(name: &str, value: &ValueType) -> Result<TensorSpec, String> {
    let ValueType::Tensor { ty, shape, dimension_symbols } = value else { return Err(value.to_string()) };
    let datatype = element::datatype(*ty).ok_or_else(|| format!("tensor({ty})"))?;
    let dims = shape.iter().zip(dimension_symbols.iter()).map(|(&dim, symbol)| match usize::try_from(dim) {
        Ok(size) => Dim::Fixed(size),
        Err(_) if symbol.is_empty() => Dim::Any,
        Err(_) => Dim::Symbol(symbol.clone()),
    });
    Ok(TensorSpec { name: name.to_owned(), datatype, shape: dims.collect() })
}
