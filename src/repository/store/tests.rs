use super::*;
use crate::model::Settings;
use crate::model::settings::Fill;
use crate::repository::Layout;
use std::collections::BTreeMap;
use tempfile::TempDir;

fn key(model: &str) -> Key {
    let machine = Machine { runtime: "1.31.1".to_owned(), cpu: "Fast 9".to_owned(), cores: 2 };
    Key::new(model.to_owned(), machine, &Settings::default())
}

fn stored() -> Stored {
    let mut stored = Stored::new(key("a"), Layout { instances: 2, threads: 1 }, Fill::One);
    stored.batch_axis = Some(0);
    stored.ladder = vec![1, 2, 4];
    stored.measured = [(1, 0.001, 4096), (2, 0.001_5, 8192), (4, 0.002, 16384)]
        .map(|(rows, seconds, bytes)| Entry { rows, seconds, bytes })
        .to_vec();
    let at_length = |size, seconds, bytes| AtLength { size, measured: vec![Entry { rows: 1, seconds, bytes }] };
    stored.lengths = vec![at_length(8, 0.003, 1000), at_length(16, 0.004, 2000)];
    stored
}

fn store() -> (TempDir, Store) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let store = Store::new(Some(folder.path().join("not/there/yet")));
    (folder, store)
}

fn path(store: &Store, key: &Key) -> PathBuf {
    store.path(key).expect("a store that is on")
}

#[test]
fn what_is_kept_comes_back_and_leaves_nothing_else_behind() {
    let (_folder, store) = store();
    assert_eq!(store.read(&key("a")), None, "nothing there, and no warning");
    store.write(&stored());
    store.write(&stored());
    assert_eq!(store.read(&key("a")), Some(stored()));
    let folder = path(&store, &key("a")).parent().expect("a folder").to_owned();
    assert_eq!(fs::read_dir(folder).expect("a folder").count(), 1);
    let off = Store::default();
    off.write(&stored());
    assert_eq!((off.read(&key("a")), off.is_on()), (None, false));
}

#[test]
fn a_key_of_anything_else_finds_nothing() {
    let (_folder, store) = store();
    store.write(&stored());
    let settings = |change: fn(&mut Settings)| {
        let mut settings = Settings::default();
        change(&mut settings);
        Key::new("a".to_owned(), key("a").machine, &settings)
    };
    let machine = |change: fn(&mut Machine)| {
        let mut key = key("a");
        change(&mut key.machine);
        key
    };
    let others = [
        key("b"),
        machine(|machine| machine.runtime.push('0')),
        machine(|machine| machine.cpu.push('0')),
        machine(|machine| machine.cores = 4),
        settings(|settings| settings.max_batch_size = Some(8)),
        settings(|settings| settings.instances = std::num::NonZeroU32::new(1)),
        settings(|settings| settings.intra_op_threads = std::num::NonZeroU32::new(1)),
        settings(|settings| settings.batch_axis = crate::model::settings::BatchAxis::Axis(0)),
        settings(|settings| settings.warmup.default_dim += 1),
        settings(|settings| settings.warmup.seconds *= 2),
        settings(|settings| settings.warmup.dims = [("n".to_owned(), 3)].into()),
        settings(|settings| settings.warmup.inputs = [("x".to_owned(), Fill::One)].into()),
        settings(|settings| settings.packing = crate::model::settings::Packing::Off),
        settings(|settings| settings.padding.lengths = [("n".to_owned(), vec![8, 16])].into()),
    ];
    for other in others {
        assert_eq!(store.read(&other), None, "{other:?}");
        // Even at the very place where it is looked for.
        fs::copy(path(&store, &key("a")), path(&store, &other)).expect("a copy");
        assert_eq!(store.read(&other), None, "{other:?}");
    }
    assert_eq!(store.read(&settings(|settings| settings.pipeline += 1)), Some(stored()), "what does not matter");
}

#[test]
fn what_one_device_or_provider_has_measured_is_nothing_to_another_one() {
    let option = |value: &str| [("cudnn_conv_algo_search".to_owned(), value.to_owned())].into();
    let on = |gpu, provider, options: &BTreeMap<String, String>| key("a").on(gpu, (provider, options));
    let keys = [
        key("a"),
        on("H200", "cuda", &BTreeMap::new()),
        on("H200", "tensorrt", &BTreeMap::new()),
        on("H100", "cuda", &BTreeMap::new()),
        on("H200", "cuda", &option("DEFAULT")),
        on("H200", "cuda", &option("HEURISTIC")),
    ];
    let (_folder, store) = store();
    for (at, key) in keys.iter().enumerate() {
        assert_eq!(store.read(key), None, "{key:?}");
        let mut found = stored();
        found.key = key.clone();
        store.write(&found);
        assert!(keys[..=at].iter().all(|known| store.read(known).is_some_and(|found| found.key == *known)));
    }
}

