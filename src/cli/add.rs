//! `concertina add`: a folder as Hugging Face's hub has it, into the repository.

use super::{Hooks, Options, report};
use crate::config::Config;
use crate::model::{Settings, derive};
use crate::repository::import::Import;
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;

/// What `add` takes.
#[derive(Debug, Args)]
pub(super) struct AddOptions {
    /// The folder: model.onnx or onnx/model.onnx, with tokenizer.json and what else is there
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// What the model is to be called; without it, as the folder
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// The ONNX file to take, relative to the folder
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Copies the model into the repository and prints what was found and chosen; the code is 1 if it cannot be.
pub(super) fn add(
    options: &AddOptions,
    config: &Config,
    hooks: Hooks<'_>,
    (out, err): (&mut dyn Write, &mut dyn Write),
) -> io::Result<u8> {
    match import(options, config, hooks) {
        Ok(lines) => {
            lines.iter().try_for_each(|line| writeln!(out, "{line}"))?;
            Ok(0)
        }
        Err(faults) => {
            report::faults(&faults, err)?;
            Ok(1)
        }
    }
}

/// What was done, a line each.
fn import(options: &AddOptions, config: &Config, hooks: Hooks<'_>) -> Result<Vec<String>, Vec<String>> {
    let one = |fault: String| vec![fault];
    let import = Import::find(&options.folder, options.file.as_deref(), options.name.as_deref()).map_err(one)?;
    let library = config.runtime.library.as_deref();
    (hooks.library)(library).map_err(one)?;
    let named = |fault: String| format!("{}: {fault}", import.model.display());
    let graph = (hooks.describe)(library, &import.model).map_err(named).map_err(one)?;
    let derived = derive(&import.name, &graph, &Settings::default());
    let derived = derived.map_err(|faults| faults.into_iter().map(named).collect::<Vec<_>>())?;
    let written = import.describe(&graph, &derived).map_err(one)?;
    let place = import.place(&config.models.path, &written.toml).map_err(one)?;
    let mut lines = vec![format!("{} is now {}", import.model.display(), place.join("1/model.onnx").display())];
    lines.extend(written.choices.into_iter().map(|choice| format!("  {choice}")));
    lines.push(format!("  all of this stands in {}", place.join("model.toml").display()));
    Ok(lines)
}
