//! What metrics read.

use super::machine::Scheduler;
use super::model::Model;
use crate::units::{ByteSize, DeviceId, Instant, ModelId};

/// One model as it is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelStats {
    /// The model.
    pub model: ModelId,
    /// Where it runs.
    pub device: DeviceId,
    /// Instances that work.
    pub instances: usize,
    /// Requests in the queue: those with rows that were never dispatched.
    pub queued_requests: u64,
    /// Rows in the queue; what [`super::ModelPlan::max_queue_rows`] limits.
    pub queued_rows: u64,
    /// Bytes of the requests in the queue; what [`super::ModelPlan::max_queue_bytes`] limits.
    pub queued_bytes: ByteSize,
    /// Rows that came back from batches that failed and wait to run again.
    pub retrying_rows: u64,
    /// Rows in flight.
    pub rows_in_flight: u64,
    /// When the oldest request in the queue came.
    pub oldest_arrival: Option<Instant>,
    /// Rows per second of all instances together at the knee, within the present budget, for the classes that ran lately;
    /// zero if not even one row fits, `None` as long as nothing is known.
    pub knee_rows_per_second: Option<f64>,
}

/// One device as it is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceStats {
    /// The device.
    pub device: DeviceId,
    /// Bytes that the batches in flight need.
    pub reserved: ByteSize,
    /// Bytes that runs may use; [`ByteSize::MAX`] as long as memory was not measured.
    pub budget: ByteSize,
    /// Batches in flight.
    pub batches_in_flight: u32,
}

impl Scheduler {
    /// All models, in order of their ids. O(classes with rows).
    pub fn model_stats(&self) -> impl Iterator<Item = ModelStats> {
        self.models.iter().map(|(id, model)| self.stats_of(*id, model))
    }

    /// All devices, in order of their ids.
    pub fn device_stats(&self) -> impl Iterator<Item = DeviceStats> {
        self.devices.iter().map(|(id, device)| DeviceStats {
            device: *id,
            reserved: device.reserved(),
            budget: device.budget(),
            batches_in_flight: device.in_flight(),
        })
    }

    /// Whether nothing is queued and nothing in flight: after [`super::Input::Drain`], whether the drain is complete.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && self.in_flight.is_empty()
    }

    fn stats_of(&self, id: ModelId, model: &Model) -> ModelStats {
        let oldest = model.queue.classes().filter_map(|(_, class)| class.oldest()).min();
        let instances = model.instances.len();
        ModelStats {
            model: id,
            device: model.plan.device,
            instances,
            queued_requests: model.queue.requests,
            queued_rows: model.queue.rows,
            queued_bytes: model.queue.bytes,
            retrying_rows: model.queue.returned_rows,
            rows_in_flight: model.rows_in_flight,
            oldest_arrival: oldest.map(|(_, request)| self.requests[&request].arrived),
            knee_rows_per_second: self.capacity(model),
        }
    }

    /// None at all where not even one row fits at present: what one row alone would give is no capacity then.
    fn capacity(&self, model: &Model) -> Option<f64> {
        let pace = model.pace?;
        let budget = self.devices[&model.plan.device].budget();
        let fits = model.recent().is_none_or(|(class, units)| model.least_bytes(class, units) <= budget);
        Some(if fits { model.instances.len() as f64 / pace.per_row } else { 0.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scheduler::{Input, MemorySample, ModelPlan, Observation, Packing, Rounding};
    use crate::units::{ClassId, InstanceId};
    use std::time::Duration;

    /// 10 ms for up to 8 rows, then in proportion; 100 bytes a row.
    fn scheduler(instances: u32) -> Scheduler {
        let run = |rows: u32| Observation {
            class: ClassId(0),
            units: 1,
            rows,
            duration: Duration::from_millis(10 * u64::from(rows.div_ceil(8))),
            bytes: ByteSize(100 * u64::from(rows)),
        };
        let plan = ModelPlan {
            model: ModelId(1),
            device: DeviceId(0),
            instances: (0..instances).map(InstanceId).collect(),
            ladder: vec![1, 2, 4, 8, 16],
            rounding: Rounding::Off,
            pipeline: 1,
            staged_unit: None,
            max_queue_delay: Duration::ZERO,
            max_gather_delay: Duration::ZERO,
            max_queue_rows: 1000,
            max_queue_bytes: ByteSize::MAX,
            priority_levels: 1,
            knee_tolerance: 0.03,
            packing: Packing::Near,
            observations: [1, 2, 4, 8, 16].map(run).to_vec(),
        };
        let mut scheduler = Scheduler::new();
        scheduler.handle(Instant(0), Input::Load(plan));
        scheduler
    }

    #[test]
    fn capacity_is_that_of_the_largest_useful_batches_which_fit_now() {
        for (instances, budget, expected) in [
            (1, u64::MAX, 800.0),
            (1, 800, 800.0),
            (1, 450, 400.0),
            (1, 100, 100.0),
            (1, 99, 0.0),
            (2, 1600, 1600.0),
            // Two of four rows, or one of eight: the same.
            (2, 800, 800.0),
            // Too little for two of one row.
            (2, 150, 100.0),
        ] {
            let mut scheduler = scheduler(instances);
            let capacity =
                |scheduler: &Scheduler| scheduler.model_stats().next().unwrap().knee_rows_per_second.unwrap();
            let full = capacity(&scheduler);
            let sample = |budget| MemorySample { device: DeviceId(0), budget, capacity: ByteSize::MAX };
            scheduler.handle(Instant(1), Input::Memory(sample(ByteSize(budget))));
            let now = capacity(&scheduler);
            assert!((now - expected).abs() < 0.01 * expected.max(1.0), "{instances}, {budget}: {now}");
            scheduler.handle(Instant(2), Input::Memory(sample(ByteSize::MAX)));
            assert!((capacity(&scheduler) - full).abs() < 1e-6, "a squeeze that has passed leaves nothing");
        }
    }
}
