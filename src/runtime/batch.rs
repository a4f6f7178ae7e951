//! What goes to a worker and what comes back.

use crate::model::ValidRequest;
use crate::tensor::Tensor;
use crate::units::{BatchId, ByteSize, InstanceId, Instant, Rows};
use std::sync::Arc;
use std::time::Duration;

/// Rows of one request in a batch.
#[derive(Clone, Debug)]
pub struct BatchPart {
    /// The request.
    pub request: Arc<ValidRequest>,
    /// Its first row in this batch.
    pub start: Rows,
    /// The number of its rows in this batch.
    pub rows: Rows,
}

/// Rows that run together: all of one model and equal in every dimension but the batch and those that the model's
/// [`PadPlan`](crate::model::PadPlan) lets be padded.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The batch.
    pub id: BatchId,
    /// The rows, in order; never empty.
    pub parts: Vec<BatchPart>,
    /// Bytes of run memory that it is predicted to need: they are committed before it runs.
    pub bytes: ByteSize,
    /// Rows to run; what exceeds the sum of `parts` is filled with copies of the first row and cut off again.
    pub padded_rows: Rows,
}

/// What became of a batch.
#[derive(Debug)]
pub struct Completion {
    /// The batch.
    pub batch: BatchId,
    /// Where it ran.
    pub instance: InstanceId,
    /// For each part the wanted outputs in the wanted order, or why there are none.
    pub result: Result<Vec<Vec<Tensor>>, RunError>,
    /// How long each stage took.
    pub stages: Stages,
    /// Peak bytes of run memory.
    pub bytes: ByteSize,
}

/// How long the stages of one run took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// Rows copied into the batch's input buffers.
    pub gather: Duration,
    /// The model's run.
    pub compute: Duration,
    /// Rows copied out of the batch's outputs.
    pub scatter: Duration,
    /// Of `compute`, the host's work of putting the run into the device's queue.
    pub launch: Duration,
    /// Inputs copied to the device, as it times that itself; beside the run of the batch before.
    pub copy: Duration,
    /// Of `compute`, what the device times: the run, and the copies of its outputs.
    pub device: Duration,
    /// How long the device had nothing to do between the batch before and this one, if this one was staged by then.
    pub idle: Duration,
    /// Whether the device computed one batch while the host gathered and scattered others.
    pub overlapped: bool,
    /// When gathering, computing and scattering began; zero: they did not.
    pub begun: [Instant; 3],
}

impl Stages {
    /// How long the instance was busy.
    #[must_use]
    pub fn total(&self) -> Duration {
        let host = self.gather + self.scatter;
        if self.overlapped { self.compute.max(host) } else { host + self.compute }
    }

    /// How long the instance could not compute another batch: what counts for rows per second. Where batches overlap, this one's
    /// inputs are copied beside the one before, unless there was none: then `compute` includes that, and this does not.
    #[must_use]
    pub fn occupied(&self) -> Duration {
        if !self.overlapped || self.device.is_zero() {
            return self.total();
        }
        self.device.max(self.copy).max(self.gather + self.scatter)
    }
}

/// Why a run has no outputs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// The device had no room for it.
    #[error("the device ran out of memory: {message}")]
    OutOfMemory {
        /// ONNX Runtime's words, for the log.
        message: String,
    },
    /// The model failed on these rows; the text is ONNX Runtime's.
    #[error("{0}")]
    Model(String),
    /// The instance cannot run anything any more.
    #[error("the instance is lost: {0}")]
    Lost(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_that_nothing_ran_beside_counts_in_a_run_and_not_in_what_an_instance_can_do() {
        let ms = Duration::from_millis;
        // 128 rows alone, whose 2 ms of copying are waited for, and behind another batch, where they are not.
        let alone = Stages {
            gather: ms(7),
            compute: ms(20),
            copy: ms(2),
            device: ms(18),
            overlapped: true,
            ..Stages::default()
        };
        let behind = Stages { compute: ms(18), ..alone };
        assert_eq!((alone.total(), behind.total()), (ms(20), ms(18)));
        assert_eq!((alone.occupied(), behind.occupied()), (ms(18), ms(18)));
        // What takes longest of what goes on at once.
        assert_eq!(Stages { copy: ms(30), ..alone }.occupied(), ms(30));
        assert_eq!(Stages { gather: ms(15), scatter: ms(16), ..alone }.occupied(), ms(31));
        // Without times of the device, or nothing at once, it is as long as it takes.
        assert_eq!(Stages { device: ms(0), ..alone }.occupied(), ms(20));
        assert_eq!(Stages { overlapped: false, ..alone }.occupied(), ms(27));
    }
}
