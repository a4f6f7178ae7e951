//! The allocator that ONNX Runtime gets from us: one object per session, over two arenas.
//!
//! What a session reserves, and everything during its load, goes to its weights arena; what it allocates during a run goes
//! to its run arena; a free finds its arena by address. ONNX Runtime never checks an allocation for null inside a run, so a
//! denied one must be thrown: the callbacks raise `std::bad_alloc` through the C++ runtime that ONNX Runtime itself has
//! loaded, and it turns that into an ordinary status.
//!
//! `unsafe`: the callbacks, their registration, and the function that throws.
#![allow(unsafe_code)]

use super::library::Runtime;
use super::locks::Locks;
use crate::memory::cuda::Gpu;
use crate::memory::{Arena, ArenaKind, ArenaOptions, Denied, Device, MemoryError, RunStats, heap};
use crate::units::{ByteSize, Instant};
use ort::AsPointer;
use ort::memory::{AllocationDevice, AllocatorType, MemoryInfo, MemoryType};
use ort::sys::{OrtAllocator, OrtMemoryInfo};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// Kernels of some architectures read a little beyond the end of a block.
const OVERREAD: usize = if cfg!(target_arch = "aarch64") { 64 } else { 0 };

/// Allocators are bound to a session when it is committed, and found by device in the one environment of the process: so
/// one registers, commits and unregisters at a time.
static REGISTRATION: Mutex<()> = Mutex::new(());

/// `std::__throw_bad_alloc` of the C++ library that ONNX Runtime uses.
type Thrower = unsafe extern "C-unwind" fn() -> !;
static THROWER: OnceLock<Thrower> = OnceLock::new();

/// The arenas of one session.
#[derive(Clone, Debug)]
pub struct Arenas {
    /// Weights, and whatever else is allocated while the session loads.
    pub weights: Arena,
    /// What a run needs; empty between runs.
    pub run: Arena,
    /// What batches are gathered into; kept between runs.
    pub buffers: Arena,
}

impl Arenas {
    /// Arenas on a device for a session with this label.
    ///
    /// # Errors
    /// If the device has no addresses left.
    pub fn new(device: &Device, label: &str, priority: u32) -> Result<Self, MemoryError> {
        let address_space = device.address_space();
        let arena =
            |kind, name| device.arena(ArenaOptions { label: format!("{label}/{name}"), kind, priority, address_space });
        Ok(Self {
            weights: arena(ArenaKind::Weights, "weights")?,
            run: arena(ArenaKind::Run, "run")?,
            buffers: arena(ArenaKind::Buffers, "buffers")?,
        })
    }
}

/// One session's allocator. It must outlive the session and all its values.
pub(super) struct SessionAllocator {
    shared: Arc<Shared>,
}

/// What the callbacks see: ONNX Runtime knows the address of `base` and hands it back with every call.
#[repr(C)]
struct Shared {
    base: OrtAllocator,
    info: MemoryInfo<'static>,
    arenas: Arenas,
    running: AtomicBool,
}

// SAFETY: the callbacks only read through shared references: arenas lock themselves, the flag is atomic, and the memory
// info is never written after it was made. The test `runs_on_several_threads_share_nothing` runs sessions side by side.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for SessionAllocator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SessionAllocator").field("arenas", &self.shared.arenas).finish_non_exhaustive()
    }
}

impl SessionAllocator {
    /// An allocator over two arenas.
    ///
    /// # Errors
    /// If the C++ runtime has no way to throw.
    pub(super) fn new(arenas: Arenas) -> Result<Self, String> {
        find_thrower()?;
        let info = memory_info(arenas.run.device().gpu())?;
        // SAFETY: plain data whose optional functions are absent; the ones that ONNX Runtime needs are set below.
        let mut base = unsafe { OrtAllocator::default() };
        // SAFETY: the signatures differ only in their licence to unwind, which the caller, being C++, can take: ONNX
        // Runtime's own allocators throw at the same place. `deny_every_allocation` throws at every single one.
        unsafe {
            base.Alloc = Some(std::mem::transmute::<Allocate, PlainAllocate>(allocate));
            base.Reserve = Some(std::mem::transmute::<Reserve, PlainReserve>(reserve));
        }
        base.Free = Some(free);
        base.Info = Some(describe);
        Ok(Self { shared: Arc::new(Shared { base, info, arenas, running: AtomicBool::new(false) }) })
    }

