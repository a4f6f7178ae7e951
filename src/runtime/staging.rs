//! Memory of the host that a GPU copies from and to, or reads where it is.

use super::shelf::Unrecorded;
use crate::memory::cuda::{CudaError, Gpu, Pinned};
use crate::memory::{Arena, Block};

/// A recorded run reads its inputs from the host if they have no more bytes than this.
const MOST_READ_IN_PLACE: usize = 64 << 10;
/// Pinned memory grows in powers of two from here on, so that a ladder of sizes pins few times.
const LEAST_PINNED: usize = 4096;

/// Pinned memory that grows.
#[derive(Debug, Default)]
pub(super) struct Staging {
    pub(super) pinned: Option<Pinned>,
}

impl Staging {
    pub(super) fn resized(&mut self, gpu: Gpu, len: usize) -> Result<&mut Pinned, CudaError> {
        if self.pinned.as_ref().is_none_or(|pinned| pinned.len() < len) {
            self.pinned = None;
            self.pinned = Some(Pinned::new(gpu, len.next_power_of_two().max(LEAST_PINNED))?);
        }
        Ok(self.pinned.as_mut().unwrap_or_else(|| unreachable!("it was just made")))
    }
}

/// Where a recorded run has its inputs, one behind the other.
#[derive(Debug)]
pub(super) enum Packed {
    /// Few bytes stay with the host, and the device reads them where they are: copying them takes it longer.
    Host(Pinned),
    /// On the device.
    Device(Block),
}

impl Packed {
    /// So many bytes for a run that is to be recorded.
    ///
    /// # Errors
    /// If the device or the host has no room for them.
    pub(super) fn new(arena: &Arena, bytes: usize) -> Result<Self, Unrecorded> {
        match arena.device().gpu() {
            Some(gpu) if bytes <= MOST_READ_IN_PLACE => Ok(Self::Host(Pinned::new(gpu, bytes)?)),
            _ => Ok(Self::Device(arena.block(bytes)?)),
        }
    }

    /// Its address, which host and device have in common.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Host(pinned) => pinned.as_slice().as_ptr().expose_provenance(),
            Self::Device(block) => block.pointer().addr().get(),
        }
    }
}

/// Whose turn of the two slots it is.
#[derive(Debug, Default)]
pub(super) struct Turns {
    next: usize,
}

impl Turns {
    /// The slot that was not taken last.
    pub(super) fn take(&mut self) -> usize {
        let slot = self.next;
        self.next = 1 - slot;
        slot
    }

    /// The slot that was taken last is taken next.
    pub(super) fn undo(&mut self) {
        self.next = self.last();
    }

    pub(super) fn last(&self) -> usize {
        1 - self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_that_is_staged_anew_takes_the_slot_that_it_had() {
        let mut turns = Turns::default();
        let (first, second) = (turns.take(), turns.take());
        assert_ne!(first, second);
        turns.undo();
        assert_eq!(turns.take(), second, "the outputs of the first one still lie in its slot");
        assert_eq!((turns.last(), turns.take()), (second, first));
    }
}
