//! A start with what an earlier start has measured: it is confirmed by two runs, and thrown away if they tell otherwise.

mod support;

use concertina::clock::Clock;
use concertina::model::Settings;
use concertina::repository::Candidate;
use concertina::repository::devices::Devices;
use concertina::repository::load::Loader;
use concertina::repository::measure::Measured;
use concertina::repository::store::Store;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::mpsc;

fn loader(folder: &Path) -> Loader {
    Loader {
        runtime: support::runtime().clone(),
        devices: Devices::host_only(support::device()),
        clock: Clock::start(),
        completions: mpsc::channel(1).0,
        cores: 2,
        ids: Default::default(),
        store: Store::new(Some(folder.to_owned())),
    }
}

fn candidate(name: &str) -> Candidate {
    let mut settings = Settings::default();
    settings.warmup.seconds = Duration::from_millis(20);
    Candidate { name: name.to_owned(), version: 1, file: support::test_model(name), settings }
}

/// A model whose rows are padded.
fn padded(lengths: &str) -> Candidate {
    let text = format!(
        "warmup.seconds = 0.02\npadding = {{ sequence = {{ lengths = {lengths} }}, inputs = {{ ids = 0, mask = 0 }} }}"
    );
    let settings = Settings::from_toml(&text, "model.toml", &Settings::default_keys()).expect("settings");
    Candidate { settings, ..candidate("varlen") }
}

fn start(folder: &Path, name: &str) -> Measured {
    loader(folder).recall(&candidate(name)).expect("it loads")
}

fn from_cache(measured: &Measured) -> bool {
    measured.calibration.as_ref().expect("it runs").from_cache
}

/// The only file of a folder.
fn kept(folder: &TempDir) -> PathBuf {
    let files: Vec<PathBuf> =
        fs::read_dir(folder.path()).expect("a folder").map(|entry| entry.expect("an entry").path()).collect();
    let [file] = files.as_slice() else { panic!("{files:?}") };
    file.clone()
}

#[test]
fn a_warm_start_runs_the_smallest_and_the_largest_size_once_and_knows_the_rest() {
    for name in ["affine", "batch_last", "varlen", "conv", "datatypes", "fails", "nonzero", "bad_output_symbolic"] {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let cold = start(folder.path(), name);
        assert!(!from_cache(&cold), "{name}");
        let warm = start(folder.path(), name);
        assert!(from_cache(&warm), "{name}");
        let sizes = warm.calibration.as_ref().expect("it runs").measured.len() as u64;
        for session in &warm.sessions {
            assert_eq!(session.runs(), sizes.min(2), "{name}");
        }
        assert_eq!((warm.layout, warm.sessions.len()), (cold.layout, cold.layout.instances), "{name}");
        assert_eq!(warm.spec.batch_axis, cold.spec.batch_axis, "{name}");
        assert_eq!(warm.spec.unbatched_reason, cold.spec.unbatched_reason, "{name}");
        let [mut warm, cold] = [warm, cold].map(|measured| measured.calibration.expect("it runs"));
        warm.from_cache = false;
        assert_eq!(warm, cold, "{name}");
    }
}

#[test]
fn what_runs_do_not_confirm_is_measured_anew_and_replaced() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    start(folder.path(), "conv");
    let file = kept(&folder);
    for first in [true, false] {
        let mut changed: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&file).expect("a file")).expect("JSON");
        let measured = changed["measured"].as_array_mut().expect("a list");
        let at = if first { 0 } else { measured.len() - 1 };
        let bytes = measured[at]["bytes"].as_u64().expect("a number");
        measured[at]["bytes"] = (bytes + 64).into();
        fs::write(&file, changed.to_string()).expect("a file");
        assert!(!from_cache(&start(folder.path(), "conv")), "entry {at}");
        assert!(from_cache(&start(folder.path(), "conv")), "replaced");
        assert_eq!(kept(&folder), file);
    }
    let good = fs::read_to_string(&file).expect("a file");
    fs::write(&file, &good[..good.len() / 2]).expect("a file");
    assert!(!from_cache(&start(folder.path(), "conv")), "truncated");
    assert!(from_cache(&start(folder.path(), "conv")), "replaced");
}

#[test]
fn what_other_lengths_cost_is_kept_and_confirmed_by_the_shortest_and_the_longest() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let lengths = "[4, 8, 64, 100]";
    let recall = |lengths: &str| loader(folder.path()).recall(&padded(lengths)).expect("it loads");
    let cold = recall(lengths);
    assert_eq!(cold.lengths.iter().map(|length| length.size).collect::<Vec<_>>(), [4, 8, 64, 100]);
    let mut warm = recall(lengths);
    assert!(from_cache(&warm) && warm.lengths.iter().all(|length| length.calibration.from_cache));
    warm.lengths.iter_mut().for_each(|length| length.calibration.from_cache = false);
    assert_eq!(warm.lengths, cold.lengths);
    // None of the other instances looks for the lengths that run: two runs for the calibration and two for the lengths.
    assert!(warm.sessions[1..].iter().all(|session| session.runs() == 4));
    let file = kept(&folder);
    let good = fs::read_to_string(&file).expect("a file");
    let change = |change: &dyn Fn(&mut Vec<serde_json::Value>)| {
        let mut changed: serde_json::Value = serde_json::from_str(&good).expect("JSON");
        change(changed["lengths"].as_array_mut().expect("a list"));
        fs::write(&file, changed.to_string()).expect("a file");
    };
    let more = |length: &mut serde_json::Value| {
        let bytes = &mut length["measured"][0]["bytes"];
        *bytes = (bytes.as_u64().expect("a number") + 64).into();
    };
    for (index, wrong) in [
        &(|lengths: &mut Vec<_>| more(&mut lengths[0])) as &dyn Fn(&mut Vec<_>),
        &|lengths| more(&mut lengths[3]),
        &|lengths| drop(lengths.pop()),
        &|lengths| lengths.clear(),
    ]
    .into_iter()
    .enumerate()
    {
        change(wrong);
        assert!(!from_cache(&recall(lengths)), "change {index}");
        assert!(from_cache(&recall(lengths)), "replaced");
    }
    assert!(!from_cache(&recall("[4, 8, 64]")), "other settings");
}

#[test]
fn another_model_or_machine_is_measured_for_itself() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    start(folder.path(), "conv");
    assert!(!from_cache(&start(folder.path(), "affine")));
    let one_core = Loader { cores: 1, ..loader(folder.path()) };
    assert!(!from_cache(&one_core.recall(&candidate("conv")).expect("it loads")));
    assert!(from_cache(&start(folder.path(), "conv")) && from_cache(&start(folder.path(), "affine")));
}

#[test]
fn a_folder_that_cannot_be_used_stops_nothing() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("file");
    fs::write(&file, "").expect("a file");
    for _ in 0..2 {
        assert!(!from_cache(&start(&file, "conv")));
    }
    let off = Loader { store: Store::default(), ..loader(folder.path()) };
    assert!(!from_cache(&off.recall(&candidate("conv")).expect("it loads")));
}
