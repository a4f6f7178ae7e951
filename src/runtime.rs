//! The only place that talks to ONNX Runtime: the library, sessions, batches in and out, worker threads.

pub mod allocator;
pub mod batch;
pub mod calibrate;
pub mod element;
pub mod library;
mod outputs;
pub mod self_test;
pub mod session;
mod strings;
pub mod worker;

pub use allocator::Arenas;
pub use batch::{Batch, BatchPart, Completion, RunError};
pub use calibrate::Calibration;
pub use library::{Runtime, RuntimeError, prepare_process};
pub use self_test::self_test;
pub use session::{Ran, Session, SessionOptions, describe};
pub use worker::{Worker, WorkerHandle};
