use super::*;

fn faults(file: &str) -> Vec<String> {
    Config::resolve(Some(("c.toml", file)), &[]).expect_err(file)
}

fn over(key: &str, value: &str) -> Override {
    Override { key: key.to_owned(), value: value.to_owned(), origin: Origin::Flag("--flag".to_owned()) }
}

#[test]
fn every_bad_value_is_refused_by_name() {
    for (section, line, expected) in [
        ("server", "address = \"8000\"", "HOST:PORT"),
        ("server", "address = \"localhost\"", "HOST:PORT"),
        ("server", "address = \"::1:8000\"", "HOST:PORT"),
        ("server", "address = \"localhost:65536\"", "HOST:PORT"),
        ("server", "address = 8000", "HOST:PORT"),
        ("models", "path = \"\"", "the path of a folder"),
        ("models", "name = \"a/b\"", "a name of 1 to 128"),
        ("models", "name = \"stats\"", "other than \"stats\""),
        ("models", "cache = 1", "the path of a folder"),
        ("runtime", "library = 1", "a text in quotes"),
        ("runtime", "threads = 0", "\"auto\" or an integer from 1 to 1024"),
        ("runtime", "threads = \"many\"", "\"auto\" or an integer from 1 to 1024"),
        ("http", "max_body_bytes = 0", "a size such as \"64MiB\" or a number of bytes, from 1.0 KiB to 1.0 TiB"),
        ("http", "max_body_bytes = \"64Mib\"", "a size"),
        ("http", "max_bodies_bytes = 1", "from 1.0 KiB to 16.0 TiB"),
        ("http", "max_header_bytes = \"4KiB\"", "from 8.0 KiB to 1.0 MiB"),
        ("http", "header_read_timeout = 10", "a duration such as \"250ms\" or \"2s\", from 1s to 1h"),
        ("http", "body_read_timeout = \"0s\"", "a duration"),
        ("http", "write_timeout = \"0s\"", "from 1ms to 1h"),
        ("http", "max_streams_per_connection = 0", "an integer from 1 to 1000000"),
        ("http", "max_request_rows = 0", "an integer from 1 to 16777216"),
        ("http", "max_connections = 0", "an integer from 1 to 1000000"),
        ("http", "max_in_flight_requests = 2.5", "an integer from 1 to 1000000"),
        ("http", "crowded_idle_timeout = \"1ms\"", "from 10ms to 1h"),
        ("http", "cors_origins = [\"example.org\"]", "a list of origins such as"),
        ("http", "cors_origins = [\"https://a.b\", \"*\"]", "or [\"*\"] alone"),
        ("http", "cors_origins = [1]", "a list of origins"),
        ("tls", "key = 1", "a text in quotes"),
        ("access", "key_file = 1", "a text in quotes"),
        ("grpc", "address = \"8001\"", "\"auto\", \"off\" or HOST:PORT"),
        ("grpc", "max_stream_requests = 0", "an integer from 1 to 65536"),
        ("model", "batch_axis = -1", "\"auto\", \"none\" or an integer from 0 to 31"),
        ("model", "instances = 65", "\"auto\", an integer from 1 to 64, or [{ device ="),
        ("model", "cuda_graph = true", "one of \"auto\", \"on\", \"off\""),
        ("runtime", "providers = [\"gpu\"]", "\"auto\", or a list by preference"),
        ("runtime", "gpus = []", "a list of different numbers from 0 to 63"),
        ("model", "intra_op_threads = 0", "\"auto\" or an integer from 1 to 1024"),
        ("model", "max_batch_size = 0", "\"auto\" or an integer from 1 to 65536"),
        ("model", "max_queue_delay = \"2m\"", "from 0s to 1m"),
        ("model", "max_queue_rows = 0", "an integer from 1 to 100000000"),
        ("model", "max_queue_bytes = true", "a size"),
        ("model", "priority_levels = 0", "an integer from 1 to 100"),
        ("model", "default_priority = 0", "an integer from 1 to 100"),
        ("model", "default_timeout = \"0s\"", "from 1ms to 1day"),
        ("model", "knee_tolerance = 0.6", "a number from 0 to 0.5"),
        ("model", "knee_tolerance = nan", "a number from 0 to 0.5"),
        ("model", "pipeline = 5", "an integer from 1 to 4"),
        ("model.warmup", "seconds = -1", "a number from 0 to 3600"),
        ("model.warmup", "default_dim = 0", "an integer from 1"),
        ("model.versions", "policy = \"newest\"", "one of \"latest\", \"specific\", \"all\""),
        ("model.versions", "count = 0", "an integer from 1 to 1000"),
        ("model.versions", "versions = [0]", "a list of different integers from 1"),
        ("memory", "limit = \"0%\"", "\"auto\", a part of the device such as \"80%\", or a size"),
        ("memory", "headroom = \"-1MiB\"", "a size such as \"64MiB\" or a number of bytes, from 0 B to 1.0 PiB"),
        ("drain", "announce = \"11m\"", "\"auto\" or a duration"),
        ("drain", "grace = \"-1s\"", "a duration"),
        ("log", "format = \"text\"", "one of \"human\", \"json\""),
        ("log", "level = \"verbose\"", "\"error\", \"warn\", \"info\""),
        ("log", "level = \"\"", "\"error\", \"warn\", \"info\""),
    ] {
        let (key, value) = line.split_once(" = ").expect(line);
        let found = faults(&format!("[{section}]\n{line}"));
        assert_eq!(found.len(), 1, "{line}: {found:?}");
        assert!(found[0].starts_with(&format!("{section}.{key} = {value} (file c.toml): expected ")), "{found:?}");
        assert!(found[0].contains(expected), "{expected}: {found:?}");
    }
}

