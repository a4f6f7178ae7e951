//! The memory of a device through its public face: what it promises to runs, to neighbours and to operators.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

#[path = "memory/behaviour.rs"]
mod behaviour;
#[path = "memory/fake.rs"]
mod fake;
#[path = "memory/properties.rs"]
mod properties;
#[path = "memory/threads.rs"]
mod threads;
