//! One session: a model's graph ready to run, and the buffers that its batches are gathered into.

use super::batch::Stages;
use super::element::{self, OutputBytes};
use super::{Batch, RunError, Runtime};
use crate::clock::Clock;
use crate::model::spec::{Side, Unsupported};
use crate::model::{Dim, Graph, ModelSpec, TensorSpec};
use crate::tensor::rows::{self, RowCopy, RowLayout};
use crate::tensor::{DataType, Shape, Tensor};
use bytes::Bytes;
use ort::session::builder::{AutoDevicePolicy, GraphOptimizationLevel};
use ort::session::{SessionInputValue, SessionOutputs};
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
    inner: ort::session::Session,
    graph: Graph,
    spec: Option<Arc<ModelSpec>>,
    buffers: Vec<Buffer>,
}

impl Session {
    /// Loads a model file.
    ///
    /// # Errors
    /// ONNX Runtime's text if it refuses the file.
    pub fn load(runtime: &Runtime, path: &Path, options: SessionOptions) -> Result<Self, String> {
        let text = |error: ort::Error| error.message().to_owned();
        let level = if options.optimize { GraphOptimizationLevel::All } else { GraphOptimizationLevel::Disable };
        let build = || -> ort::Result<ort::session::Session> {
            ort::session::Session::builder(&runtime.environment)?
                .with_auto_device(AutoDevicePolicy::PreferCPU)?
                .with_optimization_level(level)?
                .with_intra_threads(options.intra_op_threads)?
                .with_inter_threads(1)?
                // An idle pool must not burn the cores that decode requests.
                .with_intra_op_spinning(false)?
                // The pattern's cache key mixes up shapes, and its blocks are larger than what a run needs.
                .with_memory_pattern(false)?
                .commit_from_file(path)
        };
        let inner = build().map_err(text)?;
        let graph = graph_of(&inner);
        let buffers = graph.inputs.iter().map(|_| Buffer::default()).collect();
        Ok(Self { inner, graph, spec: None, buffers })
    }

    /// What the file says of itself.
    #[must_use]
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// Settles what the axes mean; without it nothing can run.
    pub fn set_spec(&mut self, spec: Arc<ModelSpec>) {
        self.spec = Some(spec);
    }

    /// Gathers a batch, runs it, and scatters the outputs: for each part the wanted outputs in the wanted order.
    ///
    /// # Errors
    /// See [`RunError`].
    pub fn run(&mut self, batch: &Batch, clock: Clock) -> (Result<Vec<Vec<Tensor>>, RunError>, Stages) {
        let mut stages = Stages::default();
        let result = self.run_stages(batch, clock, &mut stages);
        (result, stages)
    }

