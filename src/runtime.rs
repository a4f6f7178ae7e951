//! (being written)

use crate::model::Graph;
use std::path::Path;

/// (being written)
pub fn prepare_process() {}

/// (being written)
///
/// # Errors
/// Always, until it is written.
pub fn describe(library: Option<&Path>, file: &Path) -> Result<Graph, String> {
    let _ = (library, file);
    Err("this build cannot read models yet".to_owned())
}
