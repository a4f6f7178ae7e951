//! Streams, events, and host memory that the device can copy from and to while we go on.

use super::driver::{CudaError, Gpu, check};
use crate::memory::Block;
use cudarc::driver::sys;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::time::Duration;

/// A queue of work on one GPU; work in it runs in order.
#[derive(Debug)]
pub struct Stream {
    gpu: Gpu,
    raw: sys::CUstream,
}

// SAFETY: a stream is a name that the driver knows; its calls may come from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream that waits for no other.
    ///
    /// # Errors
    /// If the device has no memory for it or is lost.
    pub fn new(gpu: Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a pointer to a value of ours.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Self { gpu, raw })
    }

    /// The GPU.
    #[must_use]
    pub fn gpu(&self) -> Gpu {
        self.gpu
    }

    /// The driver's name of it.
    pub(super) fn handle(&self) -> sys::CUstream {
        self.raw
    }

    /// The same for ONNX Runtime.
    #[must_use]
    pub fn raw(&self) -> *mut () {
        self.raw.cast()
    }

    /// Waits until all that is in it has run.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: a stream of ours.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw) })
    }

    /// Notes the present end of the queue.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: a stream and an event of ours.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.raw, self.raw) })
    }

    /// Lets what comes wait, on the device, until an event has happened.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: as above.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.raw, event.raw, 0) })
    }

    /// Copies the first bytes of pinned memory to the device, when its turn comes.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Safety
    /// The block lies on the GPU of this stream. From the call until the stream has been waited for, or an event behind the copy
    /// has happened, both live, nobody writes to the pinned memory, and nothing else uses the bytes of the block except work that
    /// is in order with the copy.
    pub unsafe fn copy_in(&self, from: &Pinned, bytes: usize, to: &Block) -> Result<(), CudaError> {
        // SAFETY: as the caller says.
        unsafe { self.copy_in_at((from, bytes), (to, 0)) }
    }

    /// As [`Self::copy_in`], to an offset of the block.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Panics
    /// If the copy does not lie inside of both.
    ///
    /// # Safety
    /// As for [`Self::copy_in`].
    pub unsafe fn copy_in_at(
        &self,
        (from, bytes): (&Pinned, usize),
        (to, at): (&Block, usize),
    ) -> Result<(), CudaError> {
        let inside = bytes <= from.len() && at.checked_add(bytes).is_some_and(|end| end <= to.len());
        assert!(inside, "the copy lies inside of both");
        let to = (to.pointer().addr().get() + at) as u64;
        // SAFETY: both ranges are as long as is said, and the caller keeps them as long as the copy needs them.
        check("cuMemcpyHtoDAsync", unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, from.pointer.as_ptr().cast(), bytes, self.raw)
        })
    }

    /// Copies from an address of the device into a range of pinned memory, when its turn comes.
    ///
    /// # Errors
    /// If the device is lost.
    ///
    /// # Panics
    /// If the range does not lie inside of the pinned memory.
    ///
    /// # Safety
    /// From the address on as many bytes as the range has lie on the GPU of this stream, and stay there until the copy's turn has
    /// come: what follows it in the stream may use them for other things. From the call until the stream has been waited for, or an
    /// event behind the copy has happened, the pinned memory lives and nobody reads or writes it.
    pub unsafe fn copy_out(&self, from: usize, to: &mut Pinned, range: Range<usize>) -> Result<(), CudaError> {
        let target = to.as_mut_slice()[range].as_mut();
        let (target, bytes) = (target.as_mut_ptr().cast::<c_void>(), target.len());
        // SAFETY: the target is as long as is said, and the caller keeps both as long as the copy needs them.
        check("cuMemcpyDtoHAsync", unsafe { sys::cuMemcpyDtoHAsync_v2(target, from as u64, bytes, self.raw) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: a stream of ours that is not used again; the driver lets what is in it end.
        let destroyed =
            self.gpu.bind().and_then(|()| check("cuStreamDestroy", unsafe { sys::cuStreamDestroy_v2(self.raw) }));
        if let Err(error) = destroyed {
            tracing::debug!(%error, "a stream could not be let go");
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    gpu: Gpu,
    raw: sys::CUevent,
}

// SAFETY: an event is a name that the driver knows; its calls may come from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// An event that has happened.
    ///
    /// # Errors
    /// If the device has no memory for it or is lost.
    pub fn new(gpu: Gpu) -> Result<Self, CudaError> {
        gpu.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DEFAULT as u32;
        // SAFETY: a pointer to a value of ours.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, flags) })?;
        Ok(Self { gpu, raw })
    }

    /// Whether it has happened.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn has_happened(&self) -> Result<bool, CudaError> {
        // SAFETY: an event of ours.
        let result = unsafe { sys::cuEventQuery(self.raw) };
        if result == sys::CUresult::CUDA_ERROR_NOT_READY {
            return Ok(false);
        }
        check("cuEventQuery", result).map(|()| true)
    }

    /// How long the device took from another event of the same GPU to this one; both must have happened.
    ///
    /// # Errors
    /// If one of them has not, or if the device is lost.
    pub fn since(&self, earlier: &Self) -> Result<Duration, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: a pointer to a value of ours, and events of ours.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.raw, self.raw) };
        check("cuEventElapsedTime", result)?;
        Ok(Duration::from_secs_f32(milliseconds.max(0.0) / 1000.0))
    }

    /// Waits for it.
    ///
    /// # Errors
    /// What went wrong on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: an event of ours.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: an event of ours that is not used again.
        let destroyed =
            self.gpu.bind().and_then(|()| check("cuEventDestroy", unsafe { sys::cuEventDestroy_v2(self.raw) }));
        if let Err(error) = destroyed {
            tracing::debug!(%error, "an event could not be let go");
        }
    }
}

/// Host memory that stays where it is, so that the device can copy from and to it on its own.
#[derive(Debug)]
pub struct Pinned {
    gpu: Gpu,
    pointer: NonNull<u8>,
    len: usize,
}

// SAFETY: plain host memory with one owner.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// So many bytes, at least one, all zero.
    ///
    /// # Errors
    /// If the system has none left that it may pin.
    pub fn new(gpu: Gpu, len: usize) -> Result<Self, CudaError> {
        gpu.bind()?;
        let (len, mut pointer) = (len.max(1), std::ptr::null_mut::<c_void>());
        // SAFETY: a pointer to a value of ours.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut pointer, len, sys::CU_MEMHOSTALLOC_PORTABLE) })?;
        let pointer = NonNull::new(pointer.cast::<u8>()).expect("success means memory");
        // SAFETY: fresh memory of this length, written so that a slice of it is sound.
        unsafe { pointer.write_bytes(0, len) };
        Ok(Self { gpu, pointer, len })
    }

    /// The number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The bytes.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: host memory of this length with one owner, initialised in `new`; the device writes to it only between a
        // `copy_out` and what its caller waits for, who has promised that there is no slice of it in that time.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }

    /// The bytes, to be written.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`; `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let pointer = self.pointer.as_ptr().cast();
        // SAFETY: allocated in `new`, with this value as its one owner.
        let freed = self.gpu.bind().and_then(|()| check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(pointer) }));
        if let Err(error) = freed {
            tracing::debug!(%error, "pinned memory could not be let go");
        }
    }
}
