//! The model repository: which models lie in a folder, in which versions, with which settings.
//!
//! [`scan`] only looks at folders and reads model.toml files; it opens no model. A fault of one model never hides another.

mod changes;
pub mod control;
pub mod devices;
pub mod import;
mod labels;
mod layout;
mod layouts;
pub mod load;
pub mod manager;
pub mod measure;
mod published;
mod recall;
mod reloads;
mod room;
pub mod store;
mod texts;

pub use control::{Controller, Refused};
pub use layouts::Layout;

use crate::config::Config;
use crate::model::Settings;
use crate::runtime::external;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

/// What a folder holds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scan {
    /// The versions to serve, in order of name and version.
    pub candidates: Vec<Candidate>,
    /// Versions that would be served but for a fault elsewhere in their folder: not to be loaded, but to be looked into by
    /// whoever wants to name every fault. In the same order.
    pub suspects: Vec<Candidate>,
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

impl Candidate {
    /// Whether some of its weights are in other files, which are found from the folder of its own only.
    #[must_use]
    pub fn has_external_data(&self) -> bool {
        !external::files(&self.file).is_empty()
    }
}

/// Something in the repository that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The model that is not served because of it; `None` if it concerns no one model.
    pub model: Option<String>,
    /// The version of it that is not served, if the others are.
    pub version: Option<u64>,
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
    scan_with(path, config, &Sent::default())
}

/// Keys of model.toml that requests to load models have sent, by model: they go over what the files say.
pub type Sent = BTreeMap<String, Vec<(String, toml::Value)>>;

/// As [`scan`], with such keys.
#[must_use]
pub fn scan_with(path: &Path, config: &Config, sent: &Sent) -> Scan {
    let mut scan = Scan::default();
    for found in layout::find(path, config.models.name.as_deref(), &mut scan.faults) {
        let sent = sent.get(&found.name).map_or(&[][..], Vec::as_slice);
        add(found, config, sent, &mut scan);
    }
    for candidates in [&mut scan.candidates, &mut scan.suspects] {
        candidates.sort_by(|a, b| (&a.name, a.version).cmp(&(&b.name, b.version)));
    }
    scan.faults.sort_by(|a, b| a.path.cmp(&b.path));
    scan
}

/// Reads the settings of a model and picks its versions. What is wrong keeps the rest of the model from being served, except
/// for versions that are not there.
fn add(found: layout::Found, config: &Config, sent: &[(String, toml::Value)], scan: &mut Scan) {
    let layout::Found { name, path, settings, versions, refused } = found;
    let fault =
        |version, path: &Path, message| Fault { model: Some(name.clone()), version, path: path.to_owned(), message };
    let file = settings.as_deref().unwrap_or(&path);
    let text = match settings.as_ref().map(std::fs::read_to_string).transpose() {
        Ok(text) => text.unwrap_or_default(),
        Err(error) => return scan.faults.push(fault(None, file, format!("cannot be read: {error}"))),
    };
    let (mut readable, mut faults) = config.settings_with(&file.display().to_string(), &text, sent);
    if let Some(settings) = &mut readable {
        faults.extend(labels::read(&path, settings));
    }
    let served = !refused && faults.is_empty();
    scan.faults.extend(faults.into_iter().map(|message| fault(None, file, message)));
    // By settings that say nothing, a model still shows what is wrong with its graph.
    let settings = readable.unwrap_or_else(|| config.model.clone());
    let (picked, missing) = layout::pick(&settings.versions, &versions);
    for version in missing {
        // A folder of this version without a model in it has been named already.
        if !scan.faults.iter().any(|known| known.model.as_ref() == Some(&name) && known.version == Some(version)) {
            scan.faults.push(fault(Some(version), file, format!("versions.versions: there is no version {version}")));
        }
    }
    let candidates = if served { &mut scan.candidates } else { &mut scan.suspects };
    candidates.extend(picked.into_iter().map(|(version, file)| Candidate {
        name: name.clone(),
        version,
        file,
        settings: settings.clone(),
    }));
}

#[cfg(test)]
mod tests;
