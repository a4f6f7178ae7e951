//! What `check` and `models` print.

use crate::model::pad::PaddedDim;
use crate::model::settings::VersionPolicy;
use crate::model::{Derived, Dim, Graph, Settings, TensorSpec};
use crate::repository::Candidate;
use std::fmt::Display;
use std::io::{self, Write};

/// Every fault on a line of its own, then how many there are.
pub(super) fn faults(faults: &[String], out: &mut dyn Write) -> io::Result<()> {
    for fault in faults {
        writeln!(out, "error: {}", fault.replace('\n', "\n       "))?;
    }
    match faults.len() {
        0 => Ok(()),
        1 => writeln!(out, "1 error"),
        count => writeln!(out, "{count} errors"),
    }
}

/// One model with everything that is known before it is loaded.
pub(super) fn model(candidate: &Candidate, graph: &Graph, derived: &Derived, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "{}, version {}: {}", candidate.name, candidate.version, candidate.file.display())?;
    for (side, tensors) in [("input", &graph.inputs), ("output", &graph.outputs)] {
        for spec in tensors {
            writeln!(out, "  {side:<7} {}", tensor(spec))?;
        }
    }
    match (derived.batch_axis, &derived.unbatched_reason) {
        (Some(axis), _) if derived.unproven.is_empty() => writeln!(out, "  batch   axis {axis}")?,
        (Some(axis), _) => {
            writeln!(out, "  batch   axis {axis}, if runs while loading confirm it: {}", derived.unproven.join("; "))?;
        }
        (None, reason) => writeln!(out, "  batch   none: {}", reason.as_deref().unwrap_or("unknown"))?,
    }
    if let Some(plan) = &derived.padding {
        for PaddedDim { name, lengths } in &plan.dims {
            let lengths: Vec<String> = lengths.iter().map(ToString::to_string).collect();
            writeln!(out, "  padded  {name} to {}, if runs while loading confirm it", lengths.join(" "))?;
        }
    }
    for line in settings(&candidate.settings, derived) {
        writeln!(out, "  {line}")?;
    }
    Ok(())
}

fn tensor(spec: &TensorSpec) -> String {
    let dims: Vec<String> = spec
        .shape
        .iter()
        .map(|dim| match dim {
            Dim::Fixed(size) => size.to_string(),
            Dim::Symbol(name) => name.clone(),
            Dim::Any => "?".to_owned(),
        })
        .collect();
    format!("{} {} [{}]", spec.name, spec.datatype, dims.join(", "))
}

fn settings(settings: &Settings, derived: &Derived) -> Vec<String> {
    let time = |duration| humantime::format_duration(duration);
    let versions = match &settings.versions {
        VersionPolicy::Latest { count } => format!("the {count} latest"),
        VersionPolicy::Specific(versions) => versions.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        VersionPolicy::All => "all".to_owned(),
    };
    vec![
        format!(
            "runs    max_batch_size {}, instances {}, intra_op_threads {}, pipeline {}, knee_tolerance {}",
            auto(derived.max_batch_size),
            auto(settings.instances),
            auto(settings.intra_op_threads),
            settings.pipeline,
            settings.knee_tolerance
        ),
        format!(
            "queue   max_queue_rows {}, max_queue_bytes {}, max_queue_delay {}, max_gather_delay {}, default_timeout {}, priority {} of {}",
            settings.max_queue_rows,
            settings.max_queue_bytes,
            time(settings.max_queue_delay),
            time(settings.max_gather_delay),
            time(settings.default_timeout),
            settings.default_priority,
            settings.priority_levels
        ),
        format!("warmup  at most {}, other dimensions {}", time(settings.warmup.seconds), settings.warmup.default_dim),
        format!("serves  versions: {versions}"),
    ]
}

fn auto(value: Option<impl Display>) -> String {
    value.map_or_else(|| "auto".to_owned(), |value| value.to_string())
}
