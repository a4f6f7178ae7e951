//! The profile as a table.

use super::{Line, MOST_ROWS, Padding, Profile};
use crate::units::ByteSize;
use std::fmt::Write;

const HEADINGS: [&str; 8] = ["rows", "dims", "predicted", "observed", "error", "seconds", "device", "rows/s"];
/// The column that is there only if a device has timed something.
const DEVICE: usize = 6;

pub(super) fn render(profile: &Profile) -> String {
    let mut out = format!("{}, version {}\n", profile.model, profile.version);
    let mut line = |name: &str, text: String| {
        // Writing to a text does not fail.
        let _ = writeln!(out, "  {name:<8} {text}");
    };
    match (profile.batch_axis, &profile.unbatched_reason) {
        (Some(axis), _) => line("batch", format!("axis {axis}")),
        (None, reason) => line("batch", format!("none: {}", reason.as_deref().unwrap_or("unknown"))),
    }
    line("layout", format!("{} with {} each", count(profile.instances, "instance"), count(profile.threads, "thread")));
    let (weights, file) = (ByteSize(profile.weights_bytes), ByteSize(profile.file_bytes));
    line("weights", format!("{weights} in the ledger, of a file of {file}"));
    line("knee", knee(profile));
    line("memory", memory(profile));
    if let Some(Padding { dims, difference }) = &profile.padding {
        for (name, lengths) in dims {
            let lengths: Vec<String> = lengths.iter().map(ToString::to_string).collect();
            line(
                "padded",
                format!(
                    "{name} to {}: changes answers by at most {difference:.1e} of the largest value",
                    lengths.join(" ")
                ),
            );
        }
    }
    if !profile.recorded.is_empty() || profile.unrecorded.is_some() {
        line("recorded", recorded(profile));
    }
    if let Some(reason) = &profile.cut_short {
        line("stopped", reason.clone());
    }
    out.push('\n');
    out.push_str(&table(profile));
    out
}

fn count(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn recorded(profile: &Profile) -> String {
    let sizes: Vec<String> = profile.recorded.iter().map(ToString::to_string).collect();
    let sizes = if sizes.is_empty() { "none".to_owned() } else { format!("{} rows", sizes.join(", ")) };
    profile.unrecorded.as_ref().map_or_else(|| sizes.clone(), |reason| format!("{sizes} ({reason})"))
}

fn knee(profile: &Profile) -> String {
    let within = format!("within {}% of the best rows/s", 100.0 * profile.knee_tolerance);
    match profile.knee {
        Some(knee) => format!("{} ({within})", rows(knee)),
        None => format!("not known: rows/s still rise at the largest size, or too few were measured ({within})"),
    }
}

fn memory(profile: &Profile) -> String {
    let (free, most) = (ByteSize(profile.free_bytes), profile.max_batch_size);
    let fits = match profile.fits_rows {
        0 => "not enough for one row".to_owned(),
        MOST_ROWS => format!("enough for more than {MOST_ROWS} rows in one batch"),
        fits => format!("enough for {} in one batch", rows(fits)),
    };
    format!("{free} free for runs now: {fits}; the largest that was measured or set is {most}")
}

fn rows(rows: u32) -> String {
    count(rows as usize, "row")
}

fn table(profile: &Profile) -> String {
    let dims = profile.dims.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
    let mut cells = vec![HEADINGS.map(str::to_owned)];
    cells.extend(profile.rows.iter().map(|line| row(line, &dims)));
    let timed = profile.rows.iter().any(|line| line.device_seconds.is_some());
    let columns: Vec<usize> = (0..HEADINGS.len()).filter(|&at| timed || at != DEVICE).collect();
    let width = |at: usize| cells.iter().map(|row| row[at].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = columns.iter().map(|&at| width(at)).collect();
    let mut out = String::new();
    for (index, row) in cells.iter().enumerate() {
        let padded = columns.iter().zip(&widths).map(|(&at, &width)| format!("{:>width$}", row[at]));
        out.push_str(&padded.collect::<Vec<_>>().join("  "));
        let line = index.checked_sub(1).and_then(|index| profile.rows.get(index));
        if line.is_some_and(|line| profile.knee == Some(line.rows)) {
            out.push_str("  <- knee");
        }
        out.push('\n');
    }
    if profile.rows.iter().any(|line| line.fitted) {
        out.push_str("* the predictions are the scheduler's when it has seen these sizes only\n");
    }
    out
}

fn row(line: &Line, dims: &str) -> [String; 8] {
    [
        line.rows.to_string(),
        dims.to_owned(),
        format!("{}{}", ByteSize(line.predicted_bytes), if line.fitted { "*" } else { " " }),
        ByteSize(line.observed_bytes).to_string(),
        format!("{:+.2}%", line.error_percent),
        format!("{:.6}", line.seconds),
        line.device_seconds.map(|seconds| format!("{seconds:.6}")).unwrap_or_default(),
        format!("{:.1}", line.rows_per_second),
    ]
}