    fn run_stages(&mut self, batch: &Batch, clock: Clock, stages: &mut Stages) -> Result<Vec<Vec<Tensor>>, RunError> {
        let spec = self.spec.clone().ok_or_else(|| RunError::Lost("the session has no model".to_owned()))?;
        let started = clock.now();
        let mut shapes = Vec::with_capacity(spec.inputs.len());
        for (index, buffer) in self.buffers.iter_mut().enumerate() {
            shapes.push(gather_input(&spec, batch, index, buffer));
        }
        let gathered = clock.now();
        stages.gather = gathered.since(started);

        let mut inputs: Vec<(Cow<'_, str>, SessionInputValue<'_>)> = Vec::with_capacity(spec.inputs.len());
        for ((input, shape), buffer) in spec.inputs.iter().zip(&shapes).zip(&self.buffers) {
            let value = element::input_value(input.datatype, shape, buffer.bytes())
                .map_err(|text| RunError::Model(format!("input '{}': {text}", input.name)))?;
            inputs.push((Cow::Borrowed(input.name.as_str()), value));
        }
        let outputs = self.inner.run(inputs).map_err(|error| classify(&error))?;
        let computed = clock.now();
        stages.compute = computed.since(gathered);

        let scattered = scatter_outputs(&spec, batch, &outputs)?;
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
    let session = Session::load(&runtime, file, SessionOptions { intra_op_threads: 1, optimize: false })?;
    Ok(session.graph)
}

/// The memory that one input is gathered into, aligned for every datatype and kept between runs.
#[derive(Debug, Default)]
struct Buffer {
    words: Vec<u64>,
    len: usize,
}

impl Buffer {
    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn resized(&mut self, len: usize) -> &mut [u8] {
        let words = len.div_ceil(size_of::<u64>());
        if self.words.len() < words {
            self.words.resize(words, 0);
        }
        self.len = len;
        &mut bytemuck::cast_slice_mut(&mut self.words)[..len]
    }
}

/// Fills the buffer of one input and returns the batch's shape of it.
fn gather_input(spec: &ModelSpec, batch: &Batch, index: usize, buffer: &mut Buffer) -> Shape {
    let first = &batch.parts[0].request.inputs[index];
    let mut shape = first.shape.clone();
    if let Some(axis) = spec.batch_axis {
        shape[axis] = batch.padded_rows as usize;
    }
    let into = RowLayout::new(&shape, spec.batch_axis);
    let Some(element) = spec.inputs[index].datatype.size() else {
        gather_strings(spec, batch, index, buffer);
        return shape;
    };
    let bytes = buffer.resized(into.elements() * element);
    for (copy, part) in copies(batch) {
        let source = &part.request.inputs[index];
        rows::gather((&source.data, RowLayout::new(&source.shape, spec.batch_axis)), (bytes, into), element, copy);
    }
    shape
}

/// Strings are few and short beside a model's work: they are taken apart and written again.
fn gather_strings(spec: &ModelSpec, batch: &Batch, index: usize, buffer: &mut Buffer) {
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
    buffer.resized(out.len()).copy_from_slice(&out);
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

fn scatter_outputs(
    spec: &ModelSpec,
    batch: &Batch,
    outputs: &SessionOutputs<'_>,
) -> Result<Vec<Vec<Tensor>>, RunError> {
    let mut wanted = vec![false; spec.outputs.len()];
    batch.parts.iter().flat_map(|part| &part.request.outputs).for_each(|&index| wanted[index] = true);
    let mut produced: Vec<Option<(Shape, OutputBytes<'_>)>> = Vec::with_capacity(spec.outputs.len());
    for (output, wanted) in spec.outputs.iter().zip(wanted) {
        produced.push(if wanted { Some(look_into(spec, batch, output, outputs)?) } else { None });
    }
    let mut start = 0;
    let mut parts = Vec::with_capacity(batch.parts.len());
    for part in &batch.parts {
        let range = start..start + part.rows as usize;
        start = range.end;
        let tensors = part.request.outputs.iter().filter_map(|&index| {
            let (shape, bytes) = produced[index].as_ref()?;
            Some(scatter_rows(spec, spec.outputs[index].datatype, (shape, bytes), range.clone()))
        });
        parts.push(tensors.collect());
    }
    Ok(parts)
}

fn look_into<'a>(
    spec: &ModelSpec,
    batch: &Batch,
    output: &TensorSpec,
    outputs: &'a SessionOutputs<'_>,
) -> Result<(Shape, OutputBytes<'a>), RunError> {
    let fault = |text: String| RunError::Model(format!("output '{}': {text}", output.name));
    let value = outputs.get(output.name.as_str()).ok_or_else(|| fault("the run did not produce it".to_owned()))?;
    let (shape, bytes) = element::output_bytes(value, output.datatype).map_err(fault)?;
    if let Some(axis) = spec.batch_axis {
        let rows = batch.padded_rows as usize;
        if shape.get(axis) != Some(&rows) {
            return Err(fault(format!("its shape is {shape:?}, expected {rows} rows on axis {axis}")));
        }
    }
    Ok((shape, bytes))
}

fn scatter_rows(
    spec: &ModelSpec,
    datatype: DataType,
    produced: (&Shape, &OutputBytes<'_>),
    range: std::ops::Range<usize>,
) -> Tensor {
    let (shape, bytes) = produced;
    let layout = RowLayout::new(shape, spec.batch_axis);
    let mut shape = shape.clone();
    if let Some(axis) = spec.batch_axis {
        shape[axis] = range.len();
    }
    let data = match bytes {
        OutputBytes::Plain(bytes) => {
            let element = datatype.size().unwrap_or(1);
            rows::scatter((bytes, layout), element, range)
        }
        OutputBytes::Strings(strings) => {
            let mut out = Vec::new();
            rows::string_indices(layout, range).for_each(|index| rows::push_string(&mut out, &strings[index]));
            out
        }
    };
    Tensor { datatype, shape, data: data.into() }
}

/// Without an allocator of our own the text is all there is to tell a lack of memory from a fault of the model.
fn classify(error: &ort::Error) -> RunError {
    let message = error.message().to_owned();
    let memory = ["std::bad_alloc", "Failed to allocate memory", "Available memory of", "out of memory"];
    if memory.iter().any(|text| message.contains(text)) {
        RunError::OutOfMemory { message }
    } else {
        RunError::Model(message)
    }
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
