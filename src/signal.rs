//! The scaling signal: how much work is offered, as a part of what can be done. Pure: time and counters come in.
//!
//! For one model
//!
//! ```text
//!                rows offered per second + rows that wait ÷ window
//! saturation = ─────────────────────────────────────────────────────
//!                rows per second at the knee within the present memory budget
//! ```
//!
//! - *Offered* counts every row that fits its model over the last `scaling.window`, the refused and timed-out ones included: a
//!   server that refuses half of its load is not at half of it.
//! - *Rows that wait* are a debt beside what comes in. They count as if they were to be worked off within one window.
//! - *At the knee* is what the scheduler has measured: the best useful batch on all instances. A squeeze makes that batch
//!   smaller, so the signal rises in the moment of the squeeze, before anybody has waited for it.
//!
//! It is linear in the load, below 1 and above. Busy time is not (with batches that never wait for company a device is busy
//! nearly always), and the time in the queue is flat until it is a cliff.
//!
//! Models of one device share it, so their parts add up; the pod is as saturated as its fullest device. `desired_replicas` is that
//! number over the target: how many pods like this one the load of this pod asks for. It is not rounded, so that it can
//! be added up over the pods of a deployment and rounded up once.

use crate::units::{DeviceId, Instant, ModelId};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Samples of a window; two of them are never closer than their part of it.
const SAMPLES: u32 = 60;
/// The part of the window after which a rate is taken for true: a first request does not make a load.
const LEAST_PART: u32 = 3;
/// What is said instead of more, and where work waits for a model that can do none.
pub const MOST: f64 = 1000.0;

/// How the signal is made.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scaling {
    /// The saturation that a deployment aims at.
    pub target: f64,
    /// The time over which rows are counted, and within which what waits is to be worked off.
    pub window: Duration,
}

/// One model as the signal sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct Reading {
    /// The model.
    pub model: ModelId,
    /// Where it runs. On several devices it is as saturated on each.
    pub devices: Vec<DeviceId>,
    /// Rows offered so far.
    pub offered: u64,
    /// Rows that wait.
    pub waiting: u64,
    /// Rows per second at the knee within the present budget; `None` as long as nothing is known.
    pub capacity: Option<f64>,
}

/// The signal at one instant.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Signal {
    /// Each model: rows offered per second, and its saturation if its capacity is known.
    pub models: Vec<(ModelId, f64, Option<f64>)>,
    /// The most saturated model.
    pub model_maximum: f64,
    /// The most saturated device, over the sum of its models: what to scale on.
    pub pod: f64,
    /// `pod` over the target.
    pub desired_replicas: f64,
    /// Whether it will change even if nothing happens.
    pub settling: bool,
}

/// Makes the signal out of readings.
#[derive(Clone, Debug)]
pub struct Signals {
    scaling: Scaling,
    meters: BTreeMap<ModelId, Meter>,
}

impl Signals {
    /// Nothing was seen yet.
    #[must_use]
    pub fn new(scaling: Scaling) -> Self {
        Self { scaling, meters: BTreeMap::new() }
    }

    /// The signal now. Call it several times per window, for all models each time: a model that is not among them is forgotten.
    pub fn read(&mut self, now: Instant, readings: &[Reading]) -> Signal {
        let window = self.scaling.window;
        self.meters.retain(|model, _| readings.iter().any(|reading| reading.model == *model));
        let mut devices: BTreeMap<DeviceId, f64> = BTreeMap::new();
        let mut signal = Signal::default();
        for reading in readings {
            let meter = self.meters.entry(reading.model).or_default();
            let offered = meter.per_second(now, reading.offered, window);
            signal.settling |= offered > 0.0 || reading.waiting > 0;
            let saturation = reading.capacity.map(|capacity| saturation(offered, reading.waiting, window, capacity));
            if let Some(saturation) = saturation {
                for device in &reading.devices {
                    *devices.entry(*device).or_default() += saturation;
                }
                signal.model_maximum = signal.model_maximum.max(saturation);
            }
            signal.models.push((reading.model, offered, saturation));
        }
        signal.pod = devices.values().copied().fold(0.0, f64::max).min(MOST);
        signal.desired_replicas = signal.pod / self.scaling.target;
        signal
    }
}

/// The formula.
fn saturation(offered_per_second: f64, waiting: u64, window: Duration, capacity: f64) -> f64 {
    let demand = offered_per_second + waiting as f64 / window.as_secs_f64();
    if demand > 0.0 { (demand / capacity.max(f64::MIN_POSITIVE)).min(MOST) } else { 0.0 }
}

/// A counter's rate over a sliding window.
#[derive(Clone, Debug, Default)]
struct Meter {
    /// When it was first read.
    since: Option<Instant>,
    /// What it said, ascending in time; the first is the last one before the window, if there is one.
    samples: VecDeque<(Instant, u64)>,
}

