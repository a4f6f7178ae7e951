//! Device memory that this process owns to the byte: it grows before a run and shrinks when it is idle or wanted.
//!
//! ```text
//! Arena ──allocate, free──▶ Space     placement over offsets, pure; the arena's lock, no system call
//!   │  ╲─too little committed, ensure─▶ Ledger ──commit, decommit──▶ Backing    the device's lock, then arenas' locks
//!   ╰─begin_run, end_run                  ╰─▶ policy    who gives what back, pure
//! ```
//!
//! - A [`Device`] has a [`Backing`] (virtual memory of the host or of a GPU), a limit, a headroom, and a ledger of all
//!   that is committed.
//! - An [`Arena`] is an allocator over one reserved range of addresses, whose committed part is a prefix. Blocks are
//!   placed by best fit, and behind all others only if no hole fits. An arena of the kind [`ArenaKind::Run`] is empty
//!   between runs: then it has no holes, hence no fragmentation, and every granule of it can go.
//! - Memory is committed in granules, each given back as a whole and the last of an arena first. [`Device::trim`] gives
//!   back what has been quiet, and at once what a lowered limit or a neighbour demands; an arena that needs memory takes
//!   idle granules of others. Memory in a run, weights and whatever lies below a live block stay.
//!
//! Invariants: for each arena `allocated <= active <= committed`; the committed bytes of a device are the sum over its
//! arenas and at most the limit, also when a call fails half way. (A limit lowered below what is in use is reached as
//! runs end; until then nothing more is committed.)
//!
//! Time is always an argument. Locks: the ledger's before those of arenas; see `Core`.

mod arena;
mod backing;
mod block;
mod cgroup;
pub mod cuda;
mod device;
pub(crate) mod heap;
mod holes;
mod host;
mod ledger;
pub mod policy;
mod space;
mod stats;

pub use arena::{Arena, ArenaKind, ArenaOptions, Denied, Denier, NotOurs};
pub use backing::{Backing, BackingError, Reservation};
pub use block::Block;
pub use device::{Device, DeviceOptions, MemoryError, Shedder};
pub use host::Host;
pub use stats::{ArenaStats, Counters, LedgerStats, RunStats, Sample};

/// What ONNX Runtime's CPU kernels expect.
pub const HOST_ALIGNMENT: usize = 64;

/// What ONNX Runtime's CUDA kernels expect, and vector loads of any width.
pub const CUDA_ALIGNMENT: usize = 512;
