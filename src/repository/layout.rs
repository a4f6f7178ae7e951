//! The layouts of a repository: where models and their versions lie.

use super::Fault;
use crate::model::check_name;
use crate::model::settings::VersionPolicy;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The file that holds a model.
pub(super) const MODEL: &str = "model.onnx";
/// The file that holds its settings.
const SETTINGS: &str = "model.toml";
/// What a model's folder should hold.
const EXPECTED: &str = "expected VERSION/model.onnx (VERSION a positive number) or model.onnx";

/// A model with the files of all its versions.
pub(super) struct Found {
    pub(super) name: String,
    /// Its folder or file.
    pub(super) path: PathBuf,
    /// Its model.toml, if there is one.
    pub(super) settings: Option<PathBuf>,
    pub(super) versions: BTreeMap<u64, PathBuf>,
    /// Whether a fault of the folder as a whole keeps it from being served.
    pub(super) refused: bool,
}

/// The models at `path`. `name` is what a person calls the model if `path` is one model's own folder or file.
pub(super) fn find(path: &Path, name: Option<&str>, faults: &mut Vec<Fault>) -> Vec<Found> {
    if path.is_file() && is_onnx(path) {
        let named = name.map(str::to_owned).or_else(|| stem(path));
        return file(path, named.unwrap_or_default(), faults).into_iter().collect();
    }
    let entries = match list(path) {
        Ok(entries) => entries,
        Err(message) => {
            faults.push(Fault { model: name.map(str::to_owned), version: None, path: path.to_owned(), message });
            return Vec::new();
        }
    };
    if name.is_some() || is_one_model(&entries) {
        for inner in entries.iter().filter(|entry| entry.is_dir() && version(entry).is_none() && holds_model(entry)) {
            let message =
                format!("not served, as {} is one model's own folder: move {MODEL} out of it", path.display());
            faults.push(Fault { model: None, version: None, path: inner.clone(), message });
        }
        // "." and "models/.." have no name of their own.
        let own = || fs::canonicalize(path).ok().as_deref().and_then(file_name);
        let named = name.map(str::to_owned).or_else(own).unwrap_or_default();
        return folder(path, named, faults).into_iter().collect();
    }
    let found = entries.iter().filter_map(|entry| {
        if entry.is_dir() {
            folder(entry, file_name(entry)?, faults)
        } else {
            is_onnx(entry).then(|| stem(entry)).flatten().and_then(|name| file(entry, name, faults))
        }
    });
    let found = found.collect();
    without_doubles(found, faults)
}

/// The versions that a policy picks, and those that it names and that are not there.
pub(super) fn pick(policy: &VersionPolicy, versions: &BTreeMap<u64, PathBuf>) -> (Vec<(u64, PathBuf)>, Vec<u64>) {
    let all = versions.iter().map(|(version, file)| (*version, file.clone()));
    match policy {
        VersionPolicy::All => (all.collect(), Vec::new()),
        VersionPolicy::Latest { count } => (all.rev().take(*count).collect(), Vec::new()),
        VersionPolicy::Specific(wanted) => {
            let missing = wanted.iter().filter(|version| !versions.contains_key(version)).copied().collect();
            (all.filter(|(version, _)| wanted.contains(version)).collect(), missing)
        }
    }
}

/// A model that is one file.
fn file(path: &Path, name: String, faults: &mut Vec<Fault>) -> Option<Found> {
    if let Err(allowed) = check_name(&name) {
        let message = format!("'{name}': expected {allowed}");
        faults.push(Fault { model: None, version: None, path: path.to_owned(), message });
        return None;
    }
    let versions = BTreeMap::from([(1, path.to_owned())]);
    Some(Found { name, path: path.to_owned(), settings: None, versions, refused: false })
}