#[test]
fn the_admin_token_is_never_shown() {
    let secret = "S3CRET-t0ken";
    let config =
        Config::resolve(Some(("c.toml", &format!("[admin]\ntoken = \"{secret}\""))), &[]).expect("a good token");
    assert_eq!(config.admin.token.as_deref(), Some(secret));
    assert!(config.render().contains("token = \"***\" # file c.toml\n"), "{}", config.render());
    assert!(!format!("{config:?}").contains(secret), "{config:?}");
    let empty = Config::resolve(None, &[over("admin.token", "")]).expect("no token");
    assert_eq!(empty.admin.token, None);
    assert!(empty.render().contains("token = \"\" # flag --flag\n"), "{}", empty.render());
    let long = "x".repeat(MAX_TOKEN_LEN + 1);
    for bad in ["two words", "line\n", " ", "caf\u{e9}", "***", &long] {
        let faults = Config::resolve(None, &[over("admin.token", bad)]).expect_err(bad);
        assert_eq!(faults.len(), 1, "{faults:?}");
        let start = "admin.token = \"***\" (flag --flag): expected up to 1024 visible ASCII characters";
        assert!(faults[0].starts_with(start), "{faults:?}");
    }
    for file in
        ["[admin]\ntokn = \"S3CRET\"", "[admn]\ntoken = \"S3CRET\"", "[admin]\ntoken = S3CRET", "admin = \"S3CRET\""]
    {
        let found = faults(file);
        assert!(found.iter().all(|fault| !fault.contains("S3CRET")), "{found:?}");
    }
}

#[test]
fn grpc_follows_the_address_of_http_unless_it_has_its_own() {
    let address = |http: &str, grpc: &str| {
        let given = [over("server.address", http), over("grpc.address", grpc)];
        Config::resolve(None, &given).expect("good addresses").grpc.address
    };
    assert_eq!(Config::default().grpc.address.as_deref(), Some("127.0.0.1:8001"));
    assert_eq!(address("[::]:9000", "auto").as_deref(), Some("[::]:9001"));
    assert_eq!(address("0.0.0.0:0", "auto").as_deref(), Some("0.0.0.0:0"));
    let last = Config::resolve(None, &[over("server.address", "0.0.0.0:65535")]).expect_err("no port is left");
    assert!(last[0].starts_with("grpc.address = \"auto\" (default): expected \"off\" or HOST:PORT"), "{last:?}");
    assert_eq!(address("0.0.0.0:8000", "localhost:1").as_deref(), Some("localhost:1"));
    assert_eq!(address("0.0.0.0:8000", "off"), None);
}

