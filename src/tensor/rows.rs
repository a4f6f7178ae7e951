//! Rows in and out of batches: copies along the batch axis, for fixed-size elements and for byte strings. Pure.
//!
//! A tensor with batch axis `a` is seen as `[outer, rows, inner]`: `outer` is the product of the dimensions before `a`,
//! `inner` the bytes (or elements, for strings) of those behind it. With the usual axis 0 `outer` is 1 and every copy is
//! one piece.

use super::{Chunks, DataType, Shape, Tensor};
use bytes::Bytes;
use std::ops::Range;

/// How rows lie in a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Product of the dimensions before the batch axis.
    pub outer: usize,
    /// Size of the batch axis.
    pub rows: usize,
    /// Elements of one row in one outer slice.
    pub inner: usize,
}

impl RowLayout {
    /// The layout of a shape around its batch axis; without one the whole tensor is one row.
    ///
    /// # Panics
    /// If the axis lies outside the shape.
    #[must_use]
    pub fn new(shape: &[usize], axis: Option<usize>) -> Self {
        match axis {
            None => Self { outer: 1, rows: 1, inner: shape.iter().product() },
            Some(axis) => Self {
                outer: shape[..axis].iter().product(),
                rows: shape[axis],
                inner: shape[axis + 1..].iter().product(),
            },
        }
    }

    /// The same tensor with another number of rows.
    #[must_use]
    pub fn with_rows(self, rows: usize) -> Self {
        Self { rows, ..self }
    }

    /// All elements.
    #[must_use]
    pub fn elements(self) -> usize {
        self.outer * self.rows * self.inner
    }

    /// For each outer slice, the elements of the rows in `range`.
    fn pieces(self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        (0..self.outer).map(move |outer| {
            let base = outer * self.rows;
            (base + range.start) * self.inner..(base + range.end) * self.inner
        })
    }
}

/// Rows to copy: `count` of them, from row `from` of the source to row `to` of the destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCopy {
    /// First row in the source.
    pub from: usize,
    /// First row in the destination.
    pub to: usize,
    /// Number of rows.
    pub count: usize,
}

impl RowCopy {
    /// The part of it that goes to these rows of the destination, counted from the first of them.
    #[must_use]
    pub fn within(self, to: &Range<usize>) -> Option<Self> {
        let (begin, end) = (self.to.max(to.start), (self.to + self.count).min(to.end));
        (begin < end).then(|| Self { from: self.from + begin - self.to, to: begin - to.start, count: end - begin })
    }
}

/// Copies rows of a request's tensor into a batch buffer. `element` is the size of one element in bytes.
///
/// # Panics
/// If rows lie outside the source or the destination.
pub fn gather(source: (&Chunks, RowLayout), batch: (&mut [u8], RowLayout), element: usize, copy: RowCopy) {
    let (source, from) = source;
    let (batch, into) = batch;
    debug_assert_eq!((from.outer, from.inner), (into.outer, into.inner));
    let pieces = from.pieces(copy.from..copy.from + copy.count).zip(into.pieces(copy.to..copy.to + copy.count));
    for (read, write) in pieces {
        source.copy_to(read.start * element, &mut batch[write.start * element..write.end * element]);
    }
}

/// Copies rows of a batch's output to where they go on their own.
///
/// # Panics
/// If the rows lie outside the batch, or `out` is not exactly as long as they are.
pub fn scatter(batch: (&[u8], RowLayout), element: usize, range: Range<usize>, out: &mut [u8]) {
    let (batch, layout) = batch;
    let mut rest = out;
    for piece in layout.pieces(range) {
        let source = &batch[piece.start * element..piece.end * element];
        let (here, behind) = rest.split_at_mut(source.len());
        here.copy_from_slice(source);
        rest = behind;
    }
    assert!(rest.is_empty(), "the destination is longer than the rows");
}

/// The indices of the string elements that belong to the rows in `range`, in row-major order of the result.
pub fn string_indices(layout: RowLayout, range: Range<usize>) -> impl Iterator<Item = usize> {
    layout.pieces(range).flatten()
}

/// The elements of a BYTES tensor in binary form: a 4-byte little-endian length before each. `None` if a length runs past
/// the end.
#[must_use]
pub fn string_elements(data: &Bytes) -> Option<Vec<Bytes>> {
    let mut out = Vec::new();
    let mut offset = 0;
    while offset < data.len() {
        let prefix = data.get(offset..offset + 4)?;
        let len = u32::from_le_bytes(prefix.try_into().ok()?) as usize;
        let start = offset + 4;
        let end = start.checked_add(len).filter(|&end| end <= data.len())?;
        out.push(data.slice(start..end));
        offset = end;
    }
    Some(out)
}

