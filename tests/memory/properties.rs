//! Several arenas of one device under random calls, neighbours, limits and failures: after every call the books agree with
//! the device, and nobody lost what was promised.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use concertina::memory::{Arena, ArenaKind, Denied, Device, LedgerStats};
use concertina::units::{ByteSize, Instant};
use proptest::prelude::*;

use crate::fake::{ALIGNMENT, GRANULE, World, arena};

const TOTAL: u64 = 400;
const KINDS: [ArenaKind; 5] = [ArenaKind::Weights, ArenaKind::Run, ArenaKind::Run, ArenaKind::Run, ArenaKind::Buffers];

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate {
        arena: usize,
        bytes: usize,
    },
    Free {
        arena: usize,
        nth: usize,
    },
    Begin(usize),
    /// Frees what is left, as a run does.
    End(usize),
    Ensure {
        arena: usize,
        granules: usize,
    },
    Pass {
        milliseconds: u64,
    },
    Trim,
    Limit(u64),
    Headroom(u64),
    Neighbour(u64),
    Replace(usize),
    FailCommit(u64),
    FailDecommit(u64),
    Hide(u64),
    UseBudget(usize),
}

fn ops(faults: bool) -> impl Strategy<Value = Vec<Op>> {
    let arena = || 0..KINDS.len();
    let op = prop_oneof![
        60 => (arena(), 0..40_000_usize).prop_map(|(arena, bytes)| Op::Allocate { arena, bytes }),
        5 => (arena(), 0..900_000_usize).prop_map(|(arena, bytes)| Op::Allocate { arena, bytes }),
        60 => (arena(), any::<usize>()).prop_map(|(arena, nth)| Op::Free { arena, nth }),
        10 => arena().prop_map(Op::Begin),
        12 => arena().prop_map(Op::End),
        8 => (arena(), 1..200_usize).prop_map(|(arena, granules)| Op::Ensure { arena, granules }),
        10 => (0..1500_u64).prop_map(|milliseconds| Op::Pass { milliseconds }),
        8 => Just(Op::Trim),
        4 => (0..=TOTAL + 50).prop_map(Op::Limit),
        3 => (0..60_u64).prop_map(Op::Headroom),
        4 => (0..TOTAL).prop_map(Op::Neighbour),
        1 => arena().prop_map(Op::Replace),
        3 => arena().prop_map(Op::UseBudget),
    ];
    let fault = prop_oneof![
        (1..5_u64).prop_map(Op::FailCommit),
        (1..5_u64).prop_map(Op::FailDecommit),
        (0..TOTAL).prop_map(Op::Hide),
    ];
    let op = if faults { prop_oneof![20 => op, 1 => fault].boxed() } else { op.boxed() };
    prop::collection::vec(op, 1..1500)
}

/// One arena and what the test knows to live in it.
struct Tenant {
    arena: Arena,
    kind: ArenaKind,
    in_run: bool,
    live: BTreeMap<usize, usize>,
}

struct Simulation {
    world: Arc<World>,
    device: Device,
    tenants: Vec<Tenant>,
    now: Instant,
    faults: bool,
    limit: u64,
    headroom: u64,
}

impl Simulation {
    fn new(faults: bool) -> Self {
        let world = World::new(TOTAL);
        let device = world.device(TOTAL, 0);
        let tenants = KINDS.iter().map(|kind| Self::tenant(&device, *kind)).collect();
        Self { world, device, tenants, now: Instant(1), faults, limit: TOTAL, headroom: 0 }
    }

    fn tenant(device: &Device, kind: ArenaKind) -> Tenant {
        Tenant { arena: arena(device, kind, 1), kind, in_run: false, live: BTreeMap::new() }
    }