#[test]
fn api_keys_are_separated_by_commas_and_never_shown() {
    let config = Config::resolve(None, &[over("access.keys", "S3CRET1, S3CRET2,")]).expect("good keys");
    assert_eq!(config.access.keys, ["S3CRET1", "S3CRET2"]);
    assert!(!format!("{config:?}{}", config.render()).contains("S3CRET"), "{config:?}");
    let faults = Config::resolve(None, &[over("access.keys", "S3CRET two")]).expect_err("a space");
    assert!(faults[0].starts_with("access.keys = \"***\" (flag --flag): expected keys of up to 1024"), "{faults:?}");
}

#[test]
fn keys_that_contradict_each_other_are_named_together() {
    for (file, expected) in [
        (
            "[model]\nmax_batch_size = 64\nmax_queue_rows = 63",
            ["model.max_queue_rows = 63", "model.max_batch_size = 64"],
        ),
        ("[model]\npriority_levels = 1", ["model.default_priority = 2", "model.priority_levels = 1"]),
        (
            "[model]\nmax_queue_delay = \"1s\"\ndefault_timeout = \"1s\"",
            ["model.max_queue_delay", "model.default_timeout"],
        ),
        (
            "[http]\nmax_body_bytes = \"1GiB\"",
            ["model.max_queue_bytes = \"256MiB\" (default)", "http.max_body_bytes = \"1GiB\""],
        ),
        (
            "[http]\nmax_bodies_bytes = \"63MiB\"",
            ["http.max_bodies_bytes = \"63MiB\" (file c.toml)", "http.max_body_bytes = \"64MiB\""],
        ),
        ("[tls]\nkey = \"k.pem\"", ["tls.certificate = \"\" (default)", "tls.key = \"k.pem\""]),
        ("[model.versions]\npolicy = \"specific\"", ["model.versions.versions = []", "model.versions.policy"]),
        ("[model.versions]\nversions = [1]", ["model.versions.versions = [1]", "model.versions.policy = \"latest\""]),
    ] {
        let found = faults(file);
        assert_eq!(found.len(), 1, "{file}: {found:?}");
        assert!(expected.iter().all(|part| found[0].contains(part)), "{found:?}");
    }
}

#[test]
fn all_faults_of_all_sections_come_in_one_report() {
    let file = "[http]\nmax_connections = 0\nmax_body = 1\n[model]\npipeline = 9\nspeed = 1\n[log]\nformat = 1";
    let found = Config::resolve(Some(("c.toml", file)), &[over("server.address", "nowhere")]).expect_err("broken");
    let named =
        ["server.address", "http.max_connections", "http.max_body ", "model.pipeline", "model.speed", "log.format"];
    assert!(named.iter().all(|key| found.iter().any(|fault| fault.starts_with(key))), "{found:#?}");
    assert_eq!(found.len(), named.len(), "{found:#?}");
    assert!(found.iter().any(|fault| fault.ends_with("unknown key; did you mean http.max_body_bytes?")), "{found:#?}");
    assert!(found.iter().any(|fault| fault.contains("(flag --flag)")), "{found:#?}");
}

#[test]
fn later_layers_win_and_the_rendered_values_read_back_the_same() {
    let file = "[http]\nmax_body_bytes = 2048\n[drain]\nannounce = \"1s\"";
    let config = Config::resolve(Some(("c.toml", file)), &[over("drain.announce", "3s"), over("runtime.threads", "2")])
        .expect("these values are good");
    assert_eq!(config.http.max_body_bytes, ByteSize(2048));
    assert_eq!(config.runtime.threads, NonZeroUsize::new(2));
    assert_eq!(config.drain.announce(true), Duration::from_secs(3));
    assert_eq!(config.drain.grace, Config::default().drain.grace);
    let rendered = config.render();
    for line in ["max_body_bytes = 2048 # file c.toml", "announce = \"3s\" # flag --flag", "grace = \"30s\" # default"]
    {
        assert!(rendered.contains(line), "{line} in\n{rendered}");
    }
    let again = Config::resolve(Some(("again.toml", &rendered)), &[]).expect("rendered values are good");
    assert_eq!((again.http, again.drain, again.model), (config.http, config.drain, config.model));
}

