//! Keys to [`Settings`]: what each key allows and how the keys relate.

use super::placement::{Instances, instances};
use super::text::{TextSettings, section};
use super::{BatchAxis, CudaGraph, Fill, Labels, Packing, Padding, Settings, VersionPolicy, Warmup};
use crate::keys::value::{auto_or, bytes, choice, count, duration, integer, integers, number};
use crate::keys::{Keys, Path, Relation};
use crate::units::ByteSize;
use std::collections::BTreeMap;
use std::time::Duration;
use toml::Value;

/// The text of config/concertina.toml: every key of the server and of models with its default.
pub const DEFAULTS: &str = include_str!("../../../config/concertina.toml");

/// The most bytes that a key may ask for: more than any machine has, little enough to add up.
const MOST_BYTES: ByteSize = ByteSize(1 << 50);
/// The longest that anything may wait.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);
/// The most threads that one instance computes with.
pub const MOST_THREADS: u32 = 1024;
/// The largest size of a dimension.
const MOST_DIM: usize = 1 << 31;
/// The largest rank of a tensor in a graph that is worth naming an axis of.
const MOST_AXIS: usize = 31;

/// The words of `packing`.
const PACKINGS: [Packing; 3] = [Packing::Near, Packing::Fifo, Packing::Off];

/// The words of `cuda_graph`.
const CUDA_GRAPHS: [CudaGraph; 3] = [CudaGraph::Auto, CudaGraph::On, CudaGraph::Off];

/// Options of the CUDA provider that the server sets itself: another value would take the device, its memory, the stream or
/// graphs out of its hands.
const RESERVED_CUDA_OPTIONS: [&str; 9] = [
    "device_id",
    "has_user_compute_stream",
    "user_compute_stream",
    "gpu_mem_limit",
    "arena_extend_strategy",
    "gpu_external_alloc",
    "gpu_external_free",
    "gpu_external_empty_cache",
    "enable_cuda_graph",
];

/// All that a model.toml may hold.
pub(super) fn model(keys: &mut Keys) -> Option<Settings> {
    let settings = defaults(keys);
    let dims = warmup_dims(keys);
    let inputs = warmup_inputs(keys);
    let padding = padding(keys);
    let labels = labels(keys);
    let version_labels = version_labels(keys);
    let cuda = named(keys, "cuda", cuda_option);
    let text = section(keys);
    let mut settings = settings?;
    settings.warmup.dims = dims;
    settings.warmup.inputs = inputs;
    settings.padding = padding;
    settings.labels = labels;
    settings.version_labels = version_labels;
    settings.cuda = cuda;
    settings.text = text;
    Some(settings)
}

/// What the server's `[model]` section may hold: everything that does not name a dimension or tensor of one model.
/// All keys are read before any is missed, so that every fault is found.
pub(super) fn defaults(keys: &mut Keys) -> Option<Settings> {
    let batch_axis = keys.read("batch_axis", batch_axis);
    let instances = keys.read("instances", instances);
    let intra_op_threads = keys.read("intra_op_threads", auto_or(count(MOST_THREADS)));
    let max_batch_size = keys.read("max_batch_size", auto_or(integer(1..=65_536)));
    let max_queue_delay = keys.read("max_queue_delay", duration(Duration::ZERO..=Duration::from_secs(60)));
    let max_gather_delay = keys.read("max_gather_delay", duration(Duration::ZERO..=Duration::from_secs(1)));
    let max_queue_rows = keys.read("max_queue_rows", integer(1..=100_000_000));
    let max_queue_bytes = keys.read("max_queue_bytes", bytes(ByteSize(1)..=MOST_BYTES));
    let priority_levels = keys.read("priority_levels", integer(1..=100));
    let default_priority = keys.read("default_priority", integer(1..=100));
    let default_timeout = keys.read("default_timeout", duration(Duration::from_millis(1)..=DAY));
    let knee_tolerance = keys.read("knee_tolerance", number(0.0..=0.5));
    let pipeline = keys.read("pipeline", integer(1..=4));
    let packing = keys.read("packing", choice(&PACKINGS.map(|packing| (packing.name(), packing))));
    let cuda_graph = keys.read("cuda_graph", choice(&CUDA_GRAPHS.map(|graph| (graph.name(), graph))));
    let seconds = keys.read("warmup.seconds", number(0.0..=3600.0));
    let default_dim = keys.read("warmup.default_dim", integer(1..=MOST_DIM));
    let versions = versions(keys);
    relate(
        keys,
        (max_batch_size.flatten(), max_queue_rows),
        (default_priority, priority_levels),
        (max_queue_delay, default_timeout),
    );
    let Instances { count, place, beside } = instances?;
    Some(Settings {
        batch_axis: batch_axis?,
        instances: count,
        place,
        beside,
        intra_op_threads: intra_op_threads?,
        max_batch_size: max_batch_size?,
        max_queue_delay: max_queue_delay?,
        max_gather_delay: max_gather_delay?,
        max_queue_rows: max_queue_rows?,
        max_queue_bytes: max_queue_bytes?,
        priority_levels: priority_levels?,
        default_priority: default_priority?,
        default_timeout: default_timeout?,
        knee_tolerance: knee_tolerance?,
        pipeline: pipeline?,
        warmup: Warmup {
            seconds: Duration::from_secs_f64(seconds?),
            default_dim: default_dim?,
            dims: BTreeMap::new(),
            inputs: BTreeMap::new(),
        },
        versions: versions?,
        padding: Padding::default(),
        packing: packing?,
        version_labels: BTreeMap::new(),
        labels: BTreeMap::new(),
        cuda_graph: cuda_graph?,
        cuda: BTreeMap::new(),
        text: TextSettings::default(),
    })
}

