//! What has changed in the repository, and what to do about it. Pure, but for the look at the files.

use super::{Candidate, Scan};
use crate::model::Settings;
use crate::runtime::external;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

/// A model's name and one of its versions.
pub(super) type Key = (String, u64);

/// What a version is made of: if it differs, it is another one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Print {
    settings: Settings,
    /// The ONNX file, those that it names, and those that say how texts are treated.
    files: Vec<Stamp>,
}

/// A file as it is now: its path, device and inode, length, and the time of its last change.
pub(super) type Stamp = (PathBuf, [u64; 2], u64, [i64; 2]);

/// The stamp of a file that these are the data of.
pub(super) fn stamp(path: PathBuf, data: &fs::Metadata) -> Stamp {
    (path, [data.dev(), data.ino()], data.len(), [data.mtime(), data.mtime_nsec()])
}

/// The print of a candidate as its files are now.
pub(super) fn print(candidate: &Candidate) -> Print {
    let file = &candidate.file;
    let mut files: Vec<_> = std::iter::once(file.clone())
        .chain(external::files(file))
        .chain(crate::text::files(file))
        .filter_map(|path| {
            let data = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
            Some(stamp(path, &data))
        })
        .collect();
    files.sort();
    files.dedup();
    Print { settings: candidate.settings.clone(), files }
}

/// A look at the repository.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) scan: Scan,
    pub(super) prints: BTreeMap<Key, Print>,
}

impl Seen {
    pub(super) fn new(scan: Scan) -> Self {
        let prints = scan.candidates.iter().map(|candidate| (key(candidate), print(candidate))).collect();
        Self { scan, prints }
    }

    /// The versions of one model that should be served.
    pub(super) fn wanted(&self, model: &str) -> Vec<Candidate> {
        self.scan.candidates.iter().filter(|candidate| candidate.name == model).cloned().collect()
    }

    /// Whether something about the model is wrong, or about the repository as a whole: then what serves is left alone.
    fn is_doubtful(&self, model: &str) -> bool {
        self.scan.faults.iter().any(|fault| fault.model.as_deref().is_none_or(|name| name == model))
    }
}

pub(super) fn key(candidate: &Candidate) -> Key {
    (candidate.name.clone(), candidate.version)
}

/// What is known of a version that was tried.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Old {
    pub(super) print: Print,
    pub(super) serves: bool,
}

/// What is to be done about one model.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Change {
    /// It is new, or differs from what is known: bring what the repository wants.
    Bring(String),
    /// It has gone.
    Drop(String),
}

/// What is to be done, model by model; `held` are models that only a request moves. What differs from what is `known` must
/// have been the same at the look before, or somebody may still be copying.
pub(super) fn changes(known: &BTreeMap<Key, Old>, held: &BTreeSet<String>, before: &Seen, now: &Seen) -> Vec<Change> {
    let names = known.keys().map(|(name, _)| name).chain(now.prints.keys().map(|(name, _)| name));
    let names: BTreeSet<&String> = names.filter(|name| !held.contains(*name)).collect();
    let change = |name: &String| {
        let (wanted, old) = (of(&now.prints, name), of(known, name));
        if wanted.is_empty() {
            return (!old.is_empty() && !now.is_doubtful(name)).then(|| Change::Drop(name.clone()));
        }
        let differs = wanted.iter().any(|(key, print)| old.get(key).is_none_or(|old| old.print != **print));
        // A version that is not wanted any more serves on as long as no wanted one does.
        let serves = wanted.keys().any(|key| old.get(key).is_some_and(|old| old.serves));
        let stale = serves && old.keys().any(|key| !wanted.contains_key(key));
        ((differs || stale) && of(&before.prints, name) == wanted).then(|| Change::Bring(name.clone()))
    };
    names.into_iter().filter_map(change).collect()
}

