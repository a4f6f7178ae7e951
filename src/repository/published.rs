//! What the world is told of the repository.

use super::changes::Key;
use super::{Fault, Scan};
use crate::model::{ModelState, Table};
use std::collections::BTreeMap;
use std::path::Path;

/// The table of these states and of what the scan found wrong. The server is not ready because of those faults that are in
/// `counted`.
pub(super) fn table(scan: &Scan, counted: &[Fault], states: BTreeMap<Key, ModelState>) -> Table {
    let mut table = Table { scanned: true, ..Table::default() };
    for ((name, version), state) in states {
        table.models.entry(name).or_default().insert(version, state);
    }
    for fault in &scan.faults {
        let (reason, failed) = (for_clients(&fault.message, &fault.path), counted.contains(fault));
        let Some(name) = &fault.model else {
            table.fault = table.fault.or(failed.then_some(reason));
            continue;
        };
        let state = ModelState::Unavailable { reason, failed };
        let suspects = scan.suspects.iter().filter(|suspect| suspect.name == *name).map(|suspect| suspect.version);
        let concerned: Vec<u64> = fault.version.map_or_else(|| suspects.collect(), |version| vec![version]);
        let versions = table.models.entry(name.clone()).or_default();
        // Where no version is known there is one all the same: clients must see that the model failed.
        let first = (concerned.is_empty() && versions.is_empty()).then_some(1);
        for version in concerned.into_iter().chain(first) {
            versions.entry(version).or_insert_with(|| state.clone());
        }
    }
    table
}

/// A reason that clients may read: where things lie on this machine is none of their business.
pub(super) fn for_clients(reason: &str, file: &Path) -> String {
    let name = file.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    let text = reason.replace(&file.display().to_string(), &name);
    let folders = crate::text::folders(file);
    // A path of one part, such as ".", tells nothing, and would be found where it is not meant.
    let folders = folders.iter().filter(|folder| folder.components().nth(1).is_some());
    folders.fold(text, |text, folder| text.replace(&format!("{}/", folder.display()), ""))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::repository::scan;

    #[test]
    fn faults_are_announced_by_the_version_that_they_concern() {
        let root = tempfile::tempdir().expect("a temporary folder");
        for (file, text) in [
            ("copied/1/model.onnx", ""),
            ("copied/2/model.onnx.data", ""),
            ("settings/3/model.onnx", ""),
            ("settings/model.toml", "speed = 1"),
            ("empty/readme.txt", ""),
        ] {
            let path = root.path().join(file);
            std::fs::create_dir_all(path.parent().expect(file)).expect(file);
            std::fs::write(path, text).expect(file);
        }
        let scan = scan(root.path(), &Config::default());
        let states = scan.candidates.iter().map(|found| ((found.name.clone(), found.version), ModelState::Loading));
        let table = table(&scan, &scan.faults, states.collect());
        let seen = |name: &str| -> Vec<(u64, bool)> {
            let state = |(version, state): (&u64, &ModelState)| (*version, matches!(state, ModelState::Loading));
            table.models[name].iter().map(state).collect()
        };
        assert_eq!(seen("copied"), [(1, true), (2, false)]);
        assert_eq!(seen("settings"), [(3, false)]);
        assert_eq!(seen("empty"), [(1, false)]);
    }

    #[test]
    fn clients_see_no_paths() {
        for (file, reason, expected) in [
            ("/srv/m/1/model.onnx", "Load model from /srv/m/1/model.onnx failed", "Load model from model.onnx failed"),
            ("/srv/m/1/model.onnx", "/srv/m/1/tokenizer.json: broken", "tokenizer.json: broken"),
            ("/srv/m/1/model.onnx", "[text]: /srv/m/tokenizer.json: broken", "[text]: tokenizer.json: broken"),
            ("/srv/m/1/model.onnx", "/srv/m/1_Pooling/config.json: broken", "1_Pooling/config.json: broken"),
            ("/srv/m/model.onnx", "a /srv/m/config.json, b /srv/m/more/w.bin", "a config.json, b more/w.bin"),
            ("models/m/1/model.onnx", "models/m/tokenizer.json: broken", "tokenizer.json: broken"),
            ("./model.onnx", "./model.onnx: ../ and / stay", "model.onnx: ../ and / stay"),
            ("model.onnx", "model.onnx: / stays", "model.onnx: / stays"),
        ] {
            assert_eq!(for_clients(reason, Path::new(file)), expected);
        }
    }
}
