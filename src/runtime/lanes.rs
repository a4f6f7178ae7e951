//! Batches in and out of a GPU: pinned memory that rows are gathered into, device buffers that they are copied to, and the
//! same way back for outputs. Two slots take turns, so that one batch is gathered and copied while another one computes.
//!
//! `unsafe`: the copies. What they read and write belongs to a slot, or to a recording that counts as playing; a slot is
//! used again two batches later, and the batch in between is settled by then, which means that its last event has happened.
#![allow(unsafe_code)]

use super::RunError;
use super::allocator::memory_info;
use super::batch::Batch;
use super::bound::{self, DeviceTensor, Place};
use super::element::{OutputBytes, output_bytes};
use super::graphs::Launch;
use super::inputs::{Target, batch_shape, gather_input, packed, text_value};
use super::outputs::{Produced, Wanted, check_rows};
use super::session::out_of_memory;
use super::staging::{Packed, Staging, Turns};
use super::twins::Twins;
use crate::memory::cuda::{CudaError, Event, Gpu, Stream};
use crate::memory::{Arena, Block};
use crate::model::{Graph, ModelSpec};
use crate::tensor::{DataType, Shape};
use crate::units::Rows;
use bytes::Bytes;
use ort::memory::MemoryInfo;
use ort::session::{NoSelectedOutputs, RunOptions};
use std::ffi::CString;
use std::sync::Arc;
use std::time::Duration;

/// The ways into and out of one session.
pub(super) struct Lanes {
    // Before the streams, since the sessions that it keeps work on one of them.
    twins: Twins,
    options: RunOptions<NoSelectedOutputs>,
    slots: [Slot; 2],
    turns: Turns,
    /// Whether a batch is in the stream that has not been waited for.
    running: bool,
    /// The shapes of the last run that went well.
    last: Option<(Vec<Shape>, Vec<Shape>)>,
    names: Vec<CString>,
    device: MemoryInfo<'static>,
    host: MemoryInfo<'static>,
    copies: Stream,
    compute: Arc<Stream>,
}

/// What one batch needs.
#[derive(Debug)]
struct Slot {
    inputs: Vec<Lane>,
    /// All inputs of a run that is recorded.
    packed: Staging,
    outputs: Vec<Staging>,
    /// In front of the copies of inputs that go ahead of the run.
    copying: Event,
    /// In front of the run and, where it is recorded, of the copies of its inputs.
    begun: Event,
    /// Behind the copies of all inputs.
    arrived: Event,
    /// Behind the run and the copies of all outputs.
    done: Event,
}

/// The way of one input.
#[derive(Debug, Default)]
struct Lane {
    staging: Staging,
    device: Option<Block>,
    /// What a string tensor holds; strings stay on the host.
    text: Vec<u8>,
}

/// A batch whose inputs are on their way.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) slot: usize,
    pub(super) shapes: Vec<Shape>,
    /// Whether another batch was running by then.
    pub(super) behind: bool,
}

/// The places of a recorded run.
#[derive(Debug)]
pub(super) struct Recorded {
    pub(super) inputs: Packed,
    pub(super) outputs: Vec<(Block, Shape)>,
}

/// The outputs of a run, in the order of the model, those that are wanted.
pub(super) type Outputs = Vec<Option<Output>>;

/// One output.
#[derive(Debug)]
pub(super) enum Output {
    /// On its way into the slot's pinned memory.
    Copied(Shape),
    /// Strings, which never leave the host.
    Text(Shape, Vec<Bytes>),
}

impl Lanes {
    /// Ways for a session on the GPU of this stream.
    ///
    /// # Errors
    /// If the device or ONNX Runtime has no room for them.
    pub(super) fn new(twins: Twins, graph: &Graph, compute: Arc<Stream>) -> Result<Self, String> {
        let text = |error: ort::Error| error.message().to_owned();
        let gpu = compute.gpu();
        let slot = || -> Result<Slot, CudaError> {
            let inputs = graph.inputs.iter().map(|_| Lane::default()).collect();
            let outputs = graph.outputs.iter().map(|_| Staging::default()).collect();
            let event = || Event::new(gpu);
            Ok(Slot {
                inputs,
                packed: Staging::default(),
                outputs,
                copying: event()?,
                begun: event()?,
                arrived: event()?,
                done: event()?,
            })
        };
        let slots = [slot().map_err(|error| error.to_string())?, slot().map_err(|error| error.to_string())?];
        let mut options = RunOptions::new().map_err(text)?;
        // We wait for an event of our own, and have the next batch gathered meanwhile.
        options.disable_device_sync().map_err(text)?;
        Ok(Self {
            twins,
            options,
            slots,
            turns: Turns::default(),
            running: false,
            last: None,
            names: graph.inputs.iter().map(|input| bound::c_name(&input.name)).collect(),
            device: memory_info(Some(gpu))?,
            host: memory_info(None)?,
            copies: Stream::new(gpu).map_err(|error| error.to_string())?,
            compute,
        })
    }

