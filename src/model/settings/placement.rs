//! Where the instances of a model run.

use crate::units::DeviceId;
use std::fmt;
use std::num::NonZeroU32;
use toml::Value;

/// The most instances of a model on one device.
pub const MOST_INSTANCES: u32 = 64;
/// The highest number of a GPU.
const MOST_GPUS: u32 = 63;

/// A device by the name that people give it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// The host.
    Cpu,
    /// The GPU with this number.
    Cuda(u32),
}

impl Place {
    /// The number that the server gives it: the host is 0, GPUs follow.
    #[must_use]
    pub fn device(self) -> DeviceId {
        match self {
            Self::Cpu => DeviceId(0),
            Self::Cuda(ordinal) => DeviceId(ordinal + 1),
        }
    }

    /// The device with this number.
    #[must_use]
    pub fn of(device: DeviceId) -> Self {
        device.0.checked_sub(1).map_or(Self::Cpu, Self::Cuda)
    }

    fn parse(text: &str) -> Option<Self> {
        if text == "cpu" {
            return Some(Self::Cpu);
        }
        let ordinal = text.strip_prefix("cuda:").unwrap_or(if text == "cuda" { "0" } else { "" });
        ordinal.parse().ok().filter(|ordinal| *ordinal <= MOST_GPUS).map(Self::Cuda)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

/// The key `instances`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Instances {
    /// How many; `None`: the server chooses.
    pub count: Option<NonZeroU32>,
    /// Where; `None`: on the preferred device.
    pub place: Option<Place>,
    /// Further devices, each named once.
    pub beside: Vec<Group>,
}

/// Instances on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Group {
    /// The device.
    pub place: Place,
    /// How many; `None`: the server chooses.
    pub count: Option<NonZeroU32>,
}

/// `"auto"`, a number, or `[{ device = "cuda:0", count = 2 }, { device = "cuda:1" }]`.
pub(super) fn instances(value: &Value) -> Result<Instances, String> {
    let allowed = || {
        format!(
            "\"auto\", an integer from 1 to {MOST_INSTANCES}, or [{{ device = \"cuda:0\", count = 2 }}, ...] with each device, \
             \"cpu\" or \"cuda:NUMBER\", once"
        )
    };
    let count = |value: &Value| crate::keys::value::count::<NonZeroU32, u32>(MOST_INSTANCES)(value);
    if value.as_str() == Some("auto") {
        return Ok(Instances::default());
    }
    let Some(groups) = value.as_array() else {
        return count(value)
            .map(|count| Instances { count: Some(count), ..Instances::default() })
            .map_err(|_| allowed());
    };
    let mut found: Vec<Group> = Vec::with_capacity(groups.len());
    for group in groups {
        let Value::Table(group) = group else { return Err(allowed()) };
        let place = group.get("device").and_then(Value::as_str).and_then(Place::parse).ok_or_else(allowed)?;
        let is_known = |key: &str| key == "device" || key == "count";
        if group.keys().any(|key| !is_known(key)) || found.iter().any(|other| other.place == place) {
            return Err(allowed());
        }
        found.push(Group { place, count: group.get("count").map(count).transpose().map_err(|_| allowed())? });
    }
    let Some((first, beside)) = found.split_first() else { return Err(allowed()) };
    Ok(Instances { count: first.count, place: Some(first.place), beside: beside.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_are_a_number_or_a_number_on_a_device() {
        let read = |text: &str| {
            let table: toml::Table = format!("x = {text}").parse().expect(text);
            instances(&table["x"])
                .ok()
                .map(|found| (found.count.map(NonZeroU32::get), found.place.map(|place| place.to_string())))
        };
        let on = |count, place: &str| Some((count, Some(place.to_owned())));
        assert_eq!(read("\"auto\""), Some((None, None)));
        assert_eq!(read("3"), Some((Some(3), None)));
        assert_eq!(read("[{ device = \"cuda:1\", count = 2 }]"), on(Some(2), "cuda:1"));
        assert_eq!(read("[{ device = \"cuda\" }]"), on(None, "cuda:0"));
        assert_eq!(read("[{ device = \"cpu\" }]"), on(None, "cpu"));
        for bad in [
            "0",
            "65",
            "[]",
            "[1]",
            "[{ count = 1 }]",
            "[{ device = \"gpu\" }]",
            "[{ device = \"cuda:x\" }]",
            "[{ device = \"cpu\", cores = 1 }]",
            "[{ device = \"cuda\" }, { device = \"cuda:0\" }]",
            "[{ device = \"cuda:0\" }, 1]",
        ] {
            assert_eq!(read(bad), None, "{bad}");
        }
        let table: toml::Table =
            "x = [{ device = \"cuda:0\" }, { device = \"cpu\", count = 2 }]".parse().expect("two devices");
        let both = instances(&table["x"]).expect("two devices");
        let cpu = Group { place: Place::Cpu, count: NonZeroU32::new(2) };
        assert_eq!(both, Instances { count: None, place: Some(Place::Cuda(0)), beside: vec![cpu] });
        assert_eq!((Place::Cpu.device(), Place::Cuda(1).device()), (DeviceId(0), DeviceId(2)));
        for place in [Place::Cpu, Place::Cuda(0), Place::Cuda(7)] {
            assert_eq!(Place::of(place.device()), place);
        }
    }
}