    fn step(&mut self, op: Op) {
        let before = self.device.stats();
        match op {
            Op::Allocate { arena, bytes } => self.allocate(arena, bytes),
            Op::Free { arena, nth } => self.tenants[arena].free(nth),
            Op::Begin(arena) => self.tenants[arena].begin(self.now),
            Op::End(arena) => self.tenants[arena].end(self.now),
            Op::Ensure { arena, granules } => self.ensure(arena, granules * GRANULE),
            Op::Pass { milliseconds } => self.now = Instant(self.now.0 + milliseconds * 1_000_000),
            Op::Trim => self.trim(),
            Op::Limit(granules) => {
                self.limit = granules;
                self.device.set_limit(ByteSize(granules * GRANULE as u64));
            }
            Op::Headroom(granules) => {
                self.headroom = granules;
                self.device.set_headroom(ByteSize(granules * GRANULE as u64));
            }
            Op::Neighbour(granules) => self.world.set_neighbour(granules),
            Op::Replace(arena) => {
                // What cannot be given back when an arena is dropped is lost with the device: not in these books.
                self.world.fail_decommit.store(0, SeqCst);
                self.tenants[arena] = Self::tenant(&self.device, KINDS[arena]);
            }
            Op::FailCommit(nth) => self.world.fail_commit.store(nth, SeqCst),
            Op::FailDecommit(nth) => self.world.fail_decommit.store(nth, SeqCst),
            Op::Hide(granules) => self.world.hidden.store(granules * GRANULE as u64, SeqCst),
            Op::UseBudget(arena) => self.use_budget(arena),
        }
        let after = self.device.stats();
        self.check_books(&before, &after);
        if !matches!(op, Op::Replace(_)) {
            self.check_promises(&before, &after);
        }
    }

    fn allocate(&mut self, index: usize, bytes: usize) {
        let tenant = &mut self.tenants[index];
        let denied = match tenant.arena.allocate(bytes) {
            Ok(pointer) => return tenant.adopt(&self.world, pointer, bytes),
            Err(denied) => denied,
        };
        assert_eq!(denied.wanted, ByteSize(bytes as u64));
        assert!(denied.available < denied.wanted || bytes == 0, "{denied:?}");
        assert_eq!(tenant.arena.stats().last_denied, Some(denied));
        if let (Denied { available: ByteSize(available @ 1..), .. }, false) = (denied, self.faults) {
            let pointer = tenant.arena.allocate(available as usize).expect("what is said to be available");
            tenant.adopt(&self.world, pointer, available as usize);
        }
    }

    fn ensure(&mut self, index: usize, bytes: usize) {
        let tenant = &mut self.tenants[index];
        match tenant.arena.ensure(bytes) {
            Ok(()) => {
                let calls = self.world.calls();
                let pointer = tenant.arena.allocate(bytes).expect("what was ensured");
                assert_eq!(self.world.calls(), calls, "what was ensured is committed");
                tenant.arena.free(pointer).unwrap();
            }
            Err(denied) => {
                assert!(denied.available < denied.wanted, "{denied:?}");
                assert!(self.faults || tenant.arena.ensure(denied.available.0 as usize).is_ok());
            }
        }
    }

    /// A budget is no wish: if nothing else runs, one run can have all of it.
    fn use_budget(&mut self, index: usize) {
        let sample = self.device.sample(self.now);
        assert!(sample.budget.0 <= self.limit * GRANULE as u64);
        let idle = self.tenants.iter().all(|tenant| !tenant.in_run);
        let tenant = &mut self.tenants[index];
        if idle && !self.faults && tenant.kind == ArenaKind::Run {
            tenant.begin(self.now);
            tenant.arena.ensure(sample.budget.0 as usize).expect("the budget");
            assert!(self.device.sample(self.now).budget >= sample.budget, "what a run was promised still counts");
            tenant.end(self.now);
        }
    }

    fn trim(&mut self) {
        self.device.trim(self.now);
        let stats = self.device.stats();
        // What could go is gone, as far as a limit below it or a half of the headroom is urgent.
        let wanting = stats.committed > stats.limit || stats.free.0 < (stats.headroom.0 + stats.margin.0) / 2;
        let could_give = |tenant: &Tenant| {
            let active = tenant.arena.stats().active.0.next_multiple_of(GRANULE as u64);
            tenant.kind != ArenaKind::Weights && !tenant.in_run && active == 0 && tenant.arena.stats().reserved.0 > 0
        };
        assert!(self.faults || !wanting || !self.tenants.iter().any(could_give), "{stats:?}");
    }

