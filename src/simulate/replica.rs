//! One replica: the real scheduler and the real signal over a machine that takes its time.

use super::Setting;
use super::histogram::Histogram;
use super::machine::stretched;
use super::random::Random;
use crate::scheduler::{
    Action, Dispatch, Input, MemorySample, ModelPlan, Outcome, Packing, Part, RequestMeta, Rounding, Scheduler,
};
use crate::signal::{Reading, Signals};
use crate::units::{BatchId, ByteSize, ClassId, DeviceId, InstanceId, Instant, ModelId, RequestId, Rows};
use std::collections::VecDeque;
use std::time::Duration;

const MODEL: ModelId = ModelId(0);
const DEVICE: DeviceId = DeviceId(0);

/// What to scale on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SignalKind {
    /// `concertina_saturation_pod`.
    Saturation,
    /// Cores in use, of a server whose model runs on a GPU: the work around each row.
    Cpu,
    /// The share of time that the device is busy; with a model that runs on the processors, their utilization.
    Busy,
    /// Mean seconds from arrival to dispatch.
    QueueTime,
    /// Requests inside, waiting or running.
    Concurrency,
}

impl SignalKind {
    /// All of them with their names.
    pub const ALL: [(&'static str, Self); 5] = [
        ("saturation", Self::Saturation),
        ("cpu", Self::Cpu),
        ("busy", Self::Busy),
        ("queue-time", Self::QueueTime),
        ("concurrency", Self::Concurrency),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, other)| *other == self).map_or("", |(name, _)| name)
    }
}

/// What a replica has counted so far, or measures now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Counters {
    pub(super) offered: u64,
    pub(super) dispatched: u64,
    pub(super) batches: u64,
    pub(super) queue_seconds: f64,
    pub(super) busy_seconds: f64,
    pub(super) cpu_seconds: f64,
    /// The time integral of the requests inside, seen a few times a second.
    pub(super) inside_seconds: f64,
    /// The signal, as it is now.
    pub(super) saturation: f64,
}

/// Requests of one row that came one by one between two instants.
#[derive(Clone, Copy, Debug)]
struct Group {
    id: RequestId,
    from: Instant,
    to: Instant,
    rows: Rows,
}

impl Group {
    /// When one of them came: each somewhere in its own equal part of the time between. Over all rows of a group that is as even
    /// as Poisson arrivals are.
    fn arrived(&self, row: Rows, place: f64) -> u64 {
        let between = self.to.0 - self.from.0;
        self.from.0 + (between as f64 * (f64::from(row) + place) / f64::from(self.rows)) as u64
    }
}

/// The batch that runs.
#[derive(Clone, Debug)]
struct Flight {
    batch: BatchId,
    begin: Instant,
    end: Instant,
    bytes: ByteSize,
    rows: Rows,
    parts: Vec<Part>,
}

/// One replica.
#[derive(Clone, Debug)]
pub(super) struct Replica {
    scheduler: Scheduler,
    signals: Signals,
    random: Random,
    machine: super::Machine,
    most_waiting: u64,
    now: Instant,
    flight: Option<Flight>,
    /// Admitted and not yet answered in full, in order of their ids.
    groups: VecDeque<Group>,
    next_id: u64,
    waiting: u64,
    memory: f64,
    /// How many quarters longer than usual the rows are that come.
    pub(super) quarters: u32,
    pub(super) counters: Counters,
}

impl Replica {
    /// A replica that has loaded its model.
    pub(super) fn new(setting: &Setting, stream: u64, now: Instant) -> Self {
        let machine = setting.machine.clone();
        let plan = ModelPlan {
            model: MODEL,
            device: DEVICE,
            instances: vec![InstanceId(0)],
            ladder: machine.ladder(),
            rounding: Rounding::Off,
            pipeline: 1,
            staged_unit: None,
            max_queue_delay: Duration::ZERO,
            max_gather_delay: Duration::ZERO,
            max_queue_rows: setting.max_queue_rows,
            max_queue_bytes: ByteSize::MAX,
            priority_levels: 1,
            knee_tolerance: setting.knee_tolerance,
            packing: Packing::Near,
            observations: machine.observations(),
        };
        let mut scheduler = Scheduler::new();
        scheduler.handle(now, Input::Load(plan));
        let mut replica = Self {
            scheduler,
            signals: Signals::new(setting.scaling),
            random: Random::new(setting.seed, stream),
            machine,
            most_waiting: setting.max_queue_rows,
            now,
            flight: None,
            groups: VecDeque::new(),
            next_id: 0,
            waiting: 0,
            memory: 0.0,
            quarters: 0,
            counters: Counters::default(),
        };
        replica.remember(1.0);
        replica
    }

    /// A neighbour leaves this part of the memory of the largest batch.
    pub(super) fn remember(&mut self, part: f64) {
        if (part - self.memory).abs() > f64::EPSILON {
            self.memory = part;
            let (budget, capacity) = (self.machine.budget(part), self.machine.budget(1.0));
            self.scheduler.handle(self.now, Input::Memory(MemorySample { device: DEVICE, budget, capacity }));
        }
    }

    /// Requests inside, waiting or running.
    pub(super) fn inside(&self) -> u64 {
        self.waiting + self.flight.as_ref().map_or(0, |flight| u64::from(flight.rows))
    }

