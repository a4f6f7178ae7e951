//! What the sensors of devices say: busy time, temperature, power. Whoever can read them publishes them; where nobody can, there
//! are no such series.

use crate::units::{ByteSize, DeviceId};
use arc_swap::ArcSwap;
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{GaugeVec, Opts};

/// One device. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DeviceReading {
    /// The device.
    pub device: DeviceId,
    /// Its name in the world outside.
    pub uuid: String,
    /// The part of the time in which anything ran on it, 0 to 1.
    pub utilization: Option<f64>,
    /// Its memory.
    pub memory_total: Option<ByteSize>,
    /// What of it anybody uses.
    pub memory_used: Option<ByteSize>,
    /// What of it other processes use.
    pub memory_others: Option<ByteSize>,
    /// Its temperature.
    pub celsius: Option<f64>,
    /// What it draws.
    pub watts: Option<f64>,
    /// What it may draw.
    pub watts_limit: Option<f64>,
    /// What it has drawn since its driver was loaded.
    pub joules: Option<f64>,
}

/// Our names and Triton's: the family's name, what it says, its label, and where the value is.
type Family = (&'static str, &'static str, &'static str, fn(&DeviceReading) -> Option<f64>);

const FAMILIES: [Family; 10] = [
    ("concertina_device_utilization_ratio", "Time with anything running.", "device", |r| r.utilization),
    ("concertina_device_neighbours_bytes", "What other processes hold, where that is known.", "device", |r| {
        r.memory_others.map(|bytes| bytes.0 as f64)
    }),
    ("concertina_device_temperature_celsius", "Temperature.", "device", |r| r.celsius),
    ("concertina_device_power_watts", "Power drawn.", "device", |r| r.watts),
    ("nv_gpu_utilization", "Time with anything running, 0 to 1.", "gpu_uuid", |r| r.utilization),
    ("nv_gpu_memory_total_bytes", "Memory of the device.", "gpu_uuid", |r| r.memory_total.map(|bytes| bytes.0 as f64)),
    ("nv_gpu_memory_used_bytes", "Memory in use.", "gpu_uuid", |r| r.memory_used.map(|bytes| bytes.0 as f64)),
    ("nv_gpu_power_usage", "Watts drawn.", "gpu_uuid", |r| r.watts),
    ("nv_gpu_power_limit", "Watts allowed.", "gpu_uuid", |r| r.watts_limit),
    ("nv_energy_consumption", "Joules drawn.", "gpu_uuid", |r| r.joules),
];

/// The latest readings.
#[derive(Debug)]
pub(super) struct Readings {
    latest: ArcSwap<Vec<DeviceReading>>,
    /// Empty: they only say what there is.
    shape: [GaugeVec; FAMILIES.len()],
}

impl Readings {
    pub(super) fn new() -> Self {
        Self { latest: ArcSwap::default(), shape: families() }
    }

    pub(super) fn publish(&self, readings: Vec<DeviceReading>) {
        self.latest.store(std::sync::Arc::new(readings));
    }
}

fn families() -> [GaugeVec; FAMILIES.len()] {
    FAMILIES.map(|(name, help, label, _)| {
        GaugeVec::new(Opts::new(name, help), &[label]).expect("names and labels are constants")
    })
}

impl Collector for Readings {
    fn desc(&self) -> Vec<&Desc> {
        self.shape.iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let families = families();
        for reading in self.latest.load().iter() {
            for (family, (_, _, label, value)) in families.iter().zip(&FAMILIES) {
                let name = if *label == "device" { reading.device.to_string() } else { reading.uuid.clone() };
                if let Some(value) = value(reading) {
                    family.with_label_values(&[name.as_str()]).set(value);
                }
            }
        }
        let collected = families.iter().flat_map(Collector::collect);
        collected.filter(|family| !family.get_metric().is_empty()).collect()
    }
}