/// Appends one element of a BYTES tensor in binary form.
///
/// # Panics
/// If the element is longer than 4 GiB.
pub fn push_string(out: &mut Vec<u8>, element: &[u8]) {
    let len = u32::try_from(element.len()).expect("an element is shorter than a body, and a body than 4 GiB");
    out.extend_from_slice(&len.to_le_bytes());
    out.extend_from_slice(element);
}

/// Bytes of an element of a BYTES tensor in binary form.
#[must_use]
pub fn string_size(element: &[u8]) -> usize {
    4 + element.len()
}

/// Writes elements of a BYTES tensor in binary form.
///
/// # Panics
/// If an element is longer than 4 GiB, or `out` is shorter than they are.
pub fn write_strings<'a>(elements: impl Iterator<Item = &'a Bytes>, out: &mut [u8]) {
    let mut rest = out;
    for element in elements {
        let len = u32::try_from(element.len()).expect("an element is shorter than a body, and a body than 4 GiB");
        let (here, behind) = rest.split_at_mut(string_size(element));
        here[..4].copy_from_slice(&len.to_le_bytes());
        here[4..].copy_from_slice(element);
        rest = behind;
    }
}

/// Why parts are not joined.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConcatError {
    /// They do not fit together: the text says how.
    #[error("{0}")]
    Differ(String),
    /// There is no room for the whole.
    #[error("there is no memory for {bytes} bytes")]
    NoMemory {
        /// Its size.
        bytes: usize,
    },
}

/// Joins the parts of one request's output, in order, along the batch axis.
///
/// # Errors
/// If the parts differ in anything but their rows, or if there is no memory for them side by side.
pub fn concat(parts: Vec<Tensor>, axis: Option<usize>) -> Result<Tensor, ConcatError> {
    let mut parts = parts.into_iter();
    let first = parts.next().ok_or_else(|| ConcatError::Differ("no parts".to_owned()))?;
    let rest: Vec<Tensor> = parts.collect();
    if rest.is_empty() {
        return Ok(first);
    }
    let axis =
        axis.ok_or_else(|| ConcatError::Differ("a tensor without a batch axis came in several parts".to_owned()))?;
    let mut shape = first.shape.clone();
    for part in &rest {
        if part.datatype != first.datatype || !same_but(&part.shape, &first.shape, axis) {
            let text = format!("parts of shapes {:?} and {:?} cannot be joined", first.shape, part.shape);
            return Err(ConcatError::Differ(text));
        }
        shape[axis] += part.shape[axis];
    }
    let datatype = first.datatype;
    let all: Vec<Tensor> = std::iter::once(first).chain(rest).collect();
    let data = if shape[..axis].iter().product::<usize>() == 1 {
        let mut data = Chunks::new();
        all.into_iter().for_each(|part| data.append(part.data));
        data
    } else {
        interleave(&all, datatype, axis)?
    };
    Ok(Tensor { datatype, shape, data })
}

fn same_but(a: &Shape, b: &Shape, axis: usize) -> bool {
    a.len() == b.len() && a.iter().zip(b).enumerate().all(|(i, (x, y))| i == axis || x == y)
}

