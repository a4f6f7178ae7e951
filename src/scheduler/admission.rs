//! Arrivals: admit or reject, at once and as a whole.

use super::machine::Scheduler;
use super::model::Model;
use super::queue::{Kind, Request};
use super::{Action, Rejection, RequestMeta};
use crate::units::{Instant, ModelId};
use std::time::Duration;

/// The shortest and the longest `retry_after` of a full queue.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// What is said as long as nothing is known of the drain rate.
const RETRY_AFTER_UNKNOWN: Duration = Duration::from_secs(1);

/// How much stands between a request and its answer; less is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Load {
    obstacle: Obstacle,
    /// Until what is there and the request itself are done, as far as that is known.
    time: Duration,
    rows: u64,
}

/// What keeps a plan from taking a request, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Obstacle {
    None,
    /// Its device has no room at present.
    Memory,
    QueueFull,
    TooLarge,
    /// No instance works.
    Unhealthy,
}

impl Scheduler {
    /// Which of several models takes a request: they are one to whoever asks, each on a device of its own. Of those that can
    /// serve it that which would be through with it first, of equals the first. `None` only if there are none.
    #[must_use]
    pub fn least_loaded(&self, now: Instant, models: &[ModelId], meta: &RequestMeta) -> Option<ModelId> {
        models.iter().copied().min_by_key(|id| self.load_of(now, *id, meta))
    }

    fn load_of(&self, now: Instant, id: ModelId, meta: &RequestMeta) -> Load {
        let unhealthy = Load { obstacle: Obstacle::Unhealthy, time: Duration::MAX, rows: u64::MAX };
        let Some(model) = self.models.get(&id).filter(|model| !model.instances.is_empty()) else { return unhealthy };
        let device = &self.devices[&model.plan.device];
        let needed = model.least_bytes(meta.class, meta.units);
        let obstacle = if needed > device.capacity() {
            Obstacle::TooLarge
        } else if overflows(model, meta) {
            Obstacle::QueueFull
        } else if needed > device.budget() {
            Obstacle::Memory
        } else {
            Obstacle::None
        };
        let work = model.queue.work_before(u32::MAX) + u128::from(meta.units) * u128::from(meta.rows);
        let running: Duration = model.instances.iter().map(|instance| instance.free_at.since(now)).sum();
        let running = running / u32::try_from(model.instances.len()).unwrap_or(u32::MAX).max(1);
        let time = model.drain_time(work).unwrap_or_default().saturating_add(running);
        Load { obstacle, time, rows: model.queue.rows + model.queue.returned_rows + model.rows_in_flight }
    }

    pub(super) fn arrive(&mut self, now: Instant, meta: RequestMeta) {
        assert!(meta.rows > 0, "a request has at least one row");
        assert!(!self.requests.contains_key(&meta.id), "a request id is never reused");
        if let Some(rejection) = self.refusal(now, &meta) {
            self.outbox.push_back(Action::Reject(meta.id, rejection));
            return;
        }
        self.tickets += 1;
        let model = self.models.get_mut(&meta.model).expect("admitted requests have a model");
        let level = meta.priority.clamp(1, model.plan.priority_levels.max(1));
        let waiting = meta.rows;
        let request = Request { meta, ticket: self.tickets, arrived: now, level, next: 0, waiting, done: 0, losses: 0 };
        model.queue.push(&request);
        model.echo.arrived(now, Kind::of(&meta).kin(), meta.rows);
        self.requests.insert(meta.id, request);
        self.deadlines.extend(meta.deadline.map(|deadline| (deadline, meta.id)));
        self.end_company(meta.model, meta.class);
        self.line_up(meta.model);
    }

    fn refusal(&self, now: Instant, meta: &RequestMeta) -> Option<Rejection> {
        if self.draining {
            return Some(Rejection::Draining);
        }
        let Some(model) = self.models.get(&meta.model).filter(|model| !model.instances.is_empty()) else {
            return Some(Rejection::Unhealthy);
        };
        let needed = model.least_bytes(meta.class, meta.units);
        let capacity = self.devices[&model.plan.device].capacity();
        if needed > capacity {
            return Some(Rejection::TooLarge { needed, capacity });
        }
        if would_be_late(model, now, meta) {
            return Some(Rejection::DeadlineExceeded);
        }
        overflows(model, meta).then(|| Rejection::QueueFull { retry_after: retry_after(model) })
    }
}

/// Whether the queue alone, at the best pace, takes longer than the request may wait.
fn would_be_late(model: &Model, now: Instant, meta: &RequestMeta) -> bool {
    let Some(deadline) = meta.deadline else { return false };
    let level = meta.priority.clamp(1, model.plan.priority_levels.max(1));
    let wait = model.drain_time(model.queue.work_before(level)).unwrap_or_default();
    deadline <= now || wait > deadline.since(now)
}

/// Whether the queue has no room for the whole request. An empty queue has room for any: its limits bound what waits behind
/// others, and a request larger than the whole queue would otherwise be told to come back for ever.
fn overflows(model: &Model, meta: &RequestMeta) -> bool {
    let queue = &model.queue;
    let rows = queue.rows.saturating_add(u64::from(meta.rows));
    queue.requests > 0 && (rows > model.plan.max_queue_rows || queue.bytes + meta.bytes > model.plan.max_queue_bytes)
}

