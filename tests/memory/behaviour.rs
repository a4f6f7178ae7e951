//! One situation each.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use concertina::memory::{Arena, ArenaKind, Denied, Device, NotOurs};
use concertina::units::{ByteSize, Instant};

use crate::fake::{GRANULE, World, arena};

fn at(milliseconds: u64) -> Instant {
    Instant(milliseconds * 1_000_000)
}

fn granules(count: usize) -> ByteSize {
    ByteSize((count * GRANULE) as u64)
}

fn reserved(arena: &Arena) -> usize {
    arena.stats().reserved.0 as usize / GRANULE
}

/// A run that commits so many granules and uses them all.
fn run(arena: &Arena, now: Instant, count: usize) {
    arena.begin_run(now);
    arena.ensure(count * GRANULE).unwrap();
    let block = arena.allocate(count * GRANULE).unwrap();
    arena.free(block).unwrap();
    arena.end_run(now);
}

/// A device of 100 granules with a margin of one, a limit of 60 and a headroom of 9.
fn device() -> (Arc<World>, Device) {
    let world = World::new(100);
    let device = world.device(60, 9);
    (world, device)
}

#[test]
fn a_warm_loop_makes_no_call_to_the_device() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    run(&arena, at(0), 40);
    let calls = world.calls();
    for step in 1..500 {
        arena.begin_run(at(step * 10));
        arena.ensure(40 * GRANULE).unwrap();
        let blocks: Vec<_> = (0..19).map(|n| arena.allocate(n * 900).unwrap()).collect();
        for block in blocks {
            arena.free(block).unwrap();
        }
        let tall = arena.allocate(40 * GRANULE).unwrap();
        arena.free(tall).unwrap();
        assert_eq!(arena.end_run(at(step * 10)).footprint, granules(40));
        device.trim(at(step * 10));
    }
    assert_eq!(world.calls(), calls);
}

#[test]
fn an_arena_is_one_piece_between_runs() {
    let (_, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    arena.begin_run(at(0));
    let blocks: Vec<_> = (1..30).map(|n| arena.allocate(n * 100).unwrap()).collect();
    let (odd, even): (Vec<_>, Vec<_>) = blocks.into_iter().enumerate().partition(|(n, _)| n % 2 == 1);
    odd.into_iter().for_each(|(_, block)| arena.free(block).unwrap());
    assert!(arena.stats().fragmentation() > 0.5, "{:?}", arena.stats());
    even.into_iter().for_each(|(_, block)| arena.free(block).unwrap());
    let run = arena.end_run(at(1));
    let stats = arena.stats();
    assert!(run.peak_allocated <= run.footprint && stats.reserved >= run.footprint);
    assert_eq!((stats.fragmentation(), stats.largest_free, stats.active), (0.0, stats.reserved, ByteSize::ZERO));
}

#[test]
fn the_footprint_is_what_has_to_be_committed() {
    let (world, device) = device();
    let footprint = |spare: usize| {
        let arena = arena(&device, ArenaKind::Run, 1);
        arena.begin_run(at(0));
        arena.ensure(spare * GRANULE).unwrap();
        let first = arena.allocate(3 * GRANULE).unwrap();
        let second = arena.allocate(GRANULE).unwrap();
        arena.free(first).unwrap();
        let third = arena.allocate(4 * GRANULE).unwrap();
        let fourth = arena.allocate(2 * GRANULE).unwrap();
        for block in [second, third, fourth] {
            arena.free(block).unwrap();
        }
        arena.end_run(at(1))
    };
    let (tight, ample) = (footprint(0), footprint(50));
    assert_eq!(tight, ample, "whatever was committed before");
    assert_eq!((tight.peak_allocated, tight.footprint), (granules(7), granules(8)));
    assert_eq!(world.committed(), 0);
}

#[test]
fn an_arena_that_needs_memory_takes_idle_granules_but_nothing_else() {
    let (_, device) = device();
    let [weights, first, second, busy, needy] =
        [ArenaKind::Weights, ArenaKind::Run, ArenaKind::Run, ArenaKind::Run, ArenaKind::Run]
            .map(|kind| arena(&device, kind, 1));
    let tensor = weights.allocate(10 * GRANULE).unwrap();
    weights.free(tensor).unwrap();
    run(&first, at(300), 15);
    run(&second, at(600), 15);
    busy.begin_run(at(900));
    busy.ensure(15 * GRANULE).unwrap();
    needy.begin_run(at(1000));
    needy.ensure(10 * GRANULE).unwrap();
    assert_eq!((reserved(&weights), reserved(&second), reserved(&busy)), (10, 15, 15), "{:?}", device.stats());
    assert!(reserved(&first) <= 10, "idle longest");
    needy.ensure(35 * GRANULE).unwrap();
    assert_eq!((reserved(&weights), reserved(&first), reserved(&second), reserved(&busy)), (10, 0, 0, 15));
    let denied = needy.ensure(36 * GRANULE).unwrap_err();
    assert_eq!(denied, Denied { wanted: granules(36), available: granules(35) });
    assert_eq!(device.stats().counters.reclaimed, granules(30).0);
}

#[test]
fn a_run_that_begins_while_the_ledger_thinks_keeps_its_memory() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    run(&arena, at(0), 30);
    let runner = arena.clone();
    world.meanwhile.lock().unwrap().0 = Some(Box::new(move || runner.begin_run(at(5000))));
    assert_eq!(device.trim(at(5000)), ByteSize::ZERO);
    assert_eq!(reserved(&arena), 30);
    arena.end_run(at(5001));
    let runner = arena.clone();
    world.meanwhile.lock().unwrap().0 = Some(Box::new(move || {
        runner.allocate(29 * GRANULE).unwrap();
    }));
    device.trim(at(9000));
    assert_eq!(reserved(&arena), 30, "nor is what was allocated in between taken");
}

