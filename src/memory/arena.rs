//! Arenas: one allocator each, over one reserved range of a device.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::backing::Reservation;
use super::block::Block;
use super::device::Device;
use super::policy::{Granule, Tail};
use super::space::{Space, Unplaced};
use super::stats::{ArenaStats, RunStats};
use crate::units::{ByteSize, Instant};

/// What an arena is for, which decides who may take its idle memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArenaKind {
    /// Weights of a model: never given back before the arena is dropped.
    Weights,
    /// What one instance needs during a run: empty between runs, so all of it can be given back between them.
    Run,
    /// Buffers that outlive runs: what lies behind the last of them can be given back at any time.
    Buffers,
}

/// How to make an arena.
#[derive(Clone, Debug)]
pub struct ArenaOptions {
    /// Names it in statistics.
    pub label: String,
    /// What it is for.
    pub kind: ArenaKind,
    /// 1 is the most urgent. Among arenas that are idle about as long, the one with the largest number gives first.
    pub priority: u32,
    /// The most bytes that it can ever hold. Addresses cost nothing: be generous.
    pub address_space: usize,
}

/// An allocation that was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wanted} wanted, {available} available")]
pub struct Denied {
    /// The bytes that were asked for.
    pub wanted: ByteSize,
    /// The most bytes that the same call could have had.
    pub available: ByteSize,
}

/// A pointer that no live block of the arena begins at.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a live block of this arena")]
pub struct NotOurs;

/// Decides over each allocation of an arena in tests: `true` denies it.
pub type Denier = Box<dyn FnMut(usize) -> bool + Send>;

/// An allocator over one reserved range of a device. Clones are handles to the same arena; dropping the last one gives
/// everything back, whatever still lives in it.
#[derive(Clone)]
pub struct Arena {
    handle: Arc<Handle>,
}

/// Closes the arena when the last clone of [`Arena`] has gone.
struct Handle {
    device: Device,
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.device.close(&self.core);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("label", &self.handle.core.label).finish_non_exhaustive()
    }
}

impl Arena {
    pub(super) fn new(device: Device, core: Arc<Core>) -> Self {
        Self { handle: Arc::new(Handle { device, core }) }
    }

    /// Allocates a block; no two live blocks share an address, even of zero bytes. If what is committed does not
    /// suffice, it commits more as far as the device allows; otherwise it makes no system call.
    ///
    /// # Errors
    /// [`Denied`] if the device has no room, after idle granules of other arenas have been taken back.
    pub fn allocate(&self, bytes: usize) -> Result<NonNull<u8>, Denied> {
        let core = &*self.handle.core;
        let placed = core.lock().allocate(bytes)?;
        let offset = match placed {
            Ok(offset) => offset,
            Err(unplaced) => self.handle.device.allocate_slowly(core, bytes, unplaced)?,
        };
        Ok(core.reservation.pointer(offset))
    }

    /// Frees what [`allocate`](Self::allocate) answered. Any thread may do so.
    ///
    /// # Errors
    /// [`NotOurs`] if no live block begins there, or it belongs to a [`Block`]; nothing has changed then.
    pub fn free(&self, pointer: NonNull<u8>) -> Result<(), NotOurs> {
        let offset = self.handle.core.reservation.offset_of(pointer).ok_or(NotOurs)?;
        self.handle.core.lock().free(offset).ok_or(NotOurs)
    }

    /// Whether an address lies in the range of this arena. Takes no lock.
    #[must_use]
    pub fn owns(&self, pointer: NonNull<u8>) -> bool {
        self.handle.core.reservation.offset_of(pointer).is_some()
    }

