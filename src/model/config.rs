//! Triton's model configuration: what is published of a model, and what a request to load one may say in its words.

use super::settings::{Place, VersionPolicy};
use super::{ModelSpec, Settings, TensorSpec};
use serde_json::{Map, Value, json};
use std::time::Duration;

/// Triton's model configuration of a model, as far as it is true here.
#[must_use]
pub fn published(spec: &ModelSpec) -> Value {
    // Clients that read a positive `max_batch_size` take the first dimension for the batch: only then may it be published.
    let batched = spec.batch_axis == Some(0);
    let settings = &spec.settings;
    let tensor = |tensor: &TensorSpec| {
        let dims: Vec<i64> = tensor.wire_shape().into_iter().skip(usize::from(batched)).collect();
        json!({
            "name": tensor.name,
            "data_type": tensor.datatype.config_name(),
            "dims": dims,
            "is_shape_tensor": false,
        })
    };
    let input = |spec: &TensorSpec| {
        let mut value = tensor(spec);
        value["format"] = "FORMAT_NONE".into();
        value["allow_ragged_batch"] = false.into();
        value["optional"] = false.into();
        value
    };
    let output = |spec: &TensorSpec| {
        let mut value = tensor(spec);
        value["label_filename"] = settings.labels.get(&spec.name).map_or("", |labels| &labels.file).into();
        value
    };
    let mut config = json!({
        "name": spec.name,
        "platform": "onnxruntime_onnx",
        "backend": "onnxruntime",
        "runtime": "",
        "max_batch_size": if batched { spec.max_batch_size } else { 0 },
        "version_policy": version_policy(&settings.versions),
        "input": spec.inputs.iter().map(input).collect::<Vec<_>>(),
        "output": spec.outputs.iter().map(output).collect::<Vec<_>>(),
        "batch_input": [],
        "batch_output": [],
        "instance_group": settings.on_each_device().iter().zip(0..).map(|group| instance_group(spec, group)).collect::<Vec<_>>(),
        "default_model_filename": "model.onnx",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": parameters(spec),
        "model_warmup": [],
        "model_transaction_policy": {"decoupled": false},
        "response_cache": {"enable": false},
    });
    if batched {
        config["dynamic_batching"] = dynamic_batching(settings);
    }
    config
}

fn dynamic_batching(settings: &Settings) -> Value {
    json!({
        "preferred_batch_size": [],
        "max_queue_delay_microseconds": micros(settings.max_queue_delay),
        "preserve_ordering": false,
        "priority_levels": settings.priority_levels,
        "default_priority_level": settings.default_priority,
        "default_queue_policy": {
            "timeout_action": "REJECT",
            "default_timeout_microseconds": micros(settings.default_timeout),
            "allow_timeout_override": true,
            "max_queue_size": 0,
        },
        "priority_queue_policy": {},
    })
}

/// What Triton has no words for, by the names of model.toml's keys.
fn parameters(spec: &ModelSpec) -> Value {
    let settings = &spec.settings;
    let mut parameters = Map::new();
    let mut add = |key: &str, value: String| parameters.insert(key.to_owned(), json!({"string_value": value}));
    add("max_queue_rows", settings.max_queue_rows.to_string());
    add("max_queue_bytes", settings.max_queue_bytes.0.to_string());
    add("max_gather_delay", format!("{}us", micros(settings.max_gather_delay)));
    add("knee_tolerance", settings.knee_tolerance.to_string());
    add("pipeline", settings.pipeline.to_string());
    add("packing", settings.packing.name().to_owned());
    add("cuda_graph", settings.cuda_graph.name().to_owned());
    if let Some(threads) = settings.intra_op_threads {
        add("intra_op_threads", threads.to_string());
    }
    // A positive size would say that the first dimension is the batch.
    if let Some(axis) = spec.batch_axis.filter(|axis| *axis > 0) {
        add("batch_axis", axis.to_string());
        add("max_batch_size", spec.max_batch_size.to_string());
    }
    Value::Object(parameters)
}

