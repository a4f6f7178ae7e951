//! What a device offers: address ranges, physical memory behind them, and a count of what is free.

use std::any::Any;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::ptr::NonNull;

use super::cuda::Gpu;
use crate::units::ByteSize;

/// Virtual memory of one device.
///
/// Committed ranges are multiples of [`granularity`](Self::granularity), begin at multiples of it, never overlap, and
/// are given back by the very ranges that were committed. All calls for one device come one at a time, except
/// [`free_bytes`](Self::free_bytes) and [`total_bytes`](Self::total_bytes).
pub trait Backing: fmt::Debug + Send + Sync {
    /// The unit of commits in bytes, a power of two.
    fn granularity(&self) -> usize;

    /// Reserves addresses, at least `bytes` of them, beginning at a multiple of the granularity. It costs no memory.
    ///
    /// # Errors
    /// When the address space is exhausted or the device is lost.
    fn reserve(&self, bytes: usize) -> Result<Reservation, BackingError>;

    /// Puts memory behind a range of offsets. When this returns the memory is really there.
    ///
    /// # Errors
    /// [`BackingError::OutOfMemory`] when the device has none left. After any error the range is not committed.
    fn commit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError>;

    /// Gives the memory behind a range of offsets back to the device. Nothing uses it any more.
    ///
    /// # Errors
    /// When the device is lost. After an error the range counts as committed.
    fn decommit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError>;

    /// The bytes that the device could give to anyone now.
    fn free_bytes(&self) -> ByteSize;

    /// The bytes that there would be if nothing used the device.
    fn total_bytes(&self) -> ByteSize;

    /// The bytes that have to stay free for the system's own sake, on top of the headroom left to neighbours.
    fn margin(&self) -> ByteSize;

    /// The GPU whose memory this is; `None` for the host.
    fn gpu(&self) -> Option<Gpu> {
        None
    }
}

/// Why a device did not do what was asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackingError {
    /// It has no memory left.
    #[error("the device is out of memory")]
    OutOfMemory,
    /// Anything else, in the words of the system.
    #[error("{0}")]
    Failed(String),
}

/// A reserved range of addresses. Dropping it gives the addresses back, after all of it has been decommitted.
#[derive(Debug)]
pub struct Reservation {
    base: NonZeroUsize,
    bytes: usize,
    host: bool,
    _release: Release,
}

/// Whatever gives the addresses back when it is dropped.
struct Release(#[expect(dead_code, reason = "it is there to be dropped")] Box<dyn Any + Send + Sync>);

impl fmt::Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Release")
    }
}

impl Reservation {
    /// A range that this process cannot read or write through pointers. `release` is dropped with the reservation.
    #[must_use]
    pub fn new(base: NonZeroUsize, bytes: usize, release: Box<dyn Any + Send + Sync>) -> Self {
        Self { base, bytes, host: false, _release: Release(release) }
    }

    /// A range that this process can read and write wherever it is committed. The host backing vouches for it.
    pub(super) fn of_host(base: NonZeroUsize, bytes: usize, release: Box<dyn Any + Send + Sync>) -> Self {
        Self { host: true, ..Self::new(base, bytes, release) }
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> NonZeroUsize {
        self.base
    }

    /// The number of addresses.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether this process can read and write the committed parts through pointers.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.host
    }

    /// The offset of an address, if it lies inside.
    pub(super) fn offset_of(&self, pointer: NonNull<u8>) -> Option<usize> {
        let offset = pointer.addr().get().wrapping_sub(self.base.get());
        (offset < self.bytes).then_some(offset)
    }

    /// The address of an offset inside.
    pub(super) fn pointer(&self, offset: usize) -> NonNull<u8> {
        // The host backing exposed its mapping; addresses of other devices are never dereferenced.
        NonNull::with_exposed_provenance(self.base.saturating_add(offset))
    }
}
