//! What really is behind the addresses, as the kernel reports it in `/proc/self/smaps`.

use super::*;
use crate::memory::{Arena, ArenaKind, ArenaOptions, Device, DeviceOptions, HOST_ALIGNMENT};
use crate::units::{DeviceId, Instant};

const MIB: usize = 1 << 20;

/// The bytes of physical memory behind a range of addresses; `None` if nothing is mapped there.
fn resident(base: usize, bytes: usize) -> Option<usize> {
    let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut sum, mut inside) = (None, false);
    for line in smaps.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let parsed = range.map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)));
        if let Some((Ok(start), Ok(end))) = parsed {
            inside = start < base + bytes && end > base;
        } else if let (true, Some(kib)) = (inside, line.strip_prefix("Rss:")) {
            let kib = kib.trim().strip_suffix(" kB").unwrap();
            *sum.get_or_insert(0) += kib.parse::<usize>().unwrap() << 10;
        }
    }
    sum
}

fn arena(kind: ArenaKind) -> Arena {
    let limit = ByteSize(256 << 20);
    let options = DeviceOptions { id: DeviceId(0), limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    let device = Device::new(Box::new(Host::new()), options);
    device.arena(ArenaOptions { label: "test".into(), kind, priority: 1, address_space: 1 << 34 }).unwrap()
}

#[test]
fn resident_memory_follows_commits() {
    let host = Host::new();
    let reservation = host.reserve(1 << 36).unwrap();
    let resident = || resident(reservation.base().get(), reservation.bytes()).unwrap();
    assert_eq!(resident(), 0);
    host.commit(&reservation, 0..64 * MIB).unwrap();
    assert_eq!(resident(), 64 * MIB);
    host.commit(&reservation, 64 * MIB..66 * MIB).unwrap();
    host.commit(&reservation, 100 * MIB..102 * MIB).unwrap();
    assert_eq!(resident(), 68 * MIB);
    host.decommit(&reservation, 64 * MIB..66 * MIB).unwrap();
    assert_eq!(resident(), 66 * MIB);
    host.decommit(&reservation, 0..64 * MIB).unwrap();
    host.decommit(&reservation, 100 * MIB..102 * MIB).unwrap();
    assert_eq!(resident(), 0);
}

#[test]
fn touching_commits_as_well() {
    let host = Host::new();
    let reservation = host.reserve(32 * MIB).unwrap();
    let pages = Pages::of(&reservation, 8 * MIB..24 * MIB);
    protect(&pages, libc::PROT_READ | libc::PROT_WRITE).unwrap();
    touch(&pages);
    assert_eq!(resident(reservation.base().get(), 32 * MIB), Some(16 * MIB));
    give_back(&pages).unwrap();
    assert_eq!(resident(reservation.base().get(), 32 * MIB), Some(0));
}

#[test]
fn committed_memory_is_zero_and_keeps_data() {
    let arena = arena(ArenaKind::Buffers);
    let device = arena.device().clone();
    let mut first = arena.block(10 * MIB).unwrap();
    assert!(first.as_slice().iter().all(|byte| *byte == 0));
    first.as_mut_slice().fill(7);
    let mut second = arena.block(40 * MIB).unwrap();
    second.as_mut_slice().fill(9);
    drop(second);
    assert!(device.trim(Instant(10_000_000_000)) >= ByteSize(0));
    assert!(device.trim(Instant(20_000_000_000)) > ByteSize(30 << 20));
    assert!(first.as_slice().iter().all(|byte| *byte == 7), "what lies below a live block stays");
    let third = arena.block(40 * MIB).unwrap();
    assert!(third.as_slice()[16 * MIB..].iter().all(|byte| *byte == 0), "what was given back is gone");
    assert!(first.as_slice().iter().all(|byte| *byte == 7));
}

#[test]
fn the_ledger_is_what_is_resident() {
    let arena = arena(ArenaKind::Run);
    let device = arena.device().clone();
    let base = arena.allocate(1).unwrap();
    arena.free(base).unwrap();
    let resident = || resident(base.addr().get(), 1 << 34).unwrap();
    for (second, mib) in [3, 90, 14, 150, 1].into_iter().enumerate() {
        let now = Instant(second as u64 * 3_000_000_000);
        arena.begin_run(now);
        arena.ensure(mib * MIB).unwrap();
        assert_eq!(resident() as u64, device.stats().committed.0);
        arena.end_run(now);
        device.trim(now);
        assert_eq!(resident() as u64, device.stats().committed.0);
    }
    device.trim(Instant(60_000_000_000));
    assert_eq!((resident(), device.stats().committed), (0, ByteSize::ZERO));
}

#[test]
fn blocks_do_not_touch_each_other() {
    let arena = arena(ArenaKind::Buffers);
    let mut blocks: Vec<_> = (0..200_usize).map(|n| (n as u8, arena.block(n * 37).unwrap())).collect();
    for (byte, block) in &mut blocks {
        assert_eq!(block.pointer().addr().get() % HOST_ALIGNMENT, 0);
        block.as_mut_slice().fill(*byte);
    }
    blocks.retain(|(byte, _)| byte % 3 != 0);
    blocks.extend((200..255_u8).map(|byte| (byte, arena.block(900).unwrap())));
    for (byte, block) in blocks.iter_mut().filter(|(byte, _)| *byte >= 200) {
        block.as_mut_slice().fill(*byte);
    }
    assert!(blocks.iter().all(|(byte, block)| block.as_slice().iter().all(|found| found == byte)));
}

#[test]
fn blocks_outlive_the_arena_handle() {
    let arena = arena(ArenaKind::Buffers);
    let mut block = arena.block(5 * MIB).unwrap();
    assert!(arena.free(block.pointer()).is_err(), "only its owner frees a block");
    drop(arena);
    block.as_mut_slice().fill(3);
    assert!(block.as_slice().iter().all(|byte| *byte == 3));
}

#[test]
fn dropping_an_arena_unmaps_it() {
    // So much that no other test has a mapping like it, wherever it lies.
    const HUGE: usize = 1 << 44;
    let mapped = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let ranges = maps.lines().filter_map(|line| line.split_once(' ')?.0.split_once('-'));
        let mut sizes = ranges
            .map(|(start, end)| usize::from_str_radix(end, 16).unwrap() - usize::from_str_radix(start, 16).unwrap());
        sizes.any(|size| size > HUGE / 2)
    };
    let options = ArenaOptions { label: "huge".into(), kind: ArenaKind::Weights, priority: 1, address_space: HUGE };
    let device = arena(ArenaKind::Run).device().clone();
    let huge = device.arena(options).unwrap();
    huge.allocate(20 * MIB).unwrap();
    assert!(mapped());
    drop(huge);
    assert!(!mapped());
    assert_eq!(device.stats().committed, ByteSize::ZERO);
    assert!(device.stats().arenas.is_empty());
}

