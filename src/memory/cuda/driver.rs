//! The driver: finding it, its devices, and what its errors mean.

use cudarc::driver::sys::{self, CUresult};
use std::cell::Cell;
use std::ffi::{CStr, CString, c_int};
use std::sync::OnceLock;

/// A call of the driver that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {name} ({code})")]
pub struct CudaError {
    call: &'static str,
    name: String,
    code: u32,
}

/// After one of these the context is lost: every further call fails, and only a new process helps.
const STICKY: [u32; 13] = [214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721];

impl CudaError {
    /// Whether the device has no memory left.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY as u32
    }

    /// One with this code, without a driver to ask for its name.
    #[cfg(test)]
    pub(crate) fn of(code: u32) -> Self {
        Self { call: "a call", name: "CUDA_ERROR".to_owned(), code }
    }

    /// Whether the device is lost for this process.
    #[must_use]
    pub fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }
}

/// The result of a call.
pub(super) fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    // SAFETY: the pointer is to a value of ours; the driver answers a static text, or leaves it null for an unknown error.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut name) } == CUresult::CUDA_SUCCESS && !name.is_null();
    // SAFETY: a static text of the driver that ends with a null byte.
    let name =
        if known { unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned() } else { "unknown".to_owned() };
    Err(CudaError { call, name, code: result as u32 })
}

/// Why there is no CUDA here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoCuda {
    /// No driver.
    #[error("the NVIDIA driver (libcuda.so.1) is not installed")]
    NoDriver,
    /// A driver that does not work, or finds no device.
    #[error("the NVIDIA driver finds no GPU: {0}")]
    NoDevice(String),
}

/// One GPU, through its primary context, which this process keeps. Cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Gpu {
    ordinal: c_int,
    device: sys::CUdevice,
    context: sys::CUcontext,
}

// SAFETY: a context is no memory of ours but a name that the driver knows; its calls may come from any thread.
unsafe impl Send for Gpu {}
// SAFETY: as above.
unsafe impl Sync for Gpu {}

impl Gpu {
    /// How many there are.
    ///
    /// # Errors
    /// Why there are none.
    pub fn count() -> Result<usize, NoCuda> {
        static COUNT: OnceLock<Result<usize, NoCuda>> = OnceLock::new();
        COUNT.get_or_init(count).clone()
    }

    /// Opens the one with this number.
    ///
    /// # Errors
    /// If there is none, or if it cannot be used.
    pub fn open(ordinal: usize) -> Result<Self, NoCuda> {
        let count = Self::count()?;
        let ordinal = c_int::try_from(ordinal).ok().filter(|_| ordinal < count);
        let ordinal = ordinal.ok_or_else(|| NoCuda::NoDevice(format!("there are {count}, numbered from 0")))?;
        Self::retain(ordinal).map_err(|error| NoCuda::NoDevice(error.to_string()))
    }

    fn retain(ordinal: c_int) -> Result<Self, CudaError> {
        let (mut device, mut context) = (0, std::ptr::null_mut());
        // SAFETY: pointers to values of ours; the driver is initialised, for `count` went before.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
        // SAFETY: as above. It is never released: ONNX Runtime uses the same context as long as the process lives.
        check("cuDevicePrimaryCtxRetain", unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        let gpu = Self { ordinal, device, context };
        gpu.bind()?;
        Ok(gpu)
    }

    /// Its number, as the driver counts.
    #[must_use]
    pub fn ordinal(&self) -> i32 {
        self.ordinal
    }

    /// Makes it the device of the calling thread. Costs next to nothing.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn bind(&self) -> Result<(), CudaError> {
        thread_local!(static RELAXED: Cell<bool> = const { Cell::new(false) });
        if !RELAXED.replace(true) {
            // While any thread records a graph, the driver refuses most calls of all threads that do not say that they know
            // what they do: ours do not touch what is being recorded.
            let mut mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
            // SAFETY: a pointer to a value of ours; it changes the calling thread only.
            let result = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
            check("cuThreadExchangeStreamCaptureMode", result)?;
        }
        // SAFETY: a context that this process keeps.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Waits for everything on it, and so finds out whether it still works.
    ///
    /// # Errors
    /// The first error that nobody has been told of.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.bind()?;
        // SAFETY: a call without arguments on the context that was just bound.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// What people call it.
    #[must_use]
    pub fn name(&self) -> String {
        let mut text = [0; 96];
        // SAFETY: the buffer is as long as is said.
        let result = unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), 96, self.device) };
        if check("cuDeviceGetName", result).is_err() {
            return "unknown".to_owned();
        }
        // SAFETY: the driver has written a text that ends within the buffer.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
    }

    /// Where it sits, in the words of NVML.
    #[must_use]
    pub fn pci_bus_id(&self) -> CString {
        let mut text = [0; 32];
        // SAFETY: the buffer is as long as is said.
        let result = unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), 32, self.device) };
        if check("cuDeviceGetPCIBusId", result).is_err() {
            return CString::default();
        }
        // SAFETY: the driver has written a text that ends within the buffer.
        unsafe { CStr::from_ptr(text.as_ptr()) }.to_owned()
    }

    /// The newest version of CUDA that the driver knows, as 1000 × major + 10 × minor.
    #[must_use]
    pub fn driver_version() -> i32 {
        let mut version = 0;
        // SAFETY: a pointer to a value of ours.
        let result = unsafe { sys::cuDriverGetVersion(&raw mut version) };
        if check("cuDriverGetVersion", result).is_ok() { version } else { 0 }
    }

    /// Bytes that are free for anyone, and all of them.
    ///
    /// # Errors
    /// If the device is lost.
    pub fn free_and_total(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: pointers to values of ours; the caller has bound the context.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }
}

fn count() -> Result<usize, NoCuda> {
    // SAFETY: loading the driver runs its initialisers, as in any program that uses CUDA.
    if !unsafe { sys::is_culib_present() } {
        return Err(NoCuda::NoDriver);
    }
    let no_device = |error: CudaError| NoCuda::NoDevice(error.to_string());
    // SAFETY: the first call, with the only value that it takes.
    check("cuInit", unsafe { sys::cuInit(0) }).map_err(no_device)?;
    let mut count = 0;
    // SAFETY: a pointer to a value of ours.
    check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) }).map_err(no_device)?;
    let count = usize::try_from(count).unwrap_or(0);
    if count == 0 { Err(NoCuda::NoDevice("it counts none".to_owned())) } else { Ok(count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: u32) -> CudaError {
        CudaError { call: "cuTest", name: "CUDA_TEST".to_owned(), code }
    }

    #[test]
    fn what_passes_is_told_from_what_does_not() {
        let table = [(1, false, false), (2, true, false), (700, false, true), (719, false, true), (900, false, false)];
        for (code, out_of_memory, sticky) in table {
            assert_eq!((error(code).is_out_of_memory(), error(code).is_sticky()), (out_of_memory, sticky), "{code}");
        }
        assert_eq!(error(700).to_string(), "cuTest: CUDA_TEST (700)");
    }

    #[test]
    fn without_a_driver_the_reason_is_one_line() {
        match Gpu::count() {
            Ok(count) => assert!(count > 0),
            Err(reason) => assert!(!reason.to_string().contains('\n') && Gpu::open(0).is_err()),
        }
    }
}
