//! The space against a naive model that keeps a sorted list and searches it from end to end.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const ALIGNMENT: usize = 64;
const ADDRESS_SPACE: usize = 1 << 20;

/// Live blocks by offset, and nothing else: all answers are found by walking over them.
#[derive(Default)]
struct Naive {
    blocks: BTreeMap<usize, usize>,
    committed: usize,
}

impl Naive {
    fn top(&self) -> usize {
        self.blocks.last_key_value().map_or(0, |(offset, size)| offset + size)
    }

    /// All holes below the highest block, as `(size, offset)`.
    fn holes(&self) -> Vec<(usize, usize)> {
        let mut holes = Vec::new();
        let mut end = 0;
        for (offset, size) in &self.blocks {
            if *offset > end {
                holes.push((offset - end, end));
            }
            end = offset + size;
        }
        holes
    }

    fn allocate(&mut self, bytes: usize) -> Result<usize, Unplaced> {
        let size = bytes.max(1).div_ceil(ALIGNMENT) * ALIGNMENT;
        let hole = self.holes().into_iter().filter(|hole| hole.0 >= size).min();
        let offset = hole.map_or(self.top(), |hole| hole.1);
        if offset + size > ADDRESS_SPACE {
            return Err(Unplaced::Never);
        }
        if offset + size > self.committed {
            return Err(Unplaced::Short(offset + size));
        }
        self.blocks.insert(offset, size);
        Ok(offset)
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate(usize),
    /// The n-th live block.
    Free(usize),
    /// No live block begins there, or it is the one that is freed.
    FreeAt(usize),
    Commit(usize),
    Shrink,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..3000_usize).prop_map(Op::Allocate),
        2 => (0..60_usize).prop_map(|units| Op::Allocate(units * ALIGNMENT)),
        7 => any::<usize>().prop_map(Op::Free),
        1 => (0..ADDRESS_SPACE).prop_map(Op::FreeAt),
        2 => (1..40_000_usize).prop_map(Op::Commit),
        1 => Just(Op::Shrink),
    ];
    prop::collection::vec(op, 1..5000)
}

/// Does one step in both and compares what they answer.
fn step(space: &mut Space, naive: &mut Naive, op: Op) {
    match op {
        Op::Allocate(bytes) => assert_eq!(space.allocate(bytes), naive.allocate(bytes)),
        Op::Free(n) => {
            if let Some(&offset) = naive.blocks.keys().nth(n % naive.blocks.len().max(1)) {
                assert_eq!(space.free(offset), naive.blocks.remove(&offset));
            }
        }
        Op::FreeAt(offset) => assert_eq!(space.free(offset), naive.blocks.remove(&offset)),
        Op::Commit(bytes) => {
            naive.committed = (naive.committed + bytes).min(ADDRESS_SPACE);
            space.set_committed(naive.committed);
        }
        Op::Shrink => {
            naive.committed = naive.top();
            space.set_committed(naive.committed);
        }
    }
}

fn assert_same(space: &Space, naive: &Naive) {
    assert_eq!(space.top(), naive.top());
    assert_eq!(space.live(), naive.blocks.len());
    assert_eq!(space.allocated(), naive.blocks.values().sum::<usize>());
    assert!(space.allocated() <= space.committed());
    let largest_hole = naive.holes().into_iter().map(|hole| hole.0).max().unwrap_or(0);
    assert_eq!(space.largest_hole(), largest_hole);
    assert_eq!(space.largest_free(), largest_hole.max(naive.committed - naive.top()));
}

/// What the structure promises about itself.
fn assert_sound(space: &Space, naive: &Naive) {
    let holes: Vec<_> = space.holes.iter().map(|hole| (hole.size, hole.offset)).collect();
    let mut expected = naive.holes();
    expected.sort_unstable();
    assert_eq!(holes, expected, "every hole is known once and as large as it can be");
    assert_eq!(space.entries.len(), space.live() + space.holes.iter().count() + space.vacant.len(), "no entry is lost");
    let (mut entry, mut walked, mut start) = (space.last, 0, space.top);
    while entry != NONE {
        let Entry { offset, size, prev, .. } = space.entries[entry as usize];
        assert_eq!(offset + size, start, "entries cover the space without gap or overlap");
        assert_eq!(offset % ALIGNMENT, 0);
        (start, entry, walked) = (offset, prev, walked + 1);
    }
    assert_eq!((start, walked), (0, space.live() + space.holes.iter().count()));
}