/// What must hold between keys.
fn relate(
    keys: &mut Keys,
    (max_batch_size, max_queue_rows): (Option<u32>, Option<u64>),
    (default_priority, priority_levels): (Option<u32>, Option<u32>),
    (max_queue_delay, default_timeout): (Option<Duration>, Option<Duration>),
) {
    keys.require(
        both(max_batch_size, max_queue_rows, |batch, queue| u64::from(batch) <= queue),
        &Relation {
            key: "max_queue_rows",
            must_be: "at least",
            other: "max_batch_size",
            or_else: "the largest batch never forms",
        },
    );
    keys.require(
        both(default_priority, priority_levels, |default, levels| default <= levels),
        &Relation {
            key: "default_priority",
            must_be: "at most",
            other: "priority_levels",
            or_else: "requests that name no priority have none",
        },
    );
    keys.require(
        both(max_queue_delay, default_timeout, |delay, timeout| delay < timeout),
        &Relation {
            key: "max_queue_delay",
            must_be: "shorter than",
            other: "default_timeout",
            or_else: "requests time out while they wait for company",
        },
    );
}

fn both<A, B>(a: Option<A>, b: Option<B>, relate: impl Fn(A, B) -> bool) -> Option<bool> {
    a.zip(b).map(|(a, b)| relate(a, b))
}

fn batch_axis(value: &Value) -> Result<BatchAxis, String> {
    match value.as_str() {
        Some("auto") => Ok(BatchAxis::Auto),
        Some("none") => Ok(BatchAxis::None),
        _ => integer(0..=MOST_AXIS)(value)
            .map(BatchAxis::Axis)
            .map_err(|allowed| format!("\"auto\", \"none\" or {allowed}")),
    }
}

fn versions(keys: &mut Keys) -> Option<VersionPolicy> {
    #[derive(Clone, Copy, PartialEq)]
    enum Policy {
        Latest,
        Specific,
        All,
    }
    let policies = [("latest", Policy::Latest), ("specific", Policy::Specific), ("all", Policy::All)];
    let policy = keys.read("versions.policy", choice(&policies));
    let count = keys.read("versions.count", integer(1..=1000usize));
    let versions = keys.read("versions.versions", integers(1..=i64::MAX as u64));
    keys.require(
        both(policy, versions.as_ref(), |policy, versions| (policy == Policy::Specific) != versions.is_empty()),
        &Relation {
            key: "versions.versions",
            must_be: "there if, and only if, \"specific\" is what is said by",
            other: "versions.policy",
            or_else: "it is unclear which versions are meant",
        },
    );
    Some(match policy? {
        Policy::Latest => VersionPolicy::Latest { count: count? },
        Policy::Specific => VersionPolicy::Specific(versions?),
        Policy::All => VersionPolicy::All,
    })
}

fn warmup_dims(keys: &mut Keys) -> BTreeMap<String, usize> {
    named(keys, "warmup.dims", |rest, value| match rest {
        [name] => integer(1..=MOST_DIM)(value).map(|size| (name.clone(), size)),
        _ => Err("the size of a dimension: NAME = 64".to_owned()),
    })
}

