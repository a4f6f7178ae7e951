//! The only place that talks to ONNX Runtime: the library, sessions, batches in and out, worker threads.

pub mod allocator;
pub mod batch;
mod bound;
pub mod calibrate;
pub mod cuda;
pub mod element;
pub mod external;
mod flight;
pub mod graphs;
mod inputs;
mod lanes;
pub mod lengths;
pub mod library;
mod outputs;
pub mod padding;
pub mod self_test;
pub mod session;
mod shelf;
mod staging;
mod strings;
mod synthetic;
mod twins;
mod weights;
pub mod worker;

pub use allocator::Arenas;
pub use batch::{Batch, BatchPart, Completion, RunError};
pub use calibrate::Calibration;
pub use cuda::CudaOptions;
pub use flight::{Moment, Plan};
pub use graphs::Recipe;
pub use library::{Runtime, RuntimeError, prepare_process};
pub use self_test::self_test;
pub use session::{Ran, Session, SessionOptions, describe};
pub use weights::Weights;
pub use worker::{Worker, WorkerHandle};