proptest! {
    // About a million steps.
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn answers_as_the_naive_model(ops in ops()) {
        let mut space = Space::new(ALIGNMENT, ADDRESS_SPACE);
        let mut naive = Naive::default();
        for (at, op) in ops.into_iter().enumerate() {
            step(&mut space, &mut naive, op);
            // Each answer has been compared; the rest is the work of a walk.
            if at % 16 == 0 {
                assert_same(&space, &naive);
            }
            if at % 64 == 0 {
                assert_sound(&space, &naive);
            }
        }
        assert_sound(&space, &naive);
        while let Some((&offset, _)) = naive.blocks.iter().nth(naive.blocks.len() / 2) {
            prop_assert_eq!(space.free(offset), naive.blocks.remove(&offset));
        }
        assert_sound(&space, &naive);
        prop_assert_eq!((space.top(), space.allocated(), space.holes.iter().count()), (0, 0, 0));
    }

    #[test]
    fn placement_does_not_depend_on_what_is_committed(ops in ops()) {
        let mut ample = Space::new(ALIGNMENT, ADDRESS_SPACE);
        ample.set_committed(ADDRESS_SPACE);
        let mut tight = Space::new(ALIGNMENT, ADDRESS_SPACE);
        let mut live = Vec::new();
        for op in ops {
            match op {
                Op::Allocate(bytes) => {
                    let placed = ample.allocate(bytes);
                    if let Err(Unplaced::Short(end)) = tight.allocate(bytes).map(|offset| live.push(offset)) {
                        tight.set_committed(end);
                        live.push(tight.allocate(bytes).unwrap());
                    }
                    if let Ok(offset) = placed {
                        prop_assert_eq!(live.last(), Some(&offset));
                    }
                }
                Op::Free(n) if !live.is_empty() => {
                    let offset = live.swap_remove(n % live.len());
                    prop_assert_eq!(ample.free(offset), tight.free(offset));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn absurd_sizes_are_refused() {
    let mut space = Space::new(ALIGNMENT, ADDRESS_SPACE);
    space.set_committed(ADDRESS_SPACE);
    for bytes in [usize::MAX, usize::MAX - 63, usize::MAX / 2, ADDRESS_SPACE + 1] {
        assert_eq!(space.allocate(bytes), Err(Unplaced::Never), "{bytes}");
    }
    assert_eq!(space.allocate(64), Ok(0));
    assert_eq!(space.allocate(usize::MAX - 127), Err(Unplaced::Never), "offset plus size overflows");
    assert_eq!(space.allocate(ADDRESS_SPACE - 64), Ok(64));
}

#[test]
fn empty_blocks_are_distinct() {
    let mut space = Space::new(ALIGNMENT, ADDRESS_SPACE);
    space.set_committed(128);
    assert_eq!((space.allocate(0), space.allocate(0)), (Ok(0), Ok(64)));
    assert_eq!(space.allocate(0), Err(Unplaced::Short(192)));
    assert_eq!((space.free(0), space.free(0)), (Some(64), None), "a second free is refused");
}

#[test]
fn kept_blocks_are_freed_by_their_owner_only() {
    let mut space = Space::new(ALIGNMENT, ADDRESS_SPACE);
    space.set_committed(128);
    assert!(!space.keep(0), "nothing lives there");
    assert_eq!(space.allocate(64), Ok(0));
    assert!(space.keep(0));
    assert_eq!(space.free(0), None);
    assert!(space.release(0));
    assert_eq!(space.free(0), Some(64));
    assert_eq!(space.allocate(64), Ok(0));
    assert_eq!(space.free(0), Some(64), "the next block at this place is nobody's");
}

#[test]
fn the_best_hole_is_taken_and_of_equals_the_lowest() {
    let mut space = Space::new(ALIGNMENT, ADDRESS_SPACE);
    space.set_committed(ADDRESS_SPACE);
    let sizes = [256, 64, 128, 64, 128, 64, 192, 64];
    let offsets: Vec<_> = sizes.iter().map(|size| space.allocate(*size).unwrap()).collect();
    for hole in [6, 4, 2, 0] {
        space.free(offsets[hole]).unwrap();
    }
    assert_eq!(space.allocate(100), Ok(offsets[2]), "the lower of two equals, not the first that fits");
    assert_eq!(space.allocate(100), Ok(offsets[4]));
    assert_eq!(space.allocate(100), Ok(offsets[6]));
    assert_eq!(space.allocate(300), Ok(space.top() - 320), "the tail comes last");
}