    /// Runs `commit`, in which a session is committed, with this allocator registered: the session keeps it.
    ///
    /// # Errors
    /// ONNX Runtime's text, of the registration or of the commit.
    pub(super) fn bind<T>(&self, runtime: &Runtime, commit: impl FnOnce() -> ort::Result<T>) -> Result<T, String> {
        self.bind_if(Locks::Wait, runtime, commit).unwrap_or_else(|| unreachable!("it waits"))
    }

    /// As [`Self::bind`]; `None` if somebody else binds one and nobody is to wait.
    pub(super) fn bind_if<T>(
        &self,
        locks: Locks,
        runtime: &Runtime,
        commit: impl FnOnce() -> ort::Result<T>,
    ) -> Option<Result<T, String>> {
        let _one_at_a_time = locks.take(&REGISTRATION)?;
        Some(self.bind_alone(runtime, commit))
    }

    fn bind_alone<T>(&self, runtime: &Runtime, commit: impl FnOnce() -> ort::Result<T>) -> Result<T, String> {
        let text = |error: ort::Error| error.message().to_owned();
        let environment = runtime.environment.ptr().cast_mut();
        let allocator = Arc::as_ptr(&self.shared).cast_mut().cast::<OrtAllocator>();
        // SAFETY: the environment lives as long as the process; what an `Arc` holds stays where it is, its owner keeps it
        // until the session is gone, and nobody writes to it: ONNX Runtime only calls its functions.
        let status = unsafe { (ort::api().RegisterAllocator)(environment, allocator) };
        // SAFETY: a status that was just returned and is used once.
        unsafe { ort::Error::result_from_status(status) }.map_err(text)?;
        let committed = {
            let _parsing = heap::Parsing::begin();
            commit()
        };
        // SAFETY: as for the registration; the session keeps what it was committed with.
        let status = unsafe { (ort::api().UnregisterAllocator)(environment, self.shared.info.ptr()) };
        // SAFETY: as above.
        unsafe { ort::Error::result_from_status(status) }.map_err(text)?;
        committed.map_err(text)
    }

    /// From now on allocations belong to a run, and `bytes` of them are there for sure.
    ///
    /// # Errors
    /// If the device has no room for so many; the run must be ended all the same.
    pub(super) fn begin_run(&self, now: Instant, bytes: ByteSize) -> Result<(), Denied> {
        self.shared.arenas.run.begin_run(now);
        self.shared.running.store(true, Ordering::Release);
        self.shared.arenas.run.ensure(usize::try_from(bytes.0).unwrap_or(usize::MAX))
    }

    /// The last allocation outside of runs that was denied.
    pub(super) fn denied_while_loading(&self) -> Option<Denied> {
        self.shared.arenas.weights.stats().last_denied
    }

    /// Calls that were denied so far.
    pub(super) fn denials(&self) -> u64 {
        self.shared.arenas.weights.stats().denied + self.shared.arenas.run.stats().denied
    }

    /// The last allocation of a run that was denied.
    pub(super) fn last_denied(&self) -> Option<Denied> {
        self.shared.arenas.run.stats().last_denied
    }

    /// What is allocated from now on belongs to no run, though the run of the arena goes on. Answers the end of the highest block
    /// in it so far.
    pub(super) fn pause_run(&self) -> ByteSize {
        self.shared.running.store(false, Ordering::Release);
        self.shared.arenas.run.footprint()
    }

    /// The run is over and all its values are gone.
    pub(super) fn end_run(&self, now: Instant) -> RunStats {
        self.shared.running.store(false, Ordering::Release);
        self.shared.arenas.run.end_run(now)
    }
}

/// Whether nobody loads a session now.
pub(super) fn is_free() -> bool {
    Locks::Try.take(&REGISTRATION).is_some()
}

