//! One session: a model's graph ready to run, and the buffers that its batches are gathered into.

use super::allocator::{Arenas, SessionAllocator};
use super::batch::Stages;
use super::element;
use super::outputs::Outputs;
use super::{Batch, RunError, Runtime};
use crate::clock::Clock;
use crate::memory::{Arena, Block, Denied, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use crate::model::spec::{Side, Unsupported};
use crate::model::{Dim, Graph, ModelSpec, TensorSpec};
use crate::tensor::rows::{self, RowCopy, RowLayout};
use crate::tensor::{Shape, Tensor};
use crate::units::{ByteSize, DeviceId};
use bytes::Bytes;
use ort::session::SessionInputValue;
use ort::session::builder::{AutoDevicePolicy, GraphOptimizationLevel, SessionBuilder};
use ort::value::ValueType;
use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

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
    inner: ort::session::Session,
    graph: Graph,
    spec: Option<Arc<ModelSpec>>,
    buffers: Vec<Buffer>,
    outputs: Outputs,
    arena: Arena,
    allocator: SessionAllocator,
    runs: u64,
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
        Self::build(runtime, options, arenas, |mut builder| builder.commit_from_file(path))
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
        Self::build(runtime, options, arenas, |mut builder| builder.commit_from_memory(model))
    }

    fn build(
        runtime: &Runtime,
        options: SessionOptions,
        arenas: Arenas,
        commit: impl FnOnce(SessionBuilder) -> ort::Result<ort::session::Session>,
    ) -> Result<Self, String> {
        let level = if options.optimize { GraphOptimizationLevel::All } else { GraphOptimizationLevel::Disable };
        let build = || -> ort::Result<ort::session::Session> {
            let builder = ort::session::Session::builder(&runtime.environment)?
                .with_auto_device(AutoDevicePolicy::PreferCPU)?
                .with_optimization_level(level)?
                .with_intra_threads(options.intra_op_threads)?
                .with_inter_threads(1)?
                // An idle pool must not burn the cores that decode requests.
                .with_intra_op_spinning(false)?
                // The pattern's cache key mixes up shapes, and its blocks are larger than what a run needs.
                .with_memory_pattern(false)?
                .with_env_allocators()?
                .with_device_allocated_initializers()?;
            commit(builder)
        };
        let arena = arenas.buffers.clone();
        let allocator = SessionAllocator::new(arenas)?;
        let inner = allocator.bind(runtime, build).map_err(|text| match allocator.denied_while_loading() {
            Some(denied) => format!("its weights do not fit: {denied}"),
            None => text,
        })?;
        let graph = graph_of(&inner);
        let buffers = graph.inputs.iter().map(|_| Buffer::default()).collect();
        Ok(Self { inner, graph, spec: None, buffers, outputs: Outputs::new(arena.clone()), arena, allocator, runs: 0 })
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

    /// Settles what the axes mean; without it nothing can run.
    pub fn set_spec(&mut self, spec: Arc<ModelSpec>) {
        self.spec = Some(spec);
    }

    /// Gathers a batch, runs it, and scatters the outputs. The batch's predicted bytes are committed before anything runs.
    pub fn run(&mut self, batch: &Batch, clock: Clock) -> Ran {
        self.runs += 1;
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
    fn shortage(&self, batch: &Batch, message: String) -> RunError {
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
        let mut shapes = Vec::with_capacity(spec.inputs.len());
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            let shape = gather_input(&spec, batch, index, (buffer, &self.arena));
            shapes.push(shape.map_err(|denied| out_of_memory(&denied))?);
        }
        let gathered = clock.now();
        stages.gather = gathered.since(started);

        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> = Vec::with_capacity(spec.inputs.len());
        for ((input, shape), buffer) in spec.inputs.iter().zip(&shapes).zip(&self.buffers) {
            let value = element::input_value(input.datatype, shape, buffer.bytes())
                .map_err(|text| RunError::Model(format!("input '{}': {text}", input.name)))?;
            inputs.push((Cow::Borrowed(input.name.as_str()), value));
        }
        let outputs = self.inner.run(inputs).map_err(|error| RunError::Model(without_paths(error.message())))?;
        let computed = clock.now();
        stages.compute = computed.since(gathered);

        let scattered = self.outputs.scatter(&spec, batch, &outputs)?;
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

/// The memory that one input is gathered into, aligned for every datatype and kept between runs.
#[derive(Debug, Default)]
struct Buffer {
    block: Option<Block>,
    len: usize,
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        self.block.as_ref().map_or(&[], |block| &block.as_slice()[..self.len])
    }

    fn resized(&mut self, len: usize, arena: &Arena) -> Result<&mut [u8], Denied> {
        if self.block.as_ref().is_none_or(|block| block.len() < len) {
            // The old one goes first: there may be room for one of them only.
            self.block = None;
            self.len = 0;
            self.block = Some(arena.block(len)?);
        }
        self.len = len;
        Ok(self.block.as_mut().map_or(&mut [], |block| &mut block.as_mut_slice()[..len]))
    }
}

/// Fills the buffer of one input and returns the batch's shape of it.
fn gather_input(
    spec: &ModelSpec,
    batch: &Batch,
    index: usize,
    (buffer, arena): (&mut Buffer, &Arena),
) -> Result<Shape, Denied> {
    let first = &batch.parts[0].request.inputs[index];
    let mut shape = first.shape.clone();
    if let Some(axis) = spec.batch_axis {
        shape[axis] = batch.padded_rows as usize;
    }
    let into = RowLayout::new(&shape, spec.batch_axis);
    let Some(element) = spec.inputs[index].datatype.size() else {
        let strings = gather_strings(spec, batch, index);
        buffer.resized(strings.len(), arena)?.copy_from_slice(&strings);
        return Ok(shape);
    };
    let bytes = buffer.resized(into.elements() * element, arena)?;
    for (copy, part) in copies(batch) {
        let source = &part.request.inputs[index];
        rows::gather((&source.data, RowLayout::new(&source.shape, spec.batch_axis)), (bytes, into), element, copy);
    }
    Ok(shape)
}

/// Strings are few and short beside a model's work: they are taken apart and written again.
fn gather_strings(spec: &ModelSpec, batch: &Batch, index: usize) -> Vec<u8> {
    let sources: Vec<(RowCopy, RowLayout, Vec<Bytes>)> = copies(batch)
        .map(|(copy, part)| {
            let source = &part.request.inputs[index];
            let layout = RowLayout::new(&source.shape, spec.batch_axis);
            (copy, layout, rows::string_elements(&source.data.to_contiguous()).unwrap_or_default())
        })
        .collect();
    let outer = sources.first().map_or(0, |(_, layout, _)| layout.outer);
    let mut out = Vec::new();
    for slice in 0..outer {
        for (copy, layout, elements) in &sources {
            let base = slice * layout.rows;
            let range = (base + copy.from) * layout.inner..(base + copy.from + copy.count) * layout.inner;
            elements[range].iter().for_each(|element| rows::push_string(&mut out, element));
        }
    }
    out
}

/// Which rows of which part go where; padding rows are copies of the first row, since a model may not bear invented ones.
fn copies(batch: &Batch) -> impl Iterator<Item = (RowCopy, &super::BatchPart)> {
    let mut to = 0;
    let filled: usize = batch.parts.iter().map(|part| part.rows as usize).sum();
    let first = &batch.parts[0];
    let parts = batch.parts.iter().map(move |part| {
        let copy = RowCopy { from: part.start as usize, to, count: part.rows as usize };
        to += copy.count;
        (copy, part)
    });
    let padding = (filled..batch.padded_rows as usize)
        .map(move |to| (RowCopy { from: first.start as usize, to, count: 1 }, first));
    parts.chain(padding)
}

/// ONNX Runtime's text without the words that only its developers understand: paths of its sources and of its build.
fn without_paths(message: &str) -> String {
    let inner = |word: &&str| word.starts_with('/') && (word.contains(".cc:") || word.contains(".h:"));
    message.split_whitespace().filter(|word| !inner(word)).collect::<Vec<_>>().join(" ")
}

fn out_of_memory(denied: &Denied) -> RunError {
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
