use super::*;
use crate::model::{Dim, TensorSpec};
use crate::tensor::DataType;
use std::fs;

/// `x INT64 [batch, 4]` to `y INT64 [1]`: readable, but without a batch axis.
fn graph(_: Option<&Path>, _: &Path) -> Result<Graph, String> {
    let tensor = |name: &str, shape| TensorSpec { name: name.to_owned(), datatype: DataType::Int64, shape };
    Ok(Graph {
        inputs: vec![tensor("x", vec![Dim::Symbol("batch".to_owned()), Dim::Any])],
        outputs: vec![tensor("y", vec![Dim::Fixed(1)])],
        unsupported: Vec::new(),
    })
}

/// The exit code and both streams.
/// Nothing is measured here.
fn unmeasured(_: &Config, _: &Candidate, _: &[Rows]) -> Result<Profile, String> {
    Err("not measured".to_owned())
}

/// Nothing is compared here.
fn incomparable(_: &Config, _: [&Candidate; 2]) -> Result<Comparison, String> {
    Err("not compared".to_owned())
}

fn command(arguments: &[&str]) -> (u8, String, String) {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let serve = |config: Config| anyhow::bail!("serving on {}", config.address);
    let measure = |_: &Config, candidate: &Candidate, rows: &[Rows]| {
        Err(format!("measured {}/{} at {rows:?}", candidate.name, candidate.version))
    };
    let hooks =
        Hooks { library: &|_| Ok(()), describe: &graph, profile: &measure, compare: &incomparable, serve: &serve };
    let arguments = std::iter::once("concertina").chain(arguments.iter().copied()).map(OsString::from);
    let code = execute(arguments, hooks, &mut out, &mut err).expect("no I/O errors");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (code, text(out), text(err))
}

#[test]
fn version_and_help_go_to_standard_output_and_bad_usage_does_not() {
    let (code, out, err) = command(&["version"]);
    assert_eq!((code, out.trim(), err.as_str()), (0, concat!("concertina ", env!("CARGO_PKG_VERSION")), ""));
    let (code, out, _) = command(&["serve", "--help"]);
    assert!(code == 0 && out.contains("CONCERTINA_ADDRESS") && out.contains("models.path"), "{out}");
    for bad in [&[][..], &["serve", "--adress", "x"], &["start"], &["check", "--set", "a"]] {
        let (code, out, err) = command(bad);
        assert!(code == 2 && out.is_empty() && !err.is_empty(), "{bad:?}: {code} {out} {err}");
    }
}

#[test]
fn models_lists_what_is_known_before_loading() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let path = root.path().to_str().expect("text");
    assert_eq!(command(&["models", "--models", path]), (0, format!("no models in {path}\n"), String::new()));
    fs::write(root.path().join("m.onnx"), "").expect("a file");
    let (code, out, _) = command(&["models", "--models", path, "--set", "model.instances=2"]);
    assert_eq!(code, 0, "{out}");
    for line in [
        &format!("m, version 1: {path}/m.onnx"),
        "  input   x INT64 [batch, ?]",
        "  output  y INT64 [1]",
        "  batch   none: output 'y' has a fixed first dimension 1, so rows could not be scattered back: requests run",
        "  runs    max_batch_size 1, instances 2, intra_op_threads auto, pipeline 2, knee_tolerance 0.02",
        "  queue   max_queue_rows 4096, max_queue_bytes 256.0 MiB, max_queue_delay 0s, max_gather_delay 5ms, default_timeout 30s, priority 2 of 2",
    ] {
        assert!(out.lines().any(|found| found.starts_with(line)), "{line} in\n{out}");
    }
}

