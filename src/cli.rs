//! The command line: subcommands, flags with their environment variables, what `check`, `models`, `profile` and `simulate` print,
//! logging.
//!
//! What needs ONNX Runtime or the network comes in as [`Hooks`], so that all of this runs in tests without either.

mod add;
mod flags;
mod health;
mod log;
mod optimize;
mod otel;
mod profile;
mod report;
mod simulate;

pub use flags::Options;

use crate::config::Config;
use crate::model::{Derived, Graph, derive};
use crate::profile::{Comparison, Profile};
use crate::repository::{Candidate, Scan, scan};
use crate::units::Rows;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use std::ffi::OsString;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// Loads the ONNX Runtime library from this path (`None`: searched), without which no model can be read.
pub type Library<'a> = &'a dyn Fn(Option<&Path>) -> Result<(), String>;

/// Reads what an ONNX file says of itself: the path of the ONNX Runtime library (`None`: searched), then that of the file.
pub type Describe<'a> = &'a dyn Fn(Option<&Path>, &Path) -> Result<Graph, String>;

/// Loads and measures a model. Batch sizes, ascending; none: those that the server would choose.
pub type Measure<'a> = &'a dyn Fn(&Config, &Candidate, &[Rows]) -> Result<Profile, String>;

/// Loads two forms of a model and compares their answers.
pub type Compare<'a> = &'a dyn Fn(&Config, [&Candidate; 2]) -> Result<Comparison, String>;

/// What the commands need from below.
#[derive(Clone, Copy)]
pub struct Hooks<'a> {
    /// Makes sure that model files can be read at all.
    pub library: Library<'a>,
    /// Reads a model file without serving it.
    pub describe: Describe<'a>,
    /// Measures a model.
    pub profile: Measure<'a>,
    /// Compares two forms of a model.
    pub compare: Compare<'a>,
    /// Serves until the process is told to end.
    pub serve: &'a dyn Fn(Config) -> anyhow::Result<()>,
}

#[derive(Debug, Parser)]
#[command(name = "concertina", version, about, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Load the models and serve them over HTTP.
    Serve(Options),
    /// Print the values that hold and everything that is wrong with configuration and models; exit 1 if anything is.
    Check(Options),
    /// List the models: files, inputs, outputs, batch axis or the reason why there is none, settings.
    Models(Options),
    /// Load one model, measure it as the server would, and print what its batches need and give.
    Profile(profile::ProfileOptions),
    /// Compare signals to scale replicas on, by simulating a fleet with the server's own scheduler; needs neither models nor network.
    Simulate(simulate::SimulateOptions),
    /// Copy a folder with an ONNX file and a tokenizer, as Hugging Face's hub has it, into the repository, and write its
    /// model.toml.
    Add(add::AddOptions),
    /// Write a form of a model whose attention is one operator, for the fused kernels of GPUs, if it answers alike.
    Optimize(optimize::OptimizeOptions),
    /// Ask the server that these options describe whether it is ready; exit 0 if it is, 1 if not.
    Healthcheck(Options),
    /// Print the version.
    Version,
}

impl Command {
    /// What says where the configuration is; `None` for a command that needs none.
    fn options(&self) -> Option<&Options> {
        match self {
            Self::Version => None,
            Self::Serve(options) | Self::Check(options) | Self::Models(options) | Self::Healthcheck(options) => {
                Some(options)
            }
            Self::Profile(profile) => Some(&profile.options),
            Self::Simulate(simulate) => Some(&simulate.options),
            Self::Add(add) => Some(&add.options),
            Self::Optimize(optimize) => Some(&optimize.options),
        }
    }
}

/// Runs the command that `arguments` (the first is the program) and the environment say. Exit codes: 0, 1 if something is
/// wrong with configuration, models or the run, 2 for arguments that make no sense.
pub fn run(arguments: impl IntoIterator<Item = OsString>, hooks: Hooks<'_>) -> ExitCode {
    // Not locked: while the server runs, other threads log.
    match execute(arguments, hooks, &mut io::stdout(), &mut io::stderr()) {
        Ok(code) => ExitCode::from(code),
        // Whoever read the output (a pager, head) has gone: nothing is left to say, and nobody to say it to.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "error: cannot write: {error}");
            ExitCode::FAILURE
        }
    }
}