fn version_policy(policy: &VersionPolicy) -> Value {
    match policy {
        VersionPolicy::Latest { count } => json!({"latest": {"num_versions": count}}),
        VersionPolicy::Specific(versions) => json!({"specific": {"versions": versions}}),
        VersionPolicy::All => json!({"all": {}}),
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Keys of the configuration that describe what the model's file says anyway, or that mean nothing here: a client that sends
/// back what it was told need not take them out.
const DESCRIPTIVE: [&str; 14] = [
    "runtime",
    "input",
    "output",
    "batch_input",
    "batch_output",
    "default_model_filename",
    "cc_model_filenames",
    "metric_tags",
    "model_warmup",
    "model_transaction_policy",
    "response_cache",
    "optimization",
    "model_operations",
    "model_repository_agents",
];

/// A configuration in Triton's words, as keys of a model.toml. `parameters` with a `string_value` are keys of model.toml by
/// their own names.
///
/// # Errors
/// The first thing that cannot be done, naming the key.
pub fn sent(model: &str, config: &str) -> Result<Vec<(String, toml::Value)>, String> {
    let config: Value =
        serde_json::from_str(config).map_err(|error| format!("parameters.config must be JSON in a string: {error}"))?;
    let config = config.as_object().ok_or("parameters.config must be a JSON object in a string")?;
    let mut keys = Vec::new();
    for (key, value) in config {
        let wrong = |expected: &str| format!("parameters.config.{key} = {value}: expected {expected}");
        match key.as_str() {
            "name" if value == model || value == "" => {}
            "name" => return Err(wrong(&format!("'{model}', the model that is loaded"))),
            "backend" if value == "onnxruntime" || value == "" => {}
            "platform" if value == "onnxruntime_onnx" || value == "" => {}
            "backend" | "platform" => return Err(wrong("ONNX Runtime's: this server has no other")),
            "max_batch_size" => keys.extend(batch_size(value).ok_or_else(|| wrong("an integer from 0 to 65536"))?),
            "instance_group" => keys.push(("instances".to_owned(), instances(value).map_err(|text| wrong(&text))?)),
            "version_policy" => keys.extend(versions(value).ok_or_else(|| wrong("latest, specific or all"))?),
            "dynamic_batching" => batching(value, &mut keys)?,
            "parameters" => own_keys(value, &mut keys)?,
            known if DESCRIPTIVE.contains(&known) => {}
            _ => return Err(wrong("none: this server has no such key")),
        }
    }
    Ok(keys)
}

fn key(name: &str, value: impl Into<toml::Value>) -> (String, toml::Value) {
    (name.to_owned(), value.into())
}

fn batch_size(value: &Value) -> Option<Vec<(String, toml::Value)>> {
    match value.as_i64()? {
        0 => Some(vec![key("batch_axis", "none")]),
        size @ 1..=65_536 => Some(vec![key("max_batch_size", size)]),
        _ => None,
    }
}

/// The instances on one device.
fn instance_group(spec: &ModelSpec, (settings, number): (&Settings, usize)) -> Value {
    json!({
        "name": format!("{}_{number}", spec.name),
        "kind": match settings.place {
            None => "KIND_AUTO",
            Some(Place::Cpu) => "KIND_CPU",
            Some(Place::Cuda(_)) => "KIND_GPU",
        },
        "count": settings.instances.map_or(1, std::num::NonZeroU32::get),
        "gpus": match settings.place {
            Some(Place::Cuda(ordinal)) => vec![ordinal],
            None | Some(Place::Cpu) => Vec::new(),
        },
        "secondary_devices": [],
        "profile": [],
        "passive": false,
        "host_policy": "",
    })
}

fn instances(value: &Value) -> Result<toml::Value, String> {
    let expected = || {
        "groups, each with a count from 1 to 64 and a kind of KIND_AUTO, KIND_CPU or KIND_GPU, that with one of gpus; of \
         several each with a device of its own"
            .to_owned()
    };
    let groups = value.as_array().map(Vec::as_slice).unwrap_or_default();
    let read: Option<Vec<toml::Value>> = groups.iter().map(group).collect();
    match read.ok_or_else(expected)?.as_slice() {
        [] => Err(expected()),
        [one] if !one.is_table() => Ok(one.clone()),
        several if several.iter().all(toml::Value::is_table) => Ok(several.to_vec().into()),
        _ => Err(expected()),
    }
}

/// One group of instances: a table with its device, or a count on any.
fn group(group: &Value) -> Option<toml::Value> {
    let count = group.get("count").map_or(Some(1), Value::as_i64).filter(|count| (1..=64).contains(count));
    let count = toml::Value::from(count?);
    let gpus = group.get("gpus").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let device = match (group.get("kind").map_or(Some("KIND_AUTO"), Value::as_str), gpus) {
        (Some("KIND_AUTO"), []) => return Some(count),
        (Some("KIND_CPU"), []) => "cpu".to_owned(),
        (Some("KIND_AUTO" | "KIND_GPU"), [gpu]) => format!("cuda:{}", gpu.as_u64()?),
        (Some("KIND_GPU"), []) => "cuda".to_owned(),
        _ => return None,
    };
    let group = [("device".to_owned(), device.into()), ("count".to_owned(), count)];
    Some(toml::Value::Table(group.into_iter().collect()))
}

fn versions(value: &Value) -> Option<Vec<(String, toml::Value)>> {
    let policy = value.as_object().filter(|policy| policy.len() == 1)?;
    let none = || key("versions.versions", toml::Value::Array(Vec::new()));
    let (name, inner) = policy.iter().next()?;
    Some(match name.as_str() {
        "all" => vec![key("versions.policy", "all"), none()],
        "latest" => {
            let count = inner.get("num_versions").map_or(Some(1), Value::as_i64)?;
            vec![key("versions.policy", "latest"), key("versions.count", count), none()]
        }
        "specific" => {
            let list = inner.get("versions")?.as_array()?;
            let list: Option<Vec<toml::Value>> = list.iter().map(|item| item.as_i64().map(Into::into)).collect();
            vec![key("versions.policy", "specific"), key("versions.versions", toml::Value::Array(list?))]
        }
        _ => return None,
    })
}

fn batching(value: &Value, keys: &mut Vec<(String, toml::Value)>) -> Result<(), String> {
    let at = "parameters.config.dynamic_batching";
    let wrong = |key: &str, value: &Value, expected: &str| format!("{at}.{key} = {value}: expected {expected}");
    let micros = |name: &str, value: &Value| {
        let micros = value.as_u64().ok_or_else(|| wrong(name, value, "a number of microseconds"))?;
        Ok::<_, String>(format!("{micros}us"))
    };
    let fields = value.as_object().ok_or_else(|| format!("{at} must be an object"))?;
    for (name, value) in fields {
        match name.as_str() {
            "max_queue_delay_microseconds" => keys.push(key("max_queue_delay", micros(name, value)?)),
            "priority_levels" | "default_priority_level" => {
                let level = value.as_i64().ok_or_else(|| wrong(name, value, "an integer"))?;
                let ours = if name == "priority_levels" { name } else { "default_priority" };
                // Zero means "no such thing" there, and one level is that here.
                keys.push(key(ours, level.max(1)));
            }
            "default_queue_policy" => {
                let name = "default_timeout_microseconds";
                if let Some(timeout) = value.get(name).filter(|timeout| timeout.as_u64() != Some(0)) {
                    keys.push(key("default_timeout", micros(name, timeout)?));
                }
            }
            // Sizes are chosen by what was measured, and the order of answers never changes.
            "preferred_batch_size" | "preserve_ordering" | "priority_queue_policy" => {}
            _ => return Err(wrong(name, value, "none: this server has no such key")),
        }
    }
    Ok(())
}

fn own_keys(value: &Value, keys: &mut Vec<(String, toml::Value)>) -> Result<(), String> {
    let at = "parameters.config.parameters";
    let fields = value.as_object().ok_or_else(|| format!("{at} must be an object"))?;
    for (name, value) in fields {
        let text = value.get("string_value").and_then(Value::as_str);
        let text = text.ok_or_else(|| format!("{at}.{name} must be an object with a string_value"))?;
        // Labels name a file.
        if name.starts_with("labels") {
            return Err(format!("{at}.{name}: only the model's own model.toml may name files"));
        }
        keys.push(key(name, text));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::settings::{BatchAxis, Group};
    use super::*;

    #[test]
    fn a_configuration_becomes_keys_of_model_toml() {
        let config = r#"{"name":"m","backend":"onnxruntime","max_batch_size":16,"instance_group":[{"count":2,"kind":"KIND_CPU"}],
            "version_policy":{"specific":{"versions":[1,3]}},"input":[{"name":"x"}],
            "dynamic_batching":{"max_queue_delay_microseconds":1500,"priority_levels":3,"default_priority_level":0,
                "default_queue_policy":{"default_timeout_microseconds":2000000}},
            "parameters":{"intra_op_threads":{"string_value":"2"}}}"#;
        let keys: Vec<String> =
            sent("m", config).unwrap().into_iter().map(|(key, value)| format!("{key} = {value}")).collect();
        let mut expected = vec![
            "default_priority = 1",
            "default_timeout = \"2000000us\"",
            "instances = [{ count = 2, device = \"cpu\" }]",
            "intra_op_threads = \"2\"",
            "max_batch_size = 16",
            "max_queue_delay = \"1500us\"",
            "priority_levels = 3",
            "versions.policy = \"specific\"",
            "versions.versions = [1, 3]",
        ];
        let mut keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        keys.sort_unstable();
        expected.sort_unstable();
        assert_eq!(keys, expected);
        assert_eq!(sent("m", r#"{"max_batch_size":0}"#).unwrap(), [key("batch_axis", "none")]);
    }

    /// Settings and model that differ from what holds anyway in everything that a configuration may say.
    fn unusual(place: Option<Place>, batch_axis: Option<usize>) -> ModelSpec {
        let text = "max_queue_delay = \"3ms\"\nmax_gather_delay = \"7ms\"\nmax_queue_rows = 999\nmax_queue_bytes = 4096\n\
            priority_levels = 5\ndefault_priority = 3\ndefault_timeout = \"9s\"\nknee_tolerance = 0.25\npipeline = 3\n\
            packing = \"fifo\"\ncuda_graph = \"on\"\nintra_op_threads = 3\n[versions]\npolicy = \"specific\"\nversions = [2, 5]\n";
        let mut settings = Settings::from_toml(text, "model.toml", &Settings::default_keys()).unwrap();
        settings.place = place;
        settings.instances = std::num::NonZeroU32::new(2);
        if place == Some(Place::Cuda(3)) {
            settings.beside =
                [Place::Cuda(0), Place::Cpu].map(|place| Group { place, count: settings.instances }).to_vec();
        }
        settings.max_batch_size = batch_axis.map(|_| 24);
        settings.batch_axis = batch_axis.map_or(BatchAxis::None, BatchAxis::Axis);
        ModelSpec {
            id: crate::units::ModelId(1),
            name: "m".to_owned(),
            version: 2,
            inputs: Vec::new(),
            outputs: Vec::new(),
            batch_axis,
            unbatched_reason: None,
            max_batch_size: if batch_axis.is_some() { 24 } else { 1 },
            padding: None,
            text: None,
            settings,
        }
    }

    #[test]
    fn what_is_published_is_what_was_meant_when_it_is_sent_back() {
        for place in [None, Some(Place::Cpu), Some(Place::Cuda(0)), Some(Place::Cuda(3))] {
            for batch_axis in [Some(0), Some(1), None] {
                let spec = unusual(place, batch_axis);
                let sent = sent("m", &published(&spec).to_string()).unwrap();
                let (again, faults) = Settings::overridden("", "model.toml", &Settings::default_keys(), &sent);
                assert!(faults.is_empty(), "{faults:?}");
                let mut expected = spec.settings.clone();
                if batch_axis != Some(0) {
                    // Triton has these only where there are batches; a model's own file says them otherwise.
                    let again = again.as_ref().unwrap();
                    expected.max_queue_delay = again.max_queue_delay;
                    expected.priority_levels = again.priority_levels;
                    expected.default_priority = again.default_priority;
                    expected.default_timeout = again.default_timeout;
                }
                if batch_axis == Some(0) {
                    expected.batch_axis = BatchAxis::Auto;
                }
                assert_eq!(again.unwrap(), expected, "{place:?}, {batch_axis:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        for (config, named) in [
            ("{", "JSON"),
            ("[]", "object"),
            (r#"{"name":"other"}"#, "name"),
            (r#"{"backend":"pytorch"}"#, "backend"),
            (r#"{"max_batch_size":-1}"#, "max_batch_size"),
            (r#"{"instance_group":[]}"#, "instance_group"),
            (r#"{"instance_group":[{"kind":"KIND_GPU","gpus":[0,1]}]}"#, "instance_group"),
            (r#"{"instance_group":[{"kind":"KIND_MODEL"}]}"#, "instance_group"),
            (r#"{"instance_group":[{"kind":"KIND_AUTO"},{"kind":"KIND_CPU"}]}"#, "instance_group"),
            (r#"{"instance_group":[{"kind":"KIND_CPU","gpus":[0]}]}"#, "instance_group"),
            (r#"{"version_policy":{"newest":{}}}"#, "version_policy"),
            (r#"{"sequence_batching":{}}"#, "sequence_batching"),
            (r#"{"dynamic_batching":{"max_queue_delay_microseconds":-1}}"#, "max_queue_delay_microseconds"),
            (r#"{"parameters":{"intra_op_threads":2}}"#, "intra_op_threads"),
            (r#"{"parameters":{"labels.y":{"string_value":"x"}}}"#, "labels.y"),
        ] {
            let fault = sent("m", config).unwrap_err();
            assert!(fault.contains(named), "{config}: {fault}");
        }
    }
}