    /// Lives until an instant, with requests that come at `rate` per second.
    pub(super) fn advance(&mut self, until: Instant, rate: f64, latencies: &mut Histogram) {
        self.counters.inside_seconds += self.inside() as f64 * until.since(self.now).as_secs_f64();
        while self.now < until {
            if let Some(end) = self.flight.as_ref().map(|flight| flight.end) {
                let to = end.min(until);
                let rows = self.random.poisson(rate * to.since(self.now).as_secs_f64());
                let from = std::mem::replace(&mut self.now, to);
                self.arrive(from, rows, latencies);
                if to == end {
                    self.complete(latencies);
                    self.act();
                }
            } else {
                // Whoever waits although nothing runs waits for the scheduler.
                let wake = if self.waiting > 0 { self.scheduler.poll_timeout() } else { None };
                let gap = self.random.exponential(rate).min(1e9);
                let next = self.now + Duration::from_secs_f64(gap);
                self.now = next.min(until).min(wake.unwrap_or(until));
                if self.now == next {
                    self.arrive(next, 1, latencies);
                }
                self.act();
            }
        }
    }

    /// What the server publishes several times a second.
    pub(super) fn publish(&mut self) {
        let (now, offered) = (self.now, self.counters.offered);
        let readings = self.scheduler.model_stats().map(|stats| Reading {
            model: stats.model,
            devices: vec![stats.device],
            offered,
            waiting: stats.queued_rows + stats.retrying_rows,
            capacity: stats.knee_rows_per_second,
        });
        let readings: Vec<Reading> = readings.collect();
        self.counters.saturation = self.signals.read(now, &readings).pod;
    }

    /// Rows per second at the knee, as the scheduler knows it.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> f64 {
        self.scheduler.model_stats().next().and_then(|stats| stats.knee_rows_per_second).unwrap_or(0.0)
    }

    /// Requests that have come since `from`. Those for whom the queue has no room are offered apart, so that each of them is
    /// refused for itself and not the whole group.
    fn arrive(&mut self, from: Instant, rows: Rows, latencies: &mut Histogram) {
        self.counters.offered += u64::from(rows);
        let room = self.most_waiting.saturating_sub(self.waiting).min(u64::from(rows)) as Rows;
        for (admit, rows) in [(true, room), (false, rows - room)] {
            if rows == 0 {
                continue;
            }
            let id = RequestId(self.next_id);
            self.next_id += 1;
            let meta = RequestMeta {
                id,
                model: MODEL,
                class: ClassId(self.quarters),
                family: None,
                units: 4 + u64::from(self.quarters),
                rows,
                bytes: ByteSize(u64::from(rows)),
                deadline: None,
                priority: 1,
            };
            self.scheduler.handle(self.now, Input::Arrive(meta));
            if admit {
                self.waiting += u64::from(rows);
                self.groups.push_back(Group { id, from, to: self.now, rows });
            } else {
                self.refused(id, rows, latencies);
            }
        }
    }

    /// The scheduler must say so itself.
    fn refused(&mut self, id: RequestId, rows: Rows, latencies: &mut Histogram) {
        let action = self.scheduler.poll_action(self.now);
        assert!(
            matches!(action, Some(Action::Reject(rejected, _)) if rejected == id),
            "a full queue refuses: {action:?}"
        );
        latencies.refuse(u64::from(rows));
    }

    fn complete(&mut self, latencies: &mut Histogram) {
        let Some(flight) = self.flight.take() else { return };
        for part in &flight.parts {
            let Some(group) = self.group(part.request) else { continue };
            for row in part.start..part.start + part.rows {
                latencies.add(flight.end.0 - group.arrived(row, self.random.unit()));
            }
        }
        let duration = flight.end.since(flight.begin);
        self.counters.busy_seconds += duration.as_secs_f64();
        let (per_row, per_batch) = self.machine.cpu_seconds;
        self.counters.cpu_seconds += per_batch + per_row * f64::from(flight.rows);
        self.scheduler.handle(self.now, Input::Complete(flight.batch, Outcome::Done { duration, bytes: flight.bytes }));
    }

    /// Carries out what the scheduler says.
    fn act(&mut self) {
        while let Some(action) = self.scheduler.poll_action(self.now) {
            match action {
                Action::Dispatch(dispatch) => self.dispatch(dispatch),
                Action::Finish(id) => {
                    // In order: rows leave as they came.
                    while self.groups.front().is_some_and(|group| group.id <= id) {
                        self.groups.pop_front();
                    }
                }
                Action::Reject(..) | Action::Trim(_) => {}
            }
        }
    }

    fn dispatch(&mut self, dispatch: Dispatch) {
        for part in &dispatch.parts {
            let Some(group) = self.group(part.request) else { continue };
            let (first, last) = (group.arrived(part.start, 0.5), group.arrived(part.start + part.rows - 1, 0.5));
            let waited = self.now.0.saturating_sub(first.midpoint(last));
            self.counters.queue_seconds += f64::from(part.rows) * waited as f64 / 1e9;
        }
        self.waiting -= u64::from(dispatch.rows);
        self.counters.dispatched += u64::from(dispatch.rows);
        self.counters.batches += 1;
        let jitter = 1.0 + self.machine.jitter * (2.0 * self.random.unit() - 1.0);
        let seconds = self.machine.seconds(dispatch.padded_rows) * stretched(dispatch.class.0) * jitter;
        self.flight = Some(Flight {
            batch: dispatch.batch,
            begin: self.now,
            end: self.now + Duration::from_secs_f64(seconds.max(1e-9)),
            bytes: ByteSize(self.machine.bytes(dispatch.padded_rows)),
            rows: dispatch.rows,
            parts: dispatch.parts,
        });
    }

    fn group(&self, id: RequestId) -> Option<Group> {
        let first = self.groups.front()?.id.0;
        // Refused groups leave gaps, so it is at this place or shortly before.
        let place = (id.0.checked_sub(first)? as usize).min(self.groups.len() - 1);
        self.groups.range(..=place).rev().find(|group| group.id == id).copied()
    }
}

#[cfg(test)]
mod tests;
