//! From a batch's outputs to those of its requests.
//!
//! What goes out lives on until its response is written, long after the run: it lies in the arena of the instance's buffers,
//! so that the ledger knows of it as long as it is there.

use super::element::{self, OutputBytes};
use super::{Batch, BatchPart, RunError};
use crate::memory::{Arena, Denied};
use crate::model::pad::{PaddedAxis, PaddedDim};
use crate::model::{ModelSpec, TensorSpec};
use crate::tensor::boxes::{Copy, Run};
use crate::tensor::rows::{self, RowLayout};
use crate::tensor::{Chunks, Shape, Tensor};
use crate::units::{ByteSize, Rows};
use bytes::Bytes;
use ort::session::SessionOutputs;
use std::ops::Range;

/// Outputs smaller than this lie on the heap: an arena has nothing to give back for less than a page.
const SMALLEST_BLOCK: usize = 4096;

/// The shape of an output and its bytes.
pub(super) type Produced<'a> = (Shape, OutputBytes<'a>);

/// Which outputs somebody wants, and how many rows they must have.
#[derive(Debug)]
pub(super) struct Wanted {
    outputs: Vec<bool>,
    rows: Rows,
}

impl Wanted {
    pub(super) fn of(spec: &ModelSpec, batch: &Batch, rows: Rows) -> Self {
        let mut outputs = vec![false; spec.outputs.len()];
        batch.parts.iter().flat_map(|part| &part.request.outputs).for_each(|&index| outputs[index] = true);
        Self { outputs, rows }
    }

    pub(super) fn outputs(&self) -> impl Iterator<Item = bool> + '_ {
        self.outputs.iter().copied()
    }

    pub(super) fn rows(&self) -> Rows {
        self.rows
    }
}

/// The memory that outputs are scattered into.
///
/// What a run counts is all outputs of all its rows, whoever wants them: so equal shapes need equal bytes, and no prediction
/// depends on what the next client asks for.
#[derive(Debug)]
pub(super) struct Outputs {
    /// `None`: the heap.
    arena: Option<Arena>,
    /// Bytes of the outputs of the run that was scattered last.
    produced: u64,
    /// The largest part of a run's bytes that ever was its outputs.
    most: f64,
}

impl Outputs {
    pub(super) fn new(arena: Option<Arena>) -> Self {
        Self { arena, produced: 0, most: 0.0 }
    }

    /// A run begins. Of the bytes that it is predicted to need, those of run memory: to be committed before it runs.
    pub(super) fn begin(&mut self, predicted: ByteSize) -> ByteSize {
        self.produced = 0;
        ByteSize((predicted.0 as f64 * (1.0 - self.most)) as u64)
    }

    /// A run is over that has peaked at so many bytes of run memory; says what it needed: these and its outputs.
    pub(super) fn end(&mut self, footprint: ByteSize) -> ByteSize {
        let total = footprint + ByteSize(self.produced);
        self.most = self.most.max(self.produced as f64 / total.0.max(1) as f64);
        total
    }

    /// For each part of the batch the wanted outputs in the wanted order.
    pub(super) fn scatter(
        &mut self,
        (spec, batch): (&ModelSpec, &Batch),
        wanted: &Wanted,
        outputs: &SessionOutputs<'_>,
    ) -> Result<Vec<Vec<Tensor>>, RunError> {
        let mut produced: Vec<Option<Produced<'_>>> = Vec::with_capacity(spec.outputs.len());
        for (output, is_wanted) in spec.outputs.iter().zip(wanted.outputs()) {
            // Strings have no size of their own until they are read.
            let seen = is_wanted || output.datatype.size().is_some();
            let found = if seen { Some(look_into(spec, wanted.rows(), output, outputs)?) } else { None };
            self.produced += found.as_ref().map_or(0, |(_, bytes)| bytes.size() as u64);
            produced.push(found);
        }
        self.give_out(spec, batch, &produced)
    }