/// [`run`] with the streams to write to.
fn execute(
    arguments: impl IntoIterator<Item = OsString>,
    hooks: Hooks<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> io::Result<u8> {
    let parsed = Cli::command().try_get_matches_from(arguments).and_then(|matches| {
        let cli = Cli::from_arg_matches(&matches)?;
        Ok((cli, matches))
    });
    let (cli, matches) = match parsed {
        Ok(parsed) => parsed,
        Err(error) => {
            let text = error.render();
            if error.use_stderr() { write!(err, "{text}") } else { write!(out, "{text}") }?;
            return Ok(u8::try_from(error.exit_code()).unwrap_or(2));
        }
    };
    let Some(options) = cli.command.options() else {
        return writeln!(out, "concertina {}", env!("CARGO_PKG_VERSION")).map(|()| 0);
    };
    let matches = matches.subcommand().map(|(_, matches)| matches);
    let config = options.resolve(matches);
    match (cli.command, config) {
        (Command::Check(_), Ok(config)) => check(&config, hooks, out),
        (Command::Check(options), Err(mut faults)) => {
            // The models are looked at all the same, by the defaults, so that one run names everything.
            if let Ok(config) = options.resolve_repository(matches) {
                faults.extend(model_faults(&config, hooks));
            }
            concluded(report::faults(&faults, out), &faults)
        }
        (_, Err(faults)) => concluded(report::faults(&faults, err), &faults),
        (Command::Models(_), Ok(config)) => models(&config, hooks, out),
        (Command::Healthcheck(_), Ok(config)) => match health::check(&config) {
            Ok(()) => Ok(0),
            Err(reason) => writeln!(err, "{reason}").map(|()| 1),
        },
        (Command::Add(options), Ok(config)) => add::add(&options, &config, hooks, (out, err)),
        (Command::Profile(options), Ok(config)) => {
            log::start(&config.log);
            profile::profile(&options, &config, hooks.profile, (out, err))
        }
        (Command::Optimize(options), Ok(config)) => {
            log::start(&config.log);
            optimize::optimize(&options, &config, hooks.compare, (out, err))
        }
        (Command::Simulate(options), Ok(config)) => simulate::simulate(&options, &config, (out, err)),
        (_, Ok(config)) => {
            log::start(&config.log);
            let result = (hooks.serve)(config);
            Ok(result.map_or_else(
                |error| {
                    tracing::error!("{error:#}");
                    1
                },
                |()| 0,
            ))
        }
    }
}

fn check(config: &Config, hooks: Hooks<'_>, out: &mut dyn Write) -> io::Result<u8> {
    // Before anything is written: whoever reads it may go, and the exit code must still be right.
    let faults = model_faults(config, hooks);
    let written = writeln!(out, "{}", config.render()).and_then(|()| report::faults(&faults, out));
    concluded(written, &faults)
}

/// The exit code, also if nobody reads the rest of what is said.
fn concluded(written: io::Result<()>, faults: &[String]) -> io::Result<u8> {
    match written {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error),
        _ => Ok(u8::from(!faults.is_empty())),
    }
}

/// Everything that is wrong with the models of the repository.
fn model_faults(config: &Config, hooks: Hooks<'_>) -> Vec<String> {
    let scan = scan(&config.models.path, config);
    let mut faults: Vec<String> = scan.faults.iter().map(ToString::to_string).collect();
    for (_, inspected) in inspect(config, &scan, hooks, &mut faults) {
        faults.extend(inspected.err().unwrap_or_default());
    }
    faults
}

fn models(config: &Config, hooks: Hooks<'_>, out: &mut dyn Write) -> io::Result<u8> {
    let scan = scan(&config.models.path, config);
    let mut faults: Vec<String> = scan.faults.iter().map(ToString::to_string).collect();
    let mut known = Vec::new();
    for (candidate, inspected) in inspect(config, &scan, hooks, &mut faults) {
        match inspected {
            Ok(inspected) => known.push((candidate, inspected)),
            Err(found) => faults.extend(found),
        }
    }
    // What is not served is not listed; its faults are.
    known.retain(|(candidate, _)| scan.candidates.contains(candidate));
    let mut write = || {
        for (candidate, (graph, derived)) in &known {
            report::model(candidate, graph, derived, out)?;
        }
        if scan.candidates.is_empty() && faults.is_empty() {
            writeln!(out, "no models in {}", config.models.path.display())?;
        }
        report::faults(&faults, out)
    };
    concluded(write(), &faults)
}

/// What a model is, or everything that is wrong with it, each naming its file.
type Inspected = Result<(Graph, Derived), Vec<String>>;

/// Looks into everything that was found. Without the library that is one fault and not one for each model.
fn inspect<'a>(
    config: &Config,
    scan: &'a Scan,
    hooks: Hooks<'_>,
    faults: &mut Vec<String>,
) -> Vec<(&'a Candidate, Inspected)> {
    let library = config.runtime.library.as_deref();
    let mut candidates = scan.candidates.iter().chain(&scan.suspects).peekable();
    if candidates.peek().is_none() {
        return Vec::new();
    }
    if let Err(fault) = (hooks.library)(library) {
        faults.push(fault);
        return Vec::new();
    }
    let look = |candidate: &Candidate| {
        let named = |fault: String| format!("{}: {fault}", candidate.file.display());
        let graph = (hooks.describe)(library, &candidate.file).map_err(|fault| vec![named(fault)])?;
        let derived = derive(&candidate.name, &graph, &candidate.settings);
        let derived = derived.map_err(|faults| faults.into_iter().map(named).collect::<Vec<_>>())?;
        Ok((graph, derived))
    };
    candidates.map(|candidate| (candidate, look(candidate))).collect()
}

#[cfg(test)]
mod tests;
