//! The free blocks between live ones, found by size: best fit, and of equals the lowest address.
//!
//! Sizes fall into classes, eight to an octave; a bitmap finds the next class that has holes. A class is a sorted list
//! while it is short, which is nearly always and costs a few nanoseconds, and a tree once it is long.

use std::collections::BTreeSet;

/// A class with more holes than this is kept as a tree.
const LONG: usize = 64;

/// Classes in an octave: sizes within one differ by at most an eighth.
const STEPS_LOG2: u32 = 3;

const WORD: usize = u64::BITS as usize;

/// A hole. The order is the order of preference among holes that are large enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Hole {
    pub(super) size: usize,
    pub(super) offset: usize,
    /// Its entry in the space.
    pub(super) entry: u32,
}

/// A set of holes.
#[derive(Debug, Default)]
pub(super) struct Holes {
    classes: Vec<Class>,
    /// One bit for each class that has holes.
    occupied: Vec<u64>,
}

#[derive(Debug)]
enum Class {
    Short(Vec<Hole>),
    Long(BTreeSet<Hole>),
}

impl Holes {
    /// Takes the best hole for `size` bytes out of the set.
    pub(super) fn take(&mut self, size: usize) -> Option<Hole> {
        let mut class = class_of(size);
        let mut taken = self.classes.get_mut(class)?.take(size);
        if taken.is_none() {
            class = self.occupied_from(class + 1)?;
            taken = self.classes[class].take(size);
        }
        self.note_occupied(class);
        taken
    }

    /// The largest hole.
    pub(super) fn largest(&self) -> Option<Hole> {
        let (word, bits) = self.occupied.iter().enumerate().rev().find(|(_, bits)| **bits != 0)?;
        self.classes[word * WORD + bits.ilog2() as usize].last()
    }

    /// Adds a hole that is not in the set.
    pub(super) fn insert(&mut self, hole: Hole) {
        let class = class_of(hole.size);
        if class >= self.classes.len() {
            self.classes.resize_with(class + 1, || Class::Short(Vec::new()));
            self.occupied.resize(class / WORD + 1, 0);
        }
        self.classes[class].insert(hole);
        self.occupied[class / WORD] |= 1 << (class % WORD);
    }

    /// Removes a hole that is in the set.
    pub(super) fn remove(&mut self, hole: Hole) {
        let class = class_of(hole.size);
        self.classes[class].remove(hole);
        self.note_occupied(class);
    }

    fn note_occupied(&mut self, class: usize) {
        if self.classes[class].is_empty() {
            self.occupied[class / WORD] &= !(1 << (class % WORD));
        }
    }

    /// The first class at or after `class` that has holes.
    fn occupied_from(&self, class: usize) -> Option<usize> {
        let first = class / WORD;
        let bits = self.occupied.get(first)? & (u64::MAX << (class % WORD));
        if bits != 0 {
            return Some(first * WORD + bits.trailing_zeros() as usize);
        }
        let (word, bits) = self.occupied.iter().enumerate().skip(first + 1).find(|(_, bits)| **bits != 0)?;
        Some(word * WORD + bits.trailing_zeros() as usize)
    }

    /// All holes, by size and then by address.
    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = Hole> {
        self.classes.iter().flat_map(|class| match class {
            Class::Short(holes) => holes.clone(),
            Class::Long(holes) => holes.iter().copied().collect(),
        })
    }
}

impl Class {
    fn is_empty(&self) -> bool {
        match self {
            Self::Short(holes) => holes.is_empty(),
            Self::Long(_) => false,
        }
    }

    /// Takes out the best of those that hold `size` bytes.
    fn take(&mut self, size: usize) -> Option<Hole> {
        match self {
            Self::Short(holes) => {
                let at = holes.partition_point(|hole| hole.size < size);
                (at < holes.len()).then(|| holes.remove(at))
            }
            Self::Long(holes) => {
                let best = holes.range(Hole { size, offset: 0, entry: 0 }..).next().copied()?;
                self.remove(best);
                Some(best)
            }
        }
    }

    fn last(&self) -> Option<Hole> {
        match self {
            Self::Short(holes) => holes.last().copied(),
            Self::Long(holes) => holes.last().copied(),
        }
    }

    fn insert(&mut self, hole: Hole) {
        match self {
            Self::Short(holes) if holes.len() < LONG => {
                holes.insert(holes.partition_point(|other| *other < hole), hole);
            }
            Self::Short(holes) => *self = Self::Long(holes.drain(..).chain([hole]).collect()),
            Self::Long(holes) => {
                holes.insert(hole);
            }
        }
    }

    fn remove(&mut self, hole: Hole) {
        match self {
            Self::Short(holes) => {
                let at = holes.partition_point(|other| *other < hole);
                debug_assert_eq!(holes.get(at), Some(&hole), "only known holes are removed");
                holes.remove(at);
            }
            Self::Long(holes) => {
                holes.remove(&hole);
                // Not at the threshold itself, lest one hole that comes and goes converts the class each time.
                if holes.len() <= LONG / 2 {
                    *self = Self::Short(holes.iter().copied().collect());
                }
            }
        }
    }
}

/// The class of a size: monotone, so that a hole of a later class is larger than any of an earlier one.
fn class_of(size: usize) -> usize {
    let octave = size.max(1).ilog2();
    if octave <= STEPS_LOG2 {
        return size;
    }
    let step = (size >> (octave - STEPS_LOG2)) & ((1 << STEPS_LOG2) - 1);
    (((octave - STEPS_LOG2) as usize + 1) << STEPS_LOG2) + step
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_monotone_and_without_gaps() {
        let mut last = class_of(0);
        for size in 1..100_000 {
            let class = class_of(size);
            assert!(class == last || class == last + 1, "{size}");
            last = class;
        }
        for octave in 4..63 {
            assert_eq!(class_of((1 << octave) - 1) + 1, class_of(1 << octave), "{octave}");
        }
        assert!(class_of(usize::MAX) < 512);
    }

    #[test]
    fn finds_what_a_sorted_set_finds() {
        let (mut holes, mut reference, mut state) = (Holes::default(), BTreeSet::new(), 1_u64);
        let mut random = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        for step in 0..200_000_u32 {
            // Sometimes all sizes are alike, so that classes become long and short again.
            let spread = if step / 20_000 % 2 == 0 { 30 } else { 100_000 };
            let size = 64 + random(spread) as usize;
            let probe = Hole { size, offset: 0, entry: 0 };
            let expected = reference.range(probe..).next().copied();
            assert_eq!(holes.largest(), reference.last().copied());
            if random(2_000) < (reference.len() as u64).min(1_999) {
                match expected {
                    Some(hole) if step % 2 == 0 => holes.remove(hole),
                    _ => assert_eq!(holes.take(size), expected),
                }
                expected.map(|hole| reference.remove(&hole));
            } else {
                let hole = Hole { size, offset: random(u64::MAX >> 1) as usize, entry: step };
                holes.insert(hole);
                reference.insert(hole);
            }
        }
        assert!(holes.iter().eq(reference));
    }
}
