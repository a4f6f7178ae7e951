//! The memory sampler: looks at the device, gives back what is idle or not ours any more, and tells the scheduler.

mod sensors;

pub use sensors::{SENSOR_PERIOD, Sensor, sensors, watch};

use crate::batcher::Control;
use crate::clock::Clock;
use crate::memory::{Device, Sample};
use crate::metrics::Metrics;
use crate::scheduler::MemorySample;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::MissedTickBehavior;

/// A neighbour that takes memory is noticed within this time; a look costs some 50 microseconds.
pub const PERIOD: Duration = Duration::from_millis(20);
/// The ledger is published every so many looks.
const PUBLISH_EVERY: u32 = 10;

/// Whoever hears of what the sampler sees.
#[derive(Debug)]
pub struct Listeners {
    /// The scheduler.
    pub control: mpsc::Sender<Control>,
    /// The ledgers, as numbers.
    pub metrics: Arc<Metrics>,
    /// Told once why a device is lost for this process.
    pub lost: Option<oneshot::Sender<String>>,
}

/// Looks every [`PERIOD`], and at once when `trim` is notified, until the batcher is gone.
pub async fn sample(devices: Vec<Device>, clock: Clock, trim: Arc<Notify>, mut tell: Listeners) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told: Vec<Option<Sample>> = vec![None; devices.len()];
    let mut looks = 0u32;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = trim.notified() => {}
        }
        for (device, told) in devices.iter().zip(&mut told) {
            if let Some(reason) = device.lost() {
                let _ = tell.lost.take().map(|lost| lost.send(reason.to_owned()));
                continue;
            }
            let now = clock.now();
            device.trim(now);
            let sample = device.sample(now);
            if *told != Some(sample) {
                let Sample { device, budget, capacity } = sample;
                let sample = Control::Memory(MemorySample { device, budget, capacity });
                if tell.control.send(sample).await.is_err() {
                    return;
                }
            }
            *told = Some(sample);
            if looks.is_multiple_of(PUBLISH_EVERY) {
                tell.metrics.ledger(device.stats());
            }
        }
        looks = looks.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{DeviceOptions, HOST_ALIGNMENT, Host};
    use crate::units::{ByteSize, DeviceId};

    #[tokio::test]
    async fn a_lost_device_is_told_once_and_the_others_are_still_looked_at() {
        let device = |id| {
            let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
            let options = DeviceOptions { id: DeviceId(id), limit, headroom, alignment: HOST_ALIGNMENT };
            Device::new(Box::new(Host::new()), options)
        };
        let (control, mut controls) = mpsc::channel(8);
        let (tell, lost) = oneshot::channel();
        let tell = Listeners { control, metrics: Arc::new(Metrics::new()), lost: Some(tell) };
        let devices = vec![device(0), device(1)];
        devices[0].lose("an illegal address");
        let sampling = tokio::spawn(sample(devices, Clock::start(), Arc::default(), tell));
        assert_eq!(lost.await.as_deref(), Ok("an illegal address"));
        let told = controls.recv().await;
        assert!(matches!(told, Some(Control::Memory(sample)) if sample.device == DeviceId(1)), "{told:?}");
        sampling.abort();
    }
}