fn warmup_inputs(keys: &mut Keys) -> BTreeMap<String, Fill> {
    let fills = [("zero", Fill::Zero), ("one", Fill::One), ("random", Fill::Random)];
    named(keys, "warmup.inputs", |rest, value| match rest {
        [name, key] if key == "data" => choice(&fills)(value).map(|fill| (name.clone(), fill)),
        _ => Err("NAME = { data = \"zero\" }".to_owned()),
    })
}

fn version_labels(keys: &mut Keys) -> BTreeMap<String, u64> {
    named(keys, "versions.labels", |rest, value| match rest {
        [label] => integer(1..=i64::MAX as u64)(value).map(|version| (label.clone(), version)),
        _ => Err("the version that a label means: stable = 1".to_owned()),
    })
}

fn labels(keys: &mut Keys) -> BTreeMap<String, Labels> {
    named(keys, "labels", |rest, value| {
        let allowed = || "the name of a file in the model's folder: OUTPUT = \"labels.txt\"".to_owned();
        let file = value.as_str().filter(|file| !file.is_empty() && !file.contains('/') && !file.starts_with('.'));
        match (rest, file) {
            ([name], Some(file)) => Ok((name.clone(), Labels { file: file.to_owned(), ..Labels::default() })),
            _ => Err(allowed()),
        }
    })
}

/// An option that is handed to ONNX Runtime as it is, unless the server sets it itself.
fn cuda_option(rest: &[String], value: &Value) -> Result<(String, String), String> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Boolean(is_on) => u8::from(*is_on).to_string(),
        _ => return Err("a text, a number, true or false".to_owned()),
    };
    match rest {
        [name] if RESERVED_CUDA_OPTIONS.contains(&name.as_str()) => {
            Err("not to be set: the server itself decides on the device, its memory, its stream and graphs".to_owned())
        }
        [name] => Ok((name.clone(), text)),
        _ => Err("an option of the CUDA provider: NAME = VALUE".to_owned()),
    }
}

fn padding(keys: &mut Keys) -> Padding {
    let mut padding = Padding::default();
    for (rest, value) in keys.below("padding") {
        if let Err(allowed) = pad(&mut padding, &rest, &value) {
            let mut key: Path = vec!["padding".to_owned()];
            key.extend(rest);
            keys.refuse(&key, &allowed);
        }
    }
    padding
}

/// One key of `[padding]`. The tables `inputs` and `outputs` are ours, every other one is named after a dimension.
fn pad(padding: &mut Padding, rest: &[String], value: &Value) -> Result<(), String> {
    match rest {
        [table, name] if table == "inputs" => {
            let number = number(f64::MIN..=f64::MAX)(value).map_err(|_| "the number that pads the input".to_owned())?;
            padding.inputs.insert(name.clone(), number);
        }
        [table, name, axis] if table == "outputs" => {
            let allowed = || "AXIS = \"DIMENSION\", such as 1 = \"sequence\"".to_owned();
            let axis = axis.parse().ok().filter(|axis| *axis <= MOST_AXIS).ok_or_else(allowed)?;
            let dim = value.as_str().ok_or_else(allowed)?;
            padding.outputs.entry(name.clone()).or_default().insert(axis, dim.to_owned());
        }
        [dim, key] if key == "lengths" && dim != "outputs" => {
            let lengths = integers(1..=MOST_DIM)(value)?;
            if lengths.is_empty() {
                return Err("at least one length".to_owned());
            }
            padding.lengths.insert(dim.clone(), lengths);
        }
        _ => return Err("[padding.DIMENSION] lengths, [padding.inputs] NAME or [padding.outputs.NAME] AXIS".to_owned()),
    }
    Ok(())
}

/// Reads a table whose keys are free names.
fn named<T>(
    keys: &mut Keys,
    table: &str,
    parse: impl Fn(&[String], &Value) -> Result<(String, T), String>,
) -> BTreeMap<String, T> {
    let mut found = BTreeMap::new();
    for (rest, value) in keys.below(table) {
        match parse(&rest, &value) {
            Ok((name, parsed)) => {
                found.insert(name, parsed);
            }
            Err(allowed) => {
                let key: Path = table.split('.').map(str::to_owned).chain(rest).collect();
                keys.refuse(&key, &allowed);
            }
        }
    }
    found
}
