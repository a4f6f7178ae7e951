//! Host memory: anonymous mappings, committed page by page before use. This file and `block` are the unsafe ones of the
//! module.
//!
//! What is reserved but not committed cannot be touched: a stray access ends in a fault instead of in memory that no
//! ledger knows. Huge pages are wanted (fewer page faults, fewer misses in the TLB) and harmless to the books: a granule
//! is a whole number of them, begins where one begins and is committed entirely, so the kernel finds nothing to fill up.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::fs;
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::backing::{Backing, BackingError, Reservation};
use super::cgroup::{Groups, Room};
use crate::units::ByteSize;

/// The unit of commits: a huge page of x86-64, and of 64-bit Arm with pages of 4 KiB.
const GRANULARITY: usize = 2 << 20;

/// The smallest page of any machine.
const PAGE: usize = 4096;

/// Bytes that are never committed, whatever the limit: between our look at the free bytes and the kernel's, the rest of
/// the process and the machine allocate too, and the kernel answers by killing. A 64th of what there is, within bounds.
const MARGIN_DIVISOR: u64 = 64;
/// The margin of a small container.
const MIN_MARGIN: u64 = 16 << 20;
/// The margin of a large machine.
const MAX_MARGIN: u64 = 1 << 30;

/// The memory of this machine, or of the container that we are in.
#[derive(Debug)]
pub struct Host {
    groups: Groups,
    huge_pages: bool,
    margin: AtomicU64,
}

impl Host {
    /// Finds out where the kernel says how much memory there is.
    #[must_use]
    pub fn new() -> Self {
        let size = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size").unwrap_or_default();
        let huge_page = size.trim().parse::<usize>().ok();
        let huge_pages = huge_page.is_some_and(|huge_page| huge_page > 0 && GRANULARITY.is_multiple_of(huge_page));
        Self::within(Groups::of_this_process(), huge_pages)
    }

    fn within(groups: Groups, huge_pages: bool) -> Self {
        let host = Self { groups, huge_pages, margin: AtomicU64::new(MIN_MARGIN) };
        host.room();
        host
    }

    /// What there is now. A container can be given more or less while it runs: the margin follows.
    fn room(&self) -> Room {
        let room = self.groups.room();
        self.margin.store((room.total / MARGIN_DIVISOR).clamp(MIN_MARGIN, MAX_MARGIN), Relaxed);
        room
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Backing for Host {
    fn granularity(&self) -> usize {
        GRANULARITY
    }

    fn reserve(&self, bytes: usize) -> Result<Reservation, BackingError> {
        // One granule more, so that there is room to begin at a multiple of it.
        let mapped = bytes.checked_add(GRANULARITY).ok_or(BackingError::OutOfMemory)?;
        let mapping = Mapping::new(mapped)?;
        let base = mapping.start.checked_next_multiple_of(GRANULARITY).and_then(NonZeroUsize::new);
        let base = base.ok_or(BackingError::OutOfMemory)?;
        let reservation = Reservation::of_host(base, bytes, Box::new(mapping));
        let advice = if self.huge_pages { libc::MADV_HUGEPAGE } else { libc::MADV_NOHUGEPAGE };
        // A kernel without huge pages refuses the advice and needs none.
        let _ = advise(&Pages::of(&reservation, 0..bytes), advice);
        Ok(reservation)
    }

    fn commit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        let pages = Pages::of(reservation, range);
        let committed = protect(&pages, libc::PROT_READ | libc::PROT_WRITE).and_then(|()| populate(&pages));
        committed.map_err(|error| {
            // Half of the pages may be there.
            let _ = give_back(&pages);
            backing_error(&error)
        })
    }

    fn decommit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        give_back(&Pages::of(reservation, range)).map_err(|error| backing_error(&error))
    }

    fn free_bytes(&self) -> ByteSize {
        ByteSize(self.room().free)
    }

    fn total_bytes(&self) -> ByteSize {
        ByteSize(self.room().total)
    }

