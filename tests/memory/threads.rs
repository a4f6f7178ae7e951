//! Threads that share arenas and a device.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;

use concertina::memory::{Arena, ArenaKind, ArenaOptions, Block, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::units::{ByteSize, DeviceId, Instant};

use crate::fake::{GRANULE, World, arena};

const STEPS: u64 = 4_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// Runs one after the other, each with some allocations; what a run leaves goes to another thread to be freed.
fn worker(arena: &Arena, seed: u64, leave: impl Fn(NonNull<u8>)) {
    let mut random = Random(seed);
    for step in 0..STEPS {
        arena.begin_run(Instant(step * 1_000_000));
        let _ = arena.ensure(random.below(40) as usize * GRANULE);
        let blocks: Vec<_> = (0..8).filter_map(|_| arena.allocate(random.below(30_000) as usize).ok()).collect();
        for (at, block) in blocks.into_iter().enumerate() {
            if at == 3 {
                leave(block);
            } else {
                arena.free(block).unwrap();
            }
        }
        arena.end_run(Instant(step * 1_000_000));
    }
}

#[test]
fn threads_share_a_device_without_losing_a_byte() {
    let world = World::new(120);
    let device = world.device(100, 5);
    let arenas: Vec<_> = (0..4).map(|n| arena(&device, ArenaKind::Run, n)).collect();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = arenas
            .iter()
            .enumerate()
            .map(|(seed, arena)| {
                let (left, frees) = sync_channel::<usize>(16);
                scope.spawn(move || {
                    for address in frees {
                        let pointer = NonNull::new(std::ptr::without_provenance_mut(address)).unwrap();
                        arena.free(pointer).unwrap();
                    }
                });
                scope.spawn(move || worker(arena, seed as u64, |block| left.send(block.addr().get()).unwrap()))
            })
            .collect();
        scope.spawn(|| {
            let mut random = Random(99);
            while !done.load(SeqCst) {
                device.set_limit(ByteSize((50 + random.below(50)) * GRANULE as u64));
                world.set_neighbour(random.below(60));
                device.trim(Instant(random.below(STEPS) * 1_000_000));
                let stats = device.stats();
                assert_eq!(stats.committed.0, stats.arenas.iter().map(|arena| arena.reserved.0).sum::<u64>());
                assert!(device.sample(Instant(0)).budget <= stats.limit.max(ByteSize(100 * GRANULE as u64)));
            }
        });
        for worker in workers {
            worker.join().unwrap();
        }
        done.store(true, SeqCst);
    });
    let stats = device.stats();
    assert_eq!(stats.allocated, ByteSize::ZERO);
    assert_eq!(stats.committed.0, world.committed());
    // Not each of them: one whose thread ran while the others were stopped in their runs may have had nothing.
    assert!(stats.arenas.iter().any(|arena| arena.allocations > 0));
    assert!(stats.arenas.iter().all(|arena| arena.fragmentation() == 0.0));
    drop(arenas);
    assert_eq!(world.committed(), 0);
}

#[test]
fn threads_share_an_arena_of_real_memory() {
    let limit = ByteSize(64 << 20);
    let options = DeviceOptions { id: DeviceId(0), limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    let device = Device::new(Box::new(Host::new()), options);
    let options =
        ArenaOptions { label: "shared".into(), kind: ArenaKind::Buffers, priority: 1, address_space: 1 << 30 };
    let arena = device.arena(options).unwrap();
    std::thread::scope(|scope| {
        for byte in 1..=4_u8 {
            let arena = &arena;
            scope.spawn(move || fill_and_check(arena, byte));
        }
        let device = &device;
        scope.spawn(move || {
            for second in 0..200 {
                device.trim(Instant(second * 2_000_000_000));
            }
        });
    });
    assert_eq!(arena.stats().allocated, ByteSize::ZERO);
}

/// Each thread writes its own byte into its blocks and finds nothing else in them later.
fn fill_and_check(arena: &Arena, byte: u8) {
    let mut random = Random(u64::from(byte));
    let mut blocks: Vec<Block> = Vec::new();
    for _ in 0..STEPS {
        if blocks.len() < 20 && random.below(2) == 0 {
            let mut block = arena.block(random.below(60_000) as usize).unwrap();
            block.as_mut_slice().fill(byte);
            blocks.push(block);
        } else if !blocks.is_empty() {
            let block = blocks.swap_remove(random.below(blocks.len() as u64) as usize);
            // The ends are where neighbours would show; all of it would take minutes unoptimised.
            let bytes = block.as_slice();
            let (head, tail) = (bytes.len().min(64), bytes.len().saturating_sub(64));
            assert!(bytes[..head].iter().chain(&bytes[tail..]).all(|found| *found == byte));
        }
    }
}
