//! Where blocks lie: placement over offsets, without pointers, locks or system calls.
//!
//! The committed bytes are a prefix of the address range. Blocks below `top` (the end of the highest live block) leave
//! holes; what lies between `top` and the end of the committed prefix is one tail. A request takes the best hole (the
//! smallest that fits, then the lowest address) and turns to the tail only if no hole fits. So placement is a function
//! of the calls alone, never of how much happens to be committed, and the footprint of a run is repeatable.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::holes::{Hole, Holes};

/// Marks the end of a list.
const NONE: u32 = u32::MAX;

/// A set of blocks over one address range whose prefix is committed.
#[derive(Debug)]
pub(super) struct Space {
    alignment: usize,
    address_space: usize,
    committed: usize,
    allocated: usize,
    top: usize,
    /// Live blocks and holes, linked in the order of their addresses; two holes never touch, and the last is live.
    entries: Vec<Entry>,
    vacant: Vec<u32>,
    last: u32,
    /// Live blocks only.
    by_offset: HashMap<usize, u32, BuildHasherDefault<OffsetHasher>>,
    holes: Holes,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    offset: usize,
    size: usize,
    prev: u32,
    next: u32,
    live: bool,
    /// Live, and freed by its owner only.
    kept: bool,
}

/// Why a block was not placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unplaced {
    /// It fits once the prefix is committed up to this offset.
    Short(usize),
    /// The address range is too small.
    Never,
}

impl Space {
    /// A space with nothing committed. `alignment` is a power of two.
    pub(super) fn new(alignment: usize, address_space: usize) -> Self {
        assert!(alignment.is_power_of_two(), "the alignment is a power of two");
        Self {
            alignment,
            address_space,
            committed: 0,
            allocated: 0,
            top: 0,
            entries: Vec::new(),
            vacant: Vec::new(),
            last: NONE,
            by_offset: HashMap::default(),
            holes: Holes::default(),
        }
    }

