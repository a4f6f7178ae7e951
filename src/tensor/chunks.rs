//! A rope of byte slices: what a body is before anything needs it contiguous.

use bytes::Bytes;
use smallvec::SmallVec;
use std::ops::Range;

/// Bytes in order, held as reference-counted slices; cloning and slicing copy nothing.
#[derive(Clone, Debug, Default)]
pub struct Chunks {
    parts: SmallVec<[Bytes; 2]>,
    len: usize,
}

impl Chunks {
    /// No bytes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds bytes at the end.
    pub fn push(&mut self, part: Bytes) {
        if !part.is_empty() {
            self.len += part.len();
            self.parts.push(part);
        }
    }

    /// Adds another rope at the end.
    pub fn append(&mut self, other: Self) {
        self.len += other.len;
        self.parts.extend(other.parts);
    }

    /// The slices, in order.
    pub fn iter(&self) -> std::slice::Iter<'_, Bytes> {
        self.parts.iter()
    }

    /// The part of the rope in `range`, without copying.
    ///
    /// # Panics
    /// If the range lies outside the rope.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        let mut out = Self::new();
        let mut offset = 0;
        for part in &self.parts {
            let start = range.start.clamp(offset, offset + part.len());
            let end = range.end.clamp(offset, offset + part.len());
            if start < end {
                out.push(part.slice(start - offset..end - offset));
            }
            offset += part.len();
            if offset >= range.end {
                break;
            }
        }
        out
    }

    /// Copies `out.len()` bytes that begin at `offset` into `out`.
    ///
    /// # Panics
    /// If the rope ends before `out` is full.
    pub fn copy_to(&self, offset: usize, out: &mut [u8]) {
        assert!(offset + out.len() <= self.len, "copy of {} bytes at {offset} of {}", out.len(), self.len);
        let mut skip = offset;
        let mut filled = 0;
        for part in &self.parts {
            if filled == out.len() {
                break;
            }
            if skip >= part.len() {
                skip -= part.len();
                continue;
            }
            let count = (part.len() - skip).min(out.len() - filled);
            out[filled..filled + count].copy_from_slice(&part[skip..skip + count]);
            filled += count;
            skip = 0;
        }
    }

    /// All bytes as one slice; copies only if there is more than one part.
    #[must_use]
    pub fn to_contiguous(&self) -> Bytes {
        match self.parts.as_slice() {
            [] => Bytes::new(),
            [one] => one.clone(),
            _ => {
                let mut out = vec![0; self.len];
                self.copy_to(0, &mut out);
                out.into()
            }
        }
    }
}

impl From<Bytes> for Chunks {
    fn from(part: Bytes) -> Self {
        let mut out = Self::new();
        out.push(part);
        out
    }
}

impl From<Vec<u8>> for Chunks {
    fn from(bytes: Vec<u8>) -> Self {
        Bytes::from(bytes).into()
    }
}

impl PartialEq for Chunks {
    fn eq(&self, other: &Self) -> bool {
        self.len == other.len && self.to_contiguous() == other.to_contiguous()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rope(parts: &[Vec<u8>]) -> (Chunks, Vec<u8>) {
        let mut chunks = Chunks::new();
        for part in parts {
            chunks.push(part.clone().into());
        }
        (chunks, parts.concat())
    }

    proptest! {
        #[test]
        fn slices_and_copies_equal_those_of_the_flat_bytes(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..9), 0..6),
            a in 0usize..64,
            b in 0usize..64,
        ) {
            let (chunks, flat) = rope(&parts);
            prop_assert_eq!(chunks.len(), flat.len());
            let (a, b) = (a.min(flat.len()), b.min(flat.len()));
            let range = a.min(b)..a.max(b);
            prop_assert_eq!(&chunks.slice(range.clone()).to_contiguous()[..], &flat[range.clone()]);
            let mut out = vec![0; range.len()];
            chunks.copy_to(range.start, &mut out);
            prop_assert_eq!(&out[..], &flat[range]);
        }
    }

    #[test]
    fn a_single_part_becomes_contiguous_without_a_copy() {
        let part = Bytes::from(vec![1, 2, 3]);
        let chunks = Chunks::from(part.clone());
        assert_eq!(chunks.to_contiguous().as_ptr(), part.as_ptr());
    }
}
