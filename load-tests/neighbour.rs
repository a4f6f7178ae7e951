//! A neighbour on a GPU: takes and frees device memory on a schedule, so that so many bytes are left free.
//!
//!     neighbour [--gpu 0] [--every 5] 8GB 2GB 1GB 600MB free      with a schedule
//!     neighbour [--gpu 0] -                                       one level per line of standard input
//!
//! Each level is what shall be free of the card; `free` gives everything back. It takes plain device memory in pieces, as much
//! as the driver gives at that moment, and tries again every 10 ms until the level is reached, since others may still give
//! some back. Prints one JSON object for each level when it is reached, or when its time is over.
#![allow(clippy::disallowed_methods, reason = "a schedule reads the clock")]
#![allow(unsafe_code, reason = "plain device memory is taken through the driver")]

use clap::Parser;
use concertina::memory::cuda::Gpu;
use cudarc::driver::sys;
use std::io::BufRead;
use std::time::{Duration, Instant};

/// Memory is taken in pieces of at most so many bytes.
const PIECE: u64 = 256 << 20;
/// The driver rounds up to this.
const GRAIN: u64 = 2 << 20;

#[derive(Parser)]
struct Arguments {
    #[arg(long, default_value_t = 0)]
    gpu: usize,
    /// Seconds per level of a schedule.
    #[arg(long, default_value_t = 5.0)]
    every: f64,
    /// Watches how long less than so many bytes are free after a level was reached: the headroom of whoever must give way.
    #[arg(long)]
    headroom: Option<String>,
    /// Levels: bytes, with MB or GB (powers of ten) or MiB or GiB, or `free`; or one `-`.
    levels: Vec<String>,
}

struct Neighbour {
    gpu: Gpu,
    pieces: Vec<(sys::CUdeviceptr, u64)>,
    started: Instant,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    let gpu = Gpu::open(arguments.gpu)?;
    gpu.bind()?;
    let mut neighbour = Neighbour { gpu, pieces: Vec::new(), started: Instant::now() };
    if arguments.levels == ["-"] {
        for line in std::io::stdin().lock().lines() {
            let level = level(line?.trim())?;
            neighbour.reach(level, Instant::now() + Duration::from_secs(2))?;
        }
        return Ok(());
    }
    for text in &arguments.levels {
        let until = Instant::now() + Duration::from_secs_f64(arguments.every);
        neighbour.reach(level(text)?, until)?;
        if let Some(headroom) = arguments.headroom.as_deref().map(level).transpose()?.flatten() {
            neighbour.watch(headroom, until)?;
        }
        std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
    }
    Ok(())
}

impl Neighbour {
    /// Takes or frees until so many bytes are free, or until the time is over.
    fn reach(&mut self, level: Option<u64>, until: Instant) -> anyhow::Result<()> {
        let begin = Instant::now();
        let reached = loop {
            let (free, _) = self.gpu.free_and_total()?;
            let wanted = level.unwrap_or(u64::MAX);
            if self.pieces.is_empty() && wanted > free || wanted.abs_diff(free) <= GRAIN {
                break true;
            }
            if free < wanted {
                self.give();
            } else if !self.take((free - wanted).min(PIECE) / GRAIN * GRAIN) && Instant::now() > until {
                break false;
            }
            if level.is_some() && Instant::now() > until {
                break false;
            }
        };
        let (free, total) = self.gpu.free_and_total()?;
        let held: u64 = self.pieces.iter().map(|(_, bytes)| bytes).sum();
        let (at, took) = (self.started.elapsed().as_secs_f64(), begin.elapsed().as_secs_f64());
        println!(
            "{}",
            serde_json::json!({"at": at, "took": took, "reached": reached, "wanted_free": level, "free": free,
                "total": total, "held": held})
        );
        Ok(())
    }

    /// Looks at the free bytes every few milliseconds and says when they were enough for the last time that they were not.
    fn watch(&self, headroom: u64, until: Instant) -> anyhow::Result<()> {
        let begin = Instant::now();
        let (mut last_short, mut least) = (None, u64::MAX);
        while Instant::now() < until {
            let (free, _) = self.gpu.free_and_total()?;
            least = least.min(free);
            if free < headroom {
                last_short = Some(begin.elapsed().as_secs_f64());
            }
            std::thread::park_timeout(Duration::from_millis(2));
        }
        let (free, _) = self.gpu.free_and_total()?;
        println!(
            "{}",
            serde_json::json!({"headroom": headroom, "short_until": last_short, "least_free": least, "free_at_last": free})
        );
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> bool {
        let mut address = 0;
        // SAFETY: a pointer to a value of ours; the memory is not touched.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes as usize) };
        if result == sys::CUresult::CUDA_SUCCESS {
            self.pieces.push((address, bytes));
            return true;
        }
        std::thread::park_timeout(Duration::from_millis(10));
        false
    }

    fn give(&mut self) {
        if let Some((address, _)) = self.pieces.pop() {
            // SAFETY: allocated in `take`, freed once.
            let result = unsafe { sys::cuMemFree_v2(address) };
            assert_eq!(result, sys::CUresult::CUDA_SUCCESS, "what was taken can be given back");
        }
    }
}

fn level(text: &str) -> anyhow::Result<Option<u64>> {
    const UNITS: [(&str, u64); 4] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("GB", 1_000_000_000), ("MB", 1_000_000)];
    if text == "free" {
        return Ok(None);
    }
    let (number, unit) =
        UNITS.iter().find_map(|(unit, size)| Some((text.strip_suffix(unit)?, *size))).unwrap_or((text, 1));
    Ok(Some((number.parse::<f64>()? * unit as f64) as u64))
}
