//! From the inputs of requests to those of a batch.

use super::session::out_of_memory;
use super::{Batch, BatchPart, RunError};
use crate::memory::{Arena, Block, CUDA_ALIGNMENT, Denied};
use crate::model::pad::{self, PaddedAxis};
use crate::model::{ModelSpec, TensorSpec};
use crate::tensor::rows::{self, RowCopy, RowLayout};
use crate::tensor::{Shape, boxes};
use crate::units::Rows;
use bytes::Bytes;
use std::ops::Range;

/// Inputs of at least so many bytes are gathered by several threads: one alone copies some gigabytes a second, which is less
/// than a GPU with its own link takes.
const SPREAD_BYTES: usize = 8 << 20;
/// Shares of such an input.
const SPREAD_TASKS: usize = 4;

/// The memory that one input is gathered into, aligned for every datatype and kept between runs.
#[derive(Debug, Default)]
pub(super) struct Buffer {
    block: Option<Block>,
    len: usize,
}

impl Buffer {
    pub(super) fn bytes(&self) -> &[u8] {
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

/// What an input is gathered into.
pub(super) trait Target {
    /// Room for exactly so many bytes.
    ///
    /// # Errors
    /// If there is none.
    fn resized(&mut self, len: usize) -> Result<&mut [u8], RunError>;
}

/// A buffer that grows in an arena.
pub(super) struct InArena<'a> {
    pub(super) buffer: &'a mut Buffer,
    pub(super) arena: &'a Arena,
}

impl Target for InArena<'_> {
    fn resized(&mut self, len: usize) -> Result<&mut [u8], RunError> {
        self.buffer.resized(len, self.arena).map_err(|denied| out_of_memory(&denied))
    }
}

/// A place of its own, exactly as large as what comes.
impl Target for &mut [u8] {
    fn resized(&mut self, len: usize) -> Result<&mut [u8], RunError> {
        let found = self.len();
        let fits = self.get_mut(..len).filter(|_| found == len);
        fits.ok_or_else(|| RunError::Lost(format!("{len} bytes were gathered for a place of {found}")))
    }
}

impl Target for Vec<u8> {
    fn resized(&mut self, len: usize) -> Result<&mut [u8], RunError> {
        self.resize(len, 0);
        Ok(self)
    }
}

/// A string tensor from what [`gather_input`] has gathered for it.
///
/// # Errors
/// If the bytes do not make one.
pub(super) fn text_value(shape: &Shape, data: &[u8]) -> Result<ort::value::Tensor<String>, String> {
    let elements = rows::string_elements(&Bytes::copy_from_slice(data)).ok_or("a string runs past its tensor")?;
    super::strings::create(shape, &elements)
}

/// Fills the target with one input of a batch of so many rows, padding included, and returns its shape.
pub(super) fn gather_input(
    spec: &ModelSpec,
    (batch, padded): (&Batch, Rows),
    index: usize,
    target: &mut dyn Target,
) -> Result<Shape, RunError> {
    let shape = batch_shape(spec, (batch, padded), index);
    let into = RowLayout::new(&shape, spec.batch_axis);
    let Some(element) = spec.inputs[index].datatype.size() else {
        let strings = gather_strings(spec, (batch, padded), index);
        target.resized(strings.len())?.copy_from_slice(&strings);
        return Ok(shape);
    };
    let bytes = target.resized(into.elements() * element)?;
    let fits = |part: &BatchPart| is_as_long(spec, &part.request.inputs[index].shape, &shape);
    if !batch.parts.iter().all(fits) {
        let value = spec.padding.as_ref().map_or(0.0, |plan| plan.inputs[index].value);
        boxes::fill(bytes, &pad::element(spec.inputs[index].datatype, value));
    }
    let copy_rows = |(copy, part): (RowCopy, &BatchPart), (bytes, into): (&mut [u8], RowLayout)| {
        let source = &part.request.inputs[index];
        rows::gather((&source.data, RowLayout::new(&source.shape, spec.batch_axis)), (bytes, into), element, copy);
    };
    if bytes.len() >= SPREAD_BYTES && into.outer == 1 && batch.parts.iter().all(fits) {
        let copies: Vec<_> = copies(batch, padded).collect();
        spread(&copies, (bytes, into), copy_rows);
        return Ok(shape);
    }
    for (copy, part) in copies(batch, padded) {
        let source = &part.request.inputs[index];
        if let Some(axis) = spec.batch_axis.filter(|_| !fits(part)) {
            let copy = boxes::Copy::common(&source.shape, &shape).rows(axis, (copy.from, copy.to, copy.count));
            copy.copy_in(&source.data, element, bytes);
            continue;
        }
        copy_rows((copy, part), (&mut *bytes, into));
    }
    Ok(shape)
}