    fn check_books(&self, before: &LedgerStats, after: &LedgerStats) {
        let committed = after.committed;
        assert_eq!(committed.0, self.world.committed());
        assert_eq!(committed.0, after.arenas.iter().map(|arena| arena.reserved.0).sum::<u64>());
        assert_eq!(after.allocated.0, after.arenas.iter().map(|arena| arena.allocated.0).sum::<u64>());
        assert_eq!(after.free.0 + after.outside.0 + committed.0, after.total.0.max(committed.0));
        assert!(committed <= after.limit || committed <= before.committed, "a commit above the limit");
        if committed > before.committed {
            assert!(self.world.free() >= (self.headroom + 1) * GRANULE as u64, "a commit into headroom or margin");
        }
        for tenant in &self.tenants {
            let stats = tenant.arena.stats();
            assert_eq!(stats.allocated.0, tenant.live.values().map(|size| *size as u64).sum::<u64>());
            assert_eq!(stats.blocks, tenant.live.len() as u64);
            assert_eq!(stats.allocations - stats.frees, stats.blocks);
            assert!(stats.allocated <= stats.active && stats.active <= stats.reserved, "{stats:?}");
            assert_eq!(stats.free.0, stats.reserved.0 - stats.allocated.0);
            assert!(stats.largest_free <= stats.free && (0.0..=1.0).contains(&stats.fragmentation()));
            assert!(stats.peak_allocated >= stats.allocated && stats.peak_reserved >= stats.reserved);
            assert!(stats.blocks > 0 || stats.fragmentation() == 0.0, "an empty arena is one piece");
        }
    }

    /// Nobody takes weights, what a run holds, or what lies below a live block.
    fn check_promises(&self, before: &LedgerStats, after: &LedgerStats) {
        for (was, is) in before.arenas.iter().zip(&after.arenas) {
            let kept = was.kind == ArenaKind::Weights || (was.in_run && is.in_run);
            assert!(!kept || is.reserved >= was.reserved, "{was:?} {is:?}");
        }
        for tenant in &self.tenants {
            let ends = tenant.live.first_key_value().zip(tenant.live.last_key_value());
            if let Some(((start, _), (last, size))) = ends {
                assert!(self.world.is_committed(*start..last + size), "a live block is not committed");
            }
        }
    }
}

impl Tenant {
    fn adopt(&mut self, world: &World, pointer: NonNull<u8>, bytes: usize) {
        let (start, size) = (pointer.addr().get(), bytes.max(1).next_multiple_of(ALIGNMENT));
        assert_eq!(start % ALIGNMENT, 0);
        assert!(self.arena.owns(pointer) && world.is_committed(start..start + size));
        let below = self.live.range(..start).next_back();
        assert!(below.is_none_or(|(below, size)| below + size <= start), "overlaps the block below");
        assert!(self.live.range(start..).next().is_none_or(|(above, _)| start + size <= *above), "overlaps above");
        self.live.insert(start, size);
    }

    fn free(&mut self, nth: usize) {
        let Some(&start) = self.live.keys().nth(nth % self.live.len().max(1)) else { return };
        self.live.remove(&start);
        let pointer = NonNull::new(std::ptr::without_provenance_mut(start)).unwrap();
        assert!(self.arena.free(pointer).is_ok());
        assert!(self.arena.free(pointer).is_err(), "freed twice");
    }

    fn begin(&mut self, now: Instant) {
        if self.kind == ArenaKind::Run && !self.in_run {
            self.in_run = true;
            self.arena.begin_run(now);
        }
    }

    fn end(&mut self, now: Instant) {
        if self.in_run {
            while !self.live.is_empty() {
                self.free(self.live.len() / 2);
            }
            self.in_run = false;
            let run = self.arena.end_run(now);
            assert!(run.peak_allocated <= run.footprint);
        }
    }
}

fn simulate(ops: Vec<Op>, faults: bool) {
    let mut simulation = Simulation::new(faults);
    for op in ops {
        simulation.step(op);
    }
    let Simulation { world, device, tenants, .. } = simulation;
    world.fail_decommit.store(0, SeqCst);
    drop(tenants);
    assert_eq!(device.stats().committed, ByteSize::ZERO);
    assert_eq!(world.committed(), 0, "everything was given back");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn the_books_agree_with_the_device(ops in ops(false)) {
        simulate(ops, false);
    }

    #[test]
    fn the_books_agree_when_calls_fail(ops in ops(true)) {
        simulate(ops, true);
    }
}