/// ONNX Runtime's name for the memory of a GPU, or of the host.
///
/// # Errors
/// ONNX Runtime's text.
pub(super) fn memory_info(gpu: Option<Gpu>) -> Result<MemoryInfo<'static>, String> {
    let (kind, ordinal) = gpu.map_or((AllocationDevice::CPU, 0), |gpu| (AllocationDevice::CUDA, gpu.ordinal()));
    MemoryInfo::new(kind, ordinal, AllocatorType::Device, MemoryType::Default)
        .map_err(|error| error.message().to_owned())
}

type Allocate = unsafe extern "C-unwind" fn(*mut OrtAllocator, usize) -> *mut c_void;
type PlainAllocate = unsafe extern "system" fn(*mut OrtAllocator, usize) -> *mut c_void;
type Reserve = unsafe extern "C-unwind" fn(*const OrtAllocator, usize) -> *mut c_void;
type PlainReserve = unsafe extern "system" fn(*const OrtAllocator, usize) -> *mut c_void;

/// Nothing in here or in what it calls owns anything when the exception passes.
unsafe extern "C-unwind" fn allocate(this: *mut OrtAllocator, bytes: usize) -> *mut c_void {
    // SAFETY: ONNX Runtime hands back the address that it was given: the first field of a `Shared` that outlives it.
    let shared = unsafe { &*this.cast::<Shared>() };
    let arena = if shared.running.load(Ordering::Acquire) { &shared.arenas.run } else { &shared.arenas.weights };
    grant(arena, bytes)
}

unsafe extern "C-unwind" fn reserve(this: *const OrtAllocator, bytes: usize) -> *mut c_void {
    // SAFETY: as in `allocate`.
    let shared = unsafe { &*this.cast::<Shared>() };
    grant(&shared.arenas.weights, bytes)
}

fn grant(arena: &Arena, bytes: usize) -> *mut c_void {
    if let Ok(pointer) = arena.allocate(bytes.saturating_add(OVERREAD)) {
        return pointer.as_ptr().cast();
    }
    throw()
}

/// Raises `std::bad_alloc`.
fn throw() -> ! {
    let Some(thrower) = THROWER.get() else { std::process::abort() };
    // SAFETY: a function of the C++ library that takes nothing and throws; every frame between here and ONNX Runtime's
    // handler is either C++ or `C-unwind` without anything to drop.
    unsafe { thrower() }
}

unsafe extern "system" fn free(this: *mut OrtAllocator, pointer: *mut c_void) {
    // SAFETY: as in `allocate`.
    let shared = unsafe { &*this.cast::<Shared>() };
    let Some(pointer) = NonNull::new(pointer.cast::<u8>()) else { return };
    let Arenas { weights, run, .. } = &shared.arenas;
    let freed = if run.owns(pointer) { run.free(pointer) } else { weights.free(pointer) };
    // A pointer that is not ours stays as it is: leaking it is the least that can be done to it.
    debug_assert!(freed.is_ok(), "ONNX Runtime freed what it was not given");
}

unsafe extern "system" fn describe(this: *const OrtAllocator) -> *const OrtMemoryInfo {
    // SAFETY: as in `allocate`.
    unsafe { (*this.cast::<Shared>()).info.ptr() }
}

/// Finds the throwing function in the C++ library that ONNX Runtime has loaded already.
fn find_thrower() -> Result<(), String> {
    use libloading::os::unix::{Library, RTLD_NOW};
    /// "Only if it is loaded already", on Linux.
    const RTLD_NOLOAD: i32 = 4;
    if THROWER.get().is_some() {
        return Ok(());
    }
    let fail = |error: libloading::Error| format!("the C++ runtime has no std::__throw_bad_alloc: {error}");
    // SAFETY: with NOLOAD nothing is loaded and no initialiser runs; the type is that of the function in libstdc++.
    let thrower = unsafe {
        let library = Library::open(Some("libstdc++.so.6"), RTLD_NOW | RTLD_NOLOAD).map_err(fail)?;
        let thrower = *library.get::<Thrower>(b"_ZSt17__throw_bad_allocv\0").map_err(fail)?;
        // Never unloaded: ONNX Runtime needs it as long as the process lives.
        std::mem::forget(library);
        thrower
    };
    let _ = THROWER.set(thrower);
    Ok(())
}
