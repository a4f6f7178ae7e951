//! NVIDIA GPUs: plain device memory, committed through the virtual memory calls of the driver.
//!
//! The driver is found and loaded at run time, so the same binary runs where there is none. A granule is created, mapped,
//! and its handle released at once: from then on unmapping it is what gives the memory back. Keeping handles of unmapped
//! granules would hide that memory from neighbours to save a part of the 30 to 56 microseconds that a commit took (H200,
//! 2 to 256 MiB), so none are kept. The result of every call is looked at.
//!
//! Who decommits must know that nothing on the device still uses the range: sessions end a run only after their stream has
//! been waited for, and memory in a run, or below a live block, stays where it is.
#![allow(unsafe_code)]

mod driver;
mod graph;
mod nvml;
mod stream;

pub use driver::{CudaError, Gpu, NoCuda};
pub use graph::Graph;
pub use nvml::{GpuState, Nvml};
pub use stream::{Event, Pinned, Stream};

use super::backing::{Backing, BackingError, Reservation};
use crate::units::ByteSize;
use cudarc::driver::sys;
use driver::check;
use std::num::NonZeroUsize;
use std::ops::Range;

/// Bytes that are never committed: between our look at the free bytes and the driver's, libraries load kernels, and a library
/// that cannot is a failed run instead of a smaller batch.
const MARGIN: u64 = 64 << 20;

/// The memory of one GPU.
#[derive(Debug)]
pub struct Cuda {
    gpu: Gpu,
    granularity: usize,
    total: u64,
}

impl Cuda {
    /// The memory of a GPU.
    ///
    /// # Errors
    /// If the driver does not offer virtual memory on it.
    pub fn new(gpu: Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let properties = properties(gpu);
        // SAFETY: both pointers are to values of ours that live until the call returns. Breach: `device::memory_*`.
        let result =
            unsafe { sys::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, minimum) };
        check("cuMemGetAllocationGranularity", result)?;
        let (_, total) = gpu.free_and_total()?;
        Ok(Self { gpu, granularity: granularity.next_power_of_two(), total })
    }

    /// Maps new memory behind a range of addresses that is reserved and has none.
    fn map(&self, address: u64, bytes: usize) -> Result<(), CudaError> {
        let properties = properties(self.gpu);
        let mut handle = 0;
        // SAFETY: both pointers are to values of ours. This takes memory and touches none. Breach: `device::memory_*`.
        let created = unsafe { sys::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        check("cuMemCreate", created)?;
        // SAFETY: the range is reserved by us and unmapped, for the ledger commits each range once; the handle is as large as
        // the range. Breach: as above.
        let mapped = check("cuMemMap", unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) });
        // SAFETY: a handle that was just created and is not used again. A mapping keeps its memory alive without it.
        let released = check("cuMemRelease", unsafe { sys::cuMemRelease(handle) });
        mapped?;
        let access = sys::CUmemAccessDesc {
            location: properties.location,
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped above; the description is a value of ours.
        let opened = check("cuMemSetAccess", unsafe { sys::cuMemSetAccess(address, bytes, &raw const access, 1) });
        released.and(opened).inspect_err(|_| {
            // SAFETY: mapped above, and nobody has seen it yet.
            let unmapped = check("cuMemUnmap", unsafe { sys::cuMemUnmap(address, bytes) });
            debug_assert!(unmapped.is_ok(), "a mapping can be undone");
        })
    }
}

/// Plain memory on this device, for this process only.
fn properties(gpu: Gpu) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: gpu.ordinal() },
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

impl Backing for Cuda {
    fn granularity(&self) -> usize {
        self.granularity
    }

    fn reserve(&self, bytes: usize) -> Result<Reservation, BackingError> {
        self.gpu.bind()?;
        let mut address = 0;
        // SAFETY: the pointer is to a value of ours; addresses cost nothing and touch nothing.
        let result = unsafe { sys::cuMemAddressReserve(&raw mut address, bytes, self.granularity, 0, 0) };
        check("cuMemAddressReserve", result)?;
        let range = Addresses { gpu: self.gpu, address, bytes };
        let base = usize::try_from(address).ok().and_then(NonZeroUsize::new);
        let base = base.ok_or_else(|| BackingError::Failed("cuMemAddressReserve gave no address".to_owned()))?;
        Ok(Reservation::new(base, bytes, Box::new(range)))
    }

    fn commit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        self.gpu.bind()?;
        Ok(self.map(address(reservation, &range), range.len())?)
    }

    fn decommit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        self.gpu.bind()?;
        // SAFETY: the ledger gives back exactly the ranges that it committed, each once, and none in which a block lives or
        // that belongs to a run; a run ends only after its stream has been waited for. Breach: `device::memory_*`.
        let result = unsafe { sys::cuMemUnmap(address(reservation, &range), range.len()) };
        Ok(check("cuMemUnmap", result)?)
    }

    fn free_bytes(&self) -> ByteSize {
        // A device that does not answer has nothing to give.
        let free = self.gpu.bind().and_then(|()| self.gpu.free_and_total()).map_or(0, |(free, _)| free);
        ByteSize(free)
    }

    fn total_bytes(&self) -> ByteSize {
        ByteSize(self.total)
    }

    fn margin(&self) -> ByteSize {
        ByteSize(MARGIN)
    }

    fn gpu(&self) -> Option<Gpu> {
        Some(self.gpu)
    }
}

impl From<CudaError> for BackingError {
    fn from(error: CudaError) -> Self {
        if error.is_out_of_memory() { Self::OutOfMemory } else { Self::Failed(error.to_string()) }
    }
}

fn address(reservation: &Reservation, range: &Range<usize>) -> u64 {
    assert!(
        !reservation.is_host() && range.start <= range.end && range.end <= reservation.bytes(),
        "the range lies inside"
    );
    (reservation.base().get() + range.start) as u64
}

/// Reserved addresses, given back when they are dropped.
struct Addresses {
    gpu: Gpu,
    address: u64,
    bytes: usize,
}

impl Drop for Addresses {
    fn drop(&mut self) {
        // SAFETY: reserved by `reserve`, owned by nobody else, and dropped after the last mapping in it, with its arena.
        let free = || unsafe { sys::cuMemAddressFree(self.address, self.bytes) };
        let freed = self.gpu.bind().and_then(|()| check("cuMemAddressFree", free()));
        if let Err(error) = freed {
            tracing::warn!(%error, "addresses of a GPU could not be given back");
        }
    }
}