    /// Allocates a block that frees itself.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn block(&self, bytes: usize) -> Result<Block, Denied> {
        let pointer = self.allocate(bytes)?;
        let offset = self.handle.core.reservation.offset_of(pointer);
        // From here on `free` refuses the pointer, so that slices of a block are sound whatever others do with it.
        let kept = offset.is_some_and(|offset| self.handle.core.lock().space.keep(offset));
        assert!(kept, "nobody frees a pointer that nobody has seen");
        Ok(Block::new(self.clone(), pointer, bytes))
    }

    /// Frees what [`block`](Self::block) allocated.
    pub(super) fn free_block(&self, block: &Block) {
        let mut state = self.handle.core.lock();
        if let Some(offset) = self.handle.core.reservation.offset_of(block.pointer()) {
            state.space.release(offset);
            state.free(offset);
        }
    }

    /// Commits so much that `bytes` contiguous ones are free. Call it after [`begin_run`](Self::begin_run): between runs
    /// another arena may take the memory away again.
    ///
    /// # Errors
    /// [`Denied`] if the device has no room, after idle granules of other arenas have been taken back.
    pub fn ensure(&self, bytes: usize) -> Result<(), Denied> {
        self.handle.device.ensure(&self.handle.core, bytes)
    }

    /// Marks the arena as in a run: until [`end_run`](Self::end_run) nobody takes its memory away. Starts the counts of
    /// [`RunStats`] anew.
    pub fn begin_run(&self, now: Instant) {
        self.handle.device.observe(now);
        self.handle.core.lock().begin_run();
    }

    /// Ends a run. If the device waits for memory that this run held, gives it back now.
    pub fn end_run(&self, now: Instant) -> RunStats {
        self.handle.device.observe(now);
        let stats = self.handle.core.lock().end_run(now);
        self.handle.device.trim_if_wanted(now);
        stats
    }

    /// The end of the highest block in the run that is going on; see [`RunStats::footprint`].
    #[must_use]
    pub fn footprint(&self) -> ByteSize {
        size(self.handle.core.lock().run.map_or(0, |run| run.footprint))
    }

    /// The numbers of this arena now.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        self.handle.core.stats(&self.handle.core.lock())
    }

    /// The device that it is on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.handle.device
    }

    /// Whether this process can read and write blocks through pointers.
    #[must_use]
    pub fn is_host(&self) -> bool {
        self.handle.core.reservation.is_host()
    }

    /// For tests: from now on `denier` is asked about each allocation, with its bytes. It runs under the arena's lock
    /// and must not call the arena. `None` removes it.
    pub fn set_denier(&self, denier: Option<Denier>) {
        self.handle.core.lock().denier = denier;
    }

    /// For tests: denies the `nth` allocation from now on (1 is the next one), once.
    pub fn deny_nth(&self, nth: u64) {
        let mut seen = 0;
        self.set_denier(Some(Box::new(move |_| {
            seen += 1;
            seen == nth
        })));
    }
}

/// What the handles and the ledger share of an arena.
///
/// Order of locks: the ledger's, then those of arenas. Whoever holds only an arena's lock takes no other one, so the
/// ledger may wait for any arena, its own and its victims, and no two threads can wait for each other.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) label: String,
    pub(super) kind: ArenaKind,
    pub(super) priority: u32,
    pub(super) reservation: Reservation,
    state: Mutex<State>,
}

impl Core {
    pub(super) fn new(options: ArenaOptions, reservation: Reservation, alignment: usize) -> Self {
        let space = Space::new(alignment, reservation.bytes());
        let ArenaOptions { label, kind, priority, .. } = options;
        Self { label, kind, priority, reservation, state: Mutex::new(State::new(space)) }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under this lock is a broken assertion of ours; the numbers stay the best that there are.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The granules that could go, for the arena at `index` of the ledger.
    pub(super) fn tail(&self, index: usize, state: &mut State, now: Instant) -> Tail {
        state.note_use(now);
        let granules = if self.kind == ArenaKind::Weights { Vec::new() } else { state.free_granules() };
        Tail { arena: index, priority: self.priority, busy: state.run.is_some(), granules }
    }

    pub(super) fn stats(&self, state: &State) -> ArenaStats {
        let space = &state.space;
        let (committed, allocated) = (space.committed(), space.allocated());
        ArenaStats {
            label: self.label.clone(),
            kind: self.kind,
            priority: self.priority,
            allocated: size(allocated),
            reserved: size(committed),
            active: size(space.top()),
            peak_allocated: size(state.peak_allocated),
            peak_reserved: size(state.peak_reserved),
            peak_active: size(state.peak_active),
            blocks: space.live() as u64,
            granules: state.granules.len() as u64,
            allocations: state.allocations,
            frees: state.frees,
            denied: state.denied,
            last_denied: state.last_denied,
            free: size(committed - allocated),
            largest_free: size(space.largest_free()),
            in_run: state.run.is_some(),
        }
    }
}

/// What an arena's lock protects.
pub(super) struct State {
    pub(super) space: Space,
    /// The committed prefix, in the order of addresses.
    pub(super) granules: Vec<Granule>,
    pub(super) run: Option<Run>,
    /// The end of the highest block since use was last noted.
    mark: usize,
    peak_allocated: usize,
    peak_active: usize,
    pub(super) peak_reserved: usize,
    allocations: u64,
    frees: u64,
    denied: u64,
    last_denied: Option<Denied>,
    denier: Option<Denier>,
}

/// A run that is going on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The end of the prefix that the run was promised.
    pub(super) ensured: usize,
    pub(super) footprint: usize,
    peak_allocated: usize,
    denials: u64,
}

