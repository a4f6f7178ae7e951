//! Owned blocks, so that nobody else needs pointers. This file and the host backing are the unsafe ones of the module.
#![allow(unsafe_code)]

use std::fmt;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use super::arena::Arena;

/// An allocation that frees itself. It keeps its arena alive.
pub struct Block {
    arena: Arena,
    address: NonZeroUsize,
    len: usize,
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:#x}, {} bytes)", self.address, self.len)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.free_block(self);
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl Block {
    /// Takes over an allocation of the arena that nobody else will free or use.
    pub(super) fn new(arena: Arena, pointer: NonNull<u8>, len: usize) -> Self {
        Self { arena, address: pointer.expose_provenance(), len }
    }

    /// The number of bytes that were asked for.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no bytes were asked for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address in the memory of the device.
    #[must_use]
    pub fn pointer(&self) -> NonNull<u8> {
        NonNull::with_exposed_provenance(self.address)
    }

    /// The bytes, whatever they were before.
    ///
    /// # Panics
    /// If the block is not in host memory.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        self.assert_host();
        // SAFETY: the host backing vouches that committed memory of its reservations can be read and written. The
        // arena placed `len` bytes here, in the committed prefix, no other block overlaps them, and only our `drop` can
        // free them. They stay committed until then: nothing below the highest live block is given back, and the arena
        // is not closed while this handle to it exists. Fresh pages are zero, so all bytes are initialised. `&self` shares them, and only
        // `&mut self` gives a mutable slice. Breach: `blocks_do_not_touch_each_other`, `blocks_outlive_the_arena_handle`.
        unsafe { std::slice::from_raw_parts(self.pointer().as_ptr(), self.len) }
    }

    /// The bytes, to be written.
    ///
    /// # Panics
    /// If the block is not in host memory.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.assert_host();
        // SAFETY: as in `as_slice`; `&mut self` makes it the only slice of these bytes.
        unsafe { std::slice::from_raw_parts_mut(self.pointer().as_ptr(), self.len) }
    }

    fn assert_host(&self) {
        assert!(self.arena.is_host(), "only host memory can be read and written through slices");
    }
}
