//! The `concertina` command.

use concertina::cli::{self, Hooks};
use concertina::runtime::{self, Runtime};
use concertina::{profile, server};
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    // Before anything else: it changes the environment, which is safe only while there is one thread.
    runtime::prepare_process();
    let library = |path: Option<&Path>| Runtime::load(path).map(drop).map_err(|error| error.to_string());
    let hooks = Hooks {
        library: &library,
        describe: &runtime::describe,
        profile: &profile::measure,
        compare: &profile::compare,
        serve: &server::run,
    };
    cli::run(std::env::args_os(), hooks)
}