    fn margin(&self) -> ByteSize {
        ByteSize(self.margin.load(Relaxed))
    }
}

fn backing_error(error: &io::Error) -> BackingError {
    if error.kind() == io::ErrorKind::OutOfMemory {
        BackingError::OutOfMemory
    } else {
        BackingError::Failed(error.to_string())
    }
}

/// A mapping of ours, unmapped when it is dropped.
struct Mapping {
    start: usize,
    bytes: usize,
}

impl Mapping {
    /// Addresses without memory behind them and without permission to touch them.
    fn new(bytes: usize) -> Result<Self, BackingError> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no memory that exists.
        // Breach: `committed_memory_is_zero_and_keeps_data`.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(backing_error(&io::Error::last_os_error()));
        }
        // Exposed, so that a pointer to any committed offset can be made from its address alone.
        Ok(Self { start: start.expose_provenance(), bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value is the only owner of a mapping that `new` made and nobody else unmaps. It is dropped with its
        // reservation, that is after the last handle of its arena, so no block of it is in use.
        // Breach: `blocks_outlive_the_arena_handle`, `dropping_an_arena_unmaps_it`.
        let unmapped = unsafe { libc::munmap(ptr::with_exposed_provenance_mut(self.start), self.bytes) };
        debug_assert_eq!(unmapped, 0, "the range is a mapping");
    }
}

/// Whole granules inside one of our mappings.
struct Pages {
    start: usize,
    bytes: usize,
}

impl Pages {
    /// The checks here are what the safety of all calls below rests on.
    fn of(reservation: &Reservation, range: Range<usize>) -> Self {
        assert!(reservation.is_host(), "only this file makes reservations of host memory");
        assert!(range.start <= range.end && range.end <= reservation.bytes(), "the range lies inside");
        assert!(range.start.is_multiple_of(GRANULARITY), "a commit begins at a granule");
        assert!(range.end.is_multiple_of(PAGE), "a commit has whole pages");
        Self { start: reservation.base().get() + range.start, bytes: range.len() }
    }
}

fn protect(pages: &Pages, protection: c_int) -> io::Result<()> {
    // SAFETY: `Pages` lie inside a mapping that is ours and alive, for it was made from its reservation. Permission is
    // taken away only from granules in which no block lives. Breach: `committed_memory_is_zero_and_keeps_data`,
    // `commits_outside_of_the_reservation_are_refused`.
    let done = unsafe { libc::mprotect(ptr::with_exposed_provenance_mut(pages.start), pages.bytes, protection) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn advise(pages: &Pages, advice: c_int) -> io::Result<()> {
    // SAFETY: as in `protect`; the one advice that destroys contents is given in `give_back` only, to granules in which no
    // block lives. Breach: the same tests.
    let done = unsafe { libc::madvise(ptr::with_exposed_provenance_mut(pages.start), pages.bytes, advice) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Gives the pages back to the kernel and forbids to touch the addresses.
fn give_back(pages: &Pages) -> io::Result<()> {
    advise(pages, libc::MADV_DONTNEED)?;
    protect(pages, libc::PROT_NONE)
}

/// Makes the kernel put memory behind all pages now.
fn populate(pages: &Pages) -> io::Result<()> {
    loop {
        match advise(pages, libc::MADV_POPULATE_WRITE) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // Linux before 5.14 does not know the advice.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => {
                touch(pages);
                return Ok(());
            }
            other => return other,
        }
    }
}

/// Writes to each page. Nothing is in them yet, so nothing is lost.
fn touch(pages: &Pages) {
    for offset in (0..pages.bytes).step_by(PAGE) {
        let page = ptr::with_exposed_provenance_mut::<u8>(pages.start + offset);
        // SAFETY: the page lies inside a mapping of ours and may be written since `protect`. It is being committed, so no
        // block lies in it and no one else has a pointer to it. Breach: `touching_commits_as_well`.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests;
