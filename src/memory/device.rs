//! The handle of a device: it holds the ledger under its lock, and passes the time on.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::arena::{Arena, ArenaOptions, Core, Denied};
use super::backing::{Backing, BackingError};
use super::cuda::Gpu;
use super::ledger::{Goal, Ledger};
use super::policy;
use super::space::Unplaced;
use super::stats::{LedgerStats, Sample};
use crate::units::{ByteSize, DeviceId, Instant};

/// How to make a [`Device`].
#[derive(Clone, Copy, Debug)]
pub struct DeviceOptions {
    /// Names it.
    pub id: DeviceId,
    /// The most bytes that all arenas together may commit.
    pub limit: ByteSize,
    /// Bytes that stay free for neighbours.
    pub headroom: ByteSize,
    /// Every block begins at a multiple of this power of two: [`HOST_ALIGNMENT`](super::HOST_ALIGNMENT) or
    /// [`CUDA_ALIGNMENT`](super::CUDA_ALIGNMENT).
    pub alignment: usize,
}

/// Why an arena could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The device gave no addresses.
    #[error("reserving {bytes} of addresses for {label}")]
    Reserve {
        /// The arena.
        label: String,
        /// Its size.
        bytes: ByteSize,
        /// What the device said.
        source: BackingError,
    },
}

/// One device and its ledger. Clones are handles to the same one.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    id: DeviceId,
    alignment: usize,
    /// The latest time that anyone has passed in: allocations have no time of their own.
    latest: AtomicU64,
    /// An arena in a run has granules that should go when it ends.
    trim_wanted: AtomicBool,
    ledger: Mutex<Ledger>,
    gpu: Option<Gpu>,
    /// Why nothing runs on it any more.
    lost: OnceLock<String>,
    /// Who gives up memory that no trim can take.
    shedders: Mutex<Vec<Shedder>>,
    /// Whether there is anybody: asked without waiting for whoever is giving up memory just now.
    has_shedders: AtomicBool,
}

/// Gives up memory that no trim can take, if it can be done now; whether anything was given up, or `None` if its owner has
/// gone for good.
pub type Shedder = Box<dyn Fn() -> Option<bool> + Send>;

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("id", &self.inner.id).finish_non_exhaustive()
    }
}

impl Device {
    /// A device without arenas.
    #[must_use]
    pub fn new(backing: Box<dyn Backing>, options: DeviceOptions) -> Self {
        let DeviceOptions { id, limit, headroom, alignment } = options;
        let gpu = backing.gpu();
        let mut ledger = Ledger::new(id, backing);
        (ledger.limit, ledger.headroom) = (limit.0, headroom.0);
        let inner = Inner {
            id,
            alignment,
            latest: AtomicU64::new(0),
            trim_wanted: AtomicBool::new(false),
            ledger: Mutex::new(ledger),
            gpu,
            lost: OnceLock::new(),
            shedders: Mutex::default(),
            has_shedders: AtomicBool::new(false),
        };
        Self { inner: Arc::new(inner) }
    }

    /// The name of the device.
    #[must_use]
    pub fn id(&self) -> DeviceId {
        self.inner.id
    }

    /// The GPU that it is; `None` for the host.
    #[must_use]
    pub fn gpu(&self) -> Option<Gpu> {
        self.inner.gpu
    }

    /// Says that nothing can run on it any more in this process; the first reason stays.
    pub fn lose(&self, reason: &str) {
        let _ = self.inner.lost.set(reason.to_owned());
    }

    /// Why nothing can run on it any more.
    #[must_use]
    pub fn lost(&self) -> Option<&str> {
        self.inner.lost.get().map(String::as_str)
    }

    /// Asks `shedder` when memory is short. It is called without locks of the ledger, from any thread.
    pub fn on_shortage(&self, shedder: Shedder) {
        self.shedders().push(shedder);
        self.inner.has_shedders.store(true, Ordering::Release);
    }

    /// Has everybody give up what no trim can take; whether anything was given up.
    pub fn shed(&self) -> bool {
        let mut given_up = false;
        let mut shedders = self.shedders();
        shedders.retain(|shedder| match shedder() {
            None => false,
            Some(some) => {
                given_up |= some;
                true
            }
        });
        self.inner.has_shedders.store(!shedders.is_empty(), Ordering::Release);
        given_up
    }

    fn shedders(&self) -> MutexGuard<'_, Vec<Shedder>> {
        self.inner.shedders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Addresses for an arena that may come to hold the whole device, as any may: they cost nothing.
    #[must_use]
    pub fn address_space(&self) -> usize {
        usize::try_from(self.ledger().backing().total_bytes().0).unwrap_or(usize::MAX >> 8)
    }

    /// Makes an arena; it holds nothing yet.
    ///
    /// # Errors
    /// [`MemoryError`] if there are no addresses left.
    pub fn arena(&self, options: ArenaOptions) -> Result<Arena, MemoryError> {
        let mut ledger = self.ledger();
        let (wanted, granularity) = (options.address_space.max(1), ledger.backing().granularity());
        let rounded = wanted.checked_next_multiple_of(granularity).unwrap_or(wanted);
        let reservation = ledger.backing().reserve(rounded).map_err(|source| MemoryError::Reserve {
            label: options.label.clone(),
            bytes: ByteSize(rounded as u64),
            source,
        })?;
        let core = Arc::new(Core::new(options, reservation, self.inner.alignment));
        ledger.open(&core);
        drop(ledger);
        Ok(Arena::new(self.clone(), core))
    }

