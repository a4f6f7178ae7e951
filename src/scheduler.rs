//! The scheduler: a pure state machine that decides which rows run together, how many, where and when.
//!
//! It has no clock, no I/O, no tensors and no log. The caller feeds [`Input`]s with [`Scheduler::handle`], carries out what
//! [`Scheduler::poll_action`] says until it says nothing more, and comes back no later than [`Scheduler::poll_timeout`].
//! The same inputs at the same instants always give the same actions.
//!
//! Invariants, asserted in release too:
//! - Every request that arrives leaves exactly once: [`Action::Finish`], [`Action::Reject`], or silently after [`Input::Cancel`].
//! - Bytes reserved on a device equal the sum over what its instances need for their batches in flight, see `turns`, and no dispatch
//!   brings them above its budget.
//! - Rows of one batch are of one model and one class, or of one family and padded to the largest class among them; they are
//!   at most as many as the largest size of the ladder.
//!
//! What waits is overtaken by a bounded number of batches:
//! - A level of priority is passed over by at most 16 batches of its model (and one more for each other level that waited
//!   as long) before its oldest head leads one, see `queue`.
//! - Where packing chooses among the classes of a family, the oldest head of a level is left out of at most 4 batches before
//!   one must take it, see `pack`.
//! - A head that waits for bytes of batches in flight is overtaken by at most 4 batches on its device, see `budget`.
//! - A head that waits for memory nobody in flight holds keeps nobody else waiting. It is given up at its deadline, or after
//!   10 seconds, see `oom`.

mod admission;
mod budget;
mod completion;
mod cost;
mod dispatch;
mod echo;
mod forecast;
mod machine;
mod model;
mod oom;
mod pack;
mod policy;
mod queue;
mod stats;
mod turns;

pub use forecast::Forecast;
pub use machine::Scheduler;
pub use stats::{DeviceStats, ModelStats};

use crate::units::{BatchId, ByteSize, ClassId, DeviceId, FamilyId, InstanceId, Instant, ModelId, RequestId, Rows};
use std::time::Duration;

/// What the rows of a batch have to do with the sizes of the ladder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Rounding {
    /// Nothing: any size up to the last one may run as it is, and the ladder only says at which sizes costs are known.
    #[default]
    Off,
    /// A batch that something else than its rows makes smaller gets one of them. For an executor that any other size costs a new plan:
    /// free memory changes all the time by a few rows, and the sizes would with it.
    Down,
    /// The executor pads every batch up to one of them (graphs, shape-specialised kernels).
    Up,
}

/// What the scheduler needs to know of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelPlan {
    /// The model.
    pub model: ModelId,
    /// Where its instances run.
    pub device: DeviceId,
    /// The instances that may run its batches; each runs one at a time.
    pub instances: Vec<InstanceId>,
    /// Batch sizes, ascending; the last is the largest that is ever formed. Never empty.
    pub ladder: Vec<Rows>,
    /// What batches have to do with the sizes of the ladder.
    pub rounding: Rounding,
    /// Batches an instance may hold, the running one included. The second is given only when it is as large as it would be
    /// later, so that holding it costs no batching.
    pub pipeline: u32,
    /// Where a batch of an instance takes over the run memory of the one before it: bytes that an element of its inputs takes on
    /// the device beside that one's run, for they are copied there while it waits. `None`: it takes nothing over, so
    /// one that waits reserves all that it needs.
    pub staged_unit: Option<ByteSize>,
    /// How long rows may wait for company while an instance is idle; zero means not at all.
    pub max_queue_delay: Duration,
    /// How long an idle instance may wait for the clients of a batch that it has just answered to ask again. It does so only
    /// where they tend to, where the larger batch gives more rows per second than running at once, and for a quarter of that
    /// batch's duration at most; zero means never.
    pub max_gather_delay: Duration,
    /// The most rows that may wait in the queue. An empty queue takes a request of any size: the limit bounds what waits
    /// behind others, and a request larger than the queue would be told to come back for ever.
    pub max_queue_rows: u64,
    /// The most bytes of inputs that may wait in the queue; an empty queue takes any request.
    pub max_queue_bytes: ByteSize,
    /// Levels of priority; level 1 is the most urgent. Requests carry 1..=levels.
    pub priority_levels: u32,
    /// A batch larger than the knee is not formed: the smallest size whose rows per second are within this fraction of the
    /// best measured (0.03 means 3%).
    pub knee_tolerance: f64,
    /// How rows of one family are put together.
    pub packing: Packing,
    /// What was measured while loading; seeds the cost model.
    pub observations: Vec<Observation>,
}

/// How rows of the classes of one family share batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// Rows of about the same length: those that keep an instance busy for the least time, measured by what each of them costs
    /// among its like.
    #[default]
    Near,
    /// In order of arrival, padded to the longest.
    Fifo,
}

/// One measured run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Observation {
    /// The class of its rows.
    pub class: ClassId,
    /// Elements per row over all inputs, padding included: what costs of unseen classes are scaled by.
    pub units: u64,
    /// Rows, padding included.
    pub rows: Rows,
    /// How long the run kept the instance busy.
    pub duration: Duration,
    /// Peak bytes of run memory.
    pub bytes: ByteSize,
}

