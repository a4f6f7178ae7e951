use super::*;
use crate::config::Override;
use crate::keys::Origin;
use std::fs;
use tempfile::TempDir;

/// A folder with these files; a text after `=` is the content, a name that ends in `/` an empty folder.
fn folder(files: &[&str]) -> TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    for file in files {
        let (path, text) = file.split_once('=').unwrap_or((file, ""));
        let path = root.path().join(path);
        if file.ends_with('/') {
            fs::create_dir_all(&path).expect(file);
        } else {
            fs::create_dir_all(path.parent().expect(file)).expect(file);
            fs::write(&path, text).expect(file);
        }
    }
    root
}

fn named(name: &str) -> Config {
    let name = Override {
        key: "models.name".to_owned(),
        value: name.to_owned(),
        origin: Origin::Flag("--model-name".to_owned()),
    };
    Config::resolve(None, &[name]).expect("a good name")
}

/// `name:version file` of each candidate and `path: message` of each fault, relative to the folder.
fn seen(root: &Path, config: &Config) -> (Vec<String>, Vec<String>) {
    let scan = scan(root, config);
    let relative = |path: &Path| path.strip_prefix(root).map_or_else(|_| path.to_owned(), Path::to_owned);
    let candidate = |c: &Candidate| format!("{}:{} {}", c.name, c.version, relative(&c.file).display());
    let fault = |f: &Fault| format!("{}: {}", relative(&f.path).display(), f.message);
    (scan.candidates.iter().map(candidate).collect(), scan.faults.iter().map(fault).collect())
}

#[test]
fn every_layout_of_a_repository_is_found_and_what_is_no_model_is_ignored() {
    let root = folder(&[
        "bert/1/model.onnx",
        "bert/2/model.onnx",
        "bert/2/model.onnx.data",
        "bert/model.toml=pipeline = 1",
        "bert/tokenizer.json",
        "bert/1_Pooling/config.json",
        "resnet/model.onnx",
        "resnet/labels.txt",
        "other/1/only-one.onnx",
        "flat.v1.onnx",
        "README.md",
        "fetch.py",
        "requirements.txt",
        ".hidden/x",
        "..data/model.onnx",
        "__pycache__/fetch.pyc",
        "lost+found/",
    ]);
    let (candidates, faults) = seen(root.path(), &Config::default());
    assert_eq!(faults, Vec::<String>::new());
    let expected = [
        "bert:2 bert/2/model.onnx",
        "flat.v1:1 flat.v1.onnx",
        "other:1 other/1/only-one.onnx",
        "resnet:1 resnet/model.onnx",
    ];
    assert_eq!(candidates, expected);
    let settings = scan(root.path(), &Config::default()).candidates.into_iter().map(|c| (c.name, c.settings.pipeline));
    assert_eq!(settings.filter(|(_, pipeline)| *pipeline == 1).map(|(name, _)| name).collect::<Vec<_>>(), ["bert"]);
}

#[test]
fn one_models_own_folder_takes_its_name_from_the_flag_or_the_folder() {
    for (files, file, version) in [
        (&["mounted/model.onnx", "mounted/config.json", "mounted/onnx/"][..], "mounted/model.onnx", 1),
        (&["mounted/3/model.onnx"], "mounted/3/model.onnx", 3),
        (&["mounted/model.toml", "mounted/small.onnx"], "mounted/small.onnx", 1),
    ] {
        let root = folder(files);
        let mounted = root.path().join("mounted");
        for (config, name) in [(Config::default(), "mounted"), (named("embed"), "embed")] {
            let found = scan(&mounted, &config);
            assert_eq!(found.faults, [], "{files:?}");
            let [only] = found.candidates.as_slice() else { panic!("{found:?}") };
            assert_eq!((only.name.as_str(), only.version), (name, version));
            assert_eq!(only.file, root.path().join(file));
        }
    }
    // Without model.onnx, only the flag says that a folder with one .onnx file is a model and not a repository.
    let root = folder(&["small.onnx"]);
    assert_eq!(seen(root.path(), &Config::default()).0, ["small:1 small.onnx"]);
    assert_eq!(seen(root.path(), &named("embed")).0, ["embed:1 small.onnx"]);
}

#[test]
fn a_file_is_a_repository_of_one() {
    let root = folder(&["small.onnx"]);
    let found = scan(&root.path().join("small.onnx"), &Config::default());
    assert_eq!((found.candidates[0].name.as_str(), found.candidates[0].version), ("small", 1));
    assert_eq!(scan(&root.path().join("small.onnx"), &named("a")).candidates[0].name, "a");
}

#[test]
fn the_policy_picks_the_versions() {
    for (policy, expected) in [
        ("", &[10][..]),
        ("versions.count = 2", &[9, 10]),
        ("versions.count = 5", &[2, 9, 10]),
        ("versions = { policy = \"all\" }", &[2, 9, 10]),
        ("versions = { policy = \"specific\", versions = [9, 2] }", &[2, 9]),
    ] {
        let toml = format!("m/model.toml={policy}");
        let root = folder(&["m/2/model.onnx", "m/9/model.onnx", "m/10/model.onnx", &toml]);
        let found = scan(root.path(), &Config::default());
        assert_eq!(
            found.candidates.iter().map(|c| c.version).collect::<Vec<_>>(),
            expected,
            "{policy} {:?}",
            found.faults
        );
    }
}