#[test]
fn nothing_that_no_measurement_gives_is_believed() {
    let good = stored().render();
    assert_eq!(Stored::parse(good.as_bytes(), &key("a")), Ok(stored()));
    for (from, to) in [
        ("\"schema\": 3", "\"schema\": 1"),
        ("\"schema\": 3", "\"schema\": -1"),
        ("\"schema\": 3,", ""),
        ("\"seconds\": 0.001,", "\"seconds\": NaN,"),
        ("\"seconds\": 0.001,", "\"seconds\": null,"),
        ("\"seconds\": 0.001,", "\"seconds\": -0.001,"),
        ("\"seconds\": 0.001,", "\"seconds\": 0,"),
        ("\"seconds\": 0.001,", "\"seconds\": 1e300,"),
        ("\"seconds\": 0.001,", "\"seconds\": 1e999,"),
        ("\"bytes\": 4096", "\"bytes\": 0"),
        ("\"bytes\": 4096", "\"bytes\": -1"),
        ("\"bytes\": 4096", "\"bytes\": 18446744073709551615"),
        ("\"bytes\": 4096", "\"bytes\": 1e30"),
        ("\"bytes\": 4096", "\"bytes\": 4096, \"more\": 1"),
        ("\"rows\": 1,", "\"rows\": 2,"),
        ("\"rows\": 2,", "\"rows\": 4,"),
        ("    2,\n    4\n", "    4,\n    2\n"),
        ("    2,\n    4\n", "    2,\n    2\n"),
        ("    2,\n    4\n", "    2,\n    4000000\n"),
        ("    1,\n    2,\n    4\n", ""),
        ("    2,\n    4\n", "    2,\n    4,\n    8\n"),
        ("    2,\n    4\n", "    2\n"),
        ("\"batch_axis\": 0", "\"batch_axis\": null"),
        ("\"batch_axis\": 0", "\"batch_axis\": 77"),
        ("\"unbatched_reason\": null", "\"unbatched_reason\": \"x\""),
        ("\"integers\": \"one\"", "\"integers\": \"two\""),
        ("\"instances\": 2", "\"instances\": 0"),
        ("\"threads\": 1", "\"threads\": 1000000"),
        ("\"size\": 8", "\"size\": 16"),
        ("\"size\": 8", "\"size\": -8"),
        ("\"seconds\": 0.003", "\"seconds\": 0.0"),
        ("\"bytes\": 1000", "\"bytes\": 0"),
    ] {
        let bad = good.replacen(from, to, 1);
        assert_ne!(bad, good, "{from}");
        assert!(Stored::parse(bad.as_bytes(), &key("a")).is_err(), "{from} -> {to}");
    }
    for length in 0..good.len() {
        assert!(Stored::parse(&good.as_bytes()[..length], &key("a")).is_err(), "cut at {length}");
    }
}

#[test]
fn what_is_no_small_file_is_ignored_and_replaced() {
    let (_folder, store) = store();
    store.write(&stored());
    let path = path(&store, &key("a"));
    let padded = format!("{}{}", stored().render(), " ".repeat(MAX_FILE as usize));
    for bytes in [padded.as_bytes(), &[0xFF; 64], b"", b"[]"] {
        fs::write(&path, bytes).expect("a file");
        assert_eq!(store.read(&key("a")), None);
        store.write(&stored());
        assert_eq!(store.read(&key("a")), Some(stored()));
    }
    fs::remove_file(&path).expect("a file");
    fs::create_dir(&path).expect("a folder");
    assert_eq!(store.read(&key("a")), None);
    store.write(&stored());
    assert!(path.is_dir(), "a warning, no more");
    assert_eq!(fs::read_dir(path.parent().expect("a folder")).expect("a folder").count(), 1, "no temporary file");
}

#[test]
fn a_folder_that_cannot_be_written_is_no_error() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let file = root.path().join("file");
    fs::write(&file, "").expect("a file");
    // Root may write anywhere, but not below a file.
    let store = Store::new(Some(file.join("below")));
    store.write(&stored());
    assert_eq!(store.read(&key("a")), None);
}

#[test]
fn an_impossible_measurement_is_not_kept() {
    let (_folder, store) = store();
    let mut broken = stored();
    broken.measured[0].seconds = 0.0;
    store.write(&broken);
    assert!(!path(&store, &key("a")).exists());
}

#[test]
fn a_digest_is_sha_256_of_the_contents() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let file = root.path().join("abc");
    fs::write(&file, "abc").expect("a file");
    let expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(digest(&file).expect("a file"), expected);
    assert!(digest(&root.path().join("missing")).is_err());
}