#[test]
fn check_names_faults_of_configuration_folders_and_graphs_at_once() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let path = root.path().join("models");
    fs::create_dir_all(path.join("empty")).expect("a folder");
    fs::create_dir_all(path.join("m")).expect("a folder");
    fs::write(path.join("m/model.onnx"), "").expect("a file");
    fs::write(path.join("m/model.toml"), "batch_axis = 0").expect("a file");
    fs::create_dir_all(path.join("n")).expect("a folder");
    fs::write(path.join("n/model.onnx"), "").expect("a file");
    fs::write(path.join("n/model.toml"), "batch_axis = 0\nspeed = 2").expect("a file");
    let file = root.path().join("c.toml");
    fs::write(&file, format!("speed = 1\n[models]\npath = {:?}", path.to_str().expect("text"))).expect("a file");
    let file = file.to_str().expect("text");
    let (code, out, _) = command(&["check", "--config", file, "--address", "nowhere"]);
    assert_eq!(code, 1);
    for part in [
        "server.address = \"nowhere\" (flag --address)",
        "speed = 1 (file",
        "empty: no model",
        "m/model.onnx: batch_axis = 0: output 'y'",
        "n/model.onnx: batch_axis = 0: output 'y'",
        "n/model.toml: speed = 2 (file",
    ] {
        assert!(out.contains(part), "{part} in\n{out}");
    }
    assert!(out.ends_with("6 errors\n"), "{out}");
}

#[test]
fn a_missing_library_is_one_fault_however_broken_the_rest_is() {
    let root = tempfile::tempdir().expect("a temporary folder");
    for name in ["a.onnx", "b.onnx"] {
        fs::write(root.path().join(name), "").expect("a file");
    }
    let models = root.path().to_str().expect("text");
    let file = root.path().join("c.toml");
    fs::write(&file, format!("speed = 1\n[models]\npath = {models:?}\n[runtime]\nlibrary = \"/file.so\""))
        .expect("a file");
    let file = file.to_str().expect("text");
    let library = |path: Option<&Path>| Err(format!("no library at {}", path.expect("a path").display()));
    let hooks =
        Hooks { library: &library, describe: &graph, profile: &unmeasured, compare: &incomparable, serve: &|_| Ok(()) };
    for (arguments, expected) in [
        (&["--config", file, "--set", "runtime.library=/set.so"][..], "/set.so"),
        (&["--config", file, "--onnxruntime", "/flag.so"], "/flag.so"),
        (&["--models", models, "--set", "speed=1", "--onnxruntime", "/flag.so"], "/flag.so"),
        (&["--models", models, "--onnxruntime", "/flag.so"], "/flag.so"),
    ] {
        let mut out = Vec::new();
        let arguments = ["concertina", "check"].iter().chain(arguments).map(OsString::from);
        assert_eq!(execute(arguments, hooks, &mut out, &mut Vec::new()).expect("no I/O errors"), 1);
        let out = String::from_utf8(out).expect("text");
        assert_eq!(out.matches("no library at ").count(), 1, "{out}");
        assert!(out.contains(&format!("error: no library at {expected}\n")), "{out}");
    }
}

/// A pipe whose reader has gone.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn the_exit_code_is_right_although_nobody_reads_what_is_said() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let path = root.path().to_str().expect("text");
    let hooks = Hooks {
        library: &|_| Ok(()),
        describe: &graph,
        profile: &unmeasured,
        compare: &incomparable,
        serve: &|_| Ok(()),
    };
    let code = |command: &str, more: &[&str]| {
        let arguments =
            ["concertina", command, "--models", path].into_iter().chain(more.iter().copied()).map(OsString::from);
        execute(arguments, hooks, &mut Closed, &mut Closed).expect("a pipe that is closed is no error")
    };
    assert_eq!((code("check", &[]), code("models", &[])), (0, 0));
    let broken = ["--set", "speed=1"];
    assert_eq!((code("check", &broken), code("models", &broken), code("serve", &broken)), (1, 1, 1));
    fs::create_dir_all(root.path().join("empty")).expect("a folder");
    assert_eq!((code("check", &[]), code("models", &[])), (1, 1));
}

#[test]
fn a_flag_of_its_own_wins_over_set() {
    let models = tempfile::tempdir().expect("a temporary folder");
    let path = models.path().to_str().expect("text");
    let (code, out, _) = command(&[
        "check",
        "--models",
        path,
        "--set",
        "log.format=xml",
        "--log-format",
        "json",
        "--set",
        "drain.grace=1s",
    ]);
    assert_eq!(code, 0, "{out}");
    assert!(
        out.contains("format = \"json\" # flag --log-format\n") && out.contains("grace = \"1s\" # flag --set\n"),
        "{out}"
    );
}