    /// Whether sessions keep to sizes.
    pub(super) fn has_twins(&self) -> bool {
        self.twins.len() > 1
    }

    /// The GPU.
    pub(super) fn gpu(&self) -> Gpu {
        self.compute.gpu()
    }

    /// Gathers a batch as so many rows and begins to copy it to blocks of the arena; without one it stays in pinned memory, for
    /// a recording has places of its own. The slot that it takes was let go two batches ago. On failure it takes none.
    pub(super) fn stage(
        &mut self,
        spec: &ModelSpec,
        (batch, rows): (&Batch, Rows),
        arena: Option<&Arena>,
    ) -> Result<Staged, RunError> {
        let index = self.turns.take();
        self.stage_in(index, spec, (batch, rows), arena).inspect_err(|_| self.unstage())
    }

    /// The batch that was staged last gives its slot back, to be staged anew or not at all. The other slot may hold outputs
    /// that nobody has been given yet.
    pub(super) fn unstage(&mut self) {
        // A copy may still read the pinned memory that comes next to be written.
        if let Err(error) = self.copies.synchronize() {
            tracing::debug!(%error, "copies ended with a failure");
        }
        self.turns.undo();
    }

    /// Gives back the device memory that inputs had, while nothing is staged or running. Whether there was any.
    pub(super) fn let_go_inputs(&mut self) -> bool {
        let lanes = self.slots.iter_mut().flat_map(|slot| &mut slot.inputs);
        lanes.filter_map(|lane| lane.device.take()).count() > 0
    }

    fn stage_in(
        &mut self,
        index: usize,
        spec: &ModelSpec,
        (batch, rows): (&Batch, Rows),
        arena: Option<&Arena>,
    ) -> Result<Staged, RunError> {
        let gpu = self.gpu();
        gpu.bind().map_err(|error| device_error(&error))?;
        let Some(arena) = arena else { return self.stage_packed(index, spec, (batch, rows)) };
        let slot = &mut self.slots[index];
        let mut shapes = Vec::with_capacity(spec.inputs.len());
        let mut copying = false;
        for (input, lane) in slot.inputs.iter_mut().enumerate() {
            if spec.inputs[input].datatype == DataType::Bytes {
                shapes.push(gather_input(spec, (batch, rows), input, &mut lane.text)?);
                continue;
            }
            let mut target = PinnedTarget { gpu, staging: &mut lane.staging, len: 0 };
            let shape = gather_input(spec, (batch, rows), input, &mut target)?;
            let len = target.len;
            shapes.push(shape);
            if lane.device.as_ref().is_none_or(|block| block.len() < len) {
                lane.device = None;
                lane.device = Some(arena.block(len).map_err(|denied| out_of_memory(&denied))?);
            }
            if !std::mem::replace(&mut copying, true) {
                self.copies.record(&slot.copying).map_err(|error| device_error(&error))?;
            }
            if let (Some(pinned), Some(block)) = (&lane.staging.pinned, &lane.device) {
                // SAFETY: both belong to a slot whose last batch is settled; they are written again when this one is, and freed
                // after both streams have been waited for. The run that reads the block waits for the event behind the copy.
                let copied = unsafe { self.copies.copy_in(pinned, len, block) };
                copied.map_err(|error| device_error(&error))?;
            }
        }
        self.copies.record(&slot.arrived).map_err(|error| device_error(&error))?;
        Ok(Staged { slot: index, shapes, behind: self.running })
    }

    /// Gathers a batch for a recording.
    fn stage_packed(
        &mut self,
        index: usize,
        spec: &ModelSpec,
        (batch, rows): (&Batch, Rows),
    ) -> Result<Staged, RunError> {
        let shapes: Vec<Shape> = (0..spec.inputs.len()).map(|input| batch_shape(spec, (batch, rows), input)).collect();
        let Some((ranges, bytes)) = packed(spec, &shapes) else {
            return Err(RunError::Lost("strings are not recorded".to_owned()));
        };
        let gpu = self.gpu();
        let pinned = self.slots[index].packed.resized(gpu, bytes).map_err(|error| device_error(&error))?;
        for (input, range) in ranges.into_iter().enumerate() {
            gather_input(spec, (batch, rows), input, &mut &mut pinned.as_mut_slice()[range])?;
        }
        Ok(Staged { slot: index, shapes, behind: self.running })
    }

