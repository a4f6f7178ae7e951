//! The only place that talks to ONNX Runtime: the library, sessions, batches in and out, worker threads.

pub mod batch;
pub mod calibrate;
pub mod element;
pub mod library;
pub mod session;
mod strings;
pub mod worker;

pub use batch::{Batch, BatchPart, Completion, RunError};
pub use calibrate::Calibration;
pub use library::{Runtime, RuntimeError, prepare_process};
pub use session::{Session, SessionOptions, describe};
pub use worker::{Worker, WorkerHandle};
