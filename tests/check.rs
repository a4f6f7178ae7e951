//! `concertina check` on broken configurations and broken repositories: one run names everything.

use std::fs;
use std::path::Path;
use std::process::Command;
use tempfile::TempDir;

/// Writes files below a new folder; a name that ends in `/` is an empty folder.
fn folder(files: &[(&str, &str)]) -> TempDir {
    let root = tempfile::tempdir().expect("a temporary folder");
    for (name, text) in files {
        let path = root.path().join(name);
        if name.ends_with('/') {
            fs::create_dir_all(path).expect(name);
        } else {
            fs::create_dir_all(path.parent().expect(name)).expect(name);
            fs::write(path, text).expect(name);
        }
    }
    root
}

/// The exit code and standard output of `concertina check` with these arguments, without the caller's environment.
fn check(arguments: &[&str], environment: &[(&str, &str)]) -> (i32, String) {
    let inherited = std::env::vars().map(|(name, _)| name).filter(|name| name.starts_with("CONCERTINA_"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_concertina"));
    inherited.for_each(|name| {
        command.env_remove(name);
    });
    // Where set-up was told to use another library, so it is here; nothing else of the caller's environment counts.
    if let Some(library) = std::env::var_os("CONCERTINA_ONNXRUNTIME") {
        command.env("ORT_DYLIB_PATH", library);
    }
    let output = command.arg("check").args(arguments).envs(environment.iter().copied()).output().expect("it starts");
    (output.status.code().expect("it ends by itself"), String::from_utf8(output.stdout).expect("text"))
}

/// Runs `check` on a configuration file with an empty repository and expects a line for each of the texts, and no more.
fn refused(text: &str, expected: &[&str]) {
    let root = folder(&[("c.toml", text), ("models/", "")]);
    let path = |name: &str| root.path().join(name).display().to_string();
    let (code, out) = check(&["--config", &path("c.toml"), "--models", &path("models")], &[]);
    assert_eq!(code, 1, "{out}");
    let errors: Vec<&str> = out.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), expected.len(), "{text}:\n{out}");
    for part in expected {
        assert!(errors.iter().any(|line| line.contains(part)), "{part} in\n{out}");
    }
}

#[test]
fn ten_broken_configurations_are_refused_with_every_fault_of_each() {
    for (text, expected) in [
        ("[server\naddress = 1", &["this is not TOML"][..]),
        ("[server]\naddress = \"localhost\"\nport = 8000", &["server.address = \"localhost\"", "server.port = 8000"]),
        (
            "[http]\nmax_body_bytes = \"64 megabytes\"\nmax_connections = -1",
            &["http.max_body_bytes", "http.max_connections"],
        ),
        (
            "[http]\nheader_read_timeout = 5\nbody_read_timeout = \"5\"",
            &["header_read_timeout = 5", "body_read_timeout = \"5\""],
        ),
        ("[http]\nmax_body_bytes = \"1GiB\"\n[model]\npipeline = 0", &["model.pipeline = 0"]),
        ("[http]\nmax_body_bytes = \"1GiB\"\n[log]\nlevel = \"loud\"", &["max_queue_bytes", "log.level = \"loud\""]),
        (
            "[model]\ninstances = \"two\"\nmax_batch_size = 0",
            &["model.instances = \"two\"", "model.max_batch_size = 0"],
        ),
        (
            "[model]\nmax_batch_size = 9\nmax_queue_rows = 8\npriority_levels = 1",
            &["max_queue_rows = 8", "default_priority = 2"],
        ),
        (
            "[model.versions]\npolicy = \"newest\"\n[drain]\ngrace = \"soon\"",
            &["model.versions.policy", "drain.grace = \"soon\""],
        ),
        ("model = 1\n[runtimes]\nthreads = 1", &["[model] is a table of keys", "did you mean runtime.threads?"]),
    ] {
        refused(text, expected);
    }
}

/// Ten model folders, each broken in its own way, with what `check` must say of each.
const BROKEN: [(&[(&str, &str)], &str); 10] = [
    (&[("a-empty/", "")], "a-empty: no model in this folder: expected VERSION/model.onnx"),
    (&[("b-version/1/readme.txt", "")], "b-version/1: expected model.onnx"),
    (&[("c-zero/0/model.onnx", "")], "c-zero/0: a version is a positive number"),
    (&[("d-several/x.onnx", ""), ("d-several/y.onnx", "")], "d-several: several .onnx files (x.onnx, y.onnx)"),
    (&[("e-both/model.onnx", ""), ("e-both/1/model.onnx", "")], "e-both/model.onnx: lies beside version folders"),
    (&[("f-twice.onnx", ""), ("f-twice/model.onnx", "")], "f-twice: 'f-twice' is there twice"),
    (&[("g bad name/model.onnx", "")], "'g bad name': expected a name of 1 to 128 letters"),
    (&[("stats/model.onnx", "")], "'stats': expected a name other than \"stats\""),
    (&[("i-settings/model.onnx", ""), ("i-settings/model.toml", "speed = 1\npipeline = 9")], "speed = 1"),
    (
        &[
            ("j-absent/1/model.onnx", ""),
            ("j-absent/model.toml", "versions = { policy = \"specific\", versions = [7] }"),
        ],
        "j-absent/model.toml: versions.versions: there is no version 7",
    ),
];