#[test]
fn a_person_at_a_terminal_does_not_wait_for_proxies() {
    let drain = Config::default().drain;
    assert_eq!([true, false].map(|terminal| drain.announce(terminal)), [0, 5].map(Duration::from_secs));
}

#[test]
fn what_was_measured_is_kept_where_caches_are_kept() {
    let set = |names: &'static [(&str, &str)]| {
        move |name: &str| names.iter().find(|(known, _)| *known == name).map(|(_, value)| OsString::from(value))
    };
    for (cache, variables, expected) in [
        ("auto", &[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")][..], Some("/x/concertina")),
        ("auto", &[("XDG_CACHE_HOME", ""), ("HOME", "/h")], Some("/h/.cache/concertina")),
        ("auto", &[("XDG_CACHE_HOME", "x"), ("HOME", "h")], None),
        ("auto", &[], None),
        ("", &[("HOME", "/h")], None),
        ("here", &[("HOME", "/h")], Some("here")),
    ] {
        let config = Config::resolve(None, &[over("models.cache", cache)]).expect("a good value");
        assert_eq!(config.models.cache_folder(&set(variables)), expected.map(PathBuf::from), "{cache} {variables:?}");
    }
}

#[test]
fn a_model_overrides_the_section_and_is_checked_against_the_server() {
    let file = "[model]\npipeline = 1\nmax_queue_rows = 100";
    let config = Config::resolve(Some(("c.toml", file)), &[]).expect("these values are good");
    let settings = config.settings("m/model.toml", "max_queue_rows = 50");
    assert_eq!(settings.1, Vec::<String>::new());
    let settings = settings.0.expect("these settings are good");
    assert_eq!((settings.pipeline, settings.max_queue_rows), (1, 50));
    let found = config.settings("m/model.toml", "max_queue_bytes = \"1MiB\"").1;
    assert!(found[0].starts_with("max_queue_bytes = 1.0 MiB (file m/model.toml)"), "{found:?}");
}

#[test]
fn the_default_file_holds_exactly_the_keys_that_are_read_each_with_a_comment() {
    let mut keys = Keys::default();
    keys.overlay(DEFAULTS, &Origin::Default);
    assert!(read(&mut keys).is_some());
    let mut asked: Vec<String> = keys.asked().collect();
    assert_eq!(keys.finish(), Vec::<String>::new());

    let (mut section, mut commented, mut written) = (String::new(), false, Vec::new());
    for line in DEFAULTS.lines() {
        if let Some(name) = line.strip_prefix('[') {
            section = name.trim_end_matches(']').to_owned();
        } else if let Some((key, _)) = line.split_once(" = ").filter(|_| !line.starts_with('#')) {
            assert!(commented, "{section}.{key} has no comment of its own");
            written.push(format!("{section}.{key}"));
        }
        commented = line.starts_with('#');
    }
    asked.sort();
    written.sort();
    assert_eq!(written, asked);
}

#[test]
fn the_manifests_scale_at_the_target_of_the_configuration() {
    let target = Config::default().scaling.target;
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("config/kubernetes");
    for (path, line) in [
        ("components/autoscale-hpa/autoscaler.yaml", format!("averageValue: {:.0}m}}", 1000.0 * target)),
        ("components/autoscale-keda/scaled-object.yaml", format!("threshold: \"{target}\"")),
        ("overlays/kserve/scaled-object.yaml", format!("threshold: \"{target}\"")),
    ] {
        let text = std::fs::read_to_string(folder.join(path)).expect(path);
        assert!(text.contains(&line), "{path} does not say {line}");
    }
}