    /// Budget and capacity now. Call it often: it costs one question to the device.
    #[must_use]
    pub fn sample(&self, now: Instant) -> Sample {
        self.observe(now);
        self.ledger().sample()
    }

    /// Gives back granules that have been quiet, and at once what the limit and the headroom demand; answers how many
    /// bytes. Call it a few times a second: nothing else notices that a neighbour wants memory.
    pub fn trim(&self, now: Instant) -> ByteSize {
        let now = self.observe(now);
        let mut ledger = self.ledger();
        // First promise to look again, then look: a run that ends in between comes back here.
        self.inner.trim_wanted.store(true, Ordering::SeqCst);
        let (bytes, look_again) = ledger.trim(now);
        self.inner.trim_wanted.store(look_again, Ordering::SeqCst);
        // A question to the device, and a look at every arena: not where nobody could give anything up.
        let short = self.inner.has_shedders.load(Ordering::Acquire) && ledger.is_short(now);
        drop(ledger);
        if short && self.shed() {
            // What is wanted of it goes now; the rest is idle, and goes as everything that is.
            let more = self.ledger().trim(now).0;
            return ByteSize(bytes + more);
        }
        ByteSize(bytes)
    }

    /// Gives back all that is idle, however young: somebody outside the arenas needs it more. Answers how many bytes.
    pub fn give_back_idle(&self) -> ByteSize {
        let now = self.observe(Instant::default());
        ByteSize(self.ledger().trim(now + policy::QUIET).0)
    }

    /// Changes the limit. What is idle above a lower one is given back now, the rest as runs end.
    pub fn set_limit(&self, limit: ByteSize) {
        self.ledger().limit = limit.0;
        self.trim(Instant::default());
    }

    /// Changes the headroom. What is idle and lacking in a larger one is given back now, the rest as runs end.
    pub fn set_headroom(&self, headroom: ByteSize) {
        self.ledger().headroom = headroom.0;
        self.trim(Instant::default());
    }

    /// All numbers of the device and its arenas, of one instant.
    #[must_use]
    pub fn stats(&self) -> LedgerStats {
        self.ledger().stats()
    }

    /// Takes note of a time and answers the latest one.
    pub(super) fn observe(&self, now: Instant) -> Instant {
        // Relaxed: a time that is seen late makes a granule look a little older, no more.
        Instant(self.inner.latest.fetch_max(now.0, Ordering::Relaxed).max(now.0))
    }

    pub(super) fn trim_if_wanted(&self, now: Instant) {
        if self.inner.trim_wanted.load(Ordering::SeqCst) {
            self.trim(now);
        }
    }

    /// An allocation for which too little is committed.
    pub(super) fn allocate_slowly(&self, core: &Core, bytes: usize, unplaced: Unplaced) -> Result<usize, Denied> {
        let now = self.observe(Instant::default());
        let mut ledger = self.ledger();
        let mut state = core.lock();
        // Another thread may have freed or committed in between.
        let placed = if unplaced == Unplaced::Never { Err(unplaced) } else { state.place(bytes) };
        let growth = match placed {
            Ok(offset) => return Ok(offset),
            Err(Unplaced::Never) => ledger.attainable(core, now),
            Err(Unplaced::Short(least)) => {
                let most = policy::generous(least, state.space.committed(), core.reservation.bytes());
                match ledger.grow(core, &mut state, Goal { least, most }, now) {
                    Ok(()) => return Ok(state.place(bytes).expect("the prefix now reaches the end of the block")),
                    Err(growth) => growth,
                }
            }
        };
        let reachable = reachable(core.reservation.bytes(), state.space.committed(), growth);
        let tail = reachable.saturating_sub(state.space.top() as u64);
        let largest_hole = state.space.largest_hole() as u64;
        Err(state.deny(bytes, tail.max(largest_hole)))
    }

    /// See [`Arena::ensure`].
    pub(super) fn ensure(&self, core: &Core, bytes: usize) -> Result<(), Denied> {
        if core.lock().ensured(bytes) {
            return Ok(());
        }
        let now = self.observe(Instant::default());
        let mut ledger = self.ledger();
        let mut state = core.lock();
        let address_space = core.reservation.bytes();
        let end = state.space.top().checked_add(bytes).filter(|end| *end <= address_space);
        let growth = match end {
            None => ledger.attainable(core, now),
            Some(end) => match ledger.grow(core, &mut state, Goal { least: end, most: end }, now) {
                Ok(()) => {
                    state.ensured(bytes);
                    return Ok(());
                }
                Err(growth) => growth,
            },
        };
        let reachable = reachable(address_space, state.space.committed(), growth);
        let available = reachable.saturating_sub(state.space.top() as u64);
        Err(state.deny(bytes, available))
    }

    pub(super) fn close(&self, core: &Core) {
        self.ledger().close(core);
    }

    fn ledger(&self) -> MutexGuard<'_, Ledger> {
        // As for arenas: after a panic the numbers stay the best that there are.
        self.inner.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far a committed prefix could reach.
fn reachable(address_space: usize, committed: usize, growth: u64) -> u64 {
    (committed as u64).saturating_add(growth).min(address_space as u64)
}
