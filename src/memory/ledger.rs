//! The ledger of one device: what is committed, and how it grows and shrinks. All of it runs under the device's lock.

use std::sync::Arc;

use super::arena::{ArenaKind, Core, State};
use super::backing::{Backing, BackingError};
use super::policy::{self, Balance, Granule, Tail};
use super::stats::{Counters, LedgerStats, Sample};
use crate::units::{ByteSize, DeviceId, Instant};

/// How often growth looks again after it took memory from others or the device turned out to be fuller than it said.
const ROUNDS: usize = 3;

/// See the module.
#[derive(Debug)]
pub(super) struct Ledger {
    device: DeviceId,
    backing: Box<dyn Backing>,
    pub(super) limit: u64,
    pub(super) headroom: u64,
    committed: u64,
    arenas: Vec<Arc<Core>>,
    counters: Counters,
    last_failure: Option<String>,
}

/// How far the committed prefix of an arena should reach.
#[derive(Clone, Copy, Debug)]
pub(super) struct Goal {
    /// It has to.
    pub(super) least: usize,
    /// It may, if nobody has to give anything for it.
    pub(super) most: usize,
}

impl Ledger {
    pub(super) fn new(device: DeviceId, backing: Box<dyn Backing>) -> Self {
        let (counters, last_failure) = (Counters::default(), None);
        Self { device, backing, limit: 0, headroom: 0, committed: 0, arenas: Vec::new(), counters, last_failure }
    }

    pub(super) fn backing(&self) -> &dyn Backing {
        &*self.backing
    }

    pub(super) fn open(&mut self, core: &Arc<Core>) {
        self.arenas.push(Arc::clone(core));
    }

    /// Gives everything back that an arena holds, even under live blocks: nobody has a handle to it any more.
    pub(super) fn close(&mut self, core: &Core) {
        self.arenas.retain(|arena| !std::ptr::eq(&**arena, core));
        let mut state = core.lock();
        for granule in std::mem::take(&mut state.granules).into_iter().rev() {
            let given_back = self.backing.decommit(&core.reservation, granule.start..granule.start + granule.bytes);
            self.committed -= granule.bytes as u64;
            match given_back {
                Ok(()) => self.counters.decommits += 1,
                Err(error) => self.note_failure(&error),
            }
        }
    }

    /// Makes the committed prefix of an arena reach a goal. The error is the number of bytes that it could grow by.
    pub(super) fn grow(&mut self, core: &Core, state: &mut State, goal: Goal, now: Instant) -> Result<(), u64> {
        let granularity = self.backing.granularity();
        let missing = |end: usize| end.next_multiple_of(granularity).saturating_sub(state.space.committed());
        let (least, mut most) = (missing(goal.least), missing(goal.most));
        if least == 0 {
            return Ok(());
        }
        for _ in 0..ROUNDS {
            let balance = self.balance();
            let bytes = if balance.missing(most as u64) == 0 { most } else { least };
            let mut missing = balance.missing(bytes as u64);
            if missing == 0 {
                if self.commit(core, state, bytes, now).is_ok() {
                    return Ok(());
                }
                // The device is fuller than it says, or in pieces: others have to make all of the room.
                (most, missing) = (least, least as u64);
            }
            let Some(takes) = policy::reclaim(&self.tails(Some(core), now), missing) else { break };
            for take in takes {
                self.counters.reclaimed += self.take(take);
            }
        }
        Err(self.attainable(core, now))
    }

    /// The number of bytes that an arena could grow by.
    pub(super) fn attainable(&self, core: &Core, now: Instant) -> u64 {
        let tails = self.tails(Some(core), now);
        let reclaimable = tails.iter().filter(|tail| !tail.busy).map(Tail::bytes).sum();
        self.whole(self.balance().attainable(reclaimable))
    }

    /// Gives back what has been quiet and what the limit and the headroom demand. Answers the bytes given back, and
    /// whether arenas that are in a run have more to give when it ends.
    pub(super) fn trim(&mut self, now: Instant) -> (u64, bool) {
        let plan = policy::trim(&self.tails(None, now), self.balance(), now);
        let bytes = plan.takes.into_iter().map(|take| self.take(take)).sum();
        self.counters.trimmed += bytes;
        (bytes, plan.look_again)
    }

    /// Whether more is wanted back than all granules that could go, those of runs included.
    pub(super) fn is_short(&self, now: Instant) -> bool {
        let missing = self.balance().missing(0);
        missing > 0 && missing > self.tails(None, now).iter().map(Tail::bytes).sum()
    }