impl State {
    fn new(space: Space) -> Self {
        Self {
            space,
            granules: Vec::new(),
            run: None,
            mark: 0,
            peak_allocated: 0,
            peak_active: 0,
            peak_reserved: 0,
            allocations: 0,
            frees: 0,
            denied: 0,
            last_denied: None,
            denier: None,
        }
    }

    /// Places a block in what is committed. The outer error is final, the inner one says what is missing.
    pub(super) fn allocate(&mut self, bytes: usize) -> Result<Result<usize, Unplaced>, Denied> {
        if self.denier.as_mut().is_some_and(|denier| denier(bytes)) {
            return Err(self.deny(bytes, self.space.largest_free() as u64));
        }
        Ok(self.place(bytes))
    }

    /// As [`allocate`](Self::allocate), without asking the denier.
    pub(super) fn place(&mut self, bytes: usize) -> Result<usize, Unplaced> {
        let offset = self.space.allocate(bytes)?;
        self.allocations += 1;
        let (top, allocated) = (self.space.top(), self.space.allocated());
        self.mark = self.mark.max(top);
        self.peak_active = self.peak_active.max(top);
        self.peak_allocated = self.peak_allocated.max(allocated);
        if let Some(run) = &mut self.run {
            run.footprint = run.footprint.max(top);
            run.peak_allocated = run.peak_allocated.max(allocated);
        }
        Ok(offset)
    }

    fn free(&mut self, offset: usize) -> Option<()> {
        self.space.free(offset)?;
        self.frees += 1;
        Some(())
    }

    /// Counts a denial.
    pub(super) fn deny(&mut self, wanted: usize, available: u64) -> Denied {
        let wanted = size(wanted);
        // A device that fails may have said that there is more.
        let available = ByteSize(available.min(wanted.0.saturating_sub(1)));
        let denied = Denied { wanted, available };
        self.denied += 1;
        self.last_denied = Some(denied);
        if let Some(run) = &mut self.run {
            run.denials += 1;
        }
        denied
    }

    /// Whether `bytes` contiguous ones are free in what is committed; if so, a run that is going on was promised them.
    pub(super) fn ensured(&mut self, bytes: usize) -> bool {
        let end = self.space.top().saturating_add(bytes);
        let ensured = end <= self.space.committed();
        if let Some(run) = self.run.as_mut().filter(|_| ensured) {
            run.ensured = run.ensured.max(end);
        }
        ensured
    }

    fn begin_run(&mut self) {
        let (footprint, peak_allocated) = (self.space.top(), self.space.allocated());
        self.run = Some(Run { ensured: footprint, footprint, peak_allocated, denials: 0 });
    }

    fn end_run(&mut self, now: Instant) -> RunStats {
        self.note_use(now);
        self.run.take().map_or_else(RunStats::default, |run| RunStats {
            peak_allocated: size(run.peak_allocated),
            footprint: size(run.footprint),
            denials: run.denials,
        })
    }

    /// Writes down that the granules below the mark have been in use until `now`, and lowers the mark.
    fn note_use(&mut self, now: Instant) {
        let mark = self.mark.max(self.space.top());
        for granule in self.granules.iter_mut().take_while(|granule| granule.start < mark) {
            granule.used_at = granule.used_at.max(now);
        }
        self.mark = self.space.top();
    }

    /// The granules behind the last block, the highest first.
    pub(super) fn free_granules(&self) -> Vec<Granule> {
        self.granules.iter().rev().take_while(|granule| granule.start >= self.space.top()).copied().collect()
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("State").field("space", &self.space).field("run", &self.run).finish_non_exhaustive()
    }
}

fn size(bytes: usize) -> ByteSize {
    ByteSize(bytes as u64)
}
