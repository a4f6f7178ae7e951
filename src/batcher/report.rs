//! What the loop tells the metrics: the scheduler itself counts nothing.

use super::pending::Pending;
use super::run::{Flight, Loop};
use crate::metrics::Stage;
use crate::runtime::batch::Stages;
use crate::runtime::{Completion, RunError};
use crate::scheduler::ModelStats;
use crate::signal::Reading;
use crate::units::{ByteSize, Instant, ModelId};
use std::collections::BTreeMap;
use std::time::Duration;

/// The time between two publications of queue lengths: they cost more than counting, and nobody looks oftener.
const PUBLICATION: Duration = Duration::from_millis(50);

/// The same while nothing happens and the scaling signal still falls.
const SETTLING: Duration = Duration::from_millis(250);

impl Loop {
    pub(super) fn observe(&self, flight: &Flight, completion: &Completion) {
        let Some(model) = self.models.get(&flight.model) else { return };
        let metrics = &model.metrics;
        let dispatch = &flight.dispatch;
        match &completion.result {
            Ok(_) => metrics.done.inc(),
            Err(RunError::OutOfMemory { .. }) => {
                metrics.out_of_memory.inc();
                metrics.retried[0].inc_by(u64::from(dispatch.rows));
                metrics.halvings.inc_by(u64::from(dispatch.rows > 1));
            }
            Err(RunError::Model(_)) => {
                metrics.failed.inc();
                // The only one of a batch is not tried again.
                if dispatch.parts.iter().any(|part| part.request != dispatch.parts[0].request) {
                    metrics.retried[1].inc_by(u64::from(dispatch.rows));
                    metrics.halvings.inc();
                }
            }
            Err(RunError::Lost(_)) => {
                metrics.instance_lost.inc();
                metrics.retried[2].inc_by(u64::from(dispatch.rows));
            }
        }
        metrics.triton.executions.inc_by(u64::from(completion.result.is_ok()));
        metrics.spent(Stage::Gather, completion.stages.gather);
        metrics.spent(Stage::Compute, completion.stages.compute);
        metrics.spent(Stage::Scatter, completion.stages.scatter);
        let Stages { launch, copy, device, idle, .. } = completion.stages;
        metrics.spent_on_device([launch, copy, device, idle]);
        if completion.result.is_ok() && dispatch.bytes > ByteSize::ZERO {
            metrics.bytes_ratio.observe(completion.bytes.0 as f64 / dispatch.bytes.0 as f64);
        }
        if let (Ok(_), Some(predicted)) = (&completion.result, dispatch.duration)
            && !predicted.is_zero()
        {
            metrics.seconds_ratio.observe(completion.stages.occupied().as_secs_f64() / predicted.as_secs_f64());
        }
    }

    /// Counts a batch that ended well.
    pub(super) fn count_batch(&mut self, flight: &Flight, stages: Stages) {
        let at = self.clock.date(self.clock.now());
        if let Some(model) = self.models.get_mut(&flight.model) {
            model.statistics.ran(flight.dispatch.rows, stages, at);
        }
    }

    /// Counts a request that is answered now.
    pub(super) fn count_answer(&mut self, pending: &mut Pending) {
        let now = self.clock.now();
        let whole = now.since(pending.arrived);
        pending.trace_way(now);
        if let Some(model) = self.models.get_mut(&pending.request.model.id) {
            let [gather, compute, scatter] = pending.batches;
            model.statistics.answered(whole, Stages { gather, compute, scatter, ..Stages::default() });
        }
    }

    /// Counts a request that has no answer, or nobody who waits for one.
    pub(super) fn count_failure(&mut self, pending: &mut Pending) {
        let now = self.clock.now();
        let whole = now.since(pending.arrived);
        pending.trace_way(now);
        if let Some(model) = self.models.get_mut(&pending.request.model.id) {
            model.statistics.failed(whole);
        }
    }

    /// Publishes queue lengths and the scaling signal, not oftener than somebody could look.
    pub(super) fn publish(&mut self) {
        let now = self.clock.now();
        if now < self.next_publication {
            return;
        }
        let mut readings = Vec::with_capacity(self.models.len());
        for (id, stats) in by_owner(self.scheduler.model_stats(), |plan| self.owner(plan)) {
            let Some(model) = self.models.get(&id) else { continue };
            let metrics = &model.metrics;
            let sum = |count: fn(&ModelStats) -> u64| stats.iter().map(count).sum::<u64>();
            let (requests, rows) = (sum(|stats| stats.queued_requests), sum(|stats| stats.queued_rows));
            metrics.queue_requests.set(signed(requests));
            metrics.triton.pending.set(signed(requests));
            metrics.queue_rows.set(signed(rows));
            metrics.instances.set(signed(sum(|stats| stats.instances as u64)));
            let oldest = stats.iter().filter_map(|stats| stats.oldest_arrival).min();
            metrics.queue_oldest_seconds.set(oldest.map_or(0.0, |arrival| now.since(arrival).as_secs_f64()));
            readings.push(Reading {
                model: id,
                devices: stats.iter().map(|stats| stats.device).collect(),
                offered: metrics.offered_rows.get(),
                waiting: rows + sum(|stats| stats.retrying_rows),
                // Known once all of them are: a part would be taken for the whole.
                capacity: stats.iter().map(|stats| stats.knee_rows_per_second).sum(),
            });
        }
        let signal = self.signals.read(now, &readings);
        for ((id, offered, saturation), reading) in signal.models.iter().zip(&readings) {
            if let Some(model) = self.models.get(id) {
                model.metrics.offered_rate.set(*offered);
                model.metrics.saturated(reading.capacity, *saturation);
            }
        }
        self.metrics.signal(&signal);
        for stats in self.scheduler.device_stats() {
            // Without a measurement yet there is no budget to speak of.
            let budget = Some(stats.budget).filter(|budget| *budget < ByteSize::MAX);
            self.metrics.run_bytes(stats.device, stats.reserved, budget);
        }
        (self.changed, self.settling) = (false, signal.settling);
        self.next_publication = now + if signal.settling { SETTLING } else { PUBLICATION };
    }

    /// Something has happened: what is published follows soon.
    pub(super) fn note_change(&mut self, now: Instant) {
        self.changed = true;
        self.next_publication = self.next_publication.min(now + PUBLICATION);
    }
}

/// What the scheduler says of each part of a model, by model.
fn by_owner(
    all: impl Iterator<Item = ModelStats>,
    owner: impl Fn(ModelId) -> ModelId,
) -> BTreeMap<ModelId, Vec<ModelStats>> {
    let mut found: BTreeMap<ModelId, Vec<ModelStats>> = BTreeMap::new();
    for stats in all {
        found.entry(owner(stats.model)).or_default().push(stats);
    }
    found
}

fn signed(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