impl Meter {
    fn per_second(&mut self, now: Instant, total: u64, window: Duration) -> f64 {
        let since = *self.since.get_or_insert(now);
        let begin = now - window;
        while self.samples.get(1).is_some_and(|(at, _)| *at <= begin) {
            self.samples.pop_front();
        }
        if self.samples.back().is_none_or(|(at, _)| now.since(*at) >= window / SAMPLES) {
            self.samples.push_back((now, total));
        }
        let seconds = now.since(since).clamp(window / LEAST_PART, window).as_secs_f64();
        total.saturating_sub(self.at(begin)) as f64 / seconds
    }

    /// What the counter said then, between two samples in proportion.
    fn at(&self, then: Instant) -> u64 {
        let later = self.samples.partition_point(|(at, _)| *at <= then);
        match (later.checked_sub(1).and_then(|earlier| self.samples.get(earlier)), self.samples.get(later)) {
            (Some((before, least)), Some((after, most))) => {
                let part = then.since(*before).as_secs_f64() / after.since(*before).as_secs_f64().max(1e-9);
                least + ((most - least) as f64 * part) as u64
            }
            (Some((_, total)), None) | (None, Some((_, total))) => *total,
            (None, None) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALING: Scaling = Scaling { target: 0.7, window: Duration::from_secs(15) };

    fn at(millis: u64) -> Instant {
        Instant::default() + Duration::from_millis(millis)
    }

    fn reading(model: u32, device: u32, offered: u64, waiting: u64, capacity: Option<f64>) -> Reading {
        Reading { model: ModelId(model), devices: vec![DeviceId(device)], offered, waiting, capacity }
    }

    /// The signal after a minute of a steady load, read four times a second.
    fn steady(rows_per_second: u64, waiting: u64, capacity: Option<f64>) -> Signal {
        let mut signals = Signals::new(SCALING);
        let read = |step: u64| {
            let now = at(250 * step);
            signals.read(now, &[reading(0, 0, rows_per_second * step / 4, waiting, capacity)])
        };
        (0..=240).map(read).last().unwrap()
    }

    #[test]
    fn the_formula() {
        for (offered, waiting, capacity, expected) in [
            (0, 0, Some(100.0), 0.0),
            (40, 0, Some(100.0), 0.4),
            (100, 0, Some(100.0), 1.0),
            (250, 0, Some(100.0), 2.5),
            (40, 300, Some(100.0), 0.6),
            (0, 1500, Some(100.0), 1.0),
            (40, 0, Some(10.0), 4.0),
            (40, 0, Some(0.0), MOST),
            (0, 0, Some(0.0), 0.0),
            (40, 0, None, 0.0),
        ] {
            let signal = steady(offered, waiting, capacity);
            let close = |value: f64| (value - expected).abs() < 0.02 * expected.max(0.01);
            assert!(close(signal.pod), "{offered} rows/s, {waiting} wait, capacity {capacity:?}: {signal:?}");
            assert!((signal.desired_replicas - signal.pod / 0.7).abs() < 1e-9);
            assert_eq!(signal.models[0].2.is_some(), capacity.is_some());
        }
    }

    #[test]
    fn models_of_a_device_add_up_and_the_fullest_device_counts() {
        let mut signals = Signals::new(SCALING);
        let all = |n: u64| {
            [(1, 0, 50 * n), (2, 0, 30 * n), (3, 1, 60 * n)]
                .map(|(model, device, rows)| reading(model, device, rows, 0, Some(100.0)))
        };
        let signal = (0..=60).map(|second| signals.read(at(1000 * second), &all(second))).last().unwrap();
        assert!((signal.pod - 0.8).abs() < 0.01, "{signal:?}");
        assert!((signal.model_maximum - 0.6).abs() < 0.01, "{signal:?}");
    }

    #[test]
    fn a_step_is_seen_in_full_after_one_window_and_forgotten_after_another() {
        let mut signals = Signals::new(SCALING);
        let mut offered = 0;
        let mut seen = Vec::new();
        for second in 0..100 {
            if (30..60).contains(&second) {
                offered += 100;
            }
            seen.push(signals.read(at(1000 * second), &[reading(0, 0, offered, 0, Some(100.0))]));
        }
        assert!(seen[..30].iter().all(|signal| signal.pod == 0.0 && !signal.settling));
        assert!((seen[37].pod - 0.53).abs() < 0.05, "half a window: {:?}", seen[37]);
        assert!((seen[46].pod - 1.0).abs() < 0.05, "a window: {:?}", seen[46]);
        assert!(seen[76].pod == 0.0 && !seen[76].settling, "{:?}", seen[76]);
    }

    #[test]
    fn the_first_request_is_no_load_and_a_counter_that_begins_high_is_none() {
        let mut signals = Signals::new(SCALING);
        let mut read = |millis, offered| signals.read(at(millis), &[reading(0, 0, offered, 0, Some(100.0))]).pod;
        assert_eq!(read(1_000_000, 5_000), 0.0);
        let soon = read(1_000_100, 5_010);
        assert!((soon - 0.02).abs() < 0.001, "ten rows within five seconds: {soon}");
    }
}
