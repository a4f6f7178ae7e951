//! Concertina: an HTTP inference server for ONNX models that sizes each batch by the device memory that is free now.
//!
//! # One sentence
//! A pure scheduler decides, a thin batcher loop carries out, one thread per instance owns a session, and HTTP is a skin
//! that knows only the batcher's handle.
//!
//! # One request's way
//! ```text
//! POST ─▶ http ─▶ Batcher handle ─▶ batcher loop ─▶ worker thread (one per instance) ─▶ ONNX Runtime
//!                                    │   ▲                │
//!                                    ▼   │                ▼
//!                                 scheduler (pure)     Completion ─▶ batcher loop ─▶ http ─▶ answer
//! ```
//! 1. [`http`] reads the body within limits, decodes it into tensors, and compares it with its model
//!    ([`model::ValidRequest`]).
//! 2. [`batcher::Batcher::infer`] reserves a place inside the server and hands the request to the loop; dropping the future
//!    cancels it.
//! 3. [`batcher::Loop`] keeps tensors and reply channels, and tells the [`scheduler`] what happened; the scheduler answers
//!    with [`scheduler::Action`]s.
//! 4. A [`runtime::Worker`] gathers the rows of a batch, runs its session, and scatters the outputs.
//! 5. The loop joins the parts of each request and answers it.
//!
//! Beside this way: [`repository`] finds, loads, measures and replaces models and publishes [`model::Table`]; [`config`]
//! turns texts into checked values, over [`keys`]; [`metrics`] names every number, [`signal`] makes of them the one to scale on; [`memory`] owns the bytes of a device,
//! [`sampler`] looks after them, and [`admin`] shows and limits them while serving; [`profile`] measures a model for a person,
//! [`optimize`] rewrites an ONNX file, [`simulate`] scales a fleet of schedulers in virtual time;
//! [`grpc`] is a second skin beside [`http`], over the same ways in and out; [`server`] assembles and ends everything; [`cli`] is what a person types; [`clock`] is the one place that reads the time;
//! [`tensor`] and [`units`] are the words
//! that all others use; [`trace`] has spans of what it is told made and sent, if anybody wants them. [`text`] makes tokens of texts and one vector of many, on threads of its own.
//!
//! # Directions
//! `tests/tidy.rs` holds the table of who may name whom and fails on anything else. The scheduler names only [`units`].
//!
//! # Invariants
//! - The same inputs at the same instants give the same actions: the scheduler has no clock, no I/O and no randomness.
//! - Every request that enters the scheduler leaves exactly once: answered, rejected or cancelled.
//! - Bytes reserved equal the sum over what instances need for their batches in flight, and no dispatch brings them above the budget.
//! - Every byte of a device that a session allocates is in that device's ledger. Of a GPU's batches, what lies on the host
//!   (pinned staging for two batches of each instance, answers until they are written) is in no ledger.
//! - Only the worker's thread touches its session.
//! - No queue, channel, batch, body or wait is without a limit that config/concertina.toml or a constant names.
//! - There are no locks in `scheduler`, `batcher` and `http`.
//!
//! # Files with `unsafe`
//! - `src/memory/block.rs`: slices over blocks of host memory.
//! - `src/memory/cuda.rs`, `src/memory/cuda/driver.rs`, `src/memory/cuda/stream.rs`, `src/memory/cuda/graph.rs`,
//!   `src/memory/cuda/nvml.rs`: the driver of NVIDIA GPUs and NVML, found at run time.
//! - `src/memory/heap.rs`: how the C heap treats large blocks, and giving back what is free in it.
//! - `src/memory/host.rs`: reserving, committing and giving back address ranges of the host.
//! - `src/runtime/allocator.rs`: the allocator that ONNX Runtime gets, and the exception that a denial is.
//! - `src/runtime/bound.rs`: tensors in the memory of a device, and which node runs where.
//! - `src/runtime/graphs.rs`: launching recorded work, whose memory must stay until it has run.
//! - `src/runtime/cuda.rs`: handing a stream of ours to ONNX Runtime.
//! - `src/runtime/lanes.rs`, `src/runtime/weights.rs`: asking a GPU to copy from and to memory that must stay until it has.
//! - `src/runtime/library.rs`: setting an environment variable before any thread exists.
//! - `src/runtime/strings.rs`: string tensors of any bytes, through ONNX Runtime's C interface.
//!
//! In programs that are not part of the server:
//! - `load-tests/fuzz_server.rs`: an allocator that counts.
//! - `load-tests/neighbour.rs`: taking a GPU's memory as a neighbour does.
//! - `tests/device.rs`: copying to a GPU, and losing one on purpose.

pub mod admin;
pub mod batcher;
pub mod cli;
pub mod clock;
pub mod config;
pub mod grpc;
pub mod http;
pub mod keys;
pub mod memory;
pub mod metrics;
pub mod model;
pub mod optimize;
pub mod profile;
pub mod repository;
pub mod runtime;
pub mod sampler;
pub mod scheduler;
pub mod server;
pub mod signal;
pub mod simulate;
pub mod tensor;
pub mod text;
pub mod trace;
pub mod units;