#[test]
fn ten_broken_model_folders_are_named_in_one_run_beside_a_broken_configuration() {
    let mut files: Vec<(&str, &str)> = BROKEN.iter().flat_map(|(files, _)| files.iter().copied()).collect();
    files.push(("k-noise/model.onnx", "this is no model"));
    files.push(("README.md", ""));
    let root = folder(&files);
    let config = folder(&[("c.toml", "[http]\nmax_connections = 0")]);
    let models = root.path().display().to_string();
    let file = config.path().join("c.toml").display().to_string();
    for arguments in [&["--models", &models][..], &["--models", &models, "--config", &file]] {
        let (code, out) = check(arguments, &[]);
        assert_eq!(code, 1, "{out}");
        let both = BROKEN.iter().map(|(_, expected)| *expected).chain(["pipeline = 9", "k-noise/model.onnx: "]);
        for expected in both {
            let said = out.lines().any(|line| line.starts_with("error: ") && line.contains(expected));
            assert!(said, "{expected} in\n{out}");
        }
        assert_eq!(out.contains("http.max_connections = 0"), arguments.len() > 2, "{out}");
    }
}

#[test]
fn without_faults_it_prints_where_each_value_came_from_and_ends_with_0() {
    let root = folder(&[("c.toml", "[http]\nmax_connections = 7"), ("models/README.md", "")]);
    let path = |name: &str| root.path().join(name).display().to_string();
    let models = path("models");
    let environment =
        [("CONCERTINA_ADDRESS", "127.0.0.1:1"), ("CONCERTINA_MODELS", &models), ("CONCERTINA_LOG_FORMAT", "")];
    let file = path("c.toml");
    let (code, out) = check(&["--config", &file, "--log-level", "debug"], &environment);
    assert_eq!(code, 0, "{out}");
    for line in [
        "address = \"127.0.0.1:1\" # environment CONCERTINA_ADDRESS",
        &format!("max_connections = 7 # file {file}"),
        "level = \"debug\" # flag --log-level",
        "format = \"human\" # default",
    ] {
        assert!(out.lines().any(|found| found == line), "{line} in\n{out}");
    }
    // What it prints is a configuration file.
    fs::write(Path::new(&file), &out).expect("the file");
    assert_eq!(check(&["--config", &file], &[]).0, 0);
}

#[test]
fn the_admin_token_is_not_printed_wherever_it_comes_from() {
    let root =
        folder(&[("c.toml", "[admin]\ntoken = \"S3CRET\""), ("d.toml", "[admin]\ntoken = S3CRET"), ("models/", "")]);
    let path = |name: &str| root.path().join(name).display().to_string();
    let (good, bad, models) = (path("c.toml"), path("d.toml"), path("models"));
    for (arguments, environment, expected) in [
        (&["--config", &*good][..], &[][..], format!("token = \"***\" # file {good}")),
        (
            &[],
            &[("CONCERTINA_ADMIN_TOKEN", "S3CRET")],
            "token = \"***\" # environment CONCERTINA_ADMIN_TOKEN".to_owned(),
        ),
        (&["--admin-token", "S3CRET"], &[], "token = \"***\" # flag --admin-token".to_owned()),
        (&["--set", "admin.token=S3CRET"], &[], "token = \"***\" # flag --set".to_owned()),
        (&["--set", "admin.tokem=S3CRET"], &[], "error: admin.tokem = \"***\" (flag --set): unknown key".to_owned()),
        (&["--admin-token", "S3CRET S3CRET"], &[], "error: admin.token = \"***\" (flag --admin-token)".to_owned()),
        (&["--config", &*bad], &[], format!("error: file {bad}: this is not TOML: line 2, column 9: ")),
        (&["--help"], &[("CONCERTINA_ADMIN_TOKEN", "S3CRET")], "--admin-token <TOKEN>".to_owned()),
    ] {
        let arguments = [arguments, &["--models", &models]].concat();
        let (_, out) = check(&arguments, environment);
        assert!(out.contains(&expected) && !out.contains("S3CRET"), "{arguments:?}: {expected} in\n{out}");
    }
}

#[test]
fn a_broken_configuration_does_not_hide_which_library_was_named() {
    let root = folder(&[
        ("c.toml", "speed = 1\n[runtime]\nlibrary = \"/of/the/file.so\""),
        ("models/a.onnx", ""),
        ("models/b.onnx", ""),
    ]);
    let path = |name: &str| root.path().join(name).display().to_string();
    let (file, models) = (path("c.toml"), path("models"));
    let arguments = ["--config", &file, "--models", &models];
    let variable = [("CONCERTINA_ONNXRUNTIME", "/of/the/environment.so")];
    for (environment, expected) in [(&[][..], "/of/the/file.so"), (&variable, "/of/the/environment.so")] {
        let (code, out) = check(&arguments, environment);
        assert!(code == 1 && out.contains("speed = 1"), "{out}");
        assert!(out.contains(expected) && out.matches("was not found").count() == 1, "{out}");
    }
}

#[test]
fn bad_usage_ends_with_2() {
    assert_eq!(check(&["--adress", "x"], &[]).0, 2);
}