#[test]
fn a_configuration_file_that_is_not_there_is_a_fault_beside_the_others() {
    let (code, out, err) = command(&["serve", "--config", "/nowhere.toml", "--log-format", "xml"]);
    assert!(code == 1 && out.is_empty(), "{out}");
    assert!(err.contains("/nowhere.toml: cannot be read: ") && err.contains("log.format = \"xml\""), "{err}");
}

#[test]
fn profile_measures_the_version_that_is_meant_or_says_what_there_is() {
    let root = tempfile::tempdir().expect("a temporary folder");
    let path = root.path().to_str().expect("text");
    for file in ["m/1/model.onnx", "m/2/model.onnx", "other.onnx"] {
        fs::create_dir_all(root.path().join(file).parent().expect("a folder")).expect("a folder");
        fs::write(root.path().join(file), "").expect("a file");
    }
    fs::create_dir_all(root.path().join("broken")).expect("a folder");
    for (arguments, expected) in [
        (&["m"][..], "m/2/model.onnx: measured m/2 at []\n"),
        (&["m/1", "--set", "model.versions.policy=all", "--rows", "8,1,8"], "model.onnx: measured m/1 at [1, 8]\n"),
        (&["other", "--rows", "3"], "other.onnx: measured other/1 at [3]\n"),
        (&["m/1"], "'m' has no version 1 that is served; there are: 2\n"),
        (&["n"], "; there are: m, other\n"),
        (&["broken"], "broken: no model in this folder"),
        (&["m/x"], "'m/x': expected MODEL or MODEL/VERSION"),
    ] {
        let (code, out, err) = command(&[&["profile", "--models", path], arguments].concat());
        assert!(code == 1 && out.is_empty() && err.contains(expected), "{arguments:?}: {code} {out} {err}");
    }
    for bad in [&["profile"][..], &["profile", "m", "--rows", "0"], &["profile", "m", "--rows", "a"]] {
        assert_eq!(command(bad).0, 2, "{bad:?}");
    }
}

#[test]
fn a_health_check_says_that_it_speaks_no_tls() {
    let keys = ["tls.certificate=c.pem", "tls.key=k.pem"].map(|key| ["--set", key]);
    let (code, _, err) = command(&[&["healthcheck"], keys.as_flattened()].concat());
    assert_eq!(code, 1);
    assert!(err.contains("tls.certificate") && err.contains("/v2/health/ready"), "{err}");
}

#[test]
fn simulate_repeats_itself_and_says_what_it_does_not_know() {
    let small = ["simulate", "--workload", "burst", "--signal", "saturation", "--peak", "500"];
    let (code, first, err) = command(&small);
    assert!(code == 0 && err.is_empty() && first.starts_with("burst on saturation at 0."), "{first} {err}");
    assert_eq!(command(&small).1, first);
    assert_ne!(command(&[&small[..], &["--seed", "2"]].concat()).1, first);
    let missing = command(&[&small[..], &["--profile", "/no/such/file"]].concat());
    assert!(missing.0 == 1 && missing.2.contains("/no/such/file: cannot be read"), "{missing:?}");
    for bad in
        [["--workload", "flood"], ["--signal", "luck"], ["--fraction", "2"], ["--peak", "0"], ["--objective", "x"]]
    {
        let (code, _, err) = command(&[&["simulate"][..], &bad].concat());
        assert!(code == 2 && err.contains(bad[0]), "{bad:?}: {err}");
    }
}

#[test]
fn simulate_writes_a_report_and_a_picture_of_each_load() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = folder.path().join("results");
    let shown = path.to_str().expect("text");
    let (code, _, err) = command(&["simulate", "--peak", "40", "--workload", "step,squeeze", "--out", shown]);
    assert_eq!((code, err.lines().count()), (0, 5), "a line for each signal: {err}");
    let report = fs::read_to_string(path.join("simulate.md")).expect("a report");
    for part in [
        "concertina simulate --seed 1 --peak 40",
        "| step | saturation |",
        "| squeeze | concurrency |",
        "simulate-step.svg",
    ] {
        assert!(report.contains(part), "{part} in\n{report}");
    }
    for name in ["step", "squeeze"] {
        let svg = fs::read_to_string(path.join(format!("simulate-{name}.svg"))).expect("a picture");
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        assert_eq!(svg.matches("<polyline").count(), 11, "two lines for each signal, and what is needed");
    }
}
