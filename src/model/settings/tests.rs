use super::*;

fn parse(text: &str) -> Result<Settings, Vec<String>> {
    Settings::from_toml(text, "m/model.toml", &Settings::default_keys())
}

#[test]
fn an_empty_file_means_the_defaults() {
    assert_eq!(parse(""), Ok(Settings::default()));
}

#[allow(clippy::too_many_lines, reason = "a list of all keys")]
#[test]
fn every_key_can_be_said() {
    let text = r#"
        batch_axis = 1
        instances = [{ device = "cuda:1", count = 2 }]
        intra_op_threads = 3
        max_batch_size = 32
        max_queue_delay = "2ms"
        max_gather_delay = "3ms"
        max_queue_rows = 64
        max_queue_bytes = "1GiB"
        priority_levels = 3
        default_priority = 1
        default_timeout = "1s"
        knee_tolerance = 0.1
        pipeline = 1
        packing = "fifo"
        cuda_graph = "off"
        [cuda]
        use_tf32 = false
        cudnn_conv_algo_search = "EXHAUSTIVE"
        [warmup]
        seconds = 0.5
        default_dim = 8
        dims = { sequence = 16, "a.b" = 3 }
        [warmup.inputs."x.y"]
        data = "random"
        [versions]
        policy = "specific"
        versions = [3, 1]
        [padding.sequence]
        lengths = [64, 16]
        [padding.inputs]
        input_ids = 0
        [padding.outputs]
        hidden = { 1 = "sequence" }
        [versions.labels]
        stable = 1
        [labels]
        y = "labels.txt"
        [text]
        max_tokens = 99
    "#;
    let settings = parse(text).expect("these settings are good");
    let expected = Settings {
        batch_axis: BatchAxis::Axis(1),
        instances: NonZeroU32::new(2),
        beside: Vec::new(),
        intra_op_threads: NonZeroU32::new(3),
        max_batch_size: Some(32),
        max_queue_delay: Duration::from_millis(2),
        max_gather_delay: Duration::from_millis(3),
        max_queue_rows: 64,
        max_queue_bytes: ByteSize(1 << 30),
        priority_levels: 3,
        default_priority: 1,
        default_timeout: Duration::from_secs(1),
        knee_tolerance: 0.1,
        pipeline: 1,
        warmup: Warmup {
            seconds: Duration::from_millis(500),
            default_dim: 8,
            dims: BTreeMap::from([("sequence".to_owned(), 16), ("a.b".to_owned(), 3)]),
            inputs: BTreeMap::from([("x.y".to_owned(), Fill::Random)]),
        },
        versions: VersionPolicy::Specific(vec![1, 3]),
        packing: Packing::Fifo,
        padding: Padding {
            lengths: BTreeMap::from([("sequence".to_owned(), vec![16, 64])]),
            inputs: BTreeMap::from([("input_ids".to_owned(), 0.0)]),
            outputs: BTreeMap::from([("hidden".to_owned(), BTreeMap::from([(1, "sequence".to_owned())]))]),
        },
        version_labels: BTreeMap::from([("stable".to_owned(), 1)]),
        labels: BTreeMap::from([("y".to_owned(), Labels { file: "labels.txt".to_owned(), ..Labels::default() })]),
        place: Some(Place::Cuda(1)),
        cuda_graph: CudaGraph::Off,
        cuda: [("use_tf32", "0"), ("cudnn_conv_algo_search", "EXHAUSTIVE")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .into(),
        text: TextSettings { given: true, max_tokens: Some(99), ..TextSettings::default() },
    };
    assert_eq!(settings, expected);
}

#[test]
fn every_bad_value_is_refused_by_file_and_key() {
    for (text, key, expected) in [
        ("batch_axis = \"first\"", "batch_axis", "\"auto\", \"none\" or an integer"),
        ("max_batch_size = \"8 rows\"", "max_batch_size", "\"auto\" or an integer"),
        ("max_queue_delay = 5", "max_queue_delay", "a duration such as"),
        ("packing = \"far\"", "packing", "one of \"near\", \"fifo\", \"off\""),
        ("cuda_graph = true", "cuda_graph", "one of \"auto\", \"on\", \"off\""),
        ("[cuda]\ngpu_mem_limit = 1", "cuda.gpu_mem_limit", "not to be set"),
        ("pipeline = 0", "pipeline", "an integer from 1 to 4"),
        ("[labels]\ny = \"../y\"", "labels.y", "a file in the model's folder"),
        ("warmup = 3", "warmup", "[warmup] is a table of keys"),
        ("warmup.dims.sequence = 0", "warmup.dims.sequence", "an integer from 1"),
        ("warmup.dims.sequence.x = 1", "warmup.dims.sequence.x", "the size of a dimension"),
        ("warmup.inputs.mask.data = \"ones\"", "warmup.inputs.mask.data", "one of \"zero\", \"one\", \"random\""),
        ("warmup.inputs.mask = \"one\"", "warmup.inputs.mask", "NAME = { data"),
        ("padding.sequence.lengths = []", "padding.sequence.lengths", "at least one length"),
        ("padding.sequence.lengths = [0]", "padding.sequence.lengths", "a list of different integers"),
        ("padding.sequence.length = [1]", "padding.sequence.length", "[padding.DIMENSION] lengths"),
        ("padding.inputs.ids = \"zero\"", "padding.inputs.ids", "the number that pads the input"),
        ("padding.outputs.y.one = \"sequence\"", "padding.outputs.y.one", "AXIS = \"DIMENSION\""),
        ("padding.outputs.y.1 = 2", "padding.outputs.y.1", "AXIS = \"DIMENSION\""),
        ("max_queue_row = 1", "max_queue_row", "unknown key; did you mean max_queue_rows?"),
    ] {
        let found = parse(text).expect_err(text);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        assert!(found[0].starts_with(&format!("{key} = ")), "{found:?}");
        assert!(found[0].contains("(file m/model.toml): ") && found[0].contains(expected), "{expected}: {found:?}");
    }
}

#[test]
fn all_faults_of_a_file_come_in_one_report() {
    let found = parse("pipeline = 0\ninstances = 0\nspeed = 1\n[warmup.dims]\na = -1\n[padding.x]\nlengths = 3")
        .expect_err("broken");
    for key in ["pipeline", "instances", "speed", "warmup.dims.a", "padding.x.lengths"] {
        assert!(found.iter().any(|fault| fault.starts_with(key)), "{key}: {found:#?}");
    }
    assert_eq!(found.len(), 5, "{found:#?}");
}

#[test]
fn relations_hold_between_a_file_and_the_defaults() {
    let found = parse("max_batch_size = 8192").expect_err("more than may wait");
    assert!(
        found[0].starts_with("max_queue_rows = 4096 (default): must be at least max_batch_size = 8192"),
        "{found:?}"
    );
}
