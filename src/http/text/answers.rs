//! Answers as JSON, written straight into a buffer.

use crate::http::encode::{float32, string};
use crate::text::pooling::normalise;

/// Vectors as they leave: the first elements of each, if fewer were asked for, at unit length if that is wished.
pub(super) fn finished(mut vectors: Vec<Vec<f32>>, dimensions: Option<usize>, normalize: bool) -> Vec<Vec<f32>> {
    for vector in &mut vectors {
        vector.truncate(dimensions.unwrap_or(usize::MAX));
        if normalize {
            normalise(vector);
        }
    }
    vectors
}

/// A list of lists of numbers.
pub(super) fn rows(rows: &[Vec<f32>]) -> Vec<u8> {
    let mut out = Vec::with_capacity(rows.iter().map(|row| 11 * row.len() + 3).sum::<usize>() + 2);
    list(&mut out, rows, |out, row| numbers(out, row));
    out
}

/// A list of numbers.
pub(super) fn numbers(out: &mut Vec<u8>, values: &[f32]) {
    list(out, values, |out, value| float32(out, *value));
}

/// A list, each element by itself.
pub(super) fn list<T>(out: &mut Vec<u8>, items: &[T], mut item: impl FnMut(&mut Vec<u8>, &T)) {
    out.push(b'[');
    for (at, value) in items.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        item(out, value);
    }
    out.push(b']');
}

/// An object on its way out.
pub(super) struct Entries<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl Entries<'_> {
    /// Begins an entry; its value is to be written next.
    pub(super) fn key(&mut self, name: &str) -> &mut Vec<u8> {
        if !std::mem::take(&mut self.first) {
            self.out.push(b',');
        }
        string(self.out, name);
        self.out.push(b':');
        self.out
    }
}

/// An object with what `write` puts into it.
pub(super) fn object(out: &mut Vec<u8>, write: impl FnOnce(&mut Entries<'_>)) {
    out.push(b'{');
    write(&mut Entries { out, first: true });
    out.push(b'}');
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::encode::integer;

    #[test]
    fn lists_and_objects_are_json() {
        let mut out = Vec::new();
        list(&mut out, &[1, 2], |out, number| {
            object(out, |entry| {
                integer(entry.key("a\""), *number);
                numbers(entry.key("b"), &[0.5, -1.0]);
            });
        });
        let read: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!(read, serde_json::json!([{"a\"": 1, "b": [0.5, -1.0]}, {"a\"": 2, "b": [0.5, -1.0]}]));
        assert_eq!(rows(&[vec![], vec![1.0]]), b"[[],[1.0]]");
        let mut out = Vec::new();
        object(&mut out, |_| {});
        assert_eq!(out, b"{}");
    }

    #[test]
    fn shorter_vectors_are_cut_and_then_brought_to_unit_length() {
        assert_eq!(finished(vec![vec![3.0, 4.0, 12.0]], Some(2), true), [[0.6, 0.8]]);
        assert_eq!(finished(vec![vec![3.0, 4.0, 12.0]], Some(2), false), [[3.0, 4.0]]);
        assert_eq!(finished(vec![vec![3.0, 4.0]], None, true), [[0.6, 0.8]]);
    }
}
