//! The messages and services of the .proto files in `proto/`, as `tools/proto` generates them.

use serde::{Deserialize as _, Deserializer};

#[rustfmt::skip]
#[allow(
    missing_docs,
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    clippy::too_many_lines,
    clippy::large_futures,
    clippy::needless_pass_by_value,
    clippy::semicolon_if_nothing_returned,
    reason = "written by a program"
)]
mod generated;

pub use generated::*;

/// The files in binary form, for reflection.
pub(super) const DESCRIPTORS: &[u8] = include_bytes!("proto/descriptors.bin");

/// An enumeration as its number, from the name that JSON has for it.
pub(super) fn named<'de, D: Deserializer<'de>, E: ByName>(deserializer: D) -> Result<i32, D::Error> {
    let name = String::deserialize(deserializer)?;
    E::number(&name).ok_or_else(|| serde::de::Error::custom(format!("'{name}' is not a name of this enumeration")))
}

/// An enumeration whose values have names in the .proto file.
pub(super) trait ByName {
    /// The number of the value with this name.
    fn number(name: &str) -> Option<i32>;
}

macro_rules! by_name {
    ($($kind:ty),*) => {$(
        impl ByName for $kind {
            fn number(name: &str) -> Option<i32> {
                <$kind>::from_str_name(name).map(|value| value as i32)
            }
        }
    )*};
}
by_name!(DataType, model_input::Format, model_instance_group::Kind, model_queue_policy::TimeoutAction);

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest as _, Sha256};

    #[test]
    fn the_generated_code_is_that_of_the_files() {
        let files = [include_str!("proto/model_config.proto"), include_str!("proto/inference.proto")];
        let digest: String = Sha256::digest(files.concat()).iter().map(|byte| format!("{byte:02x}")).collect();
        let first = include_str!("proto/generated.rs").lines().next().unwrap();
        assert_eq!(first, format!("//! sources: {digest}"), "run `cargo run` in tools/proto");
    }

    #[test]
    fn a_configuration_is_read_from_json_with_its_choices_and_names() {
        let config: ModelConfig = serde_json::from_value(serde_json::json!({
            "name": "m",
            "max_batch_size": 8,
            "version_policy": {"specific": {"versions": [3]}},
            "input": [{"name": "x", "data_type": "TYPE_BF16", "dims": [-1, 4], "format": "FORMAT_NONE"}],
            "instance_group": [{"kind": "KIND_CPU", "count": 2}],
            "dynamic_batching": {"priority_levels": 2, "default_queue_policy": {"timeout_action": "REJECT"}},
        }))
        .unwrap();
        assert_eq!((config.input[0].data_type, &config.input[0].dims[..]), (DataType::TypeBf16 as i32, &[-1, 4][..]));
        let policy = config.version_policy.unwrap().policy_choice.unwrap();
        let specific = model_version_policy::Specific { versions: vec![3] };
        assert_eq!(policy, model_version_policy::PolicyChoice::Specific(specific));
        assert_eq!(config.instance_group[0].kind, model_instance_group::Kind::Cpu as i32);
        let Some(model_config::SchedulingChoice::DynamicBatching(batching)) = config.scheduling_choice else {
            panic!("no dynamic batching");
        };
        assert_eq!(batching.priority_levels, 2);
    }
}