#[test]
fn all_that_is_idle_is_given_back_on_demand_however_young() {
    let (_, device) = device();
    let [weights, idle, busy] =
        [ArenaKind::Weights, ArenaKind::Run, ArenaKind::Run].map(|kind| arena(&device, kind, 1));
    weights.allocate(10 * GRANULE).unwrap();
    run(&idle, at(300), 15);
    busy.begin_run(at(300));
    busy.ensure(5 * GRANULE).unwrap();
    assert_eq!(device.give_back_idle(), granules(15));
    assert_eq!([&weights, &idle, &busy].map(reserved), [10, 0, 5]);
}

#[test]
fn nobody_is_robbed_in_vain() {
    let (world, device) = device();
    let [rich, needy] = [1, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    run(&rich, at(0), 30);
    let calls = world.calls();
    assert_eq!(needy.ensure(61 * GRANULE).unwrap_err().available, granules(60));
    assert_eq!((reserved(&rich), world.calls()), (30, calls));
}

#[test]
fn the_least_urgent_of_those_idle_alike_gives_first() {
    let (_, device) = device();
    let [urgent, patient, needy] = [1, 5, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    run(&urgent, at(10), 20);
    run(&patient, at(20), 20);
    needy.begin_run(at(30));
    needy.ensure(25 * GRANULE).unwrap();
    assert_eq!(reserved(&urgent), 20);
    assert!(reserved(&patient) <= 15);
}

#[test]
fn a_device_that_is_fuller_than_it_says_gets_help_from_idle_arenas() {
    let (world, device) = device();
    let [rich, needy] = [1, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    run(&rich, at(0), 30);
    world.hidden.store(granules(65).0, SeqCst);
    needy.begin_run(at(1));
    needy.ensure(20 * GRANULE).unwrap();
    assert!(reserved(&needy) >= 20 && reserved(&rich) <= 10, "{:?}", device.stats());
    let denied = needy.ensure(50 * GRANULE).unwrap_err();
    assert!(denied.available < denied.wanted);
    assert!(device.stats().counters.failures > 0);
}

#[test]
fn a_commit_that_fails_half_way_is_undone() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    run(&arena, at(0), 4);
    let before = device.stats();
    world.fail_commit.store(3, SeqCst);
    arena.begin_run(at(1));
    world.hidden.store(granules(80).0, SeqCst);
    let denied = arena.ensure(40 * GRANULE).unwrap_err();
    let after = device.stats();
    assert_eq!((after.committed, world.committed()), (before.committed, before.committed.0));
    assert!(after.counters.commits > before.counters.commits, "some of it was committed: {denied:?}");
    assert_eq!(after.last_failure.as_deref(), Some("injected"));
    assert_eq!((arena.stats().peak_reserved, arena.end_run(at(2)).denials), (granules(4), 1));
}

#[test]
fn a_lowered_limit_takes_effect_as_runs_end() {
    let (world, device) = device();
    let [idle, busy] = [1, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    run(&idle, at(0), 20);
    busy.begin_run(at(1));
    busy.ensure(30 * GRANULE).unwrap();
    device.set_limit(granules(10));
    assert_eq!((reserved(&idle), reserved(&busy)), (0, 30), "at once what is idle");
    assert!(busy.allocate(31 * GRANULE).is_err(), "and nothing more is committed");
    assert_eq!(device.sample(at(2)).budget, granules(10));
    busy.end_run(at(3));
    assert!(world.committed() <= granules(10).0);
    device.set_limit(granules(60));
    run(&busy, at(4), 60);
}

#[test]
fn quiet_memory_is_given_back_and_what_is_used_stays() {
    let (_, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    run(&arena, at(0), 40);
    for step in 1..20 {
        run(&arena, at(step * 100), 8);
        device.trim(at(step * 100));
        let expected = if step < 10 { 40 } else { 10 };
        assert!(reserved(&arena) >= 8 && reserved(&arena) <= expected, "{step}: {}", reserved(&arena));
        assert!(step >= 10 || reserved(&arena) == 40);
    }
    device.trim(at(2899));
    assert!(reserved(&arena) > 0);
    assert!(device.trim(at(2900)) > ByteSize::ZERO);
    assert_eq!(reserved(&arena), 0);
}

#[test]
fn a_quiet_end_of_a_busy_arena_goes_when_the_run_ends() {
    let (_, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    run(&arena, at(0), 40);
    for step in 1..20 {
        arena.begin_run(at(step * 100));
        device.trim(at(step * 100 + 50));
        let block = arena.allocate(8 * GRANULE).unwrap();
        arena.free(block).unwrap();
        arena.end_run(at(step * 100 + 99));
    }
    assert!(reserved(&arena) >= 8 && reserved(&arena) <= 10, "{}", reserved(&arena));
}

#[test]
fn a_neighbour_gets_the_headroom_at_once_but_young_granules_are_not_thrashed() {
    let (world, device) = device();
    let [old, young] = [1, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    run(&old, at(0), 20);
    run(&young, at(700), 20);
    run(&old, at(710), 20);
    world.set_neighbour(52);
    device.trim(at(720));
    let stats = device.stats();
    assert!(stats.free >= granules(10) && stats.free <= granules(16), "{stats:?}");
    assert_eq!(reserved(&young), 20, "granules of 20 ms ago stay");
    world.set_neighbour(92);
    device.trim(at(730));
    assert!(reserved(&young) < 20 && device.stats().free >= granules(10), "unless it is urgent: {:?}", device.stats());
    let spare = (device.stats().free.0 - granules(10).0) as usize / GRANULE;
    assert!(
        old.ensure((reserved(&old) + reserved(&young) + spare + 1) * GRANULE).is_err(),
        "the headroom is not for us"
    );
    world.set_neighbour(0);
    run(&old, at(740), 60);
}

#[test]
fn whoever_holds_what_no_trim_can_take_is_asked_when_that_is_wanted_and_not_before() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Buffers, 1);
    let held = Arc::new(Mutex::new(Some(arena.block(30 * GRANULE).unwrap())));
    let (asked, gone) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (count, holds) = (Arc::clone(&asked), Arc::clone(&held));
    device.on_shortage(Box::new(move || {
        count.fetch_add(1, SeqCst);
        Some(holds.lock().unwrap().take().is_some())
    }));
    let count = Arc::clone(&gone);
    device.on_shortage(Box::new(move || {
        count.fetch_add(1, SeqCst);
        None
    }));
    world.set_neighbour(55);
    device.trim(at(1000));
    assert_eq!((asked.load(SeqCst), world.committed()), (0, granules(30).0), "15 are free, and 10 must be");
    world.set_neighbour(65);
    assert!(device.trim(at(1010)) >= granules(5));
    assert_eq!((asked.load(SeqCst), gone.load(SeqCst)), (1, 1));
    assert!(device.stats().free >= granules(10), "{:?}", device.stats());
    device.trim(at(3000));
    assert_eq!(world.committed(), 0, "the rest has been quiet");
    // Nothing is left to be given: it is asked again, but not who has gone.
    let _taken = arena.block(20 * GRANULE).unwrap();
    world.set_neighbour(75);
    device.trim(at(3010));
    assert_eq!((asked.load(SeqCst), gone.load(SeqCst), world.committed()), (2, 1, granules(20).0));
}

#[test]
fn buffers_give_back_what_lies_behind_the_last_one() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Buffers, 1);
    let low = arena.block(5 * GRANULE).unwrap();
    let high = arena.block(20 * GRANULE).unwrap();
    let outside = arena.stats();
    drop(high);
    device.trim(at(5000));
    device.trim(at(9000));
    assert!(reserved(&arena) >= 5 && reserved(&arena) <= 7, "{outside:?}");
    drop(low);
    device.trim(at(20_000));
    device.trim(at(30_000));
    assert_eq!(world.committed(), 0);
}

#[test]
fn samples_tell_budget_and_capacity() {
    let (world, device) = device();
    let [weights, buffers, first, second] =
        [ArenaKind::Weights, ArenaKind::Buffers, ArenaKind::Run, ArenaKind::Run].map(|kind| arena(&device, kind, 1));
    let sample = || {
        let sample = device.sample(at(1));
        assert_eq!(sample.device, device.id());
        (sample.budget, sample.capacity)
    };
    assert_eq!(sample(), (granules(60), granules(60)));
    weights.ensure(10 * GRANULE).unwrap();
    let _buffer = buffers.block(5 * GRANULE).unwrap();
    assert_eq!(sample(), (granules(45), granules(45)));
    run(&first, at(2), 30);
    assert_eq!(sample(), (granules(45), granules(45)), "idle memory is usable");
    second.begin_run(at(3));
    second.ensure(5 * GRANULE).unwrap();
    assert_eq!(sample(), (granules(45), granules(45)), "so is what a run was promised");
    first.begin_run(at(4));
    first.ensure(10 * GRANULE).unwrap();
    assert_eq!(sample(), (granules(25), granules(45)), "but not what a run holds and does not need");
    world.set_neighbour(50);
    assert_eq!(sample(), (granules(15), granules(45)), "a neighbour leaves what runs were promised");
    first.end_run(at(5));
    assert_eq!(sample(), (granules(25), granules(45)), "but what we owe to the headroom is not there");
    device.set_headroom(granules(70));
    assert_eq!(sample().1, granules(14), "capacity is what an empty device leaves");
}

#[test]
fn foreign_pointers_are_refused() {
    let (_, device) = device();
    let [one, other] = [1, 1].map(|priority| arena(&device, ArenaKind::Run, priority));
    let pointer = one.allocate(1000).unwrap();
    let inner = NonNull::new(std::ptr::without_provenance_mut(pointer.addr().get() + 64)).unwrap();
    assert!(one.owns(pointer) && one.owns(inner) && !other.owns(pointer));
    for wrong in [inner, NonNull::dangling()] {
        assert_eq!(one.free(wrong), Err(NotOurs));
    }
    assert_eq!(other.free(pointer), Err(NotOurs));
    assert_eq!(one.free(pointer), Ok(()));
    assert_eq!(one.free(pointer), Err(NotOurs));
}

#[test]
fn allocations_can_be_denied_for_a_test() {
    let (_, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    arena.begin_run(at(0));
    arena.deny_nth(3);
    let answers: Vec<_> = (0..5).map(|_| arena.allocate(100).is_ok()).collect();
    assert_eq!(answers, [true, true, false, true, true]);
    arena.set_denier(Some(Box::new(|bytes| bytes > 100)));
    assert!(arena.allocate(100).is_ok() && arena.allocate(101).is_err());
    arena.set_denier(None);
    assert!(arena.allocate(101).is_ok());
    let run = arena.end_run(at(1));
    let stats = arena.stats();
    assert_eq!((run.denials, stats.denied, stats.allocations), (2, 2, 6));
    assert_eq!(stats.last_denied.map(|denied| denied.wanted), Some(ByteSize(101)));
}

#[test]
fn absurd_requests_are_denied() {
    let (world, device) = device();
    let arena = arena(&device, ArenaKind::Run, 1);
    for bytes in [usize::MAX, usize::MAX / 2, 1 << 24 | 1] {
        assert_eq!(arena.allocate(bytes).unwrap_err().available, granules(60));
        assert_eq!(arena.ensure(bytes).unwrap_err().available, granules(60));
    }
    assert_eq!(world.calls(), 0);
    let options = concertina::memory::ArenaOptions {
        label: "absurd".into(),
        kind: ArenaKind::Run,
        priority: 1,
        address_space: usize::MAX,
    };
    assert!(device.arena(options).unwrap_err().to_string().contains("absurd"));
}

#[test]
#[should_panic(expected = "only host memory")]
fn device_memory_has_no_slices() {
    let (_, device) = device();
    let block = arena(&device, ArenaKind::Buffers, 1).block(10).unwrap();
    assert_eq!(block.as_slice().len(), 10);
}
