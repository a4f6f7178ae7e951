//! NVML: how busy a GPU is, and what other processes hold of it. The server does without where it is absent.
//!
//! Five calls, declared here: the wrapper crate for them brings a second version of four crates that we have already.

use libloading::Library;
use std::ffi::{CStr, c_char, c_uint, c_void};

/// A GPU as NVML sees it.
#[derive(Debug)]
pub struct Nvml {
    library: Library,
    device: *mut c_void,
}

// SAFETY: the handle is a name that the library knows; NVML's calls may come from any thread.
unsafe impl Send for Nvml {}
// SAFETY: as above.
unsafe impl Sync for Nvml {}

/// What a GPU is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Utilization {
    /// Percent of the last moments in which a kernel ran.
    pub busy_percent: u32,
    /// Percent of the last moments in which its memory was read or written.
    pub memory_percent: u32,
    /// Bytes that all processes together hold, the driver's own included.
    pub used_bytes: u64,
    /// Thousandths of a watt.
    pub milliwatts: Option<u32>,
}

#[repr(C)]
struct Rates {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

impl Nvml {
    /// The GPU on this bus, such as `0000:01:00.0`: NVML counts devices otherwise than CUDA does.
    #[must_use]
    pub fn open(pci_bus_id: &CStr) -> Option<Self> {
        // SAFETY: loading the driver's own library, and calling it by the signatures of its header.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init = *library.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlInit_v2\0").ok()?;
            type ByBus = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint;
            let by_bus = *library.get::<ByBus>(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            let mut device = std::ptr::null_mut();
            (init() == 0 && by_bus(pci_bus_id.as_ptr(), &raw mut device) == 0).then_some(Self { library, device })
        }
    }

    /// What it is doing now; `None` if NVML does not say.
    #[must_use]
    pub fn utilization(&self) -> Option<Utilization> {
        let (mut rates, mut memory) = (Rates { gpu: 0, memory: 0 }, Memory { total: 0, free: 0, used: 0 });
        let mut milliwatts: c_uint = 0;
        // SAFETY: signatures and structures of NVML's header; the pointers are to values of ours.
        unsafe {
            type Get<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> c_uint;
            let get_rates = *self.library.get::<Get<Rates>>(b"nvmlDeviceGetUtilizationRates\0").ok()?;
            let get_memory = *self.library.get::<Get<Memory>>(b"nvmlDeviceGetMemoryInfo\0").ok()?;
            let get_power = *self.library.get::<Get<c_uint>>(b"nvmlDeviceGetPowerUsage\0").ok()?;
            if get_rates(self.device, &raw mut rates) != 0 || get_memory(self.device, &raw mut memory) != 0 {
                return None;
            }
            let power = get_power(self.device, &raw mut milliwatts) == 0;
            Some(Utilization {
                busy_percent: rates.gpu,
                memory_percent: rates.memory,
                used_bytes: memory.used,
                milliwatts: power.then_some(milliwatts),
            })
        }
    }
}
