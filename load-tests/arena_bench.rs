//! Nanoseconds for one allocate and one free of a warm arena, with so many live blocks of mixed sizes.
//!
//! `cargo run --release --example arena_bench`. Each line is the median and the best of several rounds.

use std::hint::black_box;
use std::ptr::NonNull;

use concertina::memory::{Arena, ArenaKind, ArenaOptions, Device, DeviceOptions, HOST_ALIGNMENT, Host};
use concertina::units::{ByteSize, DeviceId, Instant};

const ROUNDS: usize = 21;
const PAIRS: u64 = 100_000;

/// A small generator, so that the order of frees is arbitrary and repeatable.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    /// Mostly small, sometimes large, as the tensors of a run.
    fn size(&mut self) -> usize {
        1 << (6 + self.below(11)) | self.below(64)
    }
}

#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn clock() -> std::time::Instant {
    std::time::Instant::now()
}

/// Allocates and frees a block again and again while the others live, among holes where others lived.
fn come_and_go(arena: &Arena, _live: &mut [NonNull<u8>], random: &mut Random) -> f64 {
    let start = clock();
    for _ in 0..PAIRS {
        let block = black_box(arena.allocate(random.size())).expect("room");
        arena.free(block).expect("a live block");
    }
    start.elapsed().as_nanos() as f64 / PAIRS as f64
}

/// Replaces an arbitrary one of the live blocks again and again.
fn replace(arena: &Arena, live: &mut [NonNull<u8>], random: &mut Random) -> f64 {
    let start = clock();
    for _ in 0..PAIRS {
        let at = random.below(live.len());
        arena.free(live[at]).expect("a live block");
        live[at] = black_box(arena.allocate(random.size())).expect("room");
    }
    start.elapsed().as_nanos() as f64 / PAIRS as f64
}

fn main() {
    let limit = ByteSize(1 << 30);
    let options = DeviceOptions { id: DeviceId(0), limit, headroom: ByteSize::ZERO, alignment: HOST_ALIGNMENT };
    let device = Device::new(Box::new(Host::new()), options);
    println!("live blocks      an arbitrary one is replaced    one more comes and goes    ns per pair: median (best)");
    for blocks in [1, 50, 200, 1000] {
        let label = format!("{blocks} blocks");
        let arena = ArenaOptions { label, kind: ArenaKind::Run, priority: 1, address_space: 1 << 32 };
        let arena = device.arena(arena).expect("addresses");
        arena.begin_run(Instant(1));
        arena.ensure(512 << 20).expect("half a gibibyte");
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut live: Vec<_> = (0..blocks).map(|_| arena.allocate(random.size()).expect("room")).collect();
        let mut measure = |round: fn(&Arena, &mut [NonNull<u8>], &mut Random) -> f64| {
            let mut rounds: Vec<_> = (0..ROUNDS).map(|_| round(&arena, &mut live, &mut random)).collect();
            rounds.sort_by(f64::total_cmp);
            format!("{:6.1} ({:6.1})", rounds[ROUNDS / 2], rounds[0])
        };
        let replaced = measure(replace);
        println!("{blocks:11}   {replaced:>24}   {:>24}", measure(come_and_go));
    }
    let arena = ArenaOptions { label: "commits".into(), kind: ArenaKind::Run, priority: 1, address_space: 1 << 32 };
    let arena = device.arena(arena).expect("addresses");
    for mib in [2_usize, 64, 512] {
        let start = clock();
        arena.ensure(mib << 20).expect("room");
        let commit = start.elapsed();
        device.set_limit(ByteSize::ZERO);
        let both = start.elapsed();
        device.set_limit(limit);
        println!("commit {mib} MiB: {commit:?}, give back: {:?}", both.saturating_sub(commit));
    }
    let start = clock();
    for _ in 0..100 {
        black_box(device.sample(Instant(1)));
    }
    println!("sample: {:?}", start.elapsed() / 100);
}