    /// Places a block and returns its offset. A block takes whole units of the alignment, at least one.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<usize, Unplaced> {
        let size = self.rounded(bytes).ok_or(Unplaced::Never)?;
        if let Some(hole) = self.holes.take(size) {
            let Hole { offset, entry, .. } = hole;
            self.entries[entry as usize].live = true;
            if hole.size > size {
                self.split(entry, size);
            }
            self.by_offset.insert(offset, entry);
            self.allocated += size;
            return Ok(offset);
        }
        let offset = self.top;
        let end = offset.checked_add(size).filter(|end| *end <= self.address_space).ok_or(Unplaced::Never)?;
        if end > self.committed {
            return Err(Unplaced::Short(end));
        }
        let entry = self.link(Entry { offset, size, prev: self.last, next: NONE, live: true, kept: false });
        self.by_offset.insert(offset, entry);
        self.last = entry;
        self.top = end;
        self.allocated += size;
        Ok(offset)
    }

    /// Makes [`free`](Self::free) refuse the live block at `offset` until it is released; whether there is one.
    pub(super) fn keep(&mut self, offset: usize) -> bool {
        self.set_kept(offset, true)
    }

    /// Undoes [`keep`](Self::keep).
    pub(super) fn release(&mut self, offset: usize) -> bool {
        self.set_kept(offset, false)
    }

    /// Takes the block at `offset` away and returns its size; `None` if no live block begins there, or it is kept.
    pub(super) fn free(&mut self, offset: usize) -> Option<usize> {
        let mut entry = self.by_offset.remove(&offset)?;
        let Entry { size, prev, kept, .. } = self.entries[entry as usize];
        if kept {
            self.by_offset.insert(offset, entry);
            return None;
        }
        self.allocated -= size;
        if self.is_hole(prev) {
            self.forget_hole(prev);
            self.absorb_next(prev);
            entry = prev;
        }
        let next = self.entries[entry as usize].next;
        if next == NONE {
            let Entry { offset, prev, .. } = self.entries[entry as usize];
            self.top = offset;
            self.last = prev;
            if prev != NONE {
                self.entries[prev as usize].next = NONE;
            }
            self.vacant.push(entry);
            return Some(size);
        }
        if self.is_hole(next) {
            self.forget_hole(next);
            self.absorb_next(entry);
        }
        let merged = &mut self.entries[entry as usize];
        merged.live = false;
        let hole = Hole { size: merged.size, offset: merged.offset, entry };
        self.holes.insert(hole);
        Some(size)
    }

    /// Moves the end of the committed prefix. It never goes below a live block.
    pub(super) fn set_committed(&mut self, committed: usize) {
        assert!(committed >= self.top, "live blocks are committed");
        assert!(committed <= self.address_space, "only reserved addresses are committed");
        self.committed = committed;
    }

    /// The end of the committed prefix.
    pub(super) fn committed(&self) -> usize {
        self.committed
    }

    /// The bytes of all live blocks.
    pub(super) fn allocated(&self) -> usize {
        self.allocated
    }

    /// The end of the highest live block: what cannot be given back.
    pub(super) fn top(&self) -> usize {
        self.top
    }

    /// The number of live blocks.
    pub(super) fn live(&self) -> usize {
        self.by_offset.len()
    }

    /// The largest block that fits without committing more.
    pub(super) fn largest_free(&self) -> usize {
        self.largest_hole().max(self.committed - self.top)
    }

    /// The largest free block between live ones.
    pub(super) fn largest_hole(&self) -> usize {
        self.holes.largest().map_or(0, |hole| hole.size)
    }

    fn set_kept(&mut self, offset: usize, kept: bool) -> bool {
        let entry = self.by_offset.get(&offset).map(|entry| &mut self.entries[*entry as usize]);
        entry.map(|entry| entry.kept = kept).is_some()
    }

    /// The bytes that a request for `bytes` takes; `None` if that is no number.
    fn rounded(&self, bytes: usize) -> Option<usize> {
        bytes.max(1).checked_next_multiple_of(self.alignment)
    }

    fn is_hole(&self, entry: u32) -> bool {
        entry != NONE && !self.entries[entry as usize].live
    }

    fn forget_hole(&mut self, entry: u32) {
        let Entry { size, offset, .. } = self.entries[entry as usize];
        self.holes.remove(Hole { size, offset, entry });
    }

    /// Cuts an entry to `size`; the rest becomes a hole behind it.
    fn split(&mut self, entry: u32, size: usize) {
        let Entry { offset, size: whole, next, .. } = self.entries[entry as usize];
        let rest = Entry { offset: offset + size, size: whole - size, prev: entry, next, live: false, kept: false };
        let added = self.link(rest);
        self.entries[entry as usize].size = size;
        self.holes.insert(Hole { size: rest.size, offset: rest.offset, entry: added });
    }

    /// Merges the entry behind `entry` into it.
    fn absorb_next(&mut self, entry: u32) {
        let absorbed = self.entries[entry as usize].next;
        let Entry { size, next, .. } = self.entries[absorbed as usize];
        self.entries[entry as usize].size += size;
        self.entries[entry as usize].next = next;
        if next == NONE {
            self.last = entry;
        } else {
            self.entries[next as usize].prev = entry;
        }
        self.vacant.push(absorbed);
    }

    /// Stores an entry and points its neighbours at it.
    fn link(&mut self, entry: Entry) -> u32 {
        let index = if let Some(index) = self.vacant.pop() {
            self.entries[index as usize] = entry;
            index
        } else {
            self.entries.push(entry);
            u32::try_from(self.entries.len() - 1).expect("fewer than 2^32 blocks")
        };
        if entry.prev != NONE {
            self.entries[entry.prev as usize].next = index;
        }
        if entry.next != NONE {
            self.entries[entry.next as usize].prev = index;
        }
        index
    }
}

/// Offsets are ours, so no one can choose them to collide: one multiplication spreads them.
#[derive(Default)]
struct OffsetHasher(u64);

impl Hasher for OffsetHasher {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte));
        }
    }

    fn write_usize(&mut self, value: usize) {
        // The low bits of an offset are zero and the table looks at the low and the highest ones.
        self.0 = (self.0 ^ value as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

#[cfg(test)]
mod tests;