    /// Puts the run of a staged batch and the copies of its outputs into the stream, and returns while the device works.
    pub(super) fn launch(
        &mut self,
        session: &mut ort::session::Session,
        spec: &ModelSpec,
        staged: &Staged,
        wanted: &Wanted,
    ) -> Result<Outputs, RunError> {
        let model = |text: String| RunError::Model(text);
        self.running = true;
        let slot = &mut self.slots[staged.slot];
        let (session, binding) = self.twins.for_shapes(session, &staged.shapes);
        self.compute.wait_for(&slot.arrived).map_err(|error| device_error(&error))?;
        self.compute.record(&slot.begun).map_err(|error| device_error(&error))?;
        let mut texts = Vec::new();
        for ((input, lane), (shape, name)) in
            spec.inputs.iter().zip(&slot.inputs).zip(staged.shapes.iter().zip(&self.names))
        {
            let fault = |text: String| model(format!("input '{}': {text}", input.name));
            if let Some(block) = lane.device.as_ref().filter(|_| input.datatype != DataType::Bytes) {
                let bytes = shape.iter().product::<usize>() * input.datatype.size().unwrap_or(1);
                let place = Place { info: &self.device, address: block.pointer().addr().get(), bytes };
                let tensor = DeviceTensor::over(place, input.datatype, shape).map_err(fault)?;
                tensor.bind_input(binding, name).map_err(fault)?;
            } else {
                let value = text_value(shape, &lane.text).map_err(fault)?;
                binding.bind_input(&input.name, &value).map_err(|error| fault(error.message().to_owned()))?;
                texts.push(value);
            }
        }
        for output in &spec.outputs {
            let info = if output.datatype == DataType::Bytes { &self.host } else { &self.device };
            let bound = binding.bind_output_to_device(&output.name, info);
            bound.map_err(|error| model(format!("output '{}': {}", output.name, error.message())))?;
        }
        let outputs = session.run_binding_with_options(binding, &self.options);
        let outputs = outputs.map_err(|error| model(error.message().to_owned()))?;
        let (mut found, mut shapes, rows) = (Vec::new(), Vec::new(), wanted.rows());
        for ((output, staging), is_wanted) in spec.outputs.iter().zip(&mut slot.outputs).zip(wanted.outputs()) {
            if !is_wanted {
                found.push(None);
                continue;
            }
            let fault = |text: String| model(format!("output '{}': {text}", output.name));
            let value =
                outputs.get(output.name.as_str()).ok_or_else(|| fault("the run did not produce it".to_owned()))?;
            let Some(element) = output.datatype.size() else {
                let (shape, bytes) = output_bytes(value, output.datatype)?;
                check_rows(spec, output, &shape, rows)?;
                let strings = if let OutputBytes::Strings(strings) = bytes { strings } else { Vec::new() };
                found.push(Some(Output::Text(shape, strings)));
                continue;
            };
            let (address, shape) = bound::look_at(value, output.datatype).map_err(fault)?;
            check_rows(spec, output, &shape, rows)?;
            let bytes = shape.iter().product::<usize>() * element;
            let pinned = staging.resized(self.compute.gpu(), bytes).map_err(|error| device_error(&error))?;
            // SAFETY: an output of the run in front of the copy in the same stream, as large as its shape; it is freed below, and
            // what takes its place is used behind the copy. The pinned memory is read when the slot's last event has happened.
            let copied = unsafe { self.compute.copy_out(address, pinned, 0..bytes) };
            copied.map_err(|error| device_error(&error))?;
            shapes.push(shape.clone());
            found.push(Some(Output::Copied(shape)));
        }
        drop(outputs);
        // Outputs go back to the arena now: what takes their place is behind the copies in the same stream.
        binding.clear_outputs();
        self.compute.record(&slot.done).map_err(|error| device_error(&error))?;
        self.last = (shapes.len() == spec.outputs.len()).then(|| (staged.shapes.clone(), shapes));
        Ok(found)
    }

    /// The shapes of inputs and outputs of the last run, if it had all outputs and no strings.
    pub(super) fn last_shapes(&self) -> Option<(Vec<Shape>, Vec<Shape>)> {
        self.last.clone()
    }