fn interleave(parts: &[Tensor], datatype: DataType, axis: usize) -> Result<Chunks, ConcatError> {
    let layouts: Vec<RowLayout> = parts.iter().map(|part| RowLayout::new(&part.shape, Some(axis))).collect();
    let flat: Vec<Bytes> = parts.iter().map(|part| part.data.to_contiguous()).collect();
    let bytes = flat.iter().map(Bytes::len).sum();
    let mut out = Vec::new();
    out.try_reserve_exact(bytes).map_err(|_| ConcatError::NoMemory { bytes })?;
    match datatype.size() {
        Some(element) => {
            for outer in 0..layouts[0].outer {
                for (bytes, layout) in flat.iter().zip(&layouts) {
                    let piece = layout.rows * layout.inner * element;
                    out.extend_from_slice(&bytes[outer * piece..(outer + 1) * piece]);
                }
            }
        }
        None => {
            let strings: Option<Vec<Vec<Bytes>>> = flat.iter().map(string_elements).collect();
            let strings = strings.ok_or_else(|| ConcatError::Differ("a string runs past its tensor".to_owned()))?;
            for outer in 0..layouts[0].outer {
                for (elements, layout) in strings.iter().zip(&layouts) {
                    let piece = layout.rows * layout.inner;
                    elements[outer * piece..(outer + 1) * piece].iter().for_each(|e| push_string(&mut out, e));
                }
            }
        }
    }
    Ok(out.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use smallvec::smallvec;

    /// One byte per element whose value is its row: what a row is must survive every way through a batch.
    fn tensor_of_rows(layout: RowLayout, first_row: usize) -> Vec<u8> {
        (0..layout.elements())
            .map(|index| u8::try_from(first_row + index / layout.inner.max(1) % layout.rows).expect("few rows"))
            .collect()
    }

    proptest! {
        #[test]
        fn rows_survive_gather_and_scatter(
            outer in 1usize..4,
            inner in 1usize..5,
            requests in prop::collection::vec(1usize..5, 1..6),
        ) {
            let total: usize = requests.iter().sum();
            let into = RowLayout { outer, rows: total, inner };
            let mut batch = vec![0xFF; into.elements()];
            let mut to = 0;
            for &rows in &requests {
                let from = into.with_rows(rows);
                let data = Chunks::from(tensor_of_rows(from, to));
                gather((&data, from), (&mut batch, into), 1, RowCopy { from: 0, to, count: rows });
                to += rows;
            }
            prop_assert_eq!(&batch, &tensor_of_rows(into, 0));
            let mut start = 0;
            for &rows in &requests {
                let mut part = vec![0xFF; into.with_rows(rows).elements()];
                scatter((&batch, into), 1, start..start + rows, &mut part);
                prop_assert_eq!(part, tensor_of_rows(into.with_rows(rows), start));
                start += rows;
            }
        }

        #[test]
        fn split_parts_join_to_the_whole(
            outer in 1usize..4,
            inner in 1usize..5,
            rows in 2usize..9,
            cut in 1usize..8,
            strings in any::<bool>(),
        ) {
            let cut = cut.min(rows - 1);
            let layout = RowLayout { outer, rows, inner };
            let flat = tensor_of_rows(layout, 0);
            let datatype = if strings { DataType::Bytes } else { DataType::Uint8 };
            let encode = |elements: &[u8]| -> Chunks {
                let mut out = Vec::new();
                elements.iter().for_each(|&e| push_string(&mut out, &vec![e; usize::from(e)]));
                if strings { out.into() } else { elements.to_vec().into() }
            };
            let part = |range: Range<usize>| {
                let mut elements = vec![0xFF; layout.with_rows(range.len()).elements()];
                scatter((&flat, layout), 1, range.clone(), &mut elements);
                Tensor { datatype, shape: smallvec![outer, range.len(), inner], data: encode(&elements) }
            };
            let whole = concat(vec![part(0..cut), part(cut..rows)], Some(1)).expect("shapes agree");
            prop_assert_eq!(whole, Tensor { datatype, shape: smallvec![outer, rows, inner], data: encode(&flat) });
        }
    }

    #[test]
    fn strings_are_written_as_they_are_pushed() {
        let elements = [Bytes::from_static(b"one"), Bytes::new(), Bytes::from_static(&[0, 255])];
        let mut pushed = Vec::new();
        elements.iter().for_each(|element| push_string(&mut pushed, element));
        let mut written = vec![0xFF; elements.iter().map(|element| string_size(element)).sum()];
        write_strings(elements.iter(), &mut written);
        assert_eq!(written, pushed);
        assert_eq!(string_elements(&written.into()), Some(elements.to_vec()));
    }

    #[test]
    fn strings_of_rows_are_found_by_index() {
        let layout = RowLayout { outer: 2, rows: 3, inner: 2 };
        assert_eq!(string_indices(layout, 1..2).collect::<Vec<_>>(), [2, 3, 8, 9]);
    }

    #[test]
    fn a_string_length_past_the_end_is_refused() {
        assert_eq!(string_elements(&Bytes::from_static(&[3, 0, 0, 0, b'a'])), None);
        assert_eq!(string_elements(&Bytes::from_static(&[1, 0])), None);
        let two = Bytes::from_static(&[1, 0, 0, 0, b'a', 0, 0, 0, 0]);
        assert_eq!(string_elements(&two), Some(vec![Bytes::from_static(b"a"), Bytes::new()]));
    }

    #[test]
    fn parts_that_differ_are_not_joined() {
        let part = |shape: &[usize]| Tensor {
            datatype: DataType::Uint8,
            shape: shape.into(),
            data: vec![0; shape.iter().product()].into(),
        };
        assert!(concat(vec![part(&[1, 2]), part(&[1, 3])], Some(0)).is_err());
        assert!(concat(vec![part(&[2]), part(&[2])], None).is_err());
    }
}