/// What the scheduler knows of a request; tensors and reply channels stay outside.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RequestMeta {
    /// The request.
    pub id: RequestId,
    /// The model.
    pub model: ModelId,
    /// Rows of one class share a batch.
    pub class: ClassId,
    /// And so do rows of one family, padded to the class with the most units among them. `None`: only those of one class do.
    pub family: Option<FamilyId>,
    /// Elements per row over all inputs, as they run in this class.
    pub units: u64,
    /// Rows; at least 1. More than the largest batch are split over several.
    pub rows: Rows,
    /// Bytes of the inputs.
    pub bytes: ByteSize,
    /// When the answer is no longer wanted.
    pub deadline: Option<Instant>,
    /// 1 is the most urgent.
    pub priority: u32,
}

/// Everything that can happen.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A model is ready to run batches.
    Load(ModelPlan),
    /// A model goes away: its queue is rejected as [`Rejection::Unhealthy`], its batches in flight end normally.
    Unload(ModelId),
    /// A request has come.
    Arrive(RequestMeta),
    /// A client has gone: its queued rows are dropped, those in flight end unheard. Unknown ids are ignored.
    Cancel(RequestId),
    /// A batch has ended.
    Complete(BatchId, Outcome),
    /// Memory was measured.
    Memory(MemorySample),
    /// No new work from now on: arrivals are rejected as [`Rejection::Draining`], what is queued still runs.
    Drain,
}

/// How a batch ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Outcome {
    /// All rows have answers.
    Done {
        /// How long the instance was busy.
        duration: Duration,
        /// Peak bytes of run memory.
        bytes: ByteSize,
    },
    /// The device had no room: the rows run again in two halves, before anything else.
    OutOfMemory {
        /// The bytes that the run had when it was denied more.
        bytes: ByteSize,
    },
    /// The model failed. Several requests run again in two halves, so that only the guilty one fails; one alone is rejected.
    Failed,
    /// The instance is lost; the rows run again on another one, or are rejected if there is none.
    InstanceLost,
}

/// Memory of one device as it is now.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemorySample {
    /// The device.
    pub device: DeviceId,
    /// Bytes that runs may use altogether: what we hold idle plus what the device could still give, within the limit.
    pub budget: ByteSize,
    /// Bytes that runs could use if nothing else were on the device.
    pub capacity: ByteSize,
}

/// Rows of one request in a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The request.
    pub request: RequestId,
    /// Its first row in this batch.
    pub start: Rows,
    /// The number of its rows in this batch.
    pub rows: Rows,
}

/// What kept a batch from being larger.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitedBy {
    /// No more rows were there.
    Rows,
    /// More rows would need more bytes than there are.
    Bytes,
    /// More rows would not raise throughput.
    Knee,
    /// More rows would miss the oldest deadline.
    Deadline,
    /// More rows were there, but would have been padded, or would have others padded, for longer than they are worth.
    Padding,
    /// The largest batch size of the ladder.
    Ladder,
    /// A retry of half a batch.
    Retry,
}

/// One batch to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Dispatch {
    /// The batch.
    pub batch: BatchId,
    /// The model.
    pub model: ModelId,
    /// The largest class of its rows; of rows that came back, that of all that came back with them.
    pub class: ClassId,
    /// Where to run it.
    pub instance: InstanceId,
    /// The rows, in order of arrival.
    pub parts: Vec<Part>,
    /// The sum over `parts`.
    pub rows: Rows,
    /// Rows that the executor runs, padding included.
    pub padded_rows: Rows,
    /// Predicted peak bytes of its run. Until it ends they are reserved, as far as it does not take them over from the batches before
    /// it; see [`ModelPlan::staged_unit`].
    pub bytes: ByteSize,
    /// Predicted duration; `None` where nothing is known yet.
    pub duration: Option<Duration>,
    /// What kept it from being larger.
    pub limited_by: LimitedBy,
}

/// Why a request is not served.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rejection {
    /// The queue is at its limit of rows or bytes.
    QueueFull {
        /// When there will be room, from the drain rate.
        retry_after: Duration,
    },
    /// One row of it does not fit an empty device.
    TooLarge {
        /// Bytes that one row needs.
        needed: ByteSize,
        /// Bytes that an empty device has.
        capacity: ByteSize,
    },
    /// It waited, or would have to wait, past its deadline.
    DeadlineExceeded,
    /// One row of it found no memory although an empty device would have room.
    MemoryExhausted {
        /// When to try again.
        retry_after: Duration,
    },
    /// The server takes no new work.
    Draining,
    /// The model has no instance that works.
    Unhealthy,
    /// The model failed on this request.
    Failed,
}

/// What to do now.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Run a batch.
    Dispatch(Dispatch),
    /// All rows of a request have answers.
    Finish(RequestId),
    /// A request is not served.
    Reject(RequestId, Rejection),
    /// Give idle memory of a device back.
    Trim(DeviceId),
}
