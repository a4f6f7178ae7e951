//! The files that name the elements of outputs.

use crate::model::Settings;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// A longer file is not a list of labels.
const MAX_BYTES: u64 = 16 << 20;

/// Reads the files that `[labels]` names, which lie in the model's folder. Returns what is wrong with them.
pub(super) fn read(folder: &Path, settings: &mut Settings) -> Vec<String> {
    let mut faults = Vec::new();
    for (output, labels) in &mut settings.labels {
        match text(&folder.join(&labels.file)) {
            Ok(text) => labels.lines = text.lines().map(|line| line.trim_end().to_owned()).collect(),
            Err(reason) => faults.push(format!("labels.{output} = \"{}\": {reason}", labels.file)),
        }
    }
    faults
}

fn text(path: &Path) -> Result<String, String> {
    let cannot = |error: std::io::Error| format!("cannot be read: {error}");
    let mut text = String::new();
    let read = File::open(path).map_err(cannot)?.take(MAX_BYTES + 1).read_to_string(&mut text).map_err(cannot)?;
    if read as u64 > MAX_BYTES { Err(format!("larger than {MAX_BYTES} bytes")) } else { Ok(text) }
}