    /// The same, of outputs that have been looked into.
    pub(super) fn give_out(
        &self,
        spec: &ModelSpec,
        batch: &Batch,
        produced: &[Option<Produced<'_>>],
    ) -> Result<Vec<Vec<Tensor>>, RunError> {
        let ran = padded_sizes(spec, batch);
        let mut start = 0;
        let mut parts = Vec::with_capacity(batch.parts.len());
        for part in &batch.parts {
            let range = start..start + part.rows as usize;
            start = range.end;
            let tensors = part.request.outputs.iter().filter_map(|&index| {
                let (shape, bytes) = produced[index].as_ref()?;
                Some(match cut_back(spec, (&ran, part), index, shape) {
                    Ok(None) => self.scatter_rows(spec, &spec.outputs[index], (shape, bytes), range.clone()),
                    Ok(Some(cut)) => self.scatter_cut(spec, &spec.outputs[index], (shape, bytes), (&cut, range.start)),
                    Err(error) => Err(error),
                })
            });
            parts.push(tensors.collect::<Result<_, _>>()?);
        }
        Ok(parts)
    }

    fn scatter_rows(
        &self,
        spec: &ModelSpec,
        output: &TensorSpec,
        produced: (&Shape, &OutputBytes<'_>),
        range: Range<usize>,
    ) -> Result<Tensor, RunError> {
        let datatype = output.datatype;
        let (shape, bytes) = produced;
        let layout = RowLayout::new(shape, spec.batch_axis);
        let mut shape = shape.clone();
        if let Some(axis) = spec.batch_axis {
            shape[axis] = range.len();
        }
        let data = match bytes {
            OutputBytes::Plain(bytes) => {
                let element = datatype.size().unwrap_or(1);
                let len = layout.with_rows(range.len()).elements() * element;
                self.fill(len, |out| rows::scatter((bytes, layout), element, range, out))
            }
            OutputBytes::Strings(strings) => {
                let indices = || rows::string_indices(layout, range.clone()).map(|index| &strings[index]);
                let len = indices().map(|string| rows::string_size(string)).sum();
                self.fill(len, |out| rows::write_strings(indices(), out))
            }
        };
        let data =
            data.map_err(|denied| RunError::OutOfMemory { message: format!("output '{}': {denied}", output.name) })?;
        Ok(Tensor { datatype, shape, data })
    }

    /// As [`Self::scatter_rows`], of rows from `start` on whose shape is smaller than they had in the batch.
    fn scatter_cut(
        &self,
        spec: &ModelSpec,
        output: &TensorSpec,
        (shape, bytes): (&Shape, &OutputBytes<'_>),
        (cut, start): (&Shape, usize),
    ) -> Result<Tensor, RunError> {
        let mut copy = Copy::common(shape, cut);
        if let Some(axis) = spec.batch_axis {
            copy = copy.rows(axis, (start, 0, cut[axis]));
        }
        let data = match bytes {
            OutputBytes::Plain(bytes) => {
                let element = output.datatype.size().unwrap_or(1);
                self.fill(cut.iter().product::<usize>() * element, |out| copy.copy_out(bytes, element, out))
            }
            OutputBytes::Strings(strings) => {
                let indices = || copy.runs().flat_map(|Run { from, len, .. }| from..from + len);
                let len = indices().map(|index| rows::string_size(&strings[index])).sum();
                self.fill(len, |out| rows::write_strings(indices().map(|index| &strings[index]), out))
            }
        };
        let data =
            data.map_err(|denied| RunError::OutOfMemory { message: format!("output '{}': {denied}", output.name) })?;
        Ok(Tensor { datatype: output.datatype, shape: cut.clone(), data })
    }

    fn fill(&self, len: usize, write: impl FnOnce(&mut [u8])) -> Result<Chunks, Denied> {
        let Some(arena) = self.arena.as_ref().filter(|_| len >= SMALLEST_BLOCK) else {
            let mut bytes = vec![0; len];
            write(&mut bytes);
            return Ok(bytes.into());
        };
        let mut block = arena.block(len)?;
        write(block.as_mut_slice());
        Ok(Bytes::from_owner(block).into())
    }
}

/// The size that each padded dimension has in a batch.
fn padded_sizes(spec: &ModelSpec, batch: &Batch) -> Vec<usize> {
    let Some(plan) = &spec.padding else { return Vec::new() };
    let size = |(at, dim): (usize, &PaddedDim)| {
        let sizes = batch.parts.iter().filter_map(|part| plan.size_of(at, &part.request.inputs));
        sizes.map(|size| dim.padded(size)).max().unwrap_or(0)
    };
    plan.dims.iter().enumerate().map(size).collect()
}

/// The shape of a part's rows in an output where padding made them longer than the request had them.
fn cut_back(
    spec: &ModelSpec,
    (ran, part): (&[usize], &BatchPart),
    index: usize,
    shape: &Shape,
) -> Result<Option<Shape>, RunError> {
    let Some(plan) = &spec.padding else { return Ok(None) };
    let mut cut = shape.clone();
    for &PaddedAxis { axis, dim } in &plan.outputs[index] {
        if shape.get(axis) != Some(&ran[dim]) {
            let (output, name) = (&spec.outputs[index].name, &plan.dims[dim].name);
            return Err(RunError::Model(format!(
                "output '{output}': its shape is {shape:?}, expected {} on axis {axis}, the size of '{name}' in this run",
                ran[dim]
            )));
        }
        cut[axis] = plan.size_of(dim, &part.request.inputs).unwrap_or(cut[axis]);
    }
    if cut == *shape {
        return Ok(None);
    }
    if let Some(axis) = spec.batch_axis {
        cut[axis] = part.rows as usize;
    }
    Ok(Some(cut))
}

fn look_into<'a>(
    spec: &ModelSpec,
    rows: Rows,
    output: &TensorSpec,
    outputs: &'a SessionOutputs<'_>,
) -> Result<(Shape, OutputBytes<'a>), RunError> {
    let fault = |text: String| RunError::Model(format!("output '{}': {text}", output.name));
    let value = outputs.get(output.name.as_str()).ok_or_else(|| fault("the run did not produce it".to_owned()))?;
    let (shape, bytes) = element::output_bytes(value, output.datatype).map_err(|error| match error {
        RunError::Model(text) => fault(text),
        other => other,
    })?;
    check_rows(spec, output, &shape, rows)?;
    Ok((shape, bytes))
}

/// A run of so many rows gives as many back.
pub(super) fn check_rows(spec: &ModelSpec, output: &TensorSpec, shape: &Shape, rows: Rows) -> Result<(), RunError> {
    match spec.batch_axis.filter(|axis| shape.get(*axis) != Some(&(rows as usize))) {
        Some(axis) => Err(RunError::Model(format!(
            "output '{}': its shape is {shape:?}, expected {rows} rows on axis {axis}",
            output.name
        ))),
        None => Ok(()),
    }
}