#[test]
fn every_fault_of_every_folder_is_found_and_stops_no_other_model() {
    let long = format!("{}.onnx", "x".repeat(200));
    let root = folder(&[
        "good/1/model.onnx",
        "empty/",
        "novel/1/readme.txt",
        "zero/0/model.onnx",
        "zero/01/model.onnx",
        "two/a.onnx",
        "two/b.onnx",
        "mixed/model.onnx",
        "mixed/1/model.onnx",
        "twice/model.onnx",
        "twice.onnx",
        "bad name/model.onnx",
        "stats.onnx",
        "settings/model.onnx",
        "settings/model.toml=pipeline = 0\nspeed = 1",
        "broken/model.onnx",
        "broken/model.toml=pipeline",
        "absent/1/model.onnx",
        "absent/model.toml=versions = { policy = \"specific\", versions = [2] }",
        &long,
    ]);
    let (candidates, faults) = seen(root.path(), &Config::default());
    assert_eq!(candidates, ["good:1 good/1/model.onnx"]);
    let expected = [
        "absent/model.toml: versions.versions: there is no version 2",
        "bad name: 'bad name': expected a name of 1 to 128 letters",
        "broken/model.toml: ",
        "empty: no model in this folder: expected VERSION/model.onnx",
        "mixed/model.onnx: lies beside version folders",
        "novel/1: expected model.onnx in this version",
        "settings/model.toml: pipeline = 0",
        "settings/model.toml: speed = 1",
        "stats.onnx: 'stats': expected a name other than",
        "twice: 'twice' is there twice",
        "twice.onnx: 'twice' is there twice",
        "two: several .onnx files (a.onnx, b.onnx)",
        &format!("{long}: "),
        "zero/0: a version is a positive number",
        "zero/01: a version is a positive number",
    ];
    assert_eq!(faults.len(), expected.len(), "{faults:#?}");
    for (fault, expected) in faults.iter().zip(expected) {
        assert!(fault.starts_with(expected), "{expected}: {fault}");
    }
}

#[test]
fn a_version_that_is_not_there_yet_leaves_the_others_alone() {
    let specific = "m/model.toml=versions = { policy = \"specific\", versions = [1, 2, 7] }";
    for (files, missing) in [
        (&["m/1/model.onnx", "m/2/"][..], &[("m/2: expected model.onnx in this version", 2)][..]),
        (&["m/1/model.onnx", "m/2/model.onnx.data"], &[("m/2: expected model.onnx in this version", 2)]),
        (&["m/1/model.onnx", "m/2/a.onnx", "m/2/b.onnx"], &[("m/2: several .onnx files", 2)]),
        (
            &["m/1/model.onnx", "m/2/", specific],
            &[("m/2: expected", 2), ("m/model.toml: versions.versions: there is no version 7", 7)],
        ),
    ] {
        let root = folder(files);
        let (candidates, faults) = seen(root.path(), &Config::default());
        assert_eq!(candidates, ["m:1 m/1/model.onnx"], "{files:?}");
        let versions: Vec<_> = scan(root.path(), &Config::default()).faults.iter().map(|f| f.version).collect();
        assert_eq!(versions, missing.iter().map(|(_, version)| Some(*version)).collect::<Vec<_>>());
        for (fault, (expected, _)) in faults.iter().zip(missing) {
            assert!(fault.starts_with(expected), "{expected}: {fault}");
        }
    }
}

#[test]
fn a_wrong_key_does_not_hide_what_else_is_wrong_in_its_folder() {
    let toml = "m/model.toml=speed = 1\nbatch_axis = 0\nversions = { policy = \"specific\", versions = [1, 9] }";
    let root = folder(&["m/1/model.onnx", "m/2/", toml]);
    let (candidates, faults) = seen(root.path(), &Config::default());
    assert_eq!(candidates, [""; 0]);
    assert_eq!(faults.len(), 3, "{faults:?}");
    for expected in
        ["m/2: expected model.onnx", "m/model.toml: speed = 1", "m/model.toml: versions.versions: there is no"]
    {
        assert!(faults.iter().any(|fault| fault.starts_with(expected)), "{expected}: {faults:?}");
    }
    // What is served by nobody is still there to be looked into, by the settings that can be read.
    let [suspect] = scan(root.path(), &Config::default()).suspects.try_into().expect("one version");
    assert_eq!((suspect.version, suspect.settings.batch_axis), (1, crate::model::settings::BatchAxis::Axis(0)));
}

#[test]
fn a_model_that_lies_in_the_repository_itself_does_not_hide_its_neighbours_in_silence() {
    let root = folder(&["model.onnx", "bert/1/model.onnx"]);
    let (candidates, faults) = seen(root.path(), &named("m"));
    assert_eq!(candidates, ["m:1 model.onnx"]);
    assert!(faults[0].starts_with("bert: not served"), "{faults:?}");
}

#[test]
fn a_folder_that_is_not_there_is_a_fault() {
    let root = folder(&[]);
    let missing = root.path().join("missing");
    let found = scan(&missing, &Config::default());
    assert!(found.faults[0].to_string().contains("missing: cannot be read: "), "{found:?}");
    assert_eq!(scan(root.path(), &Config::default()), Scan::default());
}
