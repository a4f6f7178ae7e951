//! The `concertina` command.

use concertina::cli::{self, Hooks};
use concertina::{profile, runtime, server};
use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else: it changes the environment, which is safe only while there is one thread.
    runtime::prepare_process();
    cli::run(
        std::env::args_os(),
        Hooks { describe: &runtime::describe, profile: &profile::measure, serve: &server::run },
    )
}
