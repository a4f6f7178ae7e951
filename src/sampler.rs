//! The memory sampler: looks at the device, gives back what is idle or not ours any more, and tells the scheduler.

use crate::batcher::Control;
use crate::clock::Clock;
use crate::memory::{Device, Sample};
use crate::metrics::Metrics;
use crate::scheduler::MemorySample;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio::time::MissedTickBehavior;

/// A neighbour that takes memory is noticed within this time; a look costs some 50 microseconds.
pub const PERIOD: Duration = Duration::from_millis(20);
/// The ledger is published every so many looks.
const PUBLISH_EVERY: u32 = 10;

/// Looks every [`PERIOD`], and at once when `trim` is notified, until the batcher is gone.
pub async fn sample(
    device: Device,
    clock: Clock,
    control: mpsc::Sender<Control>,
    trim: Arc<Notify>,
    metrics: Arc<Metrics>,
) {
    let mut ticks = tokio::time::interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut told: Option<Sample> = None;
    let mut looks = 0u32;
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = trim.notified() => {}
        }
        let now = clock.now();
        device.trim(now);
        let sample = device.sample(now);
        if told != Some(sample) {
            let Sample { device, budget, capacity } = sample;
            if control.send(Control::Memory(MemorySample { device, budget, capacity })).await.is_err() {
                return;
            }
            told = Some(sample);
        }
        if looks.is_multiple_of(PUBLISH_EVERY) {
            metrics.ledger(device.stats());
        }
        looks = looks.wrapping_add(1);
    }
}
