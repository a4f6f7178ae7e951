//! The sensors of devices: how busy, how warm, how full. They are looked at on a thread that serves nobody, and where there are
//! none there are no such numbers.

use crate::memory::Device;
use crate::memory::cuda::{GpuState, Nvml};
use crate::metrics::{DeviceReading, Metrics};
use crate::units::{ByteSize, DeviceId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::MissedTickBehavior;

/// A look may take some milliseconds, and what is seen is a mean over a part of a second anyway.
pub const SENSOR_PERIOD: Duration = Duration::from_secs(1);

/// What can be asked how a device is.
pub type Sensor = Box<dyn FnMut() -> DeviceReading + Send>;

/// The sensors of these devices, those that have one. Says in one line for which GPUs there is none.
#[must_use]
pub fn sensors(devices: &[Device]) -> Vec<Sensor> {
    let mut sensors: Vec<Sensor> = Vec::new();
    for device in devices {
        let Some(gpu) = device.gpu() else { continue };
        let id = device.id();
        match Nvml::open(&gpu.pci_bus_id()) {
            Some(nvml) => {
                let uuid = nvml.uuid().unwrap_or_default();
                sensors.push(Box::new(move || reading(id, uuid.clone(), &nvml.state())));
            }
            None => tracing::info!(device = %id, "NVML is absent: utilization, temperature and power are not shown"),
        }
    }
    sensors
}

/// Publishes what the sensors say, once in each [`SENSOR_PERIOD`], as long as it is let run. Without sensors it does nothing.
pub async fn watch(mut sensors: Vec<Sensor>, metrics: Arc<Metrics>) {
    let mut ticks = tokio::time::interval(SENSOR_PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !sensors.is_empty() {
        ticks.tick().await;
        sensors = look(sensors, &metrics).await;
    }
}

/// Publishes what the sensors say now, and gives them back; after a panic there are none any more.
async fn look(mut sensors: Vec<Sensor>, metrics: &Metrics) -> Vec<Sensor> {
    let read = move || {
        let readings: Vec<DeviceReading> = sensors.iter_mut().map(|sensor| sensor()).collect();
        (sensors, readings)
    };
    let (sensors, readings) = tokio::task::spawn_blocking(read).await.unwrap_or_else(|_| {
        tracing::warn!("reading the sensors of a device panicked: they are left alone");
        (Vec::new(), Vec::new())
    });
    metrics.devices(readings);
    sensors
}

/// In the units of metrics.
fn reading(device: DeviceId, uuid: String, state: &GpuState) -> DeviceReading {
    DeviceReading {
        device,
        uuid,
        utilization: state.busy_percent.map(|percent| f64::from(percent) / 100.0),
        memory_total: state.total_bytes.map(ByteSize),
        memory_used: state.used_bytes.map(ByteSize),
        memory_others: state.others_bytes.map(ByteSize),
        celsius: state.celsius.map(f64::from),
        watts: state.milliwatts.map(|milliwatts| f64::from(milliwatts) / 1e3),
        watts_limit: state.milliwatts_limit.map(|milliwatts| f64::from(milliwatts) / 1e3),
        joules: state.millijoules.map(|millijoules| millijoules as f64 / 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(metrics: &Metrics) -> String {
        String::from_utf8(metrics.encode()).unwrap()
    }

    #[tokio::test]
    async fn what_a_sensor_says_is_shown_and_follows_it() {
        let metrics = Metrics::new();
        let mut percent = 40;
        let sensor: Sensor = Box::new(move || {
            percent += 10;
            let state = GpuState {
                busy_percent: Some(percent),
                total_bytes: Some(1 << 30),
                used_bytes: Some(600),
                others_bytes: Some(200),
                celsius: Some(61),
                milliwatts: Some(70_500),
                milliwatts_limit: Some(700_000),
                millijoules: Some(1_234_000),
                ..GpuState::default()
            };
            reading(DeviceId(1), "GPU-x".to_owned(), &state)
        });
        let sensors = look(vec![sensor], &metrics).await;
        let shown = text(&metrics);
        for line in [
            r#"nv_gpu_utilization{gpu_uuid="GPU-x"} 0.5"#,
            r#"nv_gpu_memory_total_bytes{gpu_uuid="GPU-x"} 1073741824"#,
            r#"nv_gpu_memory_used_bytes{gpu_uuid="GPU-x"} 600"#,
            r#"nv_gpu_power_usage{gpu_uuid="GPU-x"} 70.5"#,
            r#"nv_gpu_power_limit{gpu_uuid="GPU-x"} 700"#,
            r#"nv_energy_consumption{gpu_uuid="GPU-x"} 1234"#,
            r#"concertina_device_utilization_ratio{device="1"} 0.5"#,
            r#"concertina_device_neighbours_bytes{device="1"} 200"#,
            r#"concertina_device_temperature_celsius{device="1"} 61"#,
            r#"concertina_device_power_watts{device="1"} 70.5"#,
        ] {
            assert!(shown.contains(line), "{line} in {shown}");
        }
        assert_eq!(look(sensors, &metrics).await.len(), 1);
        assert!(text(&metrics).contains(r#"nv_gpu_utilization{gpu_uuid="GPU-x"} 0.6"#));
    }

    #[tokio::test]
    async fn without_sensors_or_with_broken_ones_nothing_is_shown() {
        let metrics = Arc::new(Metrics::new());
        watch(Vec::new(), Arc::clone(&metrics)).await;
        assert!(!text(&metrics).contains("nv_gpu_"));
        watch(vec![Box::new(|| panic!("a driver that is gone"))], Arc::clone(&metrics)).await;
        assert!(!text(&metrics).contains("nv_gpu_"));
    }
}
