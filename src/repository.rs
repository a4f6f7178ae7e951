//! The model repository: which models lie in a folder, in which versions, with which settings.
//!
//! [`scan`] only looks at folders and reads model.toml files; it opens no model. A fault of one model never hides another.

mod layout;
mod layouts;
pub mod load;
pub mod manager;
pub mod measure;
mod recall;
pub mod store;

pub use layouts::Layout;

use crate::config::Config;
use crate::model::Settings;
use std::fmt;
use std::path::{Path, PathBuf};

/// What a folder holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scan {
    /// The versions to serve, in order of name and version.
    pub candidates: Vec<Candidate>,
    /// What is wrong, in order of path.
    pub faults: Vec<Fault>,
}

/// One version of a model that may be loaded.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The name of its folder or file.
    pub name: String,
    /// A positive number; 1 for a model without version folders.
    pub version: u64,
    /// The ONNX file.
    pub file: PathBuf,
    /// Its model.toml over the server's defaults.
    pub settings: Settings,
}

/// Something in the repository that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The model that is not served because of it; `None` if it concerns no one model.
    pub model: Option<String>,
    /// Where it is.
    pub path: PathBuf,
    /// What is wrong and what was expected.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.message)
    }
}

/// Looks through a repository. `path` is a folder of models (`NAME/VERSION/model.onnx`, `NAME/model.onnx` or `NAME.onnx`,
/// each folder with an optional model.toml), one model's own folder, or an .onnx file.
#[must_use]
pub fn scan(path: &Path, config: &Config) -> Scan {
    let mut scan = Scan::default();
    for found in layout::find(path, config.models.name.as_deref(), &mut scan.faults) {
        add(found, config, &mut scan);
    }
    scan.candidates.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
    scan.faults.sort_by(|a, b| a.path.cmp(&b.path));
    scan
}

/// Reads the settings of a model and picks its versions.
fn add(found: layout::Found, config: &Config, scan: &mut Scan) {
    let layout::Found { name, path, settings, versions } = found;
    let text = match settings.as_ref().map(std::fs::read_to_string).transpose() {
        Ok(text) => text.unwrap_or_default(),
        Err(error) => {
            let path = settings.unwrap_or(path);
            scan.faults.push(Fault { model: Some(name), path, message: format!("cannot be read: {error}") });
            return;
        }
    };
    let file = settings.unwrap_or_else(|| path.clone());
    match config.settings(&file.display().to_string(), &text) {
        Err(faults) => {
            let fault = |message| Fault { model: Some(name.clone()), path: file.clone(), message };
            scan.faults.extend(faults.into_iter().map(fault));
        }
        Ok(settings) => match layout::pick(&settings.versions, &versions) {
            Err(missing) => {
                let message = format!("versions.versions: there is no version {missing}");
                scan.faults.push(Fault { model: Some(name), path: file, message });
            }
            Ok(picked) => scan.candidates.extend(picked.into_iter().map(|(version, file)| Candidate {
                name: name.clone(),
                version,
                file,
                settings: settings.clone(),
            })),
        },
    }
}

#[cfg(test)]
mod tests;
