//! What metrics read.

use super::machine::Scheduler;
use super::model::Model;
use crate::units::{ByteSize, DeviceId, Instant, ModelId};

/// One model as it is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelStats {
    /// The model.
    pub model: ModelId,
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
    /// `None` as long as nothing is known.
    pub knee_rows_per_second: Option<f64>,
}

/// One device as it is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceStats {
    /// The device.
    pub device: DeviceId,
    /// Bytes of the batches in flight.
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
            instances,
            queued_requests: model.queue.requests,
            queued_rows: model.queue.rows,
            queued_bytes: model.queue.bytes,
            retrying_rows: model.queue.returned_rows,
            rows_in_flight: model.rows_in_flight,
            oldest_arrival: oldest.map(|(_, request)| self.requests[&request].arrived),
            knee_rows_per_second: model.pace.map(|pace| instances as f64 / pace.per_row),
        }
    }
}
