//! NVML: how busy a GPU is, how warm, and what other processes hold of it. The server does without where it is absent.
//!
//! Ten calls, declared here: the wrapper crate for them brings a second version of four crates that we have already.

use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

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

/// What a GPU is doing. What NVML does not say of it is `None`: a part of a divided GPU, for one, does not know how busy it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuState {
    /// Percent of the last moments in which a kernel ran.
    pub busy_percent: Option<u32>,
    /// Percent of the last moments in which its memory was read or written.
    pub memory_percent: Option<u32>,
    /// Bytes that it has.
    pub total_bytes: Option<u64>,
    /// Bytes that all processes together hold, the driver's own included.
    pub used_bytes: Option<u64>,
    /// Bytes that processes other than this one hold. Unknown where this one is not in NVML's list, as in a container whose
    /// processes have numbers of their own.
    pub others_bytes: Option<u64>,
    /// Degrees Celsius.
    pub celsius: Option<u32>,
    /// Thousandths of a watt.
    pub milliwatts: Option<u32>,
    /// Thousandths of a watt that it may draw.
    pub milliwatts_limit: Option<u32>,
    /// Thousandths of a joule since the driver was loaded.
    pub millijoules: Option<u64>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Rates {
    gpu: c_uint,
    memory: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of the calls with the suffix `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// More processes than this on one GPU are not looked at.
const MOST_PROCESSES: usize = 128;
/// What NVML says for bytes that it does not know.
const UNKNOWN: u64 = u64::MAX;
/// The sensor on the chip.
const ON_CHIP: c_int = 0;
/// The longest name, from NVML's header.
const NAME: usize = 96;

type Get<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> c_uint;

impl Nvml {
    /// The GPU on this bus, such as `0000:01:00.0`: NVML counts devices otherwise than CUDA does.
    #[must_use]
    pub fn open(pci_bus_id: &CStr) -> Option<Self> {
        type ByBus = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_uint;
        // SAFETY: loading the driver's own library, and calling it by the signatures of its header.
        unsafe {
            let library = Library::new("libnvidia-ml.so.1").ok()?;
            let init = *library.get::<unsafe extern "C" fn() -> c_uint>(b"nvmlInit_v2\0").ok()?;
            let by_bus = *library.get::<ByBus>(b"nvmlDeviceGetHandleByPciBusId_v2\0").ok()?;
            let mut device = std::ptr::null_mut();
            (init() == 0 && by_bus(pci_bus_id.as_ptr(), &raw mut device) == 0).then_some(Self { library, device })
        }
    }

    /// Its name in the world outside, such as `GPU-` and a UUID.
    #[must_use]
    pub fn uuid(&self) -> Option<String> {
        type GetName = unsafe extern "C" fn(*mut c_void, *mut c_char, c_uint) -> c_uint;
        let mut name = [0; NAME];
        // SAFETY: the signature of NVML's header; the buffer is as long as is said.
        unsafe {
            let get = *self.library.get::<GetName>(b"nvmlDeviceGetUUID\0").ok()?;
            if get(self.device, name.as_mut_ptr(), NAME as c_uint) != 0 {
                return None;
            }
            // SAFETY: NVML has written a text that ends within the buffer.
            Some(CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned())
        }
    }

    /// What it is doing now. Takes some milliseconds at times: not for threads that serve.
    #[must_use]
    pub fn state(&self) -> GpuState {
        let rates: Option<Rates> = self.get(b"nvmlDeviceGetUtilizationRates\0");
        let memory: Option<Memory> = self.get(b"nvmlDeviceGetMemoryInfo\0");
        GpuState {
            busy_percent: rates.map(|rates| rates.gpu),
            memory_percent: rates.map(|rates| rates.memory),
            total_bytes: memory.map(|memory| memory.total),
            used_bytes: memory.map(|memory| memory.used),
            others_bytes: self.processes().and_then(|processes| others(&processes, std::process::id())),
            celsius: self.celsius(),
            milliwatts: self.get(b"nvmlDeviceGetPowerUsage\0"),
            milliwatts_limit: self.get(b"nvmlDeviceGetEnforcedPowerLimit\0"),
            millijoules: self.get(b"nvmlDeviceGetTotalEnergyConsumption\0"),
        }
    }

    /// One value by the name of its function, whose second argument is where the value goes: a number or a structure of NVML's
    /// header, as the names in [`Self::state`] have.
    fn get<T: Copy + Default>(&self, name: &[u8]) -> Option<T> {
        let mut value = T::default();
        // SAFETY: the names and types are those of the header; the pointer is to a value of ours.
        let status = unsafe { (*self.library.get::<Get<T>>(name).ok()?)(self.device, &raw mut value) };
        (status == 0).then_some(value)
    }

    fn celsius(&self) -> Option<u32> {
        type GetTemperature = unsafe extern "C" fn(*mut c_void, c_int, *mut c_uint) -> c_uint;
        let mut celsius = 0;
        // SAFETY: the signature of NVML's header; the pointer is to a value of ours.
        let status = unsafe {
            let get = *self.library.get::<GetTemperature>(b"nvmlDeviceGetTemperature\0").ok()?;
            get(self.device, ON_CHIP, &raw mut celsius)
        };
        (status == 0).then_some(celsius)
    }

    fn processes(&self) -> Option<Vec<Process>> {
        type GetProcesses = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Process) -> c_uint;
        let mut processes = vec![Process::default(); MOST_PROCESSES];
        let mut count = MOST_PROCESSES as c_uint;
        // SAFETY: the signature of NVML's header; it writes at most as many as `count` says, and how many it wrote.
        let status = unsafe {
            let get = *self.library.get::<GetProcesses>(b"nvmlDeviceGetComputeRunningProcesses_v3\0").ok()?;
            get(self.device, &raw mut count, processes.as_mut_ptr())
        };
        processes.truncate(count as usize);
        (status == 0).then_some(processes)
    }
}

/// What all processes but this one hold, if it is among them and NVML knows what each of them holds.
fn others(processes: &[Process], own: u32) -> Option<u64> {
    let known = processes.iter().any(|process| process.pid == own);
    let others = processes.iter().filter(|process| process.pid != own);
    let bytes = others.map(|process| Some(process.used).filter(|used| *used != UNKNOWN)).sum::<Option<u64>>();
    bytes.filter(|_| known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_others_hold_is_told_only_where_it_is_known_who_is_who() {
        let process = |pid, used| Process { pid, used, ..Process::default() };
        let (own, one, other) = (process(7, 100), process(8, 20), process(9, 3));
        assert_eq!(others(&[own, one, other], 7), Some(23));
        assert_eq!(others(&[own], 7), Some(0));
        assert_eq!(others(&[one, other], 7), None, "this process has another number there");
        assert_eq!(others(&[own, process(8, UNKNOWN)], 7), None);
        assert_eq!(others(&[], 7), None);
    }

    #[test]
    fn without_the_library_or_such_a_device_there_is_no_sensor() {
        assert!(Nvml::open(c"ffff:ff:1f.7").is_none());
    }
}
