//! `concertina profile`: one model, measured.

use super::{Measure, Options, report};
use crate::config::Config;
use crate::repository::{Candidate, scan};
use crate::units::Rows;
use clap::Args;
use std::io::{self, Write};
use std::path::PathBuf;

/// What `profile` takes.
#[derive(Debug, Args)]
pub(super) struct ProfileOptions {
    /// The model, and its version if it is not the newest that is served
    #[arg(value_name = "MODEL[/VERSION]")]
    model: String,
    /// Print one JSON object in place of the table
    #[arg(long)]
    json: bool,
    /// Draw rows per second and bytes over rows into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// The batch sizes to measure, such as 1,2,4,12, in place of those that the server would choose
    #[arg(long, value_name = "ROWS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=65_536))]
    rows: Vec<Rows>,
    #[command(flatten)]
    pub(super) options: Options,
}

/// Measures the model and prints what was found; the code is 1 if it cannot be.
pub(super) fn profile(
    options: &ProfileOptions,
    config: &Config,
    measure: Measure<'_>,
    (out, err): (&mut dyn Write, &mut dyn Write),
) -> io::Result<u8> {
    let mut rows = options.rows.clone();
    rows.sort_unstable();
    rows.dedup();
    let measured = find(&options.model, config).and_then(|candidate| {
        measure(config, &candidate, &rows).map_err(|fault| vec![format!("{}: {fault}", candidate.file.display())])
    });
    let profile = match measured {
        Ok(profile) => profile,
        Err(faults) => {
            report::faults(&faults, err)?;
            return Ok(1);
        }
    };
    if options.json {
        writeln!(out, "{}", profile.json())?;
    } else {
        write!(out, "{}", profile.text())?;
    }
    if let Some(path) = &options.svg
        && let Err(error) = std::fs::write(path, profile.svg())
    {
        report::faults(&[format!("{}: cannot be written: {error}", path.display())], err)?;
        return Ok(1);
    }
    Ok(0)
}

/// The candidate that a person means, or why there is none.
pub(super) fn find(wanted: &str, config: &Config) -> Result<Candidate, Vec<String>> {
    let scan = scan(&config.models.path, config);
    let (name, version) = match wanted.split_once('/') {
        None => (wanted, None),
        Some((name, version)) => match version.parse::<u64>() {
            Ok(number) => (name, Some(number)),
            Err(_) => return Err(vec![format!("'{wanted}': expected MODEL or MODEL/VERSION, such as bert/2")]),
        },
    };
    let (named, others): (Vec<_>, Vec<_>) = scan.candidates.into_iter().partition(|candidate| candidate.name == name);
    let known: Vec<String> = named.iter().map(|candidate| candidate.version.to_string()).collect();
    // The newest comes last.
    let found = named.into_iter().rfind(|candidate| version.is_none_or(|version| candidate.version == version));
    found.ok_or_else(|| {
        let faults: Vec<String> = scan
            .faults
            .iter()
            .filter(|fault| fault.model.as_deref().is_none_or(|model| model == name))
            .map(ToString::to_string)
            .collect();
        let missing = match version {
            Some(version) if !known.is_empty() => {
                format!("'{name}' has no version {version} that is served; there are: {}", known.join(", "))
            }
            _ => {
                let mut names: Vec<String> = others.into_iter().map(|candidate| candidate.name).collect();
                names.dedup();
                let there = if names.is_empty() { "none".to_owned() } else { names.join(", ") };
                format!("no model '{name}' in {}; there are: {there}", config.models.path.display())
            }
        };
        if faults.is_empty() { vec![missing] } else { faults }
    })
}