    /// The stream that runs are in.
    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.compute
    }

    /// As [`Self::launch`], with a recording.
    pub(super) fn play(
        &mut self,
        spec: &ModelSpec,
        staged: &Staged,
        (recorded, launch): (&mut Recorded, Launch<'_>),
        wanted: &Wanted,
    ) -> Result<Outputs, RunError> {
        self.running = true;
        let slot = &mut self.slots[staged.slot];
        let lost = |error: CudaError| device_error(&error);
        self.compute.record(&slot.begun).map_err(lost)?;
        match (&slot.packed.pinned, &mut recorded.inputs) {
            // The batch before is settled, so nothing reads there any more.
            (Some(pinned), Packed::Host(inputs)) => {
                let len = inputs.len().min(pinned.len());
                inputs.as_mut_slice()[..len].copy_from_slice(&pinned.as_slice()[..len]);
            }
            (Some(pinned), Packed::Device(block)) => {
                // SAFETY: the pinned memory as in `stage_in`; the block belongs to a recording that cannot go while it plays. In
                // the stream of the run, behind the one before, which may still read the same place.
                unsafe { self.compute.copy_in(pinned, block.len(), block) }.map_err(lost)?;
            }
            (None, _) => return Err(RunError::Lost("nothing was gathered for a recording".to_owned())),
        }
        launch()?;
        let mut found = Vec::with_capacity(spec.outputs.len());
        for (((block, shape), staging), is_wanted) in
            recorded.outputs.iter().zip(&mut slot.outputs).zip(wanted.outputs())
        {
            if is_wanted {
                let pinned = staging.resized(self.compute.gpu(), block.len()).map_err(lost)?;
                // SAFETY: as for the input, behind the run that writes the block.
                let copied = unsafe { self.compute.copy_out(block.pointer().addr().get(), pinned, 0..block.len()) };
                copied.map_err(lost)?;
            }
            found.push(is_wanted.then(|| Output::Copied(shape.clone())));
        }
        self.compute.record(&slot.done).map_err(lost)?;
        Ok(found)
    }

    /// Whether the device is through with a batch.
    pub(super) fn is_done(&self, slot: usize) -> Result<bool, RunError> {
        self.slots[slot].done.has_happened().map_err(|error| device_error(&error))
    }

    /// Waits for a batch.
    pub(super) fn wait(&mut self, slot: usize) -> Result<(), RunError> {
        self.running = false;
        self.slots[slot].done.synchronize().map_err(|error| device_error(&error))
    }

    /// What the device says of a batch that is done: how long its inputs were copied ahead of the run, how long it ran, copies of
    /// outputs included, and how long there was nothing to do in front of it since the batch before, if it came right behind that.
    pub(super) fn device_times(&self, slot: usize, (copied, follows): (bool, bool)) -> [Duration; 3] {
        let (own, other) = (&self.slots[slot], &self.slots[1 - slot]);
        let copy = copied.then(|| own.arrived.since(&own.copying).ok()).flatten();
        let idle = follows.then(|| own.begun.since(&other.done).ok()).flatten();
        [copy, own.done.since(&own.begun).ok(), idle].map(Option::unwrap_or_default)
    }

    /// After a failure: nothing of the failed run is in the stream or the binding any more.
    pub(super) fn reset(&mut self) -> Result<(), CudaError> {
        self.running = false;
        self.twins.clear();
        self.compute.synchronize().and_then(|()| self.copies.synchronize())
    }

    /// The outputs of a batch that is done.
    pub(super) fn produced(&self, spec: &ModelSpec, slot: usize, outputs: Outputs) -> Vec<Option<Produced<'_>>> {
        let bytes = |index: usize, output: Output| match output {
            Output::Text(shape, strings) => (shape, OutputBytes::Strings(strings)),
            Output::Copied(shape) => {
                let len = shape.iter().product::<usize>() * spec.outputs[index].datatype.size().unwrap_or(1);
                let pinned = self.slots[slot].outputs[index].pinned.as_ref();
                (shape, OutputBytes::Plain(pinned.map_or(&[], |pinned| &pinned.as_slice()[..len])))
            }
        };
        outputs.into_iter().enumerate().map(|(index, output)| output.map(|output| bytes(index, output))).collect()
    }
}

impl std::fmt::Debug for Lanes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lanes").field("slots", &self.slots).field("turns", &self.turns).finish_non_exhaustive()
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        // Blocks go back to arenas, and these to the device: nothing may be on its way from or to them.
        if let Err(error) = self.reset() {
            tracing::debug!(%error, "a stream ended with a failure");
        }
    }
}

/// Pinned memory as the target of a gather.
struct PinnedTarget<'a> {
    gpu: Gpu,
    staging: &'a mut Staging,
    len: usize,
}

impl Target for PinnedTarget<'_> {
    fn resized(&mut self, len: usize) -> Result<&mut [u8], RunError> {
        self.len = len;
        let pinned = self.staging.resized(self.gpu, len).map_err(|error| device_error(&error))?;
        Ok(&mut pinned.as_mut_slice()[..len])
    }
}

/// What a failed call of the driver means for a batch.
pub(super) fn device_error(error: &CudaError) -> RunError {
    if error.is_out_of_memory() {
        RunError::OutOfMemory { message: error.to_string() }
    } else {
        RunError::Lost(error.to_string())
    }
}
