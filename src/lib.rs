//! Concertina: an HTTP inference server for ONNX models that sizes each batch by the device memory that is free now.

pub mod batcher;
pub mod config;
pub mod http;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod repository;
pub mod runtime;
pub mod scheduler;
pub mod server;
pub mod tensor;
pub mod units;
