//! `concertina optimize`: another form of a model for faster kernels, written only if it answers alike.

use super::profile::find;
use super::{Compare, Options, report};
use crate::config::Config;
use crate::optimize::{Rewritten, fuse_attention};
use crate::profile::Comparison;
use crate::repository::Candidate;
use clap::Args;
use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// What `optimize` takes.
#[derive(Debug, Args)]
pub(super) struct OptimizeOptions {
    /// The model, and its version if it is not the newest that is served
    #[arg(value_name = "MODEL[/VERSION]")]
    model: String,
    /// The ONNX file to write, which must not be there
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// How much answers may differ, as a part of the largest value of their output
    #[arg(long, value_name = "PART", default_value_t = 1e-3, value_parser = part)]
    tolerance: f64,
    #[command(flatten)]
    pub(super) options: Options,
}

fn part(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|value| (0.0..=1.0).contains(value));
    value.ok_or_else(|| "expected a number from 0 to 1, such as 1e-3".to_owned())
}

/// Rewrites the model, compares its answers, and prints what came of it; the code is 1 if nothing is written.
pub(super) fn optimize(
    options: &OptimizeOptions,
    config: &Config,
    compare: Compare<'_>,
    (out, err): (&mut dyn Write, &mut dyn Write),
) -> io::Result<u8> {
    match find(&options.model, config).and_then(|model| write(options, config, compare, &model).map_err(|e| vec![e])) {
        Ok(lines) => lines.iter().try_for_each(|line| writeln!(out, "{line}")).map(|()| 0),
        Err(faults) => report::faults(&faults, err).map(|()| 1),
    }
}

/// What was done, a line each.
fn write(
    options: &OptimizeOptions,
    config: &Config,
    compare: Compare<'_>,
    model: &Candidate,
) -> Result<Vec<String>, String> {
    let target = options.out.as_path();
    free(target, model)?;
    let named = |error: io::Error| format!("{}: {error}", model.file.display());
    let rewritten = fuse_attention(&fs::read(&model.file).map_err(named)?);
    let mut rewritten = rewritten.map_err(|fault| format!("{}: {fault}", model.file.display()))?;
    if rewritten.fused == 0 {
        return Err(format!("{}: no attention was found: {}", model.file.display(), left(&rewritten)));
    }
    let unwritten = |error: io::Error| format!("{}: cannot be written: {error}", target.display());
    // Beside its place, so that weights in other files are found, and it gets there whole or not at all.
    // A server may run as somebody else: who may read it is for the umask to say, as of any file.
    let readable = Permissions::from_mode(0o666);
    let mut builder = tempfile::Builder::new();
    let mut draft = builder.suffix(".onnx").permissions(readable).tempfile_in(folder_of(target)).map_err(unwritten)?;
    // Not held beside both forms while they are loaded.
    draft.write_all(&std::mem::take(&mut rewritten.bytes)).map_err(unwritten)?;
    let other = Candidate { file: draft.path().to_owned(), ..model.clone() };
    let compared = compare(config, [model, &other])?;
    judge(&compared, options.tolerance)?;
    draft.persist_noclobber(target).map_err(|error| unwritten(error.error))?;
    Ok(lines(&rewritten, &compared, options))
}

/// The folder of a file, also of one that is named without.
fn folder_of(file: &Path) -> &Path {
    file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether a file may be written there.
fn free(target: &Path, model: &Candidate) -> Result<(), String> {
    if target.exists() {
        return Err(format!("{}: is there already; choose another --out", target.display()));
    }
    let folder = |path: &Path| folder_of(path).canonicalize().ok();
    if model.has_external_data() && folder(target) != folder(&model.file) {
        return Err(format!(
            "{}: has weights in other files, which are found from its own folder only: --out must be in that",
            model.file.display()
        ));
    }
    Ok(())
}

fn judge(compared: &Comparison, tolerance: f64) -> Result<(), String> {
    let Comparison { difference, .. } = *compared;
    if difference <= tolerance {
        return Ok(());
    }
    Err(format!(
        "nothing is written: answers differ by {difference:.1e} of the largest value, more than {tolerance:.0e}; if your users can \
         bear that, say so with --tolerance"
    ))
}

fn lines(rewritten: &Rewritten, compared: &Comparison, options: &OptimizeOptions) -> Vec<String> {
    let Comparison { difference, rows_per_second: [before, after] } = *compared;
    let mut lines = vec![format!(
        "{} of {} softmaxes were attention, which is one operator now",
        rewritten.fused,
        softmaxes(rewritten)
    )];
    if !rewritten.left.is_empty() {
        lines.push(format!("  others: {}", left(rewritten)));
    }
    lines.push(format!(
        "  answers differ by at most {difference:.1e} of the largest value (limit {:.0e})",
        options.tolerance
    ));
    lines.push(format!("  rows per second at the best batch size: {before:.0} before, {after:.0} now"));
    lines.push(format!(
        "  written to {}; it is served once it is model.onnx in a folder of a version",
        options.out.display()
    ));
    lines
}

fn softmaxes(rewritten: &Rewritten) -> usize {
    rewritten.fused + rewritten.left.values().sum::<usize>()
}

/// Why what is not rewritten is not.
fn left(rewritten: &Rewritten) -> String {
    if softmaxes(rewritten) == 0 {
        return "it has no Softmax at all".to_owned();
    }
    let reasons: Vec<String> = rewritten.left.iter().map(|(reason, count)| format!("{reason} ({count})")).collect();
    reasons.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_answers_alike_is_written() {
        for (difference, fits) in
            [(0.0, true), (1e-3, true), (1.1e-3, false), (f64::INFINITY, false), (f64::NAN, false)]
        {
            let judged = judge(&Comparison { difference, rows_per_second: [1.0, 2.0] }, 1e-3);
            assert_eq!(judged.is_ok(), fits, "{difference}: {judged:?}");
        }
        let said = judge(&Comparison { difference: 3.1e-3, rows_per_second: [1.0, 2.0] }, 1e-3).unwrap_err();
        assert!(said.contains("3.1e-3") && said.contains("--tolerance"), "{said}");
    }

    #[test]
    fn a_file_without_a_folder_lies_here() {
        assert_eq!(
            (folder_of(Path::new("a.onnx")), folder_of(Path::new("b/a.onnx"))),
            (Path::new("."), Path::new("b"))
        );
    }
}
