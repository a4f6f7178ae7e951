//! The ledgers of all devices, as one picture: what a scrape says of them was true at one instant.

use crate::memory::LedgerStats;
use crate::units::{ByteSize, DeviceId};
use arc_swap::ArcSwap;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, IntCounterVec, IntGaugeVec, Opts};
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the scheduler says of one device.
#[derive(Clone, Copy, Debug)]
struct Run {
    reserved: ByteSize,
    budget: Option<ByteSize>,
}

/// The latest picture.
#[derive(Debug)]
pub(super) struct Ledgers {
    ledgers: ArcSwap<BTreeMap<DeviceId, Arc<LedgerStats>>>,
    runs: ArcSwap<BTreeMap<DeviceId, Run>>,
    /// Empty: they only say what there is.
    shape: Families,
}

impl Ledgers {
    pub(super) fn new() -> Self {
        Self { ledgers: ArcSwap::default(), runs: ArcSwap::default(), shape: Families::new() }
    }

    pub(super) fn publish(&self, stats: LedgerStats) {
        let (device, stats) = (stats.device, Arc::new(stats));
        self.ledgers.rcu(|ledgers| {
            let mut ledgers = BTreeMap::clone(ledgers);
            ledgers.insert(device, Arc::clone(&stats));
            ledgers
        });
    }

    pub(super) fn publish_run(&self, device: DeviceId, reserved: ByteSize, budget: Option<ByteSize>) {
        self.runs.rcu(|runs| {
            let mut runs = BTreeMap::clone(runs);
            runs.insert(device, Run { reserved, budget });
            runs
        });
    }
}

impl Collector for Ledgers {
    fn desc(&self) -> Vec<&Desc> {
        self.shape.desc()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let families = Families::new();
        for stats in self.ledgers.load().values() {
            families.device(stats);
        }
        for (device, run) in self.runs.load().iter() {
            families.memory(*device, "run_reserved", run.reserved);
            // Without a measurement yet there is no budget to speak of.
            if let Some(budget) = run.budget {
                families.memory(*device, "run_budget", budget);
            }
        }
        families.collect()
    }
}

/// The families that a picture is written into.
#[derive(Debug)]
struct Families {
    memory: IntGaugeVec,
    fragmentation: GaugeVec,
    arena: IntGaugeVec,
    events: IntCounterVec,
    denials: IntCounterVec,
}

impl Families {
    fn new() -> Self {
        let options = |name: &str, help: &str| Opts::new(name, help).namespace("concertina");
        let memory = IntGaugeVec::new(options("memory_bytes", "Device memory by kind."), &["device", "kind"]);
        let fragmentation = options("arena_fragmentation_ratio", "Free bytes that the largest free block lacks.");
        let arena = options("arena_bytes", "Bytes of one arena by kind.");
        let events = options("memory_events_total", "What the ledger has done.");
        let denials = options("arena_denials_total", "Allocations that an arena refused.");
        const VALID: &str = "names and labels are constants";
        Self {
            memory: memory.expect(VALID),
            fragmentation: GaugeVec::new(fragmentation, &["device", "arena"]).expect(VALID),
            arena: IntGaugeVec::new(arena, &["device", "arena", "kind"]).expect(VALID),
            events: IntCounterVec::new(events, &["device", "what"]).expect(VALID),
            denials: IntCounterVec::new(denials, &["device", "arena"]).expect(VALID),
        }
    }

    fn memory(&self, device: DeviceId, kind: &str, bytes: ByteSize) {
        self.memory.with_label_values(&[device.to_string().as_str(), kind]).set(signed(bytes));
    }

    fn device(&self, stats: &LedgerStats) {
        let LedgerStats { device, limit, headroom, margin, committed, allocated, free, total, outside, .. } = stats;
        let kinds = [
            ("limit", limit),
            ("headroom", headroom),
            ("margin", margin),
            ("committed", committed),
            ("allocated", allocated),
            ("free", free),
            ("total", total),
            ("outside", outside),
        ];
        kinds.into_iter().for_each(|(kind, bytes)| self.memory(*device, kind, *bytes));
        let device = device.to_string();
        for arena in &stats.arenas {
            let kinds = [("allocated", arena.allocated), ("reserved", arena.reserved), ("active", arena.active)];
            let label = arena.label.as_str();
            for (kind, bytes) in kinds {
                self.arena.with_label_values(&[device.as_str(), label, kind]).set(signed(bytes));
            }
            self.fragmentation.with_label_values(&[device.as_str(), label]).set(arena.fragmentation());
            self.denials.with_label_values(&[device.as_str(), label]).inc_by(arena.denied);
        }
        let counters = &stats.counters;
        let counts = [
            ("commits", counters.commits),
            ("decommits", counters.decommits),
            ("failures", counters.failures),
            ("reclaimed_bytes", counters.reclaimed),
            ("trimmed_bytes", counters.trimmed),
        ];
        for (what, count) in counts {
            self.events.with_label_values(&[device.as_str(), what]).inc_by(count);
        }
    }

    fn desc(&self) -> Vec<&Desc> {
        let families: [&dyn Collector; 5] =
            [&self.memory, &self.fragmentation, &self.arena, &self.events, &self.denials];
        families.into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let families: [&dyn Collector; 5] =
            [&self.memory, &self.fragmentation, &self.arena, &self.events, &self.denials];
        let collected = families.into_iter().flat_map(Collector::collect);
        // A family without series is nothing that can be written.
        collected.filter(|family| !family.get_metric().is_empty()).collect()
    }
}

fn signed(bytes: ByteSize) -> i64 {
    i64::try_from(bytes.0).unwrap_or(i64::MAX)
}