#[test]
#[should_panic(expected = "the range lies inside")]
fn commits_outside_of_the_reservation_are_refused() {
    let host = Host::new();
    let reservation = host.reserve(4 * MIB).unwrap();
    let _ = host.commit(&reservation, 2 * MIB..6 * MIB);
}

#[test]
#[should_panic(expected = "only this file makes reservations")]
fn reservations_of_others_are_refused() {
    let reservation = Reservation::new(NonZeroUsize::MIN, 4 * MIB, Box::new(()));
    let _ = Host::new().decommit(&reservation, 0..2 * MIB);
}

#[test]
fn addresses_that_do_not_exist_are_refused() {
    assert!(Host::new().reserve(usize::MAX - MIB).is_err());
    assert!(Host::new().reserve(usize::MAX / 2).is_err());
}

#[test]
fn the_machine_is_never_emptied() {
    let host = Host::new();
    assert!(host.free_bytes() <= host.total_bytes());
    assert!(host.margin() >= ByteSize(MIN_MARGIN));
    let options = DeviceOptions { id: DeviceId(0), limit: ByteSize::MAX, headroom: ByteSize::ZERO, alignment: 64 };
    let device = Device::new(Box::new(host), options);
    let everything = ArenaOptions { label: "all".into(), kind: ArenaKind::Run, priority: 1, address_space: 1 << 42 };
    let arena = device.arena(everything).unwrap();
    let stats = device.stats();
    let too_much = stats.free.0.saturating_sub(stats.margin.0 / 2);
    let denied = arena.allocate(too_much as usize).unwrap_err();
    assert!(denied.available < denied.wanted, "{denied:?}");
    assert_eq!(device.stats().committed, ByteSize::ZERO, "refused before a page was touched");
}

#[test]
fn the_margin_follows_the_limit_of_the_container() {
    let folder = tempfile::tempdir().unwrap();
    let limit = |bytes: u64| fs::write(folder.path().join("memory.max"), bytes.to_string()).unwrap();
    fs::write(folder.path().join("memory.current"), "0").unwrap();
    limit(2 << 30);
    let host = Host::within(Groups::in_folder(folder.path().to_owned()), false);
    assert_eq!(host.margin(), ByteSize(32 << 20));
    for (bytes, margin) in [(140 << 20, MIN_MARGIN), (3 << 30, 48 << 20)] {
        limit(bytes);
        assert!(host.free_bytes() <= ByteSize(bytes));
        assert_eq!(host.margin(), ByteSize(margin));
    }
}
