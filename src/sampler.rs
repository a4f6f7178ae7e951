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
            // A worker that commits memory holds the locks meanwhile, which may take a tenth of a second and more: a thread that
            // serves requests must not wait for it.
            let (looked, now, publish) = (device.clone(), clock.now(), looks.is_multiple_of(PUBLISH_EVERY));
            let look = move || {
                looked.trim(now);
                (looked.sample(now), publish.then(|| looked.stats()))
            };
            let (sample, stats) = match tokio::task::spawn_blocking(look).await {
                Ok(found) => found,
                Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
                // The runtime is going.
                Err(_) => return,
            };
            if *told != Some(sample) {
                let Sample { device, budget, capacity } = sample;
                let sample = Control::Memory(MemorySample { device, budget, capacity });
                if tell.control.send(sample).await.is_err() {
                    return;
                }
            }
            *told = Some(sample);
            stats.into_iter().for_each(|stats| tell.metrics.ledger(stats));
        }
        looks = looks.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{Backing, BackingError, DeviceOptions, HOST_ALIGNMENT, Host, Reservation};
    use crate::units::{ByteSize, DeviceId};
    use std::ops::Range;
    use std::sync::{Barrier, mpsc as channel};

    /// A host whose free bytes are not known until somebody else comes to the barrier twice.
    #[derive(Debug)]
    struct Slow(Host, Arc<Barrier>);

    impl Backing for Slow {
        fn granularity(&self) -> usize {
            self.0.granularity()
        }
        fn reserve(&self, bytes: usize) -> Result<Reservation, BackingError> {
            self.0.reserve(bytes)
        }
        fn commit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
            self.0.commit(reservation, range)
        }
        fn decommit(&self, reservation: &Reservation, range: Range<usize>) -> Result<(), BackingError> {
            self.0.decommit(reservation, range)
        }
        fn free_bytes(&self) -> ByteSize {
            self.1.wait();
            self.1.wait();
            self.0.free_bytes()
        }
        fn total_bytes(&self) -> ByteSize {
            self.0.total_bytes()
        }
        fn margin(&self) -> ByteSize {
            self.0.margin()
        }
    }

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

    /// With one thread for everything asynchronous, whoever waits for memory on it would never hear of the answer.
    #[tokio::test]
    async fn other_tasks_go_on_while_a_look_takes_its_time() {
        let barrier = Arc::new(Barrier::new(2));
        let (limit, headroom) = (ByteSize::MAX, ByteSize::ZERO);
        let options = DeviceOptions { id: DeviceId(0), limit, headroom, alignment: HOST_ALIGNMENT };
        let device = Device::new(Box::new(Slow(Host::new(), Arc::clone(&barrier))), options);
        let (control, mut controls) = mpsc::channel(8);
        let tell = Listeners { control, metrics: Arc::new(Metrics::new()), lost: None };
        let sampling = tokio::spawn(sample(vec![device], Clock::start(), Arc::default(), tell));
        // On a thread of its own: the barrier is not for tasks.
        let (go, may_go) = channel::sync_channel::<()>(1);
        let (begun, mut has_begun) = mpsc::channel(8);
        let helper = std::thread::spawn(move || {
            loop {
                barrier.wait();
                let _ = begun.try_send(());
                let _ = may_go.recv();
                barrier.wait();
            }
        });
        has_begun.recv().await.expect("a look has begun");
        tokio::spawn(async move { drop(go) }).await.expect("this task runs while the look goes on");
        assert!(matches!(controls.recv().await, Some(Control::Memory(_))), "the look ends after all");
        sampling.abort();
        drop(helper);
    }
}