/// When half of the queue has drained: then there will be room, and not only for the first one who comes back.
fn retry_after(model: &Model) -> Duration {
    let half = model.queue.work_before(u32::MAX) / 2;
    model.drain_time(half).map_or(RETRY_AFTER_UNKNOWN, |time| time.clamp(RETRY_AFTER.0, RETRY_AFTER.1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{Action, Dispatch, Input, MemorySample, ModelPlan, Observation, Outcome, Packing, Rounding};
    use crate::units::{ByteSize, ClassId, DeviceId, InstanceId, RequestId};

    const PLANS: [ModelId; 2] = [ModelId(1), ModelId(2)];
    const NOW: Instant = Instant(1_000_000_000);

    /// One model on two devices; a row takes so many milliseconds on each, and 100 bytes.
    fn scheduler(milliseconds: [u64; 2]) -> Scheduler {
        let mut scheduler = Scheduler::new();
        for (model, milliseconds) in PLANS.into_iter().zip(milliseconds) {
            let run = |rows: u32| Observation {
                class: ClassId(0),
                units: 1,
                rows,
                duration: Duration::from_millis(milliseconds * u64::from(rows)),
                bytes: ByteSize(100 * u64::from(rows)),
            };
            scheduler.handle(
                NOW,
                Input::Load(ModelPlan {
                    model,
                    device: DeviceId(model.0),
                    instances: vec![InstanceId(model.0)],
                    ladder: vec![1, 2, 4],
                    rounding: Rounding::Off,
                    pipeline: 1,
                    staged_unit: None,
                    max_queue_delay: Duration::ZERO,
                    max_gather_delay: Duration::ZERO,
                    max_queue_rows: 8,
                    max_queue_bytes: ByteSize::MAX,
                    priority_levels: 1,
                    knee_tolerance: 0.0,
                    packing: Packing::Near,
                    observations: [1, 2, 4].map(run).to_vec(),
                }),
            );
            memory(&mut scheduler, model, [10_000; 2]);
        }
        scheduler
    }

    fn memory(scheduler: &mut Scheduler, model: ModelId, [budget, capacity]: [u64; 2]) {
        let [budget, capacity] = [budget, capacity].map(ByteSize);
        scheduler.handle(NOW, Input::Memory(MemorySample { device: DeviceId(model.0), budget, capacity }));
    }

    fn meta(id: u64, rows: u32) -> RequestMeta {
        RequestMeta {
            id: RequestId(id),
            model: PLANS[0],
            class: ClassId(0),
            family: None,
            units: 1,
            rows,
            bytes: ByteSize(1),
            deadline: None,
            priority: 0,
        }
    }

    /// Sends so many requests of one row where there is least to do, and answers how many each device has got.
    fn share(scheduler: &mut Scheduler, requests: u64) -> [u64; 2] {
        let mut got = [0; 2];
        for id in 1..=requests {
            let model = scheduler.least_loaded(NOW, &PLANS, &meta(id, 1)).expect("there are two");
            got[usize::from(model == PLANS[1])] += 1;
            scheduler.handle(NOW, Input::Arrive(RequestMeta { model, ..meta(id, 1) }));
            while scheduler.poll_action(NOW).is_some() {}
        }
        got
    }

    #[test]
    fn equal_devices_share_alike_and_unequal_ones_by_their_speed() {
        assert_eq!(share(&mut scheduler([5, 5]), 8), [4, 4]);
        assert_eq!(share(&mut scheduler([5, 15]), 8), [6, 2]);
    }

    #[test]
    fn who_cannot_serve_gets_nothing_as_long_as_another_one_can() {
        let short = |sample: [u64; 2]| {
            let mut scheduler = scheduler([5, 50]);
            memory(&mut scheduler, PLANS[0], sample);
            share(&mut scheduler, 4)
        };
        assert_eq!(short([50, 10_000]), [0, 4], "no room for a row now");
        assert_eq!(short([50, 50]), [0, 4], "no room for a row ever");
        // The full queue of the fast one is passed over.
        let mut full = scheduler([1, 50]);
        assert_eq!(share(&mut full, 11), [9, 2], "one in flight and eight that wait");
        let lost = |scheduler: &mut Scheduler| {
            scheduler.handle(NOW, Input::Arrive(meta(100, 1)));
            let Some(Action::Dispatch(Dispatch { batch, .. })) = scheduler.poll_action(NOW) else {
                panic!("it is idle")
            };
            scheduler.handle(NOW, Input::Complete(batch, Outcome::InstanceLost));
            while scheduler.poll_action(NOW).is_some() {}
        };
        let mut one_left = scheduler([5, 50]);
        lost(&mut one_left);
        assert_eq!(share(&mut one_left, 4), [0, 4]);
        assert_eq!(Scheduler::new().least_loaded(NOW, &[], &meta(1, 1)), None);
    }
}
