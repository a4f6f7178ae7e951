//! Copies between tensors whose shapes differ: rows that are shorter than their batch go in, and come out cut back. Pure.

use super::{Chunks, Shape};
use smallvec::SmallVec;

/// A part of one tensor that lies somewhere in another one of the same rank: in each axis `sizes` elements, from `from` in the
/// one and from `to` in the other.
#[derive(Clone, Debug)]
pub struct Copy<'a> {
    /// The shape that is read.
    pub source: &'a [usize],
    /// The shape that is written.
    pub target: &'a [usize],
    /// What is copied, in each axis.
    pub sizes: Shape,
    /// Where it begins in the source, in each axis.
    pub from: Shape,
    /// Where it begins in the target, in each axis.
    pub to: Shape,
}

/// Elements that lie side by side in both tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first in the source.
    pub from: usize,
    /// The first in the target.
    pub to: usize,
    /// How many.
    pub len: usize,
}

impl<'a> Copy<'a> {
    /// As much of each axis as both shapes have, from the beginning.
    ///
    /// # Panics
    /// If the ranks differ.
    #[must_use]
    pub fn common(source: &'a [usize], target: &'a [usize]) -> Self {
        assert_eq!(source.len(), target.len(), "only tensors of one rank are copied");
        let sizes = source.iter().zip(target).map(|(source, target)| *source.min(target)).collect();
        let zeros: Shape = source.iter().map(|_| 0).collect();
        Self { source, target, sizes, from: zeros.clone(), to: zeros }
    }

    /// The same with `count` rows of an axis, those from `from` on to those from `to` on.
    #[must_use]
    pub fn rows(mut self, axis: usize, (from, to, count): (usize, usize, usize)) -> Self {
        (self.from[axis], self.to[axis], self.sizes[axis]) = (from, to, count);
        self
    }

    /// What lies side by side, in the order of the source.
    pub fn runs(&self) -> impl Iterator<Item = Run> {
        // Behind this axis whole rows are copied: everything there is one run.
        let whole = |axis: &usize| self.sizes[*axis] == self.source[*axis] && self.sizes[*axis] == self.target[*axis];
        let rank = self.sizes.len();
        let inner = (0..rank).rev().take_while(whole).count();
        let outer = rank.saturating_sub(inner + 1);
        let len = self.sizes[outer..].iter().product();
        let (source, target) = (strides(self.source), strides(self.target));
        let base = |begin: &Shape, strides: &Shape| begin.iter().zip(strides).map(|(at, stride)| at * stride).sum();
        let (from, to): (usize, usize) = (base(&self.from, &source), base(&self.to, &target));
        let sizes: SmallVec<[usize; 4]> = self.sizes[..outer].into();
        let count: usize = if len == 0 { 0 } else { sizes.iter().product() };
        (0..count).map(move |index| {
            let (mut rest, mut run) = (index, Run { from, to, len });
            for axis in (0..sizes.len()).rev() {
                let at = rest % sizes[axis];
                rest /= sizes[axis];
                run.from += at * source[axis];
                run.to += at * target[axis];
            }
            run
        })
    }

    /// Copies from a rope. `element` is the size of one element in bytes.
    ///
    /// # Panics
    /// If either side is shorter than its shape says.
    pub fn copy_in(&self, source: &Chunks, element: usize, target: &mut [u8]) {
        for Run { from, to, len } in self.runs() {
            source.copy_to(from * element, &mut target[to * element..(to + len) * element]);
        }
    }

    /// Copies from a slice; as [`Self::copy_in`].
    ///
    /// # Panics
    /// If either side is shorter than its shape says.
    pub fn copy_out(&self, source: &[u8], element: usize, target: &mut [u8]) {
        for Run { from, to, len } in self.runs() {
            target[to * element..(to + len) * element].copy_from_slice(&source[from * element..(from + len) * element]);
        }
    }
}

/// Fills bytes with one element after the other.
pub fn fill(bytes: &mut [u8], element: &[u8]) {
    match element {
        [] => {}
        [first, rest @ ..] if rest.iter().all(|byte| byte == first) => bytes.fill(*first),
        _ => bytes.chunks_exact_mut(element.len()).for_each(|chunk| chunk.copy_from_slice(element)),
    }
}

fn strides(shape: &[usize]) -> Shape {
    let mut strides: Shape = shape.iter().map(|_| 1).collect();
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The coordinates of an element.
    fn place(mut index: usize, shape: &[usize]) -> Vec<usize> {
        let mut at: Vec<usize> = shape
            .iter()
            .rev()
            .map(|size| {
                let here = index % size;
                index /= size;
                here
            })
            .collect();
        at.reverse();
        at
    }

    proptest! {
        /// Against a copy that looks at every element of the target by itself.
        #[test]
        fn each_element_comes_from_its_place(
            shape in prop::collection::vec((1usize..4, 1usize..4), 1..5),
            axis in 0usize..4,
            (from, to, count) in (0usize..3, 0usize..3, 0usize..3),
        ) {
            let source: Vec<usize> = shape.iter().map(|(size, _)| *size).collect();
            let target: Vec<usize> = shape.iter().map(|(_, size)| *size).collect();
            let axis = axis % source.len();
            let (from, to) = (from.min(source[axis] - 1), to.min(target[axis] - 1));
            let count = count.min(source[axis] - from).min(target[axis] - to);
            let copy = Copy::common(&source, &target).rows(axis, (from, to, count));
            let data: Vec<u8> = (0..source.iter().product()).map(|at: usize| at as u8 + 1).collect();
            let mut written = vec![0; target.iter().product()];
            copy.copy_out(&data, 1, &mut written);
            for (index, found) in written.iter().enumerate() {
                let mut at = place(index, &target);
                let inside = (to..to + count).contains(&at[axis]);
                at[axis] = (at[axis] + from).wrapping_sub(to);
                let expected = if inside && at.iter().zip(&source).all(|(at, size)| at < size) {
                    at.iter().zip(&source).fold(0, |flat, (at, size)| flat * size + at) as u8 + 1
                } else {
                    0
                };
                prop_assert_eq!(*found, expected, "at {:?} of {:?}", index, target);
            }
            let mut again = vec![0; written.len()];
            copy.copy_in(&Chunks::from(data), 1, &mut again);
            prop_assert_eq!(again, written);
        }
    }

    #[test]
    fn what_is_whole_is_one_run() {
        let runs = |source: &[usize], target: &[usize]| Copy::common(source, target).runs().collect::<Vec<_>>();
        assert_eq!(runs(&[2, 3], &[2, 3]), [Run { from: 0, to: 0, len: 6 }]);
        assert_eq!(runs(&[2, 3], &[4, 3]), [Run { from: 0, to: 0, len: 6 }]);
        assert_eq!(runs(&[2, 2], &[2, 3]), [Run { from: 0, to: 0, len: 2 }, Run { from: 2, to: 3, len: 2 }]);
        assert_eq!(runs(&[], &[]), [Run { from: 0, to: 0, len: 1 }]);
        assert_eq!(runs(&[2, 0], &[2, 3]), []);
    }

    #[test]
    fn elements_fill_up() {
        let mut bytes = [9; 6];
        fill(&mut bytes, &[1, 2]);
        assert_eq!(bytes, [1, 2, 1, 2, 1, 2]);
        fill(&mut bytes, &[0, 0]);
        assert_eq!(bytes, [0; 6]);
    }
}
