//! One input of a target, on a server that lives as long as the process.

use crate::fuzz_server::{Server, Target, attempt, named, server};
use std::sync::OnceLock;
use tokio::runtime::{Builder, Runtime};

static SERVER: OnceLock<(Runtime, Server)> = OnceLock::new();

/// Sends the input; what is broken is a panic, which the fuzzer keeps the input of.
pub fn one(target: Target, input: &[u8]) {
    let (runtime, server) = SERVER.get_or_init(|| {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let server = runtime.block_on(server(target));
        (runtime, server)
    });
    if let Err(what) = runtime.block_on(attempt(server, target, input, named(input).unwrap_or("m"))) {
        panic!("{what}");
    }
}
