//! Arrivals: admit or reject, at once and as a whole.

use super::machine::Scheduler;
use super::model::Model;
use super::queue::{Kind, Request};
use super::{Action, Rejection, RequestMeta};
use crate::units::Instant;
use std::time::Duration;

/// The shortest and the longest `retry_after` of a full queue.
const RETRY_AFTER: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// What is said as long as nothing is known of the drain rate.
const RETRY_AFTER_UNKNOWN: Duration = Duration::from_secs(1);

impl Scheduler {
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