    /// What a scheduler needs to know.
    pub(super) fn sample(&self) -> Sample {
        let granularity = self.backing.granularity();
        let (mut fixed, mut promised, mut idle) = (0, 0, 0);
        for core in &self.arenas {
            let state = core.lock();
            let committed = state.space.committed();
            let free = || state.free_granules().iter().map(|granule| granule.bytes).sum::<usize>();
            match (core.kind, state.run) {
                (ArenaKind::Weights, _) => fixed += committed as u64,
                (ArenaKind::Buffers, _) => {
                    fixed += (committed - free()) as u64;
                    idle += free() as u64;
                }
                (ArenaKind::Run, Some(run)) => {
                    let reach = run.ensured.max(run.footprint).next_multiple_of(granularity);
                    promised += reach.min(committed) as u64;
                }
                (ArenaKind::Run, None) => idle += free() as u64,
            }
        }
        let balance = self.balance();
        // What we owe to the limit or the headroom is not there to be used, though we still hold it.
        let next = (idle + balance.room()).saturating_sub(balance.missing(0));
        let limit = balance.limit.saturating_sub(fixed);
        let empty = self.backing.total_bytes().0.saturating_sub(balance.headroom).saturating_sub(fixed);
        Sample {
            device: self.device,
            budget: ByteSize(self.whole((promised + next).min(limit))),
            capacity: ByteSize(self.whole(limit.min(empty))),
        }
    }

    pub(super) fn stats(&self) -> LedgerStats {
        let arenas: Vec<_> = self.arenas.iter().map(|core| core.stats(&core.lock())).collect();
        let (free, total) = (self.backing.free_bytes(), self.backing.total_bytes());
        let committed = ByteSize(self.committed);
        LedgerStats {
            device: self.device,
            limit: ByteSize(self.limit),
            headroom: ByteSize(self.headroom),
            margin: self.backing.margin(),
            committed,
            allocated: ByteSize(arenas.iter().map(|arena| arena.allocated.0).sum()),
            free,
            total,
            outside: total.saturating_sub(free).saturating_sub(committed),
            counters: self.counters,
            last_failure: self.last_failure.clone(),
            arenas,
        }
    }

    fn balance(&self) -> Balance {
        Balance {
            limit: self.limit,
            headroom: self.headroom.saturating_add(self.backing.margin().0),
            committed: self.committed,
            free: self.backing.free_bytes().0,
        }
    }

    /// Whole granules only.
    fn whole(&self, bytes: u64) -> u64 {
        bytes & !(self.backing.granularity() as u64 - 1)
    }

    /// The granules that each arena, except one whose lock the caller holds, could give.
    fn tails(&self, except: Option<&Core>, now: Instant) -> Vec<Tail> {
        let others = self.arenas.iter().enumerate();
        let others = others.filter(|(_, core)| !except.is_some_and(|except| std::ptr::eq(&***core, except)));
        others.map(|(index, core)| core.tail(index, &mut core.lock(), now)).collect()
    }

    /// Commits all of it or nothing, unless the device fails in giving back as well.
    fn commit(&mut self, core: &Core, state: &mut State, bytes: usize, now: Instant) -> Result<(), BackingError> {
        let before = state.space.committed();
        let committed = policy::granules(before, bytes, self.backing.granularity())
            .try_for_each(|bytes| self.commit_next(core, state, bytes, now));
        if committed.is_err() {
            while state.space.committed() > before && self.give_back_last(core, state) {}
        }
        state.peak_reserved = state.peak_reserved.max(state.space.committed());
        committed
    }

    fn commit_next(&mut self, core: &Core, state: &mut State, bytes: usize, now: Instant) -> Result<(), BackingError> {
        let start = state.space.committed();
        if let Err(error) = self.backing.commit(&core.reservation, start..start + bytes) {
            self.note_failure(&error);
            return Err(error);
        }
        state.granules.push(Granule { start, bytes, committed_at: now, used_at: now });
        state.space.set_committed(start + bytes);
        self.committed += bytes as u64;
        self.counters.commits += 1;
        Ok(())
    }

    /// Takes granules from an arena, as far as it has not begun a run or allocated since it was looked at.
    fn take(&mut self, take: policy::Take) -> u64 {
        let core = Arc::clone(&self.arenas[take.arena]);
        let mut state = core.lock();
        let before = state.space.committed();
        for _ in 0..take.granules {
            let free = state.granules.last().is_some_and(|granule| granule.start >= state.space.top());
            if state.run.is_some() || !free || !self.give_back_last(&core, &mut state) {
                break;
            }
        }
        (before - state.space.committed()) as u64
    }

    /// Gives the last granule back, in which nothing lives. On failure it stays in the books.
    fn give_back_last(&mut self, core: &Core, state: &mut State) -> bool {
        let Some(granule) = state.granules.pop() else { return false };
        match self.backing.decommit(&core.reservation, granule.start..granule.start + granule.bytes) {
            Ok(()) => {
                state.space.set_committed(granule.start);
                self.committed -= granule.bytes as u64;
                self.counters.decommits += 1;
                true
            }
            Err(error) => {
                self.note_failure(&error);
                state.granules.push(granule);
                false
            }
        }
    }

    fn note_failure(&mut self, error: &BackingError) {
        self.counters.failures += 1;
        if let BackingError::Failed(words) = error {
            self.last_failure = Some(words.clone());
        }
    }
}
