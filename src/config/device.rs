//! The section `[runtime]`: threads, the library, and which devices models may run on.

use crate::keys::Keys;
use crate::keys::value::{auto_or, count, integers, text_or_empty};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use toml::Value;

/// The section `[runtime]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Runtime {
    /// The ONNX Runtime library; `None`: searched.
    pub library: Option<PathBuf>,
    /// Threads that serve HTTP; `None`: one per processor.
    pub threads: Option<NonZeroUsize>,
    /// What runs models.
    pub providers: Providers,
    /// The GPUs that models may be put on, as the driver counts, ascending; never empty.
    pub gpus: Vec<u32>,
}

/// Reads the section. All keys are read before any is missed.
pub(super) fn runtime(keys: &mut Keys) -> Option<Runtime> {
    let library = keys.read("runtime.library", text_or_empty);
    let threads = keys.read("runtime.threads", auto_or(count(1024usize)));
    let providers = keys.read("runtime.providers", providers);
    let gpus = keys.read("runtime.gpus", gpus);
    let library = library?.map(PathBuf::from);
    Some(Runtime { library, threads: threads?, providers: providers?, gpus: gpus? })
}

fn gpus(value: &Value) -> Result<Vec<u32>, String> {
    let allowed = || "a list of different numbers from 0 to 63, at least one".to_owned();
    integers(0..=63u32)(value).ok().filter(|gpus| !gpus.is_empty()).ok_or_else(allowed)
}

/// A part of ONNX Runtime that runs models on one kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    /// NVIDIA GPUs, through compiled engines.
    TensorRt,
    /// NVIDIA GPUs.
    Cuda,
    /// The host.
    Cpu,
}

/// Providers by preference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Providers {
    /// CUDA where it works, else the CPU.
    Auto,
    /// These. A GPU that is named without `cpu` behind it is demanded.
    These(Vec<Provider>),
}

impl Providers {
    /// Whether a GPU may be used, if there is one.
    #[must_use]
    pub fn allow_gpu(&self) -> bool {
        match self {
            Self::Auto => true,
            Self::These(order) => order.first().is_some_and(|first| *first != Provider::Cpu),
        }
    }

    /// Whether the server must not start without a GPU.
    #[must_use]
    pub fn demand_gpu(&self) -> bool {
        self.allow_gpu() && matches!(self, Self::These(order) if !order.contains(&Provider::Cpu))
    }

    /// Whether TensorRT is asked before CUDA.
    #[must_use]
    pub fn tensorrt(&self) -> bool {
        matches!(self, Self::These(order) if order.first() == Some(&Provider::TensorRt))
    }
}

/// Reads the value of `runtime.providers`.
fn providers(value: &Value) -> Result<Providers, String> {
    let allowed = || {
        "\"auto\", or a list by preference of \"tensorrt\", \"cuda\" and \"cpu\", each at most once, with tensorrt before cuda"
            .to_owned()
    };
    let names: Vec<&str> = match value {
        // The environment and flags know only texts.
        Value::String(text) => text.split(',').map(str::trim).collect(),
        Value::Array(items) => items.iter().filter_map(Value::as_str).collect(),
        _ => return Err(allowed()),
    };
    if names == ["auto"] && value.is_str() {
        return Ok(Providers::Auto);
    }
    let mut order = Vec::new();
    for name in &names {
        let provider = match *name {
            "tensorrt" => Provider::TensorRt,
            "cuda" => Provider::Cuda,
            "cpu" => Provider::Cpu,
            _ => return Err(allowed()),
        };
        if order.contains(&provider) {
            return Err(allowed());
        }
        order.push(provider);
    }
    let position = |provider| order.iter().position(|other| *other == provider);
    let misplaced = match (position(Provider::TensorRt), position(Provider::Cuda)) {
        // What TensorRT does not take goes to CUDA.
        (Some(tensorrt), cuda) => cuda != Some(tensorrt + 1),
        _ => false,
    };
    let whole = value.as_array().is_none_or(|items| items.len() == names.len());
    if order.is_empty() || misplaced || !whole { Err(allowed()) } else { Ok(Providers::These(order)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn providers_say_what_is_allowed_and_what_is_demanded() {
        type Case = (Value, Option<(bool, bool, bool)>);
        let table: [Case; 11] = [
            (Value::from("auto"), Some((true, false, false))),
            (Value::from("cpu"), Some((false, false, false))),
            (Value::from("cuda"), Some((true, true, false))),
            (Value::from("cuda, cpu"), Some((true, false, false))),
            (Value::from(vec!["cpu", "cuda"]), Some((false, false, false))),
            (Value::from(vec!["tensorrt", "cuda"]), Some((true, true, true))),
            (Value::from(vec!["tensorrt", "cpu"]), None),
            (Value::from(vec!["cuda", "cuda"]), None),
            (Value::from(Vec::<String>::new()), None),
            (Value::from(vec!["gpu"]), None),
            (Value::from(1), None),
        ];
        for (value, expected) in table {
            let read = providers(&value).ok();
            let seen = read.map(|found| (found.allow_gpu(), found.demand_gpu(), found.tensorrt()));
            assert_eq!(seen, expected, "{value}");
        }
    }
}