/// A model that is a folder. A version that is not right, perhaps only not yet, does not keep the others from being served.
fn folder(path: &Path, name: String, faults: &mut Vec<Fault>) -> Option<Found> {
    let valid = check_name(&name);
    let model = valid.is_ok().then(|| name.clone());
    let before = faults.len();
    let mut fault = |version: Option<u64>, path: &Path, message: String| {
        faults.push(Fault { model: model.clone(), version, path: path.to_owned(), message });
    };
    if let Err(allowed) = &valid {
        fault(None, path, format!("'{name}': expected {allowed}"));
    }
    let entries = list(path).unwrap_or_else(|message| {
        fault(None, path, message);
        Vec::new()
    });
    let (mut versions, mut refused) = (BTreeMap::new(), false);
    for entry in entries.iter().filter(|entry| entry.is_dir()) {
        match version(entry) {
            None => {}
            Some(None) => {
                fault(None, entry, "a version is a positive number without leading zeros".to_owned());
                refused = true;
            }
            Some(Some(number)) => match list(entry).and_then(|inner| onnx_file(&inner)) {
                Ok(Some(file)) => {
                    versions.insert(number, file);
                }
                Ok(None) => fault(Some(number), entry, format!("expected {MODEL} in this version")),
                Err(message) => fault(Some(number), entry, message),
            },
        }
    }
    let has_folders = entries.iter().any(|entry| matches!(version(entry), Some(Some(_))));
    match onnx_file(&entries) {
        Ok(Some(file)) if !has_folders => {
            versions.insert(1, file);
        }
        Ok(Some(file)) => {
            fault(None, &file, "lies beside version folders: move it into one".to_owned());
            refused = true;
        }
        Err(message) if !has_folders => fault(None, path, message),
        Ok(None) | Err(_) => {}
    }
    if faults.len() == before && versions.is_empty() {
        let message = format!("no model in this folder: {EXPECTED}");
        faults.push(Fault { model, version: None, path: path.to_owned(), message });
    }
    let settings = entries.iter().find(|entry| file_name(entry).as_deref() == Some(SETTINGS)).cloned();
    valid.is_ok().then(|| Found { name, path: path.to_owned(), settings, versions, refused })
}

/// The names that are given twice, as a folder and as a file, are served as neither.
fn without_doubles(found: Vec<Found>, faults: &mut Vec<Fault>) -> Vec<Found> {
    let mut by_name: BTreeMap<String, Vec<Found>> = BTreeMap::new();
    for model in found {
        by_name.entry(model.name.clone()).or_default().push(model);
    }
    let mut single = Vec::new();
    for (name, mut models) in by_name {
        if models.len() == 1 {
            single.append(&mut models);
        } else {
            for model in models {
                let message = format!("'{name}' is there twice, as a folder and as a file: keep one");
                faults.push(Fault { model: Some(name.clone()), version: None, path: model.path, message });
            }
        }
    }
    single
}

/// The one .onnx file among these: `model.onnx`, or the only one there is.
fn onnx_file(entries: &[PathBuf]) -> Result<Option<PathBuf>, String> {
    let files: Vec<&PathBuf> = entries.iter().filter(|entry| is_onnx(entry) && entry.is_file()).collect();
    if let Some(model) = files.iter().find(|file| file_name(file).as_deref() == Some(MODEL)) {
        return Ok(Some((*model).clone()));
    }
    match files.as_slice() {
        [] => Ok(None),
        [only] => Ok(Some((*only).clone())),
        several => {
            let names: Vec<String> = several.iter().filter_map(|file| file_name(file)).collect();
            Err(format!("several .onnx files ({}): call the one to serve {MODEL}", names.join(", ")))
        }
    }
}

/// Whether a folder with these entries is one model's own, as KServe mounts it, and not a repository.
fn is_one_model(entries: &[PathBuf]) -> bool {
    entries.iter().any(|entry| {
        let name = file_name(entry);
        let file = entry.is_file() && matches!(name.as_deref(), Some(MODEL | SETTINGS));
        file || (matches!(version(entry), Some(Some(_))) && holds_model(entry))
    })
}

/// Whether a folder holds a model, directly or in a version.
fn holds_model(folder: &Path) -> bool {
    let holds = |folder: &Path| folder.join(MODEL).is_file();
    let inner = || list(folder).unwrap_or_default();
    holds(folder) || inner().iter().any(|entry| version(entry).is_some() && holds(entry))
}

/// The version that a folder's name says: `None` if it is no number, `Some(None)` if it is one that no version may have.
fn version(entry: &Path) -> Option<Option<u64>> {
    let name = file_name(entry)?;
    if !entry.is_dir() || !name.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    // The protocol's clients read versions as signed numbers.
    Some(name.parse().ok().filter(|version| *version <= i64::MAX as u64 && !name.starts_with('0')))
}

/// What may matter in a folder, by name: no dot files (Kubernetes mounts have some), no folders of Python or file systems.
fn list(folder: &Path) -> Result<Vec<PathBuf>, String> {
    let cannot = |error: std::io::Error| format!("cannot be read: {error}");
    let mut entries = Vec::new();
    for entry in fs::read_dir(folder).map_err(cannot)? {
        let path = entry.map_err(cannot)?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !name.starts_with('.') && !name.starts_with("__") && name != "lost+found" {
            entries.push(path);
        }
    }
    entries.sort();
    Ok(entries)
}

fn is_onnx(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "onnx")
}

/// The last part of a path. What is not Unicode shows as `?` and is refused as a name.
fn file_name(path: &Path) -> Option<String> {
    path.file_name().map(|name| name.to_string_lossy().replace(char::REPLACEMENT_CHARACTER, "?"))
}

fn stem(path: &Path) -> Option<String> {
    path.file_stem().map(|name| name.to_string_lossy().replace(char::REPLACEMENT_CHARACTER, "?"))
}