/// What is kept of the versions of one model.
fn of<'a, T>(all: &'a BTreeMap<Key, T>, model: &str) -> BTreeMap<&'a Key, &'a T> {
    all.iter().filter(|((name, _), _)| name == model).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repository::Fault;

    fn seen(versions: &[(&str, u64, u64)]) -> Seen {
        let print = |len| Print { settings: Settings::default(), files: vec![("f".into(), [1, 1], len, [0, 0])] };
        let prints = versions.iter().map(|(name, version, len)| (((*name).to_owned(), *version), print(*len)));
        Seen { scan: Scan::default(), prints: prints.collect() }
    }

    /// Everything that is known serves, but for version 2 of whatever has one.
    fn found(known: &Seen, before: &Seen, now: &Seen) -> Vec<Change> {
        let old = |(key, print): (&Key, &Print)| (key.clone(), Old { print: print.clone(), serves: key.1 != 2 });
        changes(&known.prints.iter().map(old).collect(), &BTreeSet::from(["held".to_owned()]), before, now)
    }

    #[test]
    fn what_is_new_or_different_is_brought_once_it_is_the_same_twice() {
        let known = seen(&[("a", 1, 10), ("b", 1, 10)]);
        let now = seen(&[("a", 1, 10), ("b", 1, 11), ("c", 1, 10), ("held", 1, 5)]);
        let half = seen(&[("a", 1, 10), ("b", 1, 11), ("c", 1, 9)]);
        assert_eq!(found(&known, &known, &known), []);
        assert_eq!(found(&known, &half, &now), [Change::Bring("b".to_owned())]);
        assert_eq!(found(&known, &now, &now), [Change::Bring("b".to_owned()), Change::Bring("c".to_owned())]);
    }

    #[test]
    fn a_version_that_nothing_wanted_replaces_stays_until_something_does() {
        let (second, third) = (seen(&[("a", 2, 10)]), seen(&[("a", 3, 10)]));
        let bring = [Change::Bring("a".to_owned())];
        // Version 2 has failed, so it is known, and version 1 serves on.
        assert_eq!(found(&seen(&[("a", 1, 10), ("a", 2, 10)]), &second, &second), []);
        assert_eq!(found(&seen(&[("a", 1, 10)]), &second, &second), bring);
        assert_eq!(found(&seen(&[("a", 1, 10), ("a", 3, 10)]), &third, &third), bring);
        // The broken version is taken away again.
        let first = seen(&[("a", 1, 10)]);
        assert_eq!(found(&seen(&[("a", 1, 10), ("a", 2, 10)]), &first, &first), bring);
    }

    #[test]
    fn what_has_gone_is_dropped_but_not_on_a_doubt() {
        let known = seen(&[("a", 1, 10), ("held", 1, 10)]);
        let mut now = seen(&[]);
        assert_eq!(found(&known, &now, &now), [Change::Drop("a".to_owned())]);
        for model in [None, Some("a".to_owned())] {
            now.scan.faults = vec![Fault { model, version: None, path: "x".into(), message: "unreadable".to_owned() }];
            assert_eq!(found(&known, &now, &now), []);
        }
    }

    #[test]
    fn a_model_is_another_one_when_a_file_that_belongs_to_it_is() {
        let folder = tempfile::tempdir().unwrap();
        // A version's folder, and a model that is one file among others.
        for file in ["m/1/model.onnx", "flat.onnx"] {
            let path = folder.path().join(file);
            let beside = path.parent().unwrap().to_owned();
            fs::create_dir_all(&beside).unwrap();
            fs::write(&path, external::naming(&["weights.bin"])).unwrap();
            let candidate = Candidate { name: "m".to_owned(), version: 1, file: path, settings: Settings::default() };
            let mut seen = print(&candidate);
            for (name, belongs) in [("weights.bin", true), ("other.bin", false), ("tokenizer.json", true)] {
                for text in ["a", "longer"] {
                    fs::write(beside.join(name), text).unwrap();
                    let now = print(&candidate);
                    assert_eq!(now != seen, belongs, "{file}: {name}");
                    seen = now;
                }
            }
        }
    }
}
