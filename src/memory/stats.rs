//! The numbers of arenas and devices, as plain values. The words are those of PyTorch's `memory_stats`.

use super::arena::{ArenaKind, Denied};
use crate::units::{ByteSize, DeviceId};

/// One arena. `allocated <= active <= reserved`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaStats {
    /// Its name.
    pub label: String,
    /// What it is for.
    pub kind: ArenaKind,
    /// 1 is the most urgent.
    pub priority: u32,
    /// Bytes of live blocks, each rounded up to the alignment.
    pub allocated: ByteSize,
    /// Bytes committed: device memory that nobody else can use.
    pub reserved: ByteSize,
    /// Bytes up to the end of the highest live block, which cannot be given back.
    pub active: ByteSize,
    /// The most that `allocated` ever was.
    pub peak_allocated: ByteSize,
    /// The most that `reserved` ever was.
    pub peak_reserved: ByteSize,
    /// The most that `active` ever was.
    pub peak_active: ByteSize,
    /// Live blocks.
    pub blocks: u64,
    /// Granules that the reserved bytes consist of.
    pub granules: u64,
    /// Blocks allocated so far.
    pub allocations: u64,
    /// Blocks freed so far.
    pub frees: u64,
    /// Calls refused so far.
    pub denied: u64,
    /// The last of them.
    pub last_denied: Option<Denied>,
    /// `reserved` less `allocated`.
    pub free: ByteSize,
    /// The largest block that fits without committing more.
    pub largest_free: ByteSize,
    /// Whether a run is going on.
    pub in_run: bool,
}

impl ArenaStats {
    /// The part of the free bytes that the largest free block does not hold; zero if nothing is free.
    #[must_use]
    pub fn fragmentation(&self) -> f64 {
        if self.free == ByteSize::ZERO { 0.0 } else { 1.0 - self.largest_free.0 as f64 / self.free.0 as f64 }
    }
}

/// What a run needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RunStats {
    /// The most bytes of live blocks during the run.
    pub peak_allocated: ByteSize,
    /// The end of the highest block during the run: what has to be committed so that the same run fits again. It depends
    /// on the calls alone, not on how much was committed.
    pub footprint: ByteSize,
    /// Calls refused during the run.
    pub denials: u64,
}

/// One device. `committed` is the sum over its arenas, at every instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LedgerStats {
    /// The device.
    pub device: DeviceId,
    /// The most bytes that may be committed.
    pub limit: ByteSize,
    /// Bytes left to neighbours.
    pub headroom: ByteSize,
    /// Bytes that have to stay free besides, for the system's own sake.
    pub margin: ByteSize,
    /// Bytes committed by all arenas.
    pub committed: ByteSize,
    /// Bytes of live blocks in all arenas.
    pub allocated: ByteSize,
    /// Bytes that the device could give to anyone.
    pub free: ByteSize,
    /// Bytes of the whole device.
    pub total: ByteSize,
    /// Bytes that neither are free nor ours: neighbours, and what drivers and libraries of this process hold.
    pub outside: ByteSize,
    /// Counts of what has been done so far.
    pub counters: Counters,
    /// The words of the device when it last failed otherwise than by being full.
    pub last_failure: Option<String>,
    /// Each arena.
    pub arenas: Vec<ArenaStats>,
}

/// Things that a ledger has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Granules committed.
    pub commits: u64,
    /// Granules given back.
    pub decommits: u64,
    /// Calls of the device that failed, because it was full or otherwise.
    pub failures: u64,
    /// Bytes taken from an idle arena because another one needed them.
    pub reclaimed: u64,
    /// Bytes given back because they were quiet, or for the limit or the headroom.
    pub trimmed: u64,
}

/// What a scheduler needs to know about a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The device.
    pub device: DeviceId,
    /// Bytes that runs may use altogether: what those in flight were promised, what we hold idle, and what the device
    /// could still give, within the limit.
    pub budget: ByteSize,
    /// Bytes that runs could use if nothing but our weights and buffers were on the device.
    pub capacity: ByteSize,
}
