//! Threads that share arenas and a device.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::sync_channel;

use concertina::memory::{Arena, ArenaKind};
use concertina::units::{ByteSize, Instant};

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
    assert!(stats.arenas.iter().all(|arena| arena.allocations > 0 && arena.fragmentation() == 0.0));
    drop(arenas);
    assert_eq!(world.committed(), 0);
}
