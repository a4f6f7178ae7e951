//! What the loop tells the metrics: the scheduler itself counts nothing.

use super::run::{Flight, Loop};
use crate::runtime::{Completion, RunError};
use crate::units::ByteSize;
use std::time::Duration;

/// The time between two publications of queue lengths: they cost more than counting, and nobody looks oftener.
const PUBLICATION: Duration = Duration::from_millis(50);

impl Loop {
    pub(super) fn observe(&self, flight: &Flight, completion: &Completion) {
        let Some(model) = self.models.get(&flight.model) else { return };
        let metrics = &model.metrics;
        match &completion.result {
            Ok(_) => &metrics.done,
            Err(RunError::OutOfMemory { .. }) => &metrics.out_of_memory,
            Err(RunError::Model(_)) => &metrics.failed,
            Err(RunError::Lost(_)) => &metrics.instance_lost,
        }
        .inc();
        let stages = [completion.stages.gather, completion.stages.compute, completion.stages.scatter];
        metrics.stages.iter().zip(stages).for_each(|(counter, seconds)| counter.inc_by(seconds.as_secs_f64()));
        if completion.result.is_ok() && flight.dispatch.bytes > ByteSize::ZERO {
            metrics.bytes_ratio.observe(completion.bytes.0 as f64 / flight.dispatch.bytes.0 as f64);
        }
        if let (Ok(_), Some(predicted)) = (&completion.result, flight.dispatch.duration)
            && !predicted.is_zero()
        {
            metrics.seconds_ratio.observe(completion.stages.total().as_secs_f64() / predicted.as_secs_f64());
        }
    }

    /// Publishes queue lengths, not oftener than somebody could look.
    pub(super) fn publish(&mut self) {
        let now = self.clock.now();
        if now < self.next_publication {
            return;
        }
        self.next_publication = now + PUBLICATION;
        self.changed = false;
        for stats in self.scheduler.model_stats() {
            let Some(model) = self.models.get(&stats.model) else { continue };
            model.metrics.queue_requests.set(i64::try_from(stats.queued_requests).unwrap_or(i64::MAX));
            model.metrics.queue_rows.set(i64::try_from(stats.queued_rows).unwrap_or(i64::MAX));
        }
        for stats in self.scheduler.device_stats() {
            self.metrics.memory(stats.device, "run_reserved", stats.reserved);
            // Without a measurement yet there is no budget to speak of.
            if stats.budget < ByteSize::MAX {
                self.metrics.memory(stats.device, "run_budget", stats.budget);
            }
        }
    }
}
