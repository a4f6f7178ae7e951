//! The batcher: the thin loop that feeds the scheduler and carries out what it says, and the handle that HTTP holds.
//!
//! One task runs [`Loop::run`]. It alone owns the scheduler, the table of pending requests and the workers' sending ends;
//! everything else speaks to it through bounded channels. Tensors and reply channels stay here: the scheduler sees only
//! [`crate::scheduler::RequestMeta`].

mod answer;
mod classes;
mod handle;
mod load;
mod pending;
mod report;
mod run;
mod statistics;
mod traces;

pub use crate::scheduler::Rejection;
pub use handle::{Batcher, InferError, Job, Jobs, Ticket};
pub use load::{DeviceLoad, ModelLoad, Sample};
pub use run::{Control, Ends, Event, Loop};
pub use statistics::{StageTotals, Statistics, Total};