/// Does these copies in parallel, each task those of its share of the rows.
fn spread<T: Copy + Sync>(
    copies: &[(RowCopy, T)],
    (bytes, into): (&mut [u8], RowLayout),
    copy_rows: impl Fn((RowCopy, T), (&mut [u8], RowLayout)) + Sync,
) {
    let share = into.rows.div_ceil(SPREAD_TASKS).max(1);
    let row = bytes.len() / into.rows.max(1);
    let copy_rows = &copy_rows;
    rayon::scope(|scope| {
        for (task, bytes) in bytes.chunks_mut((share * row).max(1)).enumerate() {
            let range = task * share..((task + 1) * share).min(into.rows);
            let into = RowLayout { rows: range.len(), ..into };
            scope.spawn(move |_| {
                for (copy, source) in copies {
                    if let Some(copy) = copy.within(&range) {
                        copy_rows((copy, *source), (&mut *bytes, into));
                    }
                }
            });
        }
    });
}

/// Where each input of a run lies in the memory that holds all of them, and how large that is; `None` if one of them has no
/// fixed size, as strings have not.
pub(super) fn packed(spec: &ModelSpec, shapes: &[Shape]) -> Option<(Vec<Range<usize>>, usize)> {
    let mut end: usize = 0;
    let range = |(input, shape): (&TensorSpec, &Shape)| {
        let start = end.next_multiple_of(CUDA_ALIGNMENT);
        end = start + shape.iter().product::<usize>() * input.datatype.size()?;
        Some(start..end)
    };
    let ranges = spec.inputs.iter().zip(shapes).map(range).collect::<Option<Vec<_>>>()?;
    Some((ranges, end))
}

/// The shape of one input of a batch of so many rows: each padded dimension is as long as that of the longest row.
pub(super) fn batch_shape(spec: &ModelSpec, (batch, rows): (&Batch, Rows), index: usize) -> Shape {
    let mut shape = batch.parts[0].request.inputs[index].shape.clone();
    if let Some(axis) = spec.batch_axis {
        shape[axis] = rows as usize;
    }
    let Some(plan) = &spec.padding else { return shape };
    for &PaddedAxis { axis, dim } in &plan.inputs[index].axes {
        let sizes = batch.parts.iter().map(|part| part.request.inputs[index].shape[axis]);
        shape[axis] = sizes.map(|size| plan.dims[dim].padded(size)).max().unwrap_or(0);
    }
    shape
}

/// Whether rows of one shape lie in a batch of another without gaps.
fn is_as_long(spec: &ModelSpec, rows: &Shape, batch: &Shape) -> bool {
    spec.padding.is_none()
        || rows.iter().zip(batch).enumerate().all(|(axis, (a, b))| a == b || spec.batch_axis == Some(axis))
}

/// Strings are few and short beside a model's work: they are taken apart and written again.
fn gather_strings(spec: &ModelSpec, (batch, padded): (&Batch, Rows), index: usize) -> Vec<u8> {
    let sources: Vec<(RowCopy, RowLayout, Vec<Bytes>)> = copies(batch, padded)
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
fn copies(batch: &Batch, padded: Rows) -> impl Iterator<Item = (RowCopy, &BatchPart)> {
    let mut to = 0;
    let filled: usize = batch.parts.iter().map(|part| part.rows as usize).sum();
    let first = &batch.parts[0];
    let parts = batch.parts.iter().map(move |part| {
        let copy = RowCopy { from: part.start as usize, to, count: part.rows as usize };
        to += copy.count;
        (copy, part)
    });
    let padding =
        (filled..padded as usize).map(move |to| (RowCopy { from: first.start as usize, to, count: 1 }, first));
    parts.chain(padding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn spread_rows_are_those_of_one_thread_after_the_other(parts in prop::collection::vec((0..5_usize, 1..9_usize), 1..20), row in 1..4_usize) {
            let mut to = 0;
            let copies: Vec<(RowCopy, u8)> = parts.iter().zip(1..).map(|(&(from, count), source)| {
                to += count;
                (RowCopy { from, to: to - count, count }, source)
            }).collect();
            let into = RowLayout { outer: 1, rows: to, inner: row };
            // Every element says which row of which source it is.
            let write = |(copy, source): (RowCopy, u8), (bytes, into): (&mut [u8], RowLayout)| {
                assert_eq!(bytes.len(), into.rows * row);
                for (at, bytes) in bytes.chunks_mut(row).skip(copy.to).take(copy.count).enumerate() {
                    bytes.fill(source.wrapping_mul(16).wrapping_add(u8::try_from(copy.from + at).expect("few rows")));
                }
            };
            let (mut expected, mut found) = (vec![0; to * row], vec![0; to * row]);
            copies.iter().for_each(|&copy| write(copy, (&mut expected, into)));
            spread(&copies, (&mut found, into), write);
            prop_assert_eq!(found, expected);
        }
    }
}
