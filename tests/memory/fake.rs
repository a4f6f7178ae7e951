//! A device whose memory is a table: it checks every call, can be full, and fails on demand.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use concertina::memory::{Arena, ArenaKind, ArenaOptions, Backing, BackingError, Device, DeviceOptions, Reservation};
use concertina::units::{ByteSize, DeviceId};

/// Small, so that small numbers make many granules.
pub(crate) const GRANULE: usize = 4096;
pub(crate) const ALIGNMENT: usize = 64;

/// The device as a test sees it.
#[derive(Debug, Default)]
pub(crate) struct World {
    pub total: u64,
    pub neighbour: AtomicU64,
    /// Bytes that `free_bytes` promises but `commit` does not have.
    pub hidden: AtomicU64,
    pub commits: AtomicU64,
    pub decommits: AtomicU64,
    /// The commit after so many fails; 0 is never.
    pub fail_commit: AtomicU64,
    pub fail_decommit: AtomicU64,
    /// Runs once, the next time that somebody asks for the free bytes.
    pub meanwhile: Mutex<Meanwhile>,
    next_base: AtomicU64,
    ranges: Mutex<BTreeMap<usize, usize>>,
}

/// What happens on another thread while the ledger is thinking.
#[derive(Default)]
pub(crate) struct Meanwhile(pub Option<Box<dyn FnOnce() + Send>>);

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Meanwhile")
    }
}

impl World {
    pub(crate) fn new(granules: u64) -> Arc<Self> {
        let total = granules * GRANULE as u64;
        Arc::new(Self { total, next_base: AtomicU64::new(1 << 40), ..Self::default() })
    }

    pub(crate) fn device(self: &Arc<Self>, limit: u64, headroom: u64) -> Device {
        let (limit, headroom) = (ByteSize(limit * GRANULE as u64), ByteSize(headroom * GRANULE as u64));
        let options = DeviceOptions { id: DeviceId(7), limit, headroom, alignment: ALIGNMENT };
        Device::new(Box::new(Fake(Arc::clone(self))), options)
    }

    pub(crate) fn committed(&self) -> u64 {
        self.ranges.lock().unwrap().iter().map(|(start, end)| (end - start) as u64).sum()
    }

    pub(crate) fn set_neighbour(&self, granules: u64) {
        // A neighbour cannot have what we have.
        let most = self.total - self.committed();
        self.neighbour.store(most.min(granules * GRANULE as u64), SeqCst);
    }

    pub(crate) fn free(&self) -> u64 {
        self.total.saturating_sub(self.neighbour.load(SeqCst)).saturating_sub(self.committed())
    }

    pub(crate) fn calls(&self) -> u64 {
        self.commits.load(SeqCst) + self.decommits.load(SeqCst)
    }

    /// Whether the whole range of addresses is committed.
    pub(crate) fn is_committed(&self, range: Range<usize>) -> bool {
        let ranges = self.ranges.lock().unwrap();
        let mut at = range.start;
        while at < range.end {
            match ranges.range(..=at).next_back() {
                Some((_, end)) if *end > at => at = *end,
                _ => return false,
            }
        }
        true
    }
}

/// Counts down to a failure.
fn fails(countdown: &AtomicU64) -> bool {
    countdown.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)) == Ok(1)
}

#[derive(Debug)]
pub(crate) struct Fake(pub Arc<World>);

impl Backing for Fake {
    fn granularity(&self) -> usize {
        GRANULE
    }

    fn reserve(&self, bytes: usize) -> Result<Reservation, BackingError> {
        if bytes > 1 << 46 {
            return Err(BackingError::OutOfMemory);
        }
        let base = self.0.next_base.fetch_add((bytes + GRANULE) as u64, SeqCst) as usize;
        Ok(Reservation::new(NonZeroUsize::new(base).unwrap(), bytes, Box::new(())))
    }

    fn commit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        assert!(range.start.is_multiple_of(GRANULE) && range.len().is_multiple_of(GRANULE) && !range.is_empty());
        assert!(range.end <= reservation.bytes());
        if fails(&self.0.fail_commit) {
            return Err(BackingError::Failed("injected".into()));
        }
        if range.len() as u64 > self.0.free().saturating_sub(self.0.hidden.load(SeqCst)) {
            return Err(BackingError::OutOfMemory);
        }
        let start = reservation.base().get() + range.start;
        assert!(!self.0.is_committed(start..start + 1), "committed twice");
        self.0.ranges.lock().unwrap().insert(start, start + range.len());
        self.0.commits.fetch_add(1, SeqCst);
        Ok(())
    }

    fn decommit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
        if fails(&self.0.fail_decommit) {
            return Err(BackingError::Failed("injected".into()));
        }
        let start = reservation.base().get() + range.start;
        let end = self.0.ranges.lock().unwrap().remove(&start);
        assert_eq!(end, Some(start + range.len()), "given back as it was committed");
        self.0.decommits.fetch_add(1, SeqCst);
        Ok(())
    }

    fn free_bytes(&self) -> ByteSize {
        let meanwhile = self.0.meanwhile.lock().unwrap().0.take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        ByteSize(self.0.free())
    }

    fn total_bytes(&self) -> ByteSize {
        ByteSize(self.0.total)
    }

    fn margin(&self) -> ByteSize {
        ByteSize(GRANULE as u64)
    }
}

pub(crate) fn arena(device: &Device, kind: ArenaKind, priority: u32) -> Arena {
    let options = ArenaOptions { label: format!("{kind:?}"), kind, priority, address_space: 1 << 24 };
    device.arena(options).unwrap()
}
